#include <doctest/doctest.h>

#include <cstring>

#include "slab.h"
#include "volume_files.h"

using namespace stepwell;
using stepwell::testing::label_of;
using stepwell::testing::shape_of;
using stepwell::testing::stamped;

TEST_CASE("a slab gives back what was written, and only under its key and epoch") {
  const PageShape shape = shape_of({5000, 3000, 1});
  Slab slab(shape, 5);
  Scratch scratch;
  for (uint32_t slot = 0; slot < 5; ++slot) {
    const std::string key = "page " + std::to_string(slot);
    REQUIRE(write_page(slab, shape, slot, label_of(key, 9), stamped(shape, key).data(), scratch) == Status::kOk);
  }
  std::vector<std::byte> out(shape.page_bytes());
  for (uint32_t slot = 0; slot < 5; ++slot) {
    const std::string key = "page " + std::to_string(slot);
    CHECK(read_page(slab, shape, slot, label_of(key, 9), out.data(), scratch) == Status::kOk);
    CHECK(out == stamped(shape, key));
    CHECK(read_page(slab, shape, slot, label_of(key, 8), out.data(), scratch) == Status::kStale);
    CHECK(read_page(slab, shape, slot, label_of("page", 9), out.data(), scratch) == Status::kStale);
  }
  CHECK(slab.retire(2) == Status::kOk);
  CHECK(read_page(slab, shape, 2, label_of("page 2", 9), out.data(), scratch) == Status::kStale);
}

TEST_CASE("a slot of a slab that is being written holds no page, whether the write ends or not") {
  const PageShape shape = shape_of({64, 64});
  Slab slab(shape, 1);
  Scratch scratch;
  std::vector<std::byte> out(shape.page_bytes());
  REQUIRE(write_page(slab, shape, 0, label_of("k"), stamped(shape, "k").data(), scratch) == Status::kOk);
  PageTarget target;
  REQUIRE(slab.begin_write(0, scratch, &target) == Status::kOk);
  CHECK(read_page(slab, shape, 0, label_of("k"), out.data(), scratch) == Status::kStale);
}

TEST_CASE("a slab's slots are aligned for device copies and direct I/O") {
  const PageShape shape = shape_of({4097});
  Slab slab(shape, 3);
  CHECK(slab.slot_bytes() == 8192);
  CHECK(reinterpret_cast<uintptr_t>(slab.slot_address(0)) % (2u << 20) == 0);
  CHECK(slab.slot_address(2) - slab.slot_address(0) == 2 * 8192);
}

TEST_CASE("a byte that changes in a slab is found at the next read") {
  const PageShape shape = shape_of({64, 64});
  Slab slab(shape, 1);
  Scratch scratch;
  std::vector<std::byte> out(shape.page_bytes());
  REQUIRE(write_page(slab, shape, 0, label_of("k"), stamped(shape, "k").data(), scratch) == Status::kOk);
  slab.slot_address(0)[100] ^= std::byte{1};
  CHECK(read_page(slab, shape, 0, label_of("k"), out.data(), scratch) == Status::kChecksum);
  CHECK(slab.rewrite_and_check(0, scratch) == Status::kOk);
  CHECK(read_page(slab, shape, 0, label_of("k"), out.data(), scratch) == Status::kStale);
}

TEST_CASE("a slot out of range is refused by every method of a slab") {
  const PageShape shape = shape_of({64});
  Slab slab(shape, 2);
  Scratch scratch;
  PageSource source;
  PageTarget target;
  const uint32_t checksum = 0;
  CHECK(slab.prepare_read(2, label_of("k"), scratch, &source) == Status::kInvalid);
  CHECK(slab.begin_write(2, scratch, &target) == Status::kInvalid);
  CHECK(slab.finish_write(2, label_of("k"), &checksum, target) == Status::kInvalid);
  CHECK(slab.finish_write(0, Label{}, &checksum, target) == Status::kInvalid);
  CHECK(slab.retire(kNoSlot) == Status::kInvalid);
  CHECK(slab.rewrite_and_check(2, scratch) == Status::kInvalid);
}

TEST_CASE("a slab that cannot exist is refused with its numbers") {
  CHECK_THROWS_AS(Slab(shape_of({64}), 0), std::invalid_argument);
  CHECK_THROWS_AS(Slab(shape_of({uint64_t{4} << 30}), UINT32_MAX), std::exception);
}

TEST_CASE("scratch memory is aligned for direct I/O and is kept when less is asked for") {
  Scratch scratch;
  std::byte* first = scratch.source(10000);
  CHECK(reinterpret_cast<uintptr_t>(first) % 4096 == 0);
  CHECK(scratch.source(100) == first);
  CHECK(scratch.source(12288) == first);
  CHECK(scratch.target(100) != first);
  CHECK(scratch.source(SIZE_MAX) == nullptr);
  CHECK(scratch.source(10000) == first);
}
