// Memory for large arrays and for the buffers of direct I/O, in huge pages where the kernel gives them.
//
// Why: a new prompt of 8,192 pages looks at 8,192 random places of the page table, and with 4 KiB pages each is a TLB
// miss that a prefetch cannot hide; of buffers medium.cc says it. A hint only: where huge pages are off, it is plain
// memory.
#pragma once

#include <cstddef>
#include <new>

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
  HugeAllocator(const HugeAllocator<U>&) noexcept {}  // NOLINT(google-explicit-constructor): allocators convert
  T* allocate(size_t count) { return static_cast<T*>(huge_allocate(count * sizeof(T))); }
  void deallocate(T* memory, size_t) noexcept { huge_free(memory); }
  bool operator==(const HugeAllocator&) const noexcept { return true; }
};

}  // namespace stepwell
