#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy.h"
#include "crc32c.h"
#include "guard.h"
#include "implementations.h"

using namespace stepwell;

namespace {

PageShape shape_of(std::vector<uint64_t> layer_bytes) { return PageShape(std::move(layer_bytes), {}); }

StreamView view_of(void* base, int64_t slot, int64_t outer, int64_t inner, uint32_t outers, uint32_t inners,
                   uint64_t piece) {
  return {static_cast<std::byte*>(base), slot, outer, inner, outers, inners, piece};
}

// A layout drawn at random: heads or tokens may be apart, rows may run backwards, pieces are of any size.
struct Drawn {
  std::vector<std::byte> memory;
  std::vector<StreamView> views;
  std::vector<uint64_t> layer_bytes;
  uint32_t streams;
  uint64_t slots;
};

Drawn draw(std::mt19937& random) {
  const auto below = [&](uint32_t n) { return random() % n; };
  Drawn drawn;
  drawn.streams = 1 + below(3);
  drawn.slots = 1 + below(5);
  const uint32_t layers = 1 + below(4);
  constexpr std::array<uint64_t, 8> kPieces = {1, 8, 24, 64, 100, 256, 1024, 5000};
  std::vector<int64_t> offsets;
  int64_t end = 64;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    uint64_t total = 0;
    for (uint32_t stream = 0; stream < drawn.streams; ++stream) {
      const uint64_t piece = kPieces[below(kPieces.size())];
      const uint32_t outers = 1 + below(6), inners = 1 + below(5);
      const int64_t inner = static_cast<int64_t>(piece + (below(2) ? 0 : below(40)));
      const int64_t outer = inner * inners + (below(2) ? 0 : below(40));
      const int64_t slot = outer * outers + (below(2) ? 0 : below(100));
      const bool backwards = below(4) == 0;
      const int64_t base = end + (backwards ? outer * (outers - 1) : 0);
      offsets.push_back(base);
      drawn.views.push_back(view_of(nullptr, slot, backwards ? -outer : outer, inner, outers, inners, piece));
      end += slot * static_cast<int64_t>(drawn.slots);
      total += piece * outers * inners;
    }
    drawn.layer_bytes.push_back(total);
  }
  drawn.memory.resize(static_cast<size_t>(end) + 64);
  for (std::byte& byte : drawn.memory) byte = static_cast<std::byte>(random());
  for (size_t i = 0; i < offsets.size(); ++i) drawn.views[i].base = drawn.memory.data() + offsets[i];
  return drawn;
}

// The canonical bytes of a layer, one byte at a time.
std::vector<std::byte*> canonical(const Drawn& drawn, uint64_t slot, uint32_t layer) {
  std::vector<std::byte*> out;
  for (uint32_t stream = 0; stream < drawn.streams; ++stream) {
    const StreamView& view = drawn.views[layer * drawn.streams + stream];
    for (uint32_t o = 0; o < view.outer_count; ++o)
      for (uint32_t i = 0; i < view.inner_count; ++i)
        for (uint64_t b = 0; b < view.piece_bytes; ++b)
          out.push_back(view.base + static_cast<int64_t>(slot) * view.slot_stride + o * view.outer_stride +
                        i * view.inner_stride + static_cast<int64_t>(b));
  }
  return out;
}

}  // namespace

TEST_CASE("gather delivers the canonical bytes and their checksum, from any layout") {
  by_each_crc32c([] {
    std::mt19937 random(1);
    for (int round = 0; round < 60; ++round) {
      CAPTURE(round);
      const Drawn drawn = draw(random);
      const PageShape shape = shape_of(drawn.layer_bytes);
      const PoolLayout pool(shape, drawn.streams, drawn.views, drawn.slots, false);
      const uint64_t slot = random() % drawn.slots;
      for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
        std::vector<std::byte> expected, target(shape.layer_bytes(layer) + 8, std::byte{0xee});
        for (const std::byte* byte : canonical(drawn, slot, layer)) expected.push_back(*byte);
        uint32_t crc = 77;
        REQUIRE(pool.gather_layer(slot, layer, target.data(), &crc, false) == Status::kOk);
        copy_fence();
        REQUIRE(crc == crc32c_portable(77, expected.data(), expected.size()));
        expected.resize(target.size(), std::byte{0xee});
        REQUIRE(target == expected);
        std::vector<std::byte> plain(target.size(), std::byte{0xee});
        REQUIRE(pool.gather_layer(slot, layer, plain.data(), nullptr, false) == Status::kOk);
        copy_fence();
        REQUIRE(plain == expected);
      }
    }
  });
}

TEST_CASE("scatter writes the canonical bytes into the slot and nothing beside them") {
  by_each_crc32c([] {
    std::mt19937 random(2);
    for (int round = 0; round < 60; ++round) {
      CAPTURE(round);
      Drawn drawn = draw(random);
      const PageShape shape = shape_of(drawn.layer_bytes);
      const PoolLayout pool(shape, drawn.streams, drawn.views, drawn.slots, true);
      const uint64_t slot = random() % drawn.slots;
      for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
        std::vector<std::byte> source(shape.layer_bytes(layer));
        for (std::byte& byte : source) byte = static_cast<std::byte>(random());
        const std::vector<std::byte> before = drawn.memory;
        uint32_t crc = 0;
        REQUIRE(pool.scatter_layer(slot, layer, source.data(), round % 2 ? &crc : nullptr, false) == Status::kOk);
        copy_fence();
        if (round % 2) REQUIRE(crc == crc32c_portable(0, source.data(), source.size()));
        std::vector<std::byte> expected = before;
        const auto places = canonical(drawn, slot, layer);
        for (size_t i = 0; i < places.size(); ++i)
          expected[static_cast<size_t>(places[i] - drawn.memory.data())] = source[i];
        REQUIRE(drawn.memory == expected);
      }
    }
  });
}

