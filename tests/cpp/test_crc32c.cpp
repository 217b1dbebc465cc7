#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "crc32c.h"
#include "implementations.h"

using namespace stepwell;

namespace {

std::vector<uint8_t> random_bytes(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(bytes);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

// One bit at a time, straight from the definition: shares nothing with the implementations.
uint32_t crc32c_by_definition(uint32_t crc, const uint8_t* data, size_t bytes) {
  crc = ~crc;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

// Lengths around every boundary of the kernels, and some between.
std::vector<size_t> lengths() {
  std::vector<size_t> out;
  for (size_t n = 0; n <= 300; ++n) out.push_back(n);
  for (const size_t edge : {512, 1024, 2048, 3072, 4096, 5120, 8192, 65536})
    for (int d = -9; d <= 9; ++d) out.push_back(edge + d);
  return out;
}

}  // namespace

TEST_CASE("crc32c has the values of RFC 3720") {
  by_each_crc32c([] {
    const std::string digits = "123456789";
    CHECK(crc32c(0, digits.data(), digits.size()) == 0xe3069283);
    std::vector<uint8_t> bytes(32, 0);
    CHECK(crc32c(0, bytes.data(), 32) == 0x8a9136aa);
    bytes.assign(32, 0xff);
    CHECK(crc32c(0, bytes.data(), 32) == 0x62a8ab43);
    for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
    CHECK(crc32c(0, bytes.data(), 32) == 0x46dd794e);
    CHECK(crc32c(0, nullptr, 0) == 0);
  });
}

TEST_CASE("all implementations agree with the definition at every length and alignment") {
  by_each_crc32c([] {
    const auto data = random_bytes(66000, 1);
    for (const size_t n : lengths()) {
      CAPTURE(n);
      const size_t offset = n % 67;
      const uint32_t start = static_cast<uint32_t>(n * 2654435761u);
      const uint32_t expected = crc32c_by_definition(start, data.data() + offset, n);
      REQUIRE(crc32c_portable(start, data.data() + offset, n) == expected);
      REQUIRE(crc32c(start, data.data() + offset, n) == expected);
    }
  });
}

TEST_CASE(
    "an implementation of crc32c that the machine has not, or that nobody knows, is refused and changes nothing") {
  const std::string before = crc32c_implementation();
  CHECK(before == crc32c_implementations().front());
  CHECK(!use_crc32c("abacus"));
  CHECK(crc32c_implementation() == before);
  CHECK(crc32c_implementations().back() == "table");
}

TEST_CASE("crc32c_copy copies exactly its bytes and returns their checksum, whatever length and alignments") {
  by_each_crc32c([] {
    const auto data = random_bytes(66000, 2);
    std::mt19937 random(3);
    for (const size_t n : lengths()) {
      for (int round = 0; round < 3; ++round) {
        CAPTURE(n);
        const size_t from = random() % 130, to = 64 + random() % 130;
        std::vector<uint8_t> target(n + 400, 0xa5), expected(n + 400, 0xa5);
        if (n > 0) std::memcpy(expected.data() + to, data.data() + from, n);
        const uint32_t start = static_cast<uint32_t>(random());
        REQUIRE(crc32c_copy(start, target.data() + to, data.data() + from, n) ==
                crc32c_portable(start, data.data() + from, n));
        copy_fence();
        REQUIRE(target == expected);
      }
    }
  });
}

TEST_CASE("stream_copy copies exactly its bytes") {
  by_each_crc32c([] {
    const auto data = random_bytes(66000, 4);
    std::mt19937 random(5);
    for (const size_t n : lengths()) {
      CAPTURE(n);
      const size_t from = random() % 130, to = 64 + random() % 130;
      std::vector<uint8_t> target(n + 400, 0xa5), expected(n + 400, 0xa5);
      if (n > 0) std::memcpy(expected.data() + to, data.data() + from, n);
      stream_copy(target.data() + to, data.data() + from, n);
      copy_fence();
      REQUIRE(target == expected);
    }
  });
}

TEST_CASE("a checksum made in parts is that of the whole") {
  by_each_crc32c([] {
    const auto data = random_bytes(20000, 6);
    std::vector<uint8_t> target(data.size());
    std::mt19937 random(7);
    const uint32_t whole = crc32c(0, data.data(), data.size());
    for (int round = 0; round < 50; ++round) {
      uint32_t crc = 0;
      for (size_t at = 0; at < data.size();) {
        const size_t n = std::min<size_t>(random() % (round % 2 ? 3000 : 200), data.size() - at);
        crc = crc32c_copy(crc, target.data() + at, data.data() + at, n);
        at += n;
      }
      REQUIRE(crc == whole);
      REQUIRE(target == data);
    }
  });
}

TEST_CASE("crc32c_combine joins the checksums of two parts") {
  const auto data = random_bytes(10000, 8);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{7}, size_t{1024}, size_t{5000}, size_t{9999}, size_t{10000}}) {
    const uint32_t a = crc32c(0, data.data(), cut), b = crc32c(0, data.data() + cut, data.size() - cut);
    CHECK(crc32c_combine(a, b, data.size() - cut) == whole);
  }
}

TEST_CASE("crc32c_combine does not overflow where the second part is huge") {
  // Two steps of 2^62 bytes are one of 2^63; the checksum of nothing in front leaves the second as it is.
  const uint32_t a = 0x12345678;
  const uint32_t twice = crc32c_combine(crc32c_combine(a, 0, uint64_t{1} << 62), 0, uint64_t{1} << 62);
  CHECK(crc32c_combine(a, 0, uint64_t{1} << 63) == twice);
  CHECK(crc32c_combine(0, 77, UINT64_MAX) == 77);
}

TEST_CASE("every flipped bit of a page changes the checksum") {
  by_each_crc32c([] {
    auto data = random_bytes(4096, 9);
    const uint32_t before = crc32c(0, data.data(), data.size());
    for (size_t bit = 0; bit < 8 * data.size(); bit += 37) {
      data[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
      REQUIRE(crc32c(0, data.data(), data.size()) != before);
      data[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    }
  });
}
