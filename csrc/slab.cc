#include "slab.h"

#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "crc32c.h"
#include "file.h"

namespace stepwell {

namespace {

constexpr uint64_t kSlotAlignment = 4096;
constexpr uint64_t kHugePage = 2u << 20;
constexpr uint64_t kMostBytes = std::numeric_limits<uint64_t>::max() / 4;

uint64_t round_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

}  // namespace

Slab::Slab(const PageShape& shape, uint32_t slots)
    : shape_(shape), slots_(slots), fork_(fork_generation.load(std::memory_order_relaxed)) {
  slot_bytes_ = round_up(shape.page_bytes(), kSlotAlignment);
  if (slots == 0) throw std::invalid_argument("a slab needs at least one slot");
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(slot_bytes_, slots, &bytes) || bytes > kMostBytes) {
    throw std::invalid_argument("slab too large: " + std::to_string(slots) + " slots of " +
                                std::to_string(slot_bytes_) + " bytes");
  }
  checksums_.resize(size_t{slots} * shape.layers());
  labels_.resize(slots);

  // A huge page more than needed, then the ends cut off: mmap promises no alignment above 4096.
  memory_bytes_ = round_up(bytes, kHugePage);
  const uint64_t mapped = memory_bytes_ + kHugePage;
  void* address = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<std::byte*>(address);
  const uint64_t head = round_up(reinterpret_cast<uintptr_t>(start), kHugePage) - reinterpret_cast<uintptr_t>(start);
  const uint64_t tail = mapped - head - memory_bytes_;
  if (head > 0) ::munmap(start, head);
  if (tail > 0) ::munmap(start + head + memory_bytes_, tail);
  memory_ = start + head;
  ::madvise(memory_, memory_bytes_, MADV_HUGEPAGE);  // advice: a kernel without huge pages serves small ones
  ::madvise(memory_, memory_bytes_, MADV_DONTFORK);
}

Slab::~Slab() {
  // In a forked child the memory was never there, and its addresses may be another's.
  if (fork_ == fork_generation.load(std::memory_order_relaxed)) ::munmap(memory_, memory_bytes_);
}

std::byte* Slab::slot_address(uint32_t slot) const noexcept { return memory_ + slot * slot_bytes_; }

Status Slab::prepare_read(uint32_t slot, const Label& label, Scratch&, PageSource* source) noexcept {
  if (slot >= slots_) return Status::kInvalid;
  const Label& held = labels_[slot];
  if (held.key.length == 0 || !same_page(held, label)) return Status::kStale;
  source->bytes = slot_address(slot);
  source->checksums = &checksums_[size_t{slot} * shape_.layers()];
  source->guarded = false;
  return Status::kOk;
}

Status Slab::begin_write(uint32_t slot, Scratch&, PageTarget* target) noexcept {
  if (slot >= slots_) return Status::kInvalid;
  labels_[slot].key.length = 0;
  target->bytes = slot_address(slot);
  target->guarded = false;
  return Status::kOk;
}

Status Slab::finish_write(uint32_t slot, const Label& label, const uint32_t* checksums, const PageTarget&) noexcept {
  if (slot >= slots_ || label.key.length == 0 || label.key.length > kMaxKeyBytes) return Status::kInvalid;
  copy_fence();  // the index's mutex, which publishes the page, does not order non-temporal stores
  std::memcpy(&checksums_[size_t{slot} * shape_.layers()], checksums, sizeof(uint32_t) * shape_.layers());
  labels_[slot] = label;
  return Status::kOk;
}

Status Slab::retire(uint32_t slot) noexcept {
  if (slot >= slots_) return Status::kInvalid;
  labels_[slot].key.length = 0;
  return Status::kOk;
}

Status Slab::rewrite_and_check(uint32_t slot, Scratch&) noexcept {
  if (slot >= slots_) return Status::kInvalid;
  labels_[slot].key.length = 0;
  // Both values of every bit; volatile, so that what is compared was read from memory.
  auto* words = reinterpret_cast<volatile uint64_t*>(slot_address(slot));
  const uint64_t count = slot_bytes_ / sizeof(uint64_t);
  bool right = true;
  for (const uint64_t pattern : {0xa5a5a5a5a5a5a5a5ull, 0x5a5a5a5a5a5a5a5aull}) {
    for (uint64_t i = 0; i < count; ++i) words[i] = pattern ^ i;
    for (uint64_t i = 0; i < count; ++i) right &= words[i] == (pattern ^ i);
  }
  return right ? Status::kOk : Status::kChecksum;
}

}  // namespace stepwell
