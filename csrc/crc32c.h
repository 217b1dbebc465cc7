// CRC-32C (polynomial 0x1EDC6F41, reflected), alone and fused into a copy.
//
// The value never depends on how it is computed: hardware or table, one lane or four, aligned or not.
// Convention: `crc` is the finished value of what came before (0 for nothing), as in zlib's crc32().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace stepwell {

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) noexcept;

// Copies source to target and returns the checksum of the bytes copied: each source byte is read once, and the
// checksum is of the value that was stored. Stores may be non-temporal: call copy_fence() before publishing.
uint32_t crc32c_copy(uint32_t crc, void* target, const void* source, size_t bytes) noexcept;

// The same copy without a checksum (non-temporal where it pays).
void stream_copy(void* target, const void* source, size_t bytes) noexcept;

// The checksum of A|B from the checksums of A and B.
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) noexcept;

// Orders the non-temporal stores of this thread before its later stores (sfence; dmb ishst on ARM).
void copy_fence() noexcept;

// "sse4.2+avx2", "armv8-crc", "table": which implementation this machine runs. For `doctor` and tests.
const char* crc32c_implementation() noexcept;
// All that this machine can run, the one it runs by itself first.
std::vector<std::string_view> crc32c_implementations();
// For tests: the process computes and copies by this one from now on. False: this machine cannot.
bool use_crc32c(std::string_view implementation) noexcept;

// The table implementation, kept reachable as the oracle of the fast ones.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) noexcept;

}  // namespace stepwell
