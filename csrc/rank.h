// Which page of a tier leaves next: one order of the tier's RESIDENT pages, and the stamps by which it is found again.
//
// The index keeps rank monotone along a chain (I4) by the four ways in; another policy replaces this class and keeps
// them:
//   enter_highest  just used                     enter_below  just used, but leaves before that page (its ancestor)
//   enter_lowest   leaves first                  touch        used again; the index touches a path from tail to head
//
// Here: least recently used, an intrusive doubly linked list, O(1) each. The list is the order. Beside it each page has
// a stamp: the wall clock (ns) at its last use, made unique, so that it strictly grows along the list. Stamps order
// pages of all volumes and processes after a restart (FORMAT.md 2.4). A page that enters between two others gets a stamp
// between theirs; where none is left, those around it are spread out.
// Threads: none of its own; under the index's mutex.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace stepwell {

class Rank {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  // Between the stamps of pages used in one go, and before the first of them: room for those that enter below them.
  // With 16 ns a page and 4 us a path, stamps run ahead of the clock only beyond 60 million pages or 240,000 paths a
  // second.
  static constexpr uint64_t kStep = 16, kPathStep = 4096;

  void enter_highest(uint32_t page, uint64_t now, uint64_t step = kPathStep) {
    insert(page, tail_, kNone, next_stamp(now, step));
  }
  void enter_lowest(uint32_t page, uint64_t now) {
    if (head_ == kNone) return insert(page, kNone, kNone, now);
    enter_between(page, kNone, head_, false);
  }
  void enter_below(uint32_t page, uint32_t other) { enter_between(page, link(other).lower, other, false); }
  void enter_above(uint32_t page, uint32_t other) { enter_between(page, other, link(other).higher, true); }
  void leave(uint32_t page) noexcept;
  void touch(uint32_t page, uint64_t now, uint64_t step) {
    if (page == tail_) {
      if (stamp(page) < now) set_stamp(page, now);
      return;
    }
    leave(page);
    enter_highest(page, now, step);
  }
  // For recovery: a page with its stamp directly above `lower` (kNone: as the first to leave). Stamps need not be in
  // order then, until order_stamps() has made them so: each page keeps its stamp or gets a higher one.
  void place_above(uint32_t page, uint32_t lower, uint64_t value);
  void order_stamps();
  // For recovery, before order_stamps(): `last` and what leaves before it get stamps below that of the page after it, so
  // that pages which leave first although they were used later do not make others seem used later than they were.
  void lower_stamps(uint32_t last);

  // The page that leaves first and last, and those that leave after and before `page`; kNone at the ends.
  uint32_t first() const noexcept { return head_; }
  uint32_t last() const noexcept { return tail_; }
  uint32_t after(uint32_t page) const noexcept { return link(page).higher; }
  uint32_t before(uint32_t page) const noexcept { return link(page).lower; }
  uint64_t size() const noexcept { return size_; }
  uint64_t stamp(uint32_t page) const noexcept { return link(page).stamp & ~kChanged; }
  uint64_t bytes() const noexcept {
    return blocks_allocated_ * sizeof(Block) + changed_.capacity() * sizeof(changed_[0]);
  }

  // From now on remembers whose stamps change: a list of bounded length, and where that is full a mark at each page.
  void watch() noexcept { is_watched_ = true; }
  // f(page, stamp) for pages whose stamp was set since they were last given out; at most `most`. Cost: about 20 ns each;
  // after an overflow a scan of marks, 65,536 a call.
  template <typename F>
  void take_changed(size_t most, F&& f);
  bool has_changed() const noexcept { return !changed_.empty() || is_overflown_ || scanned_ != kNone; }

 private:
  static constexpr uint64_t kChanged = uint64_t{1} << 63;  // of a stamp: not given out yet
  static constexpr uint64_t kSpread = 16;                  // least distance of stamps that were spread out
  static constexpr size_t kLeastListed = 4096;
  static constexpr uint32_t kScanAtOnce = 65536;
  struct Link {
    uint32_t lower, higher;
    uint64_t stamp;
  };
  static constexpr uint32_t kBlockBits = 12;
  using Block = std::array<Link, 1u << kBlockBits>;

