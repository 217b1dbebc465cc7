#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "huge.h"
#include "medium.h"

using namespace stepwell;

namespace {

bool kernel_has_huge_pages() { return std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good(); }

// Whether the kernel was asked for huge pages where these bytes lie: "hg" among the flags of their mapping.
bool is_advised(const std::byte* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  std::ifstream maps("/proc/self/smaps");
  bool is_inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long first = 0, end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &end) == 2) is_inside = first <= address && address < end;
    if (is_inside && line.starts_with("VmFlags:")) return line.find(" hg") != std::string::npos;
  }
  return false;
}

uint64_t beyond(const std::byte* memory, uint64_t alignment) { return reinterpret_cast<uintptr_t>(memory) % alignment; }

}  // namespace

TEST_CASE("a worker's buffers of 64 KiB and more lie in one huge page as long as they fit") {
  Scratch scratch;
  std::byte* const source = scratch.source(64 << 10);
  std::byte* const target = scratch.target((64 << 10) + 1);
  std::byte* const run = scratch.run(1 << 20);
  CHECK(beyond(source, kHugePage) == 0);
  CHECK(target == source + (64 << 10));
  CHECK(run == target + (68 << 10));
  if (kernel_has_huge_pages()) CHECK(is_advised(source));
  std::memset(source, 1, 64 << 10);
  std::memset(target, 2, 68 << 10);
  std::memset(run, 3, 1 << 20);
  CHECK(source[(64 << 10) - 1] == std::byte{1});
  CHECK(target[0] == std::byte{2});
  CHECK(target[(68 << 10) - 1] == std::byte{2});
  CHECK(scratch.run(1 << 20) == run);
}

TEST_CASE("a worker's buffers that do not fit into one huge page are of whole ones") {
  Scratch scratch;
  std::byte* const source = scratch.source(2 << 20);
  std::byte* const target = scratch.target((2 << 20) + 4096);
  std::byte* const run = scratch.run(1 << 20);
  for (std::byte* const buffer : {source, target, run}) {
    REQUIRE(beyond(buffer, kHugePage) == 0);
    if (kernel_has_huge_pages()) CHECK(is_advised(buffer));
  }
  std::memset(source, 1, kHugePage);
  std::memset(target, 2, 2 * kHugePage);  // what it was rounded up to is its own
  std::memset(run, 3, kHugePage);
  CHECK(source[kHugePage - 1] == std::byte{1});
  CHECK(target[2 * kHugePage - 1] == std::byte{2});
}

TEST_CASE("a worker's buffer is aligned for direct I/O, and grows and never shrinks") {
  Scratch scratch;
  std::byte* const small = scratch.source(5000);
  CHECK(beyond(small, 4096) == 0);
  CHECK(scratch.source(8192) == small);  // it was rounded up
  std::byte* const grown = scratch.source(100 << 10);
  std::byte* const large = scratch.source(3 << 20);
  CHECK(beyond(grown, 4096) == 0);
  CHECK(beyond(large, kHugePage) == 0);
  std::memset(large, 1, 2 * kHugePage);
  CHECK(scratch.source(2 * kHugePage) == large);
  CHECK(scratch.source(1) == large);
  CHECK(scratch.source(0) == large);
}

TEST_CASE("a buffer that there is no memory for is null, and the one before stays") {
  Scratch scratch;
  std::byte* const before = scratch.run(1 << 20);
  CHECK(scratch.run(SIZE_MAX) == nullptr);
  CHECK(scratch.run(1 << 20) == before);
}
