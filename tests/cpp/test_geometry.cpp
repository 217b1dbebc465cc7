#include <doctest/doctest.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32c.h"
#include "geometry.h"

using namespace stepwell;

namespace {

std::array<uint8_t, 32> fingerprint() {
  std::array<uint8_t, 32> out;
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(i + 1);
  return out;
}

Key key_of(const std::string& text) {
  Key key;
  key.length = static_cast<uint8_t>(text.size());
  std::copy(text.begin(), text.end(), key.bytes.begin());
  return key;
}

}  // namespace

TEST_CASE("a shape lays its layers out one behind the other") {
  const PageShape shape({10, 1, 300}, fingerprint());
  CHECK(shape.layers() == 3);
  CHECK(shape.page_bytes() == 311);
  CHECK(shape.layer_offset(0) == 0);
  CHECK(shape.layer_offset(1) == 10);
  CHECK(shape.layer_offset(2) == 11);
  CHECK(shape.layer_bytes(2) == 300);
}

TEST_CASE("a shape without layers, with an empty one, or of 4 GiB and more is refused") {
  CHECK_THROWS_AS(PageShape({}, fingerprint()), std::invalid_argument);
  CHECK_THROWS_AS(PageShape({4, 0}, fingerprint()), std::invalid_argument);
  CHECK_THROWS_AS(PageShape({uint64_t{1} << 32}, fingerprint()), std::invalid_argument);
  CHECK_THROWS_AS(PageShape({UINT32_MAX, 1}, fingerprint()), std::invalid_argument);
  CHECK_THROWS_AS(PageShape({1, UINT64_MAX}, fingerprint()), std::invalid_argument);
  CHECK_THROWS_AS(PageShape(std::vector<uint64_t>(65537, 1), fingerprint()), std::invalid_argument);
  CHECK_NOTHROW(PageShape({UINT32_MAX}, fingerprint()));
  CHECK_NOTHROW(PageShape(std::vector<uint64_t>(65536, 1), fingerprint()));
}

TEST_CASE("a layer checksum is that of FORMAT.md 2.3, byte by byte") {
  const PageShape shape({5, 0x01020304 - 5}, fingerprint());
  Label label;
  label.key = key_of("abc");
  label.epoch = 0x1122334455667788;
  label.kind = 7;
  std::string message;
  for (const uint8_t byte : fingerprint()) message += static_cast<char>(byte);
  message += "\x88\x77\x66\x55\x44\x33\x22\x11";
  message += '\x07';
  message += "\x04\x03\x02\x01";
  message +=
      "\x03"
      "abc";
  CHECK(shape.page_seed(label) == crc32c_portable(0, message.data(), message.size()));
  message += std::string("\x02\x01\x00\x00", 4);
  CHECK(PageShape::layer_seed(shape.page_seed(label), 0x102) == crc32c_portable(0, message.data(), message.size()));
}

TEST_CASE("the page seed depends on each of fingerprint, epoch, kind, length and key, not on parent or depth") {
  const PageShape shape({64}, fingerprint());
  Label label;
  label.key = key_of("k");
  const uint32_t seed = shape.page_seed(label);
  auto other = fingerprint();
  other[31] ^= 1;
  CHECK(PageShape({64}, other).page_seed(label) != seed);
  CHECK(PageShape({65}, fingerprint()).page_seed(label) != seed);
  Label changed = label;
  changed.epoch = 1;
  CHECK(shape.page_seed(changed) != seed);
  changed = label;
  changed.kind = 2;
  CHECK(shape.page_seed(changed) != seed);
  changed = label;
  changed.key = key_of("l");
  CHECK(shape.page_seed(changed) != seed);
  changed = label;
  changed.key = key_of(std::string("k\0", 2));
  CHECK(shape.page_seed(changed) != seed);
  changed = label;
  changed.parent = key_of("p");
  changed.depth = 3;
  CHECK(shape.page_seed(changed) == seed);
}
