// Memory for large arrays, in huge pages where the kernel gives them.
//
// Why: a new prompt of 8,192 pages touches 1.4 MB of fresh records and 8,192 random places of the page table; with 4 KiB pages the
// faults and the TLB misses cost more than the work. A hint only: where huge pages are off, it is plain memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace stepwell {

constexpr size_t kHugePage = size_t{2} << 20;

// Not initialised. Throws std::bad_alloc.
void* huge_allocate(size_t bytes);
void huge_free(void* memory) noexcept;

template <typename T>
struct HugeAllocator {
  using value_type = T;
  HugeAllocator() = default;
  template <typename U>
  HugeAllocator(const HugeAllocator<U>&) noexcept {}
  T* allocate(size_t count) { return static_cast<T*>(huge_allocate(count * sizeof(T))); }
  void deallocate(T* memory, size_t) noexcept { huge_free(memory); }
  bool operator==(const HugeAllocator&) const noexcept { return true; }
};

// Hands out pieces that live as long as the arena, from regions of at least one huge page.
class HugeArena {
 public:
  // Aligned to 64 bytes, not initialised.
  void* allocate(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { huge_free(memory); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> regions_;
  size_t used_ = 0;
  size_t size_ = 0;  // of the last region
};

}  // namespace stepwell
