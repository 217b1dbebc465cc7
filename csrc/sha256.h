// SHA-256 and the prefix-hash chain of pages.
//
// Source of the chain: SGLang 0.5.23 mem_cache/cpp_utils/hash_binding.cpp: h_i = SHA256(h_{i-1} || tokens_i), tokens as
// little-endian u32; the first page has no prior, or the namespace seed as prior.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace stepwell {

constexpr size_t kDigestBytes = 32;

void sha256(const void* data, size_t bytes, uint8_t digest[kDigestBytes]) noexcept;

// Hashes `pages` pages of `page_tokens` tokens each into out[pages][32].
// prior: 32 bytes, or nullptr for a chain without seed. REQUIRES tokens >= 0 (checked by the caller).
void hash_chain(const uint8_t* prior, const int32_t* tokens, size_t pages, size_t page_tokens, uint8_t* out) noexcept;

// "sha-ni", "armv8-sha2", "portable".
const char* sha256_implementation() noexcept;
// All that this machine can run, the one it runs by itself first.
std::vector<std::string_view> sha256_implementations();
// For tests: the process hashes by this one from now on. False: this machine cannot.
bool use_sha256(std::string_view implementation) noexcept;

}  // namespace stepwell
