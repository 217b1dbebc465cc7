// The shape of a page in canonical order, and what a page is called in a record.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace stepwell {

constexpr size_t kMaxKeyBytes = 64;
constexpr uint32_t kNoSlot = UINT32_MAX;
constexpr uint32_t kUnknownDepth = UINT32_MAX;

// A page key: up to 64 bytes, zero behind its length.
struct Key {
  std::array<uint8_t, kMaxKeyBytes> bytes{};
  uint8_t length = 0;
  bool operator==(const Key& other) const noexcept {
    return length == other.length && std::memcmp(bytes.data(), other.bytes.data(), length) == 0;
  }
};

// `count` keys of `length` bytes, 1 to kMaxKeyBytes, that lie one behind the other.
std::vector<Key> make_keys(const uint8_t* bytes, size_t count, size_t length);

enum class ParentState : uint8_t { kRoot = 0, kKnown = 1, kUnknown = 2 };

// What a record says of a page beside its checksum. FORMAT.md 2.2.
struct Label {
  Key key;
  Key parent;
  ParentState parent_state = ParentState::kUnknown;
  uint8_t kind = 1;
  uint32_t depth = kUnknownDepth;
  uint64_t epoch = 0;
};

// Immutable. Layers in canonical order; an opaque page has its 64 KiB pieces as layers.
class PageShape {
 public:
  // REQUIRES every size > 0; throws std::invalid_argument on an empty list or an overflow of u64/u32 length.
  PageShape(std::vector<uint64_t> layer_bytes, const std::array<uint8_t, 32>& fingerprint);

  uint32_t layers() const noexcept { return static_cast<uint32_t>(layer_bytes_.size()); }
  uint64_t layer_bytes(uint32_t layer) const noexcept { return layer_bytes_[layer]; }
  uint64_t layer_offset(uint32_t layer) const noexcept { return layer_offset_[layer]; }
  uint64_t page_bytes() const noexcept { return page_bytes_; }
  const std::array<uint8_t, 32>& fingerprint() const noexcept { return fingerprint_; }

  // FORMAT.md 2.3: the checksum of everything before the layer number...
  uint32_t page_seed(const Label& label) const noexcept;
  // ...and with the layer number: what the layer's bytes continue from.
  static uint32_t layer_seed(uint32_t page_seed, uint32_t layer) noexcept;

 private:
  std::vector<uint64_t> layer_bytes_;
  std::vector<uint64_t> layer_offset_;
  uint64_t page_bytes_ = 0;
  std::array<uint8_t, 32> fingerprint_{};
};

}  // namespace stepwell
