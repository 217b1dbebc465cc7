// Which page of a tier leaves next: one order of the tier's RESIDENT pages.
//
// The index keeps rank monotone along a chain (I4) by the four ways in; another policy replaces this class and keeps
// them:
//   enter_highest  just used                     enter_below  just used, but leaves before that page (its ancestor)
//   enter_lowest   leaves first                  touch        used again; the index touches a path from tail to head
//
// Here: least recently used, an intrusive doubly linked list, O(1) each. Threads: none of its own; under the index's
// mutex.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace stepwell {

class Rank {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  void enter_highest(uint32_t page) { insert(page, tail_, kNone); }
  void enter_lowest(uint32_t page) { insert(page, kNone, head_); }
  void enter_below(uint32_t page, uint32_t other) { insert(page, link(other).lower, other); }
  void enter_above(uint32_t page, uint32_t other) { insert(page, other, link(other).higher); }
  void leave(uint32_t page) noexcept;
  void touch(uint32_t page) noexcept {
    if (page == tail_) return;
    leave(page);
    insert(page, tail_, kNone);
  }
  // The page that leaves first, and those that leave after and before `page`; kNone at the ends.
  uint32_t first() const noexcept { return head_; }
  uint32_t after(uint32_t page) const noexcept { return link(page).higher; }
  uint32_t before(uint32_t page) const noexcept { return link(page).lower; }
  uint64_t size() const noexcept { return size_; }
  uint64_t bytes() const noexcept { return blocks_allocated_ * sizeof(Block); }

 private:
  struct Link {
    uint32_t lower, higher;
  };
  static constexpr uint32_t kBlockBits = 12;
  using Block = std::array<Link, 1u << kBlockBits>;

  Link& link(uint32_t page) noexcept { return (*blocks_[page >> kBlockBits])[page & ((1u << kBlockBits) - 1)]; }
  const Link& link(uint32_t page) const noexcept { return const_cast<Rank*>(this)->link(page); }
  void insert(uint32_t page, uint32_t lower, uint32_t higher);
  void make_block(uint32_t block);

  std::vector<std::unique_ptr<Block>> blocks_;
  uint64_t blocks_allocated_ = 0;
  uint32_t head_ = kNone;
  uint32_t tail_ = kNone;
  uint64_t size_ = 0;
};

inline void Rank::insert(uint32_t page, uint32_t lower, uint32_t higher) {
  const uint32_t block = page >> kBlockBits;
  if (block >= blocks_.size() || blocks_[block] == nullptr) [[unlikely]]
    make_block(block);
  link(page) = {lower, higher};
  (lower == kNone ? head_ : link(lower).higher) = page;
  (higher == kNone ? tail_ : link(higher).lower) = page;
  ++size_;
}

inline void Rank::leave(uint32_t page) noexcept {
  const Link gone = link(page);
  (gone.lower == kNone ? head_ : link(gone.lower).higher) = gone.higher;
  (gone.higher == kNone ? tail_ : link(gone.higher).lower) = gone.lower;
  --size_;
}

}  // namespace stepwell
