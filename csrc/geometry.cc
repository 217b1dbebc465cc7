#include "geometry.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "crc32c.h"

namespace stepwell {
namespace {

constexpr size_t kMaxLayers = size_t{1} << 16;  // FORMAT.md 2.1

// Appends a number in little-endian order, whatever the machine's.
template <typename T>
uint8_t* put(uint8_t* out, T value) noexcept {
  for (size_t i = 0; i < sizeof(T); ++i) *out++ = static_cast<uint8_t>(value >> (8 * i));
  return out;
}

}  // namespace

std::vector<Key> make_keys(const uint8_t* bytes, size_t count, size_t length) {
  std::vector<Key> keys(count);
  // A size that the compiler knows: a call of memcpy a key was half of a lookup (the keys of engines are SHA-256).
  constexpr size_t kDigest = 32;
  for (size_t i = 0; i < count; ++i, bytes += length) {
    if (length == kDigest)
      std::memcpy(keys[i].bytes.data(), bytes, kDigest);
    else
      std::memcpy(keys[i].bytes.data(), bytes, length);
    keys[i].length = static_cast<uint8_t>(length);
  }
  return keys;
}

PageShape::PageShape(std::vector<uint64_t> layer_bytes, const std::array<uint8_t, 32>& fingerprint)
    : layer_bytes_(std::move(layer_bytes)), fingerprint_(fingerprint) {
  if (layer_bytes_.empty()) throw std::invalid_argument("a page needs at least one layer");
  if (layer_bytes_.size() > kMaxLayers)
    throw std::invalid_argument("a page has at most 65536 layers, not " + std::to_string(layer_bytes_.size()));
  layer_offset_.reserve(layer_bytes_.size());
  for (size_t layer = 0; layer < layer_bytes_.size(); ++layer) {
    const uint64_t bytes = layer_bytes_[layer];
    if (bytes == 0) throw std::invalid_argument("layer " + std::to_string(layer) + " has no bytes");
    // A record holds the length of a page as u32 (FORMAT.md 2.2).
    if (bytes > UINT32_MAX - page_bytes_)
      throw std::invalid_argument("a page must stay below 4 GiB: layers 0 to " + std::to_string(layer) + " have " +
                                  std::to_string(page_bytes_) + " + " + std::to_string(bytes) + " bytes");
    layer_offset_.push_back(page_bytes_);
    page_bytes_ += bytes;
  }
}

uint32_t PageShape::page_seed(const Label& label) const noexcept {
  std::array<uint8_t, 32 + 8 + 1 + 4 + 1 + kMaxKeyBytes> prefix;
  uint8_t* end = std::copy(fingerprint_.begin(), fingerprint_.end(), prefix.data());
  const uint8_t length = std::min<uint8_t>(label.key.length, kMaxKeyBytes);
  end = put(end, label.epoch);
  end = put(end, label.kind);
  end = put(end, static_cast<uint32_t>(page_bytes_));
  end = put(end, length);
  end = std::copy_n(label.key.bytes.begin(), length, end);
  return crc32c(0, prefix.data(), static_cast<size_t>(end - prefix.data()));
}

uint32_t PageShape::layer_seed(uint32_t page_seed, uint32_t layer) noexcept {
  std::array<uint8_t, 4> number;
  put(number.data(), layer);
  return crc32c(page_seed, number.data(), number.size());
}

}  // namespace stepwell