  Link& link(uint32_t page) noexcept { return (*blocks_[page >> kBlockBits])[page & ((1u << kBlockBits) - 1)]; }
  const Link& link(uint32_t page) const noexcept { return const_cast<Rank*>(this)->link(page); }
  uint64_t next_stamp(uint64_t now, uint64_t step) const noexcept {
    return tail_ == kNone ? now : std::max(now, stamp(tail_) + step);
  }
  void insert(uint32_t page, uint32_t lower, uint32_t higher, uint64_t value);
  void enter_between(uint32_t page, uint32_t lower, uint32_t higher, bool is_near_lower);
  void spread(uint32_t lower, uint32_t higher);
  void set_stamp(uint32_t page, uint64_t value);
  void note_change(uint32_t page);
  void make_block(uint32_t block);

  std::vector<std::unique_ptr<Block>> blocks_;
  uint64_t blocks_allocated_ = 0;
  uint32_t head_ = kNone;
  uint32_t tail_ = kNone;
  uint64_t size_ = 0;
  bool is_watched_ = false;
  bool is_overflown_ = false;      // more have changed than are listed
  uint32_t scanned_ = kNone;       // marks are looked at from this page on; kNone: no scan is under way
  std::vector<uint32_t> changed_;  // some may have left, or be marked no more
};

inline void Rank::insert(uint32_t page, uint32_t lower, uint32_t higher, uint64_t value) {
  const uint32_t block = page >> kBlockBits;
  if (block >= blocks_.size() || blocks_[block] == nullptr) [[unlikely]]
    make_block(block);
  link(page) = {lower, higher, 0};
  (lower == kNone ? head_ : link(lower).higher) = page;
  (higher == kNone ? tail_ : link(higher).lower) = page;
  ++size_;
  set_stamp(page, value);
}

inline void Rank::leave(uint32_t page) noexcept {
  const Link gone = link(page);
  (gone.lower == kNone ? head_ : link(gone.lower).higher) = gone.higher;
  (gone.higher == kNone ? tail_ : link(gone.higher).lower) = gone.lower;
  link(page).stamp = 0;
  --size_;
}

inline void Rank::set_stamp(uint32_t page, uint64_t value) {
  const bool was_changed = (link(page).stamp & kChanged) != 0;
  link(page).stamp = is_watched_ ? value | kChanged : value;
  if (!is_watched_) return;
  if (!was_changed) note_change(page);
}

inline void Rank::note_change(uint32_t page) {
  if (is_overflown_) return;
  if (changed_.size() < std::max<size_t>(kLeastListed, size_ / 2)) {
    changed_.push_back(page);
  } else {
    is_overflown_ = true;
    changed_.clear();
  }
}

template <typename F>
void Rank::take_changed(size_t most, F&& f) {
  const auto give = [&](uint32_t page) {
    Link& of = link(page);
    if ((of.stamp & kChanged) == 0) return;
    of.stamp &= ~kChanged;
    f(page, of.stamp);
    --most;
  };
  if (is_overflown_ && scanned_ == kNone) {  // what changes from here on is listed again
    is_overflown_ = false;
    scanned_ = 0;
  }
  if (scanned_ != kNone) {
    const auto end = static_cast<uint32_t>(blocks_.size() << kBlockBits);
    for (uint32_t looked = 0; scanned_ < end && looked < kScanAtOnce && most > 0; ++looked) {
      if (blocks_[scanned_ >> kBlockBits] != nullptr) {
        give(scanned_++);
      } else {
        scanned_ += 1u << kBlockBits;
      }
    }
    if (scanned_ >= end) scanned_ = kNone;
    return;
  }
  while (most > 0 && !changed_.empty()) {
    give(changed_.back());
    changed_.pop_back();
  }
}

}  // namespace stepwell
