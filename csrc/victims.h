// Pages that have left a tier: out of the index, their slots not free yet.
//
//   taken out -> record retired -> free
//             -> record cannot be written (EIO, ENOSPC) -> owed -> tried again -> free
//
// A slot is free only when the record of the page before is retired; in between no call of Python's has it alone, as
// ctrl-C may end that call at any point. Were it given back without, a restart would find the page again, one that was
// forgotten too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index.h"
#include "medium.h"

namespace stepwell {

// Invariant: each slot is freed, or owed, once, by free(), free_with_records(), owe() or ~Victims().
// Threads: one at a time.
class Victims {
 public:
  // medium: null where pages have no records. REQUIRES that both outlive it.
  Victims(Index* index, Medium* medium, Tier tier) noexcept : index_(index), medium_(medium), tier_(tier) {}
  // As free(), for what is left. Never throws.
  ~Victims();
  Victims(Victims&& other) noexcept = default;
  Victims(const Victims&) = delete;
  Victims& operator=(const Victims&) = delete;
  Victims& operator=(Victims&&) = delete;

  // Takes out up to n unpinned pages of lowest rank.
  void take(uint32_t n);
  // Takes the pages of a chain past its first keep_pages out of all the tiers that `from` are of, as
  // Index::claim_chain() chooses them, but for those that a match wants again meanwhile. They are chosen under one lock:
  // a save that comes between two tiers would be told that a page is where it leaves next.
  // REQUIRES that `from` are of one index, and each of another tier.
  static void take_chain(std::span<Victims* const> from, uint32_t name_space, const int32_t* tokens, uint64_t count,
                         uint32_t keep_pages);
  // Takes up to n slots that are owed since a free() before; only_range: as in Index::take_owed().
  void take_owed(uint32_t n, uint32_t only_range);
  // How many were taken out, freed since or not.
  size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return slots_.empty(); }
  // How many of them free() found to be owed.
  size_t owed() const noexcept { return owed_; }
  // How many calls to retire them failed in free(): one for each that is owed, and those for several records together.
  size_t errors() const noexcept { return errors_; }
  // errno of the last such call; 0: none, or it is not known.
  int error() const noexcept { return error_; }
  // Retires the records, then frees the slots; those whose record cannot be retired are owed. Returns how many are free;
  // none the second time.
  size_t free();
  // Frees the slots and leaves the records, so that a restart finds the pages again.
  size_t free_with_records();
  // Has the slots owed and calls no file: for who must not stand in a disk that hangs; Index::take_owed() has them then.
  // Nothing the second time.
  void owe();

 private:
  Index* index_;
  Medium* medium_;
  Tier tier_;
  std::vector<uint32_t> slots_;
  size_t size_ = 0;
  size_t owed_ = 0;
  size_t errors_ = 0;
  int error_ = 0;
};

}  // namespace stepwell
