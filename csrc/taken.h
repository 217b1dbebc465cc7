// What a call has taken of an index and not handed on yet: claims, the pins that came with them, leases,
// holds.
//
// In Python ctrl-C comes as an exception, after any call of the core that took a while: also between a claim and what
// takes it over, and before its result has a name. So the call that claims puts down here what it claimed.
#pragma once

#include <cstdint>
#include <vector>

#include "index.h"

namespace stepwell {

// Invariant: what was added is returned by give_back() or ~Taken(), once, unless hand_on() came before.
// Threads: one at a time.
class Taken {
 public:
  // REQUIRES that the index outlives it.
  explicit Taken(Index* index) noexcept : index_(index) {}
  ~Taken();
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  // The new claims of a batch, and the pin of each of their pages. Throws std::bad_alloc: then they were returned.
  void add(const ClaimBatch& batch);
  // A pin of each page. Throws std::bad_alloc: then they were returned.
  void add_pins(const std::vector<PageId>& pages);
  // One owner of a lease; 0: there is none. Throws std::bad_alloc: then it was released.
  void add_lease(uint64_t lease);
  // One more owner of a lease.
  void retain(uint64_t lease);
  // One owner of a hold; 0: there is none. Throws std::bad_alloc: then it was dropped.
  void add_hold(uint64_t hold);
  bool empty() const noexcept { return claims_.empty() && pins_.empty() && leases_.empty() && holds_.empty(); }
  // Somebody else returns all of it from now on.
  void hand_on() noexcept;
  // Returns all of it: ARRIVING pages are ABSENT again, pins, leases and holds end. Never throws.
  void give_back() noexcept;

 private:
  struct Claim {
    PageId page;
    Tier tier;
    uint32_t number;
  };
  // is_lost: there is no memory to note them in.
  void take_row(const ClaimBatch& batch, size_t row, bool is_lost) noexcept;
  void abort(const Claim& claim) noexcept;
  void unpin(PageId page) noexcept;

  Index* index_;
  std::vector<Claim> claims_;
  std::vector<PageId> pins_;
  std::vector<uint64_t> leases_;
  std::vector<uint64_t> holds_;
};

}  // namespace stepwell
