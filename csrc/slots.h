// Which slots of a tier are free: ranges of slots, each with a bitmap, handed out so that slots of one batch lie
// together.
//
// Threads: none of its own; the index calls it under its mutex.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "geometry.h"

namespace stepwell {

// A set of small integers that can be taken and given back, next-fit.
// Invariant: bit w of some_ is set where words_[w] has a bit set: what is taken is passed over 4096 at a time.
class FreeMap {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kSeekWords = 4096;  // what one search may look at: tens of microseconds

  uint32_t size() const noexcept { return size_; }
  uint32_t free() const noexcept { return free_; }
  bool is_free(uint32_t index) const noexcept { return (words_[index / 64] >> (index % 64)) & 1; }
  // Adds `count` free integers behind the last one.
  void grow(uint32_t count);
  // Moves to a run of `want` free integers, or to the longest run that a bounded search finds, so that the takes
  // that follow are consecutive. Returns how long it is, at most `want` as far as it was followed. Looks at *words words
  // at most, less those that it has looked at when it returns.
  uint32_t seek(uint32_t want, uint32_t* words) noexcept;
  // Whether the next take is the one behind the last.
  bool is_in_run() const noexcept { return cursor_ < size_ && is_free(cursor_); }
  // The next free integer, or kNone.
  uint32_t take() noexcept;
  // Takes this one. REQUIRES is_free(index).
  void take_at(uint32_t index) noexcept;
  // REQUIRES !is_free(index).
  void give(uint32_t index) noexcept;

 private:
  size_t next_with_some(size_t word) const noexcept;  // the first of words_ from here on that is not 0; or their number

  std::vector<uint64_t> words_;  // bit set: free
  std::vector<uint64_t> some_;
  uint32_t size_ = 0;
  uint32_t free_ = 0;
  uint32_t cursor_ = 0;
};

enum class SlotUse : uint8_t {
  kFree = 0,
  kPage = 1,       // a page's: arriving, resident, leaving or quarantined there
  kPrivate = 2,    // a private holder's
  kReturning = 3,  // no longer the page's; its record is being retired
  kOwed = 4,       // no longer the page's; its record could not be retired, and may name the page still
};

// Invariant: a slot has exactly one use; free() counts kFree, in closed ranges too.
class SlotRanges {
 public:
  // Throws std::invalid_argument on an empty or overlapping range.
  void add(uint32_t first, uint32_t count);
  // Throws std::invalid_argument where no range starts at `first`.
  void close(uint32_t first);
  void open(uint32_t first);
  // Slots of the range that are not free; removes the range where that is 0.
  uint32_t drop(uint32_t first);
  bool has_range(uint32_t first) const noexcept;
  // Last slot (inclusive) of the range that starts at `first`. REQUIRES has_range(first).
  uint32_t last_of(uint32_t first) const noexcept;

  // The takes that follow should be `want` consecutive slots, or few runs of them where there is no such one.
  // Cost: of all searches until the next seek, O(want) and a constant, whatever the capacity.
  void seek(uint32_t want) noexcept;
  uint32_t take(SlotUse use) noexcept;                // kNoSlot: none in an open range
  bool take_at(uint32_t slot, SlotUse use) noexcept;  // false: unknown or not free; in a closed range too
  // kNoUse where the slot is in no range.
  static constexpr SlotUse kNoUse = static_cast<SlotUse>(0xff);
  SlotUse use(uint32_t slot) const noexcept;
  // REQUIRES the slot exists. Setting kFree makes it free again.
  void set_use(uint32_t slot, SlotUse use) noexcept;
  // The first slot from `slot` to `last` (inclusive) that is of this use; kNoSlot: none. Cost: a scan of the uses.
  uint32_t find_use(SlotUse use, uint32_t slot, uint32_t last) const noexcept;
  // Undoes set_use(slot, kFree), in a closed range too.
  void take_back(uint32_t slot, SlotUse use) noexcept;

  uint64_t capacity() const noexcept { return capacity_; }
  uint64_t free() const noexcept { return used(SlotUse::kFree); }
  uint64_t claimable() const noexcept { return claimable_; }  // free, in open ranges
  uint64_t used(SlotUse use) const noexcept { return used_[static_cast<size_t>(use)]; }
  uint64_t count(SlotUse use) const noexcept;  // by a full scan, for check()

 private:
  struct Range {
    uint32_t first;
    bool closed = false;
    FreeMap map;
    std::vector<SlotUse> uses;
  };
  Range* find(uint32_t slot) noexcept;
  const Range* find(uint32_t slot) const noexcept { return const_cast<SlotRanges*>(this)->find(slot); }

  // Moves to the longest run that is found in the open ranges, of each at most so many words; looks at no further range
  // once it has one of `enough` slots.
  void find_run(uint32_t most_in_range, uint32_t enough, uint64_t* words) noexcept;

  std::vector<Range> ranges_;  // sorted by first
  void change_use(Range* range, uint32_t index, SlotUse use) noexcept;

  uint64_t capacity_ = 0;
  uint64_t claimable_ = 0;
  std::array<uint64_t, 5> used_{};  // slots by use
  size_t current_ = 0;              // the range that takes come from
  uint32_t sought_ = 0;             // takes of the batch that are still to come
  uint64_t looks_ = 0;              // words that searches may still look at for them
};

}  // namespace stepwell
