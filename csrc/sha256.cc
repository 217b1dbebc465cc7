#include "sha256.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__) && \
    (!defined(__clang__) || __clang_major__ >= 18 || defined(__ARM_FEATURE_SHA2))
// Older clang hides the intrinsics from functions with a target attribute.
#define STEPWELL_ARMV8_SHA2
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace stepwell {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as little-endian u32, in place");

constexpr size_t kBlockBytes = 64;

// Source of the constants: FIPS 180-4, 4.2.2 and 5.3.3.
alignas(64) constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;
constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

using Compress = void (*)(State& state, const uint8_t* blocks, size_t count) noexcept;

uint32_t load_big_endian(const uint8_t* bytes) noexcept {
  uint32_t value;
  std::memcpy(&value, bytes, sizeof value);
  return __builtin_bswap32(value);
}

void compress_portable(State& state, const uint8_t* blocks, size_t count) noexcept {
  for (; count > 0; --count, blocks += kBlockBytes) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i) w[i] = load_big_endian(blocks + 4 * i);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const State round = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += round[i];
  }
}

#if defined(__x86_64__)

// The SHA extensions work on the state as two registers, ABEF and CDGH, and on four rounds at a time.
// Source of the instruction sequence: Intel, "Intel SHA Extensions" (2013).
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(State& state, const uint8_t* blocks,
                                                                 size_t count) noexcept {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data()));       // D C B A
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4));  // H G F E
  low = _mm_shuffle_epi32(low, 0xb1);                                                  // C D A B
  high = _mm_shuffle_epi32(high, 0x1b);                                                // E F G H
  __m128i abef = _mm_alignr_epi8(low, high, 8);
  __m128i cdgh = _mm_blend_epi16(high, low, 0xf0);

  for (; count > 0; --count, blocks += kBlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + 16 * i)), big_endian);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound.data() + 4 * i));
      const __m128i sum = _mm_add_epi32(w[i & 3], constants);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
      if (i < 12) {
        // w[16..19 + 4i] from the four before: msg1 adds sigma0, alignr takes w[t-7], msg2 adds sigma1.
        const __m128i sevenths = _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4);
        const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]), sevenths);
        w[i & 3] = _mm_sha256msg2_epu32(partial, w[(i + 3) & 3]);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  low = _mm_shuffle_epi32(abef, 0x1b);   // F E B A
  high = _mm_shuffle_epi32(cdgh, 0xb1);  // D C H G
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(low, high, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(high, low, 8));
}

bool has_hardware() noexcept {
  // __builtin_cpu_supports("sha") is unknown to the oldest compilers we accept: ask cpuid (leaf 7, EBX bit 29).
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (b & (1u << 29)) != 0 && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}
constexpr Compress kHardware = compress_sha_ni;
constexpr const char* kHardwareName = "sha-ni";

#elif defined(STEPWELL_ARMV8_SHA2)

#if defined(__clang__)
#define STEPWELL_TARGET_SHA2 __attribute__((target("sha2")))
#else
#define STEPWELL_TARGET_SHA2 __attribute__((target("+crypto")))
#endif

STEPWELL_TARGET_SHA2 void compress_armv8(State& state, const uint8_t* blocks, size_t count) noexcept {
  uint32x4_t abcd = vld1q_u32(state.data()), efgh = vld1q_u32(state.data() + 4);
  for (; count > 0; --count, blocks += kBlockBytes) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * i)));
    for (int i = 0; i < 16; ++i) {
      const uint32x4_t sum = vaddq_u32(w[i & 3], vld1q_u32(kRound.data() + 4 * i));
      const uint32x4_t abcd_old = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_old, sum);
      if (i < 12) w[i & 3] = vsha256su1q_u32(vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]), w[(i + 2) & 3], w[(i + 3) & 3]);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state.data(), abcd);
  vst1q_u32(state.data() + 4, efgh);
}

bool has_hardware() noexcept { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }
constexpr Compress kHardware = compress_armv8;
constexpr const char* kHardwareName = "armv8-sha2";

#else

bool has_hardware() noexcept { return false; }
constexpr Compress kHardware = compress_portable;
constexpr const char* kHardwareName = "portable";

#endif

std::atomic<Compress>& chosen() noexcept {
  static std::atomic<Compress> compress = has_hardware() ? kHardware : compress_portable;
  return compress;
}

Compress in_use() noexcept { return chosen().load(std::memory_order_relaxed); }

// One message in up to two parts: whole blocks are hashed where they lie, only the seam and the end pass through a
// buffer.
void digest_parts(Compress compress, const uint8_t* first, size_t first_bytes, const uint8_t* second,
                  size_t second_bytes, uint8_t* digest) noexcept {
  State state = kInitial;
  const uint64_t bits = 8 * static_cast<uint64_t>(first_bytes + second_bytes);
  compress(state, first, first_bytes / kBlockBytes);
  size_t held = first_bytes % kBlockBytes;
  alignas(64) std::array<uint8_t, 2 * kBlockBytes> tail;
  if (held > 0) {
    std::memcpy(tail.data(), first + (first_bytes - held), held);
    const size_t taken = std::min(kBlockBytes - held, second_bytes);
    if (taken > 0) std::memcpy(tail.data() + held, second, taken);
    held += taken, second += taken, second_bytes -= taken;
    if (held == kBlockBytes) {
      compress(state, tail.data(), 1);
      held = 0;
    }
  }
  if (held == 0 && second_bytes > 0) {
    compress(state, second, second_bytes / kBlockBytes);
    held = second_bytes % kBlockBytes;
    if (held > 0) std::memcpy(tail.data(), second + (second_bytes - held), held);
  }
  const size_t padded = held + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  tail[held] = 0x80;
  std::memset(tail.data() + held + 1, 0, padded - held - 9);
  const uint64_t length = __builtin_bswap64(bits);
  std::memcpy(tail.data() + padded - 8, &length, sizeof length);
  compress(state, tail.data(), padded / kBlockBytes);
  for (size_t i = 0; i < state.size(); ++i) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(digest + 4 * i, &word, sizeof word);
  }
}

}  // namespace

void sha256(const void* data, size_t bytes, uint8_t digest[kDigestBytes]) noexcept {
  digest_parts(in_use(), nullptr, 0, static_cast<const uint8_t*>(data), bytes, digest);
}

void hash_chain(const uint8_t* prior, const int32_t* tokens, size_t pages, size_t page_tokens, uint8_t* out) noexcept {
  const Compress compress = in_use();
  const size_t page_bytes = page_tokens * sizeof(int32_t);
  const auto* bytes = reinterpret_cast<const uint8_t*>(tokens);
  for (size_t page = 0; page < pages; ++page, bytes += page_bytes, out += kDigestBytes) {
    digest_parts(compress, prior, prior != nullptr ? kDigestBytes : 0, bytes, page_bytes, out);
    prior = out;
  }
}

const char* sha256_implementation() noexcept { return in_use() == compress_portable ? "portable" : kHardwareName; }

std::vector<std::string_view> sha256_implementations() {
  if (has_hardware()) return {kHardwareName, "portable"};
  return {"portable"};
}

bool use_sha256(std::string_view implementation) noexcept {
  if (implementation == "portable") {
    chosen().store(compress_portable, std::memory_order_relaxed);
  } else if (implementation == kHardwareName && has_hardware()) {
    chosen().store(kHardware, std::memory_order_relaxed);
  } else {
    return false;
  }
  return true;
}

}  // namespace stepwell
