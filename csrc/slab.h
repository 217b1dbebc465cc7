// Private host memory as a medium: fixed slots of one page, their labels and checksums beside them.
#pragma once

#include <cstdint>
#include <vector>

#include "medium.h"

namespace stepwell {

// Invariant: a slot's checksums are those of the bytes last finished in it. Memory is anonymous, 2 MiB aligned,
// MADV_HUGEPAGE and MADV_DONTFORK, reserved lazily (touched by first use).
class Slab final : public Medium {
 public:
  // slot bytes = round_up(page bytes, 4096) so that device_put and O_DIRECT may use a slot as it is.
  // Throws std::bad_alloc, std::invalid_argument.
  Slab(const PageShape& shape, uint32_t slots);
  ~Slab() override;
  bool does_io() const noexcept override { return false; }
  Status prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept override;
  Status begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept override;
  Status finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                      const PageTarget& target) noexcept override;
  Status retire(uint32_t slot) noexcept override;
  Status rewrite_and_check(uint32_t slot, Scratch& scratch) noexcept override;

  const PageShape& shape() const noexcept { return shape_; }
  std::byte* slot_address(uint32_t slot) const noexcept;
  uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  uint32_t slots() const noexcept { return slots_; }

 private:
  PageShape shape_;
  uint64_t slot_bytes_;
  uint32_t slots_;
  uint32_t fork_;
  std::byte* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  std::vector<uint32_t> checksums_;  // [slot * layers + layer]; written by the slot's claim holder only
  std::vector<Label> labels_;        // label.key.length 0: free
};

}  // namespace stepwell
