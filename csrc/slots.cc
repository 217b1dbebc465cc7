// Free maps and slot ranges: see slots.h.
#include "slots.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "status.h"

namespace stepwell {

namespace {
constexpr size_t kSeekWords = 4096;
}

void FreeMap::grow(uint32_t count) {
  const uint32_t old_size = size_;
  words_.resize((static_cast<size_t>(size_) + count + 63) / 64, 0);
  size_ += count;
  free_ += count;
  for (uint32_t i = old_size; i < size_;) {
    if (i % 64 == 0 && size_ - i >= 64) {
      words_[i / 64] = ~uint64_t{0};
      i += 64;
    } else {
      words_[i / 64] |= uint64_t{1} << (i % 64);
      ++i;
    }
  }
}

void FreeMap::seek(uint32_t want) noexcept {
  if (free_ == 0 || want <= 1) return;
  const size_t words = words_.size();
  const size_t limit = std::min(words, kSeekWords);
  uint32_t best_start = 0, best = 0, start = 0, run = 0;
  size_t word = cursor_ / 64;
  for (size_t looked = 0; looked < limit && best < want; ++looked, ++word) {
    if (word >= words) {  // a run does not wrap around
      word = 0;
      run = 0;
    }
    uint64_t bits = words_[word];
    uint32_t at = static_cast<uint32_t>(word * 64);
    uint32_t left = 64;
    while (left > 0) {
      if ((bits & 1) == 0) {
        run = 0;
        const uint32_t zeros =
            bits == 0 ? left : std::min<uint32_t>(left, static_cast<uint32_t>(std::countr_zero(bits)));
        at += zeros;
        left -= zeros;
        bits = zeros == 64 ? 0 : bits >> zeros;
        continue;
      }
      const uint32_t ones = std::min<uint32_t>(left, static_cast<uint32_t>(std::countr_one(bits)));
      if (run == 0) start = at;
      run += ones;
      if (run > best) {
        best = run;
        best_start = start;
      }
      at += ones;
      left -= ones;
      bits = ones == 64 ? 0 : bits >> ones;
    }
  }
  if (best > 0) cursor_ = best_start;
}

uint32_t FreeMap::take() noexcept {
  if (free_ == 0) return kNone;
  if (cursor_ >= size_) cursor_ = 0;
  size_t word = cursor_ / 64;
  uint64_t bits = words_[word] & (~uint64_t{0} << (cursor_ % 64));
  while (bits == 0) {
    if (++word == words_.size()) word = 0;
    bits = words_[word];
  }
  const uint32_t index = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits)));
  take_at(index);
  cursor_ = index + 1;
  return index;
}

void FreeMap::take_at(uint32_t index) noexcept {
  words_[index / 64] &= ~(uint64_t{1} << (index % 64));
  --free_;
}

void FreeMap::give(uint32_t index) noexcept {
  words_[index / 64] |= uint64_t{1} << (index % 64);
  ++free_;
}

void SlotRanges::add(uint32_t first, uint32_t count) {
  if (count == 0 || count > kNoSlot - first) {
    throw std::invalid_argument("slot range " + std::to_string(first) + "+" + std::to_string(count) +
                                " is empty or too large");
  }
  for (const Range& range : ranges_) {
    if (first < range.first + range.map.size() && range.first < first + count) {
      throw std::invalid_argument("slot range " + std::to_string(first) + "+" + std::to_string(count) +
                                  " overlaps the one at " + std::to_string(range.first));
    }
  }
  Range range{first, false, {}, std::vector<SlotUse>(count, SlotUse::kFree)};
  range.map.grow(count);
  const auto place = std::lower_bound(ranges_.begin(), ranges_.end(), first,
                                      [](const Range& have, uint32_t value) { return have.first < value; });
  ranges_.insert(place, std::move(range));
  capacity_ += count;
  used_[static_cast<size_t>(SlotUse::kFree)] += count;
  claimable_ += count;
}

SlotRanges::Range* SlotRanges::find(uint32_t slot) noexcept {
  auto after = std::upper_bound(ranges_.begin(), ranges_.end(), slot,
                                [](uint32_t value, const Range& have) { return value < have.first; });
  if (after == ranges_.begin()) return nullptr;
  Range& range = *std::prev(after);
  return slot - range.first < range.map.size() ? &range : nullptr;
}