TEST_CASE("a slot or layer out of range, or a scatter into a read-only pool, is invalid and copies nothing") {
  std::vector<std::byte> memory(64, std::byte{1}), page(32, std::byte{2});
  const PageShape shape = shape_of({32});
  const auto views = std::vector{view_of(memory.data(), 32, 0, 0, 1, 1, 32)};
  const PoolLayout pool(shape, 1, views, 2, false), writable(shape, 1, views, 2, true);
  uint32_t crc = 3;
  CHECK(pool.gather_layer(2, 0, page.data(), &crc, false) == Status::kInvalid);
  CHECK(pool.gather_layer(0, 1, page.data(), &crc, false) == Status::kInvalid);
  CHECK(pool.scatter_layer(0, 0, page.data(), &crc, false) == Status::kInvalid);
  CHECK(writable.scatter_layer(2, 0, page.data(), &crc, false) == Status::kInvalid);
  CHECK(writable.scatter_layer(0, 1, page.data(), &crc, false) == Status::kInvalid);
  CHECK(crc == 3);
  CHECK(page == std::vector<std::byte>(32, std::byte{2}));
  CHECK(memory == std::vector<std::byte>(64, std::byte{1}));
}

TEST_CASE("a layout that does not add up to the shape, overflows or overlaps itself is refused") {
  std::vector<std::byte> memory(1024);
  void* base = memory.data();
  const PageShape shape = shape_of({64, 32});
  const auto good = view_of(base, 64, 0, 0, 1, 1, 64), half = view_of(base, 32, 0, 0, 1, 1, 32);
  CHECK_NOTHROW(PoolLayout(shape, 1, {good, half}, 4, true));
  const auto refused = [&](uint32_t streams, std::vector<StreamView> views, uint64_t slots, bool writable) {
    CHECK_THROWS_AS(PoolLayout(shape, streams, views, slots, writable), std::invalid_argument);
  };
  refused(0, {}, 4, true);
  refused(1, {good, half}, 0, true);
  refused(1, {good}, 4, true);
  refused(2, {good, half}, 4, true);
  refused(1, {half, half}, 4, true);
  refused(1, {good, good}, 4, true);
  refused(1, {view_of(nullptr, 64, 0, 0, 1, 1, 64), half}, 4, true);
  refused(1, {view_of(base, 64, 0, 0, 0, 1, 64), half}, 4, true);
  refused(1, {view_of(base, 64, 0, 0, 1, 0, 64), half}, 4, true);
  refused(1, {view_of(base, 64, 0, 0, 1, 1, 0), half}, 4, true);
  refused(1, {view_of(base, INT64_MAX, 0, 0, 1, 1, 64), half}, 4, true);
  refused(1, {view_of(base, 64, INT64_MIN, 0, 4, 1, 16), half}, 4, true);
  refused(1, {view_of(base, 64, 0, 0, UINT32_MAX, UINT32_MAX, UINT64_MAX), half}, 4, true);
  refused(1, {view_of(base, 0, 0, 0, 1, 1, 64), half}, 4, true);
  refused(1, {view_of(base, 64, 8, 0, 4, 1, 16), half}, 4, true);
  // Streams whose sum wraps around to the right number.
  refused(2,
          {view_of(base, 0, 0, 0, UINT32_MAX, 1, uint64_t{1} << 32),
           view_of(base, 0, 0, 0, 1, 1, (uint64_t{1} << 32) + 64), half, half},
          1, false);
  // Reading may repeat bytes: a broadcast array is a legitimate source.
  CHECK_NOTHROW(PoolLayout(shape, 1, {view_of(base, 0, 0, 0, 4, 1, 16), half}, 4, false));
}

TEST_CASE("a guarded copy of a layer to or from a truncated mapping ends with bus_fault and leaves the checksum") {
  REQUIRE(guard::install());
  std::string name = "/dev/shm/stepwell-test-XXXXXX";
  const int file = mkstemp(name.data());
  REQUIRE(file >= 0);
  REQUIRE(unlink(name.c_str()) == 0);
  constexpr size_t kBytes = 16384;
  REQUIRE(ftruncate(file, kBytes) == 0);
  auto* mapping = static_cast<std::byte*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  REQUIRE(mapping != MAP_FAILED);
  REQUIRE(guard::add_range(mapping, kBytes));
  std::vector<std::byte> memory(2 * kBytes);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 7);
  const PageShape shape = shape_of({kBytes});
  const PoolLayout pool(shape, 1, {view_of(memory.data(), 2 * kBytes, 512, 0, 64, 1, 256)}, 1, true);
  uint32_t gathered = 4, scattered = 4;
  CHECK(pool.gather_layer(0, 0, mapping, &gathered, true) == Status::kOk);
  copy_fence();
  CHECK(gathered == crc32c(4, mapping, kBytes));
  CHECK(pool.scatter_layer(0, 0, mapping, &scattered, true) == Status::kOk);
  CHECK(scattered == gathered);
  REQUIRE(ftruncate(file, 4096) == 0);
  uint32_t crc = 4;
  CHECK(pool.gather_layer(0, 0, mapping, &crc, true) == Status::kBusFault);
  CHECK(pool.scatter_layer(0, 0, mapping, &crc, true) == Status::kBusFault);
  CHECK(pool.scatter_layer(0, 0, mapping, nullptr, true) == Status::kBusFault);
  CHECK(crc == 4);
  guard::remove_range(mapping);
  munmap(mapping, kBytes);
  close(file);
}
