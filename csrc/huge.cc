// Huge pages by madvise: see huge.h.
#include "huge.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

namespace stepwell {

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

}  // namespace stepwell
