// Free maps and slot ranges: see slots.h.
#include "slots.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "status.h"

namespace stepwell {

namespace {

// What a batch may look at behind its first search: in one range, and in all searches for each slot. A word takes a few
// nanoseconds, and the index is locked meanwhile.
constexpr uint32_t kSeekAgainWords = 64;
constexpr uint32_t kSeekWordsASlot = 32;
constexpr uint32_t kGoodRun = 16;  // later searches do not look for a longer one in other ranges

// Bit i: bits i .. i + count - 1 are set. REQUIRES 1 <= count <= 64
uint64_t starts_of_runs(uint64_t bits, uint32_t count) noexcept {
  for (uint32_t have = 1; have < count;) {
    const uint32_t step = std::min(have, count - have);
    bits &= bits >> step;
    have += step;
  }
  return bits;
}

}  // namespace

void FreeMap::grow(uint32_t count) {
  const size_t words = (static_cast<size_t>(size_) + count + 63) / 64;
  some_.resize((words + 63) / 64, 0);
  words_.resize(words, 0);
  for (uint32_t i = size_; i < size_ + count;) {
    some_[i / 64 / 64] |= uint64_t{1} << (i / 64 % 64);
    if (i % 64 == 0 && size_ + count - i >= 64) {
      words_[i / 64] = ~uint64_t{0};
      i += 64;
    } else {
      words_[i / 64] |= uint64_t{1} << (i % 64);
      ++i;
    }
  }
  size_ += count;
  free_ += count;
}

size_t FreeMap::next_with_some(size_t word) const noexcept {
  if (word >= words_.size()) return words_.size();
  size_t group = word / 64;
  uint64_t bits = some_[group] & (~uint64_t{0} << (word % 64));
  while (bits == 0) {
    if (++group == some_.size()) return words_.size();
    bits = some_[group];
  }
  return group * 64 + static_cast<size_t>(std::countr_zero(bits));
}

uint32_t FreeMap::seek(uint32_t want, uint32_t* words) noexcept {
  if (free_ == 0) return 0;
  uint32_t best_start = 0, best = 0, start = 0, run = 0;
  const auto note = [&](uint32_t from, uint32_t length) {
    if (length <= best) return;
    best = length;
    best_start = from;
  };
  size_t word = cursor_ / 64;
  for (size_t passed = 0; passed < words_.size() && *words > 0 && best < want; --*words) {
    if (word >= words_.size()) {  // a run does not wrap around
      word = 0;
      run = 0;
    }
    const uint64_t bits = words_[word];
    if (bits == 0) {
      const size_t next = next_with_some(word);
      passed += next - word;
      word = next;
      run = 0;
      continue;
    }
    const auto at = static_cast<uint32_t>(word * 64);
    const auto head = static_cast<uint32_t>(std::countr_one(bits)), tail = static_cast<uint32_t>(std::countl_one(bits));
    if (run == 0) start = at;
    run += head;
    note(start, run);
    if (head < 64) {
      const uint64_t ends = ~(~uint64_t{0} << head) | (tail == 0 ? 0 : ~uint64_t{0} << (64 - tail));
      const uint64_t inside = bits & ~ends;
      for (uint64_t longer; best < 63 && (longer = starts_of_runs(inside, best + 1)) != 0;) {
        const auto first = static_cast<uint32_t>(std::countr_zero(longer));
        note(at + first, static_cast<uint32_t>(std::countr_one(inside >> first)));
      }
      run = tail;
      start = at + 64 - tail;
      note(start, run);
    }
    ++word;
    ++passed;
  }
  if (best > 0) cursor_ = best_start;
  return best;
}

uint32_t FreeMap::take() noexcept {
  if (free_ == 0) return kNone;
  if (cursor_ >= size_) cursor_ = 0;
  size_t word = cursor_ / 64;
  uint64_t bits = words_[word] & (~uint64_t{0} << (cursor_ % 64));
  if (bits == 0) {
    word = next_with_some(word + 1);
    if (word == words_.size()) word = next_with_some(0);
    bits = words_[word];
  }
  const uint32_t index = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits)));
  take_at(index);
  cursor_ = index + 1;
  return index;
}

void FreeMap::take_at(uint32_t index) noexcept {
  const size_t word = index / 64;
  words_[word] &= ~(uint64_t{1} << (index % 64));
  if (words_[word] == 0) some_[word / 64] &= ~(uint64_t{1} << (word % 64));
  --free_;
}

void FreeMap::give(uint32_t index) noexcept {
  const size_t word = index / 64;
  words_[word] |= uint64_t{1} << (index % 64);
  some_[word / 64] |= uint64_t{1} << (word % 64);
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
  sought_ = want;
  looks_ = uint64_t{kSeekWordsASlot} * want;
  uint64_t words = FreeMap::kSeekWords;
  if (want > 1) find_run(FreeMap::kSeekWords, want, &words);
}

void SlotRanges::find_run(uint32_t most_in_range, uint32_t enough, uint64_t* words) noexcept {
  size_t best_range = current_;
  uint32_t best = 0;
  for (size_t tried = 0; tried < ranges_.size() && best < enough && *words > 0; ++tried) {
    const size_t index = (current_ + tried) % ranges_.size();
    Range& range = ranges_[index];
    if (range.closed || range.map.free() <= best) continue;
    const auto given = static_cast<uint32_t>(std::min<uint64_t>(most_in_range, *words));
    uint32_t left = given;
    const uint32_t found = range.map.seek(sought_, &left);
    *words -= given - left;
    if (found <= best) continue;
    best = found;
    best_range = index;
  }
  current_ = best_range;
}

uint32_t SlotRanges::take(SlotUse use) noexcept {
  if (claimable_ == 0) return kNoSlot;
  const bool is_in_run = current_ < ranges_.size() && !ranges_[current_].closed && ranges_[current_].map.is_in_run();
  if (sought_ > 1 && looks_ > 0 && !is_in_run) {
    find_run(kSeekAgainWords, std::min(sought_, kGoodRun), &looks_);
  }
  if (sought_ > 0) --sought_;
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
