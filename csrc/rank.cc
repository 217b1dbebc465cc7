// The rank's storage, and stamps where there is little room between two: see rank.h.
#include "rank.h"

namespace stepwell {

void Rank::make_block(uint32_t block) {
  if (block >= blocks_.size()) blocks_.resize(block + 1);
  blocks_[block] = std::make_unique<Block>();
  ++blocks_allocated_;
}

void Rank::enter_between(uint32_t page, uint32_t lower, uint32_t higher, bool is_near_lower) {
  if (higher == kNone) return insert(page, lower, kNone, stamp(lower) + kStep);
  const auto room = [&] { return stamp(higher) - (lower == kNone ? 0 : stamp(lower)); };
  if (room() < 2) spread(lower, higher);
  const uint64_t step = std::min(kStep, room() / 2);
  insert(page, lower, higher, is_near_lower && lower != kNone ? stamp(lower) + step : stamp(higher) - step);
}

// Gives the fewest pages around a place new stamps, kSpread apart or more. The window doubles, so that it grows with
// the logarithm of what was inserted at one place; one that reaches the last page has all the time after it.
// Source: order maintenance by relabelling (Dietz and Sleator, 1987; the simple form of Bender et al., 2002).
void Rank::spread(uint32_t lower, uint32_t higher) {
  uint32_t first = lower == kNone ? higher : lower, last = higher;  // the window
  uint64_t count = first == last ? 1 : 2;
  for (;;) {
    const uint32_t below = link(first).lower, above = link(last).higher;
    const uint64_t floor = below == kNone ? 0 : stamp(below);
    const uint64_t needed = kSpread * (count + 1);
    const uint64_t ceiling = above != kNone ? stamp(above) : std::max(stamp(last) + kSpread, floor + needed);
    if (ceiling - floor >= needed) {
      const uint64_t step = std::min((ceiling - floor) / (count + 1), kPathStep);
      uint64_t next = ceiling;
      for (uint32_t page = last;; page = link(page).lower) {
        set_stamp(page, next -= step);
        if (page == first) return;
      }
    }
    uint64_t grown = 0;
    for (uint64_t i = 0; i < count; ++i) {
      if (i % 2 == 0 && link(first).lower != kNone) {
        first = link(first).lower;
        ++grown;
      } else if (link(last).higher != kNone) {
        last = link(last).higher;
        ++grown;
      }
    }
    count += grown;
  }
}

void Rank::place_above(uint32_t page, uint32_t lower, uint64_t value) {
  insert(page, lower, lower == kNone ? head_ : link(lower).higher, value);
}

void Rank::lower_stamps(uint32_t last) {
  for (uint32_t page = last; page != kNone; page = link(page).lower) {
    const uint32_t above = link(page).higher;
    if (above != kNone && stamp(page) >= stamp(above)) set_stamp(page, stamp(above) - std::min(stamp(above), kStep));
  }
}

void Rank::order_stamps() {
  uint64_t before = 0;
  for (uint32_t page = head_; page != kNone; page = link(page).higher) {
    if (stamp(page) <= before) set_stamp(page, before + 1);
    before = stamp(page);
  }
}

}  // namespace stepwell