bool SlotRanges::has_range(uint32_t first) const noexcept {
  const Range* range = find(first);
  return range != nullptr && range->first == first;
}

uint32_t SlotRanges::last_of(uint32_t first) const noexcept {
  const Range* range = find(first);
  return range->first + range->map.size() - 1;
}

void SlotRanges::close(uint32_t first) {
  if (!has_range(first)) throw std::invalid_argument("no slot range starts at " + std::to_string(first));
  Range* range = find(first);
  if (range->closed) return;
  range->closed = true;
  claimable_ -= range->map.free();
}

void SlotRanges::open(uint32_t first) {
  if (!has_range(first)) throw std::invalid_argument("no slot range starts at " + std::to_string(first));
  Range* range = find(first);
  if (!range->closed) return;
  range->closed = false;
  claimable_ += range->map.free();
}

uint32_t SlotRanges::drop(uint32_t first) {
  if (!has_range(first)) throw std::invalid_argument("no slot range starts at " + std::to_string(first));
  Range* range = find(first);
  const uint32_t used = range->map.size() - range->map.free();
  if (used > 0) return used;
  capacity_ -= range->map.size();
  used_[static_cast<size_t>(SlotUse::kFree)] -= range->map.size();
  if (!range->closed) claimable_ -= range->map.size();
  ranges_.erase(ranges_.begin() + (range - ranges_.data()));
  current_ = 0;
  return 0;
}

void SlotRanges::seek(uint32_t want) noexcept {
  for (size_t tried = 0; tried < ranges_.size(); ++tried) {
    const size_t index = (current_ + tried) % ranges_.size();
    Range& range = ranges_[index];
    if (range.closed || range.map.free() == 0) continue;
    current_ = index;
    range.map.seek(std::min(want, range.map.free()));
    return;
  }
}

uint32_t SlotRanges::take(SlotUse use) noexcept {
  if (claimable_ == 0) return kNoSlot;
  while (ranges_[current_].closed || ranges_[current_].map.free() == 0) current_ = (current_ + 1) % ranges_.size();
  Range& range = ranges_[current_];
  const uint32_t index = range.map.take();
  change_use(&range, index, use);
  --claimable_;
  return range.first + index;
}

bool SlotRanges::take_at(uint32_t slot, SlotUse use) noexcept {
  Range* range = find(slot);
  if (range == nullptr || !range->map.is_free(slot - range->first)) return false;
  range->map.take_at(slot - range->first);
  change_use(range, slot - range->first, use);
  if (!range->closed) --claimable_;
  return true;
}

SlotUse SlotRanges::use(uint32_t slot) const noexcept {
  const Range* range = find(slot);
  return range == nullptr ? kNoUse : range->uses[slot - range->first];
}

void SlotRanges::change_use(Range* range, uint32_t index, SlotUse use) noexcept {
  --used_[static_cast<size_t>(range->uses[index])];
  ++used_[static_cast<size_t>(use)];
  range->uses[index] = use;
}

void SlotRanges::set_use(uint32_t slot, SlotUse use) noexcept {
  Range* range = find(slot);
  const uint32_t index = slot - range->first;
  change_use(range, index, use);
  if (use != SlotUse::kFree) return;
  range->map.give(index);
  if (!range->closed) ++claimable_;
}

uint32_t SlotRanges::find_use(SlotUse use, uint32_t slot, uint32_t last) const noexcept {
  for (const Range& range : ranges_) {
    if (range.first > last) break;
    const uint32_t end = range.first + range.map.size();
    if (end <= slot) continue;
    const auto from = range.uses.begin() + (slot > range.first ? slot - range.first : 0);
    const auto found = std::find(from, range.uses.end(), use);
    if (found == range.uses.end()) continue;
    const uint32_t at = range.first + static_cast<uint32_t>(found - range.uses.begin());
    return at <= last ? at : kNoSlot;
  }
  return kNoSlot;
}

void SlotRanges::take_back(uint32_t slot, SlotUse use) noexcept {
  Range* range = find(slot);
  range->map.take_at(slot - range->first);
  change_use(range, slot - range->first, use);
  if (!range->closed) --claimable_;
}

uint64_t SlotRanges::count(SlotUse use) const noexcept {
  uint64_t total = 0;
  for (const Range& range : ranges_)
    total += static_cast<uint64_t>(std::count(range.uses.begin(), range.uses.end(), use));
  return total;
}

}  // namespace stepwell
