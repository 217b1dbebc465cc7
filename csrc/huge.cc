// Huge pages by madvise: see huge.h.
#include "huge.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

namespace stepwell {

namespace {
constexpr size_t kRegion = 2 * kHugePage;  // of an arena
}

void* huge_allocate(size_t bytes) {
  const bool is_huge = bytes >= kHugePage;
  const size_t alignment = is_huge ? kHugePage : 64;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, std::max(rounded, alignment));
  if (memory == nullptr) throw std::bad_alloc();
  if (is_huge) madvise(memory, rounded, MADV_HUGEPAGE);
  return memory;
}

void huge_free(void* memory) noexcept { std::free(memory); }

void* HugeArena::allocate(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > size_ - used_) {
    size_ = (std::max(bytes, kRegion) + kHugePage - 1) / kHugePage * kHugePage;
    regions_.emplace_back(static_cast<std::byte*>(huge_allocate(size_)));
    used_ = 0;
  }
  void* piece = regions_.back().get() + used_;
  used_ += bytes;
  return piece;
}

}  // namespace stepwell
