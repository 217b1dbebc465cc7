// Reads what a fuzz target does from the bytes it is given: an input is a script, so every input does something, and what
// a fuzzer changes in it is one step of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace stepwell::fuzz {

// Values at which bounds are wrong, where they are.
constexpr std::array<uint64_t, 28> kInteresting{0,
                                                1,
                                                2,
                                                3,
                                                63,
                                                64,
                                                65,
                                                191,
                                                192,
                                                511,
                                                512,
                                                4095,
                                                4096,
                                                4097,
                                                8192,
                                                1u << 16,
                                                1u << 20,
                                                1u << 24,
                                                (1u << 24) + 1,
                                                (1u << 31) - 1,
                                                UINT32_MAX,
                                                1ull << 32,
                                                1ull << 61,
                                                1ull << 62,
                                                1ull << 63,
                                                (1ull << 63) - 2,
                                                UINT64_MAX - 1,
                                                UINT64_MAX};

// Zeros once the bytes are used up.
class Script {
 public:
  Script(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}
  bool is_over() const noexcept { return left_ == 0; }

  template <typename T>
  T take() noexcept {
    T value{};
    const size_t have = std::min(sizeof(T), left_);
    if (have > 0) std::memcpy(&value, data_, have);
    data_ += have;
    left_ -= have;
    return value;
  }
  // Below `limit`, which is not 0.
  uint32_t below(uint64_t limit) noexcept { return static_cast<uint32_t>(take<uint16_t>() % limit); }
  bool flag() noexcept { return take<uint8_t>() % 2 == 1; }
  // A value for a field that held `before`: one near it, a telling one, or any.
  uint64_t value(uint64_t before) noexcept {
    switch (take<uint8_t>() % 4) {
      case 0: return before + static_cast<uint64_t>(static_cast<int64_t>(take<int8_t>()));
      case 1: return kInteresting[take<uint8_t>() % kInteresting.size()];
      case 2: return before ^ (uint64_t{1} << take<uint8_t>() % 64);
      default: return take<uint64_t>();
    }
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace stepwell::fuzz
