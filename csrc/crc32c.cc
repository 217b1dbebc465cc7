#include "crc32c.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#if !defined(__clang__)
#include <arm_acle.h>
#endif
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

// How the fused copy works: a block of 1 KiB is four lanes of 256 bytes. Each step loads one word of each lane, feeds
// it to that lane's checksum and stores the same register: a source byte is read once, and four independent chains hide
// the latency of the crc instruction (3 cycles). At the end of a block the lanes are joined: shift by x^(8 * distance),
// one table or carry-less product each. Measured against other shapes: see benchmarks/bench_copy.py.

namespace stepwell {
namespace {

static_assert(std::endian::native == std::endian::little, "words are checksummed in memory order");

constexpr uint32_t kPolynomial = 0x82f63b78;  // 0x1EDC6F41 reflected: bit 31 is x^0, bit 0 is x^31

constexpr uint32_t times_x(uint32_t v) noexcept { return (v >> 1) ^ ((v & 1) != 0 ? kPolynomial : 0); }

// a * b modulo the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) noexcept {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit, b = times_x(b))
    if (((a >> bit) & 1) != 0) product ^= b;
  return product;
}

// x^exponent modulo the polynomial.
constexpr uint32_t power_of_x(uint64_t exponent) noexcept {
  uint32_t result = 0x80000000, square = 0x40000000;
  for (; exponent != 0; exponent >>= 1, square = multiply(square, square))
    if ((exponent & 1) != 0) result = multiply(result, square);
  return result;
}

// kTables[k][b]: the checksum register after byte b and k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t v = byte;
    for (int bit = 0; bit < 8; ++bit) v = times_x(v);
    tables[0][byte] = v;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
  return tables;
}();

uint64_t load_word(const std::byte* from) noexcept {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

constexpr size_t kLaneBytes = 256;
constexpr size_t kBlockBytes = 4 * kLaneBytes;

// ---- portable ----

// `crc` here and in all kernels: the raw register, without the final inversion.
uint32_t update_portable(uint32_t crc, const std::byte* from, size_t bytes) noexcept {
  for (; bytes >= 8; bytes -= 8, from += 8) {
    const uint64_t v = load_word(from) ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(v >> (8 * i)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++from) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*from)) & 0xff];
  return crc;
}

uint32_t copy_portable(uint32_t crc, std::byte* target, const std::byte* source, size_t bytes) noexcept {
  for (; bytes >= 8; bytes -= 8, source += 8, target += 8) {
    const uint64_t word = load_word(source);
    std::memcpy(target, &word, sizeof word);
    const uint64_t v = word ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(v >> (8 * i)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++source, ++target) {
    const std::byte byte = *source;
    *target = byte;
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return crc;
}

void stream_portable(std::byte* target, const std::byte* source, size_t bytes) noexcept {
  std::memcpy(target, source, bytes);
}

struct Kernels {
  const char* name;
  uint32_t (*update)(uint32_t crc, const std::byte* from, size_t bytes) noexcept;
  uint32_t (*copy)(uint32_t crc, std::byte* target, const std::byte* source, size_t bytes) noexcept;
  void (*stream)(std::byte* target, const std::byte* source, size_t bytes) noexcept;
};

constexpr Kernels kPortable = {"table", update_portable, copy_portable, stream_portable};

// ---- x86-64: SSE4.2 crc32, PCLMULQDQ to join lanes, movnti to stream words, AVX2 for the plain copy ----
#if defined(__x86_64__)

// Below this a piece is stored through the cache: the lines at its ends are seldom filled whole, and a streamed line
// that is not costs more than it saves. Source: benchmarks/bench_copy.py.
constexpr size_t kStreamBytes = 1024;
constexpr size_t kLineBytes = 64;
constexpr size_t kPrefetchBytes = 2 * kBlockBytes;
constexpr size_t kSmallBlockBytes = 128;  // four lanes of 32: for what is left, and for small pieces

#define STEPWELL_SSE42 __attribute__((target("sse4.2,pclmul")))
#define STEPWELL_INLINE_SSE42 __attribute__((target("sse4.2,pclmul"), always_inline)) inline

inline void prefetch_line(const std::byte* line) noexcept {
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0);
}

// The first lines of a piece, which nothing has announced to the hardware prefetcher yet.
inline void prefetch_start(const std::byte* source, size_t bytes) noexcept {
  for (size_t line = 0; line < std::min(bytes, kPrefetchBytes); line += kLineBytes) prefetch_line(source + line);
}

STEPWELL_INLINE_SSE42 uint64_t step(uint64_t crc, uint64_t word) noexcept { return _mm_crc32_u64(crc, word); }

enum class Store : uint8_t { kNone, kCached, kStreamed };

// `target` is null where nothing is stored, so it is only offset where something is.
template <Store store>
STEPWELL_INLINE_SSE42 void put(std::byte* target, size_t at, uint64_t word) noexcept {
  if constexpr (store == Store::kStreamed) {
    _mm_stream_si64(reinterpret_cast<long long*>(target + at), static_cast<long long>(word));
  } else if constexpr (store == Store::kCached) {
    std::memcpy(target + at, &word, sizeof word);
  }
}

// The factor that, multiplied carry-less into a register and reduced by one crc32 instruction, shifts it by `bytes`.
// The 64-bit product of two reflected 32-bit values stands one place low, and the instruction multiplies by x^32.
constexpr uint64_t shift_factor(uint64_t bytes) noexcept { return power_of_x(8 * bytes - 33); }

template <uint64_t bytes>
STEPWELL_INLINE_SSE42 __m128i shifted(uint64_t crc) noexcept {
  constexpr uint64_t factor = shift_factor(bytes);
  return _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                              _mm_cvtsi64_si128(static_cast<long long>(factor)), 0);
}

// One block of four lanes, `at` bytes into source and target. `ahead`: prefetch the lines kPrefetchBytes further on.
template <size_t lane, Store store, bool ahead>
STEPWELL_INLINE_SSE42 uint64_t block(uint64_t crc, std::byte* target, const std::byte* source, size_t at) noexcept {
  constexpr size_t kRun = std::min(lane, kLineBytes);
  uint64_t a = crc, b = 0, c = 0, d = 0;
  for (size_t line = at; line < at + lane; line += kRun) {
    if constexpr (ahead) {
      for (size_t i = 0; i < 4; ++i) prefetch_line(source + line + kPrefetchBytes + i * lane);
    }
    for (size_t i = line; i < line + kRun; i += 8) {
      const uint64_t wa = load_word(source + i), wb = load_word(source + i + lane),
                     wc = load_word(source + i + 2 * lane), wd = load_word(source + i + 3 * lane);
      a = step(a, wa), b = step(b, wb), c = step(c, wc), d = step(d, wd);
      put<store>(target, i, wa), put<store>(target, i + lane, wb);
      put<store>(target, i + 2 * lane, wc), put<store>(target, i + 3 * lane, wd);
    }
  }
  const __m128i joined = _mm_xor_si128(_mm_xor_si128(shifted<3 * lane>(a), shifted<2 * lane>(b)), shifted<lane>(c));
  return step(0, static_cast<uint64_t>(_mm_cvtsi128_si64(joined))) ^ d;
}

template <Store store>
STEPWELL_INLINE_SSE42 uint32_t run_sse42(uint32_t start, std::byte* target, const std::byte* source,
                                         size_t bytes) noexcept {
  uint64_t crc = start;
  size_t at = 0;
  for (; bytes - at >= kBlockBytes + kPrefetchBytes; at += kBlockBytes)
    crc = block<kLaneBytes, store, true>(crc, target, source, at);
  for (; bytes - at >= kBlockBytes; at += kBlockBytes) crc = block<kLaneBytes, store, false>(crc, target, source, at);
  for (; bytes - at >= kSmallBlockBytes; at += kSmallBlockBytes)
    crc = block<kSmallBlockBytes / 4, store, false>(crc, target, source, at);
  for (; bytes - at >= 8; at += 8) {
    const uint64_t word = load_word(source + at);
    crc = step(crc, word);
    put<store>(target, at, word);
  }
  for (; at < bytes; ++at) {
    const std::byte byte = source[at];
    crc = _mm_crc32_u8(static_cast<uint32_t>(crc), static_cast<uint8_t>(byte));
    if constexpr (store != Store::kNone) target[at] = byte;
  }
  return static_cast<uint32_t>(crc);
}

STEPWELL_SSE42 uint32_t update_sse42(uint32_t crc, const std::byte* from, size_t bytes) noexcept {
  prefetch_start(from, bytes);
  return run_sse42<Store::kNone>(crc, nullptr, from, bytes);
}

STEPWELL_SSE42 uint32_t copy_sse42(uint32_t crc, std::byte* target, const std::byte* source, size_t bytes) noexcept {
  prefetch_start(source, bytes);
  if (bytes < kStreamBytes) return run_sse42<Store::kCached>(crc, target, source, bytes);
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(target) % kLineBytes) % kLineBytes;
  crc = run_sse42<Store::kCached>(crc, target, source, head);
  target += head, source += head, bytes -= head;
  const size_t body = bytes / kLineBytes * kLineBytes;
  crc = run_sse42<Store::kStreamed>(crc, target, source, body);
  return run_sse42<Store::kCached>(crc, target + body, source + body, bytes - body);
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* target, const std::byte* source, size_t bytes) noexcept {
  if (bytes < kStreamBytes) {
    std::memcpy(target, source, bytes);
    return;
  }
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(target) % kLineBytes) % kLineBytes;
  prefetch_start(source, bytes);
  std::memcpy(target, source, head);
  target += head, source += head, bytes -= head;
  for (; bytes >= 128; bytes -= 128, source += 128, target += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(source + kPrefetchBytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(source + kPrefetchBytes + kLineBytes), _MM_HINT_T0);
    const auto* from = reinterpret_cast<const __m256i*>(source);
    auto* to = reinterpret_cast<__m256i*>(target);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1), c = _mm256_loadu_si256(from + 2),
                  d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
  std::memcpy(target, source, bytes);
}

// Best first.
constexpr std::array kImplementations = {Kernels{"sse4.2+avx2", update_sse42, copy_sse42, stream_avx2},
                                         Kernels{"sse4.2", update_sse42, copy_sse42, stream_portable}, kPortable};

bool can_run(const Kernels& kernels) noexcept {
  if (kernels.update == update_sse42 && !(__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")))
    return false;
  return kernels.stream != stream_avx2 || __builtin_cpu_supports("avx2");
}

// ---- AArch64: the CRC extension. No streaming stores: these cores notice full lines being written and stop allocating
// ----
#elif defined(__aarch64__) && defined(__linux__)

#if defined(__clang__)
#define STEPWELL_CRC __attribute__((target("crc")))
#define STEPWELL_CRC_WORD __builtin_arm_crc32cd
#define STEPWELL_CRC_BYTE __builtin_arm_crc32cb
#else
#define STEPWELL_CRC __attribute__((target("+crc")))
#define STEPWELL_CRC_WORD __crc32cd
#define STEPWELL_CRC_BYTE __crc32cb
#endif

// kShift[k][b]: byte k of a register, shifted by one lane.
constexpr std::array<std::array<uint32_t, 256>, 4> kShift = [] {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  for (size_t k = 0; k < 4; ++k)
    for (uint32_t bit = 0; bit < 8; ++bit) {
      const uint32_t shifted = multiply(1u << (8 * k + bit), power_of_x(8 * kLaneBytes));
      for (size_t byte = 0; byte < 256; ++byte)
        if (((byte >> bit) & 1) != 0) tables[k][byte] ^= shifted;
    }
  return tables;
}();

uint32_t shift_lane(uint32_t crc) noexcept {
  return kShift[0][crc & 0xff] ^ kShift[1][(crc >> 8) & 0xff] ^ kShift[2][(crc >> 16) & 0xff] ^ kShift[3][crc >> 24];
}

template <bool store>
STEPWELL_CRC uint32_t run_armv8(uint32_t crc, std::byte* target, const std::byte* source, size_t bytes) noexcept {
  const auto put = [&target](size_t offset, uint64_t word) {
    if constexpr (store)
      std::memcpy(target + offset, &word, sizeof word);
    else
      static_cast<void>(target);
  };
  size_t at = 0;
  for (; bytes - at >= kBlockBytes; at += kBlockBytes) {
    uint32_t lanes[4] = {crc, 0, 0, 0};
    for (size_t i = at; i < at + kLaneBytes; i += 8) {
      for (size_t lane = 0; lane < 4; ++lane) {
        const uint64_t word = load_word(source + i + lane * kLaneBytes);
        lanes[lane] = STEPWELL_CRC_WORD(lanes[lane], word);
        put(i + lane * kLaneBytes, word);
      }
    }
    crc = shift_lane(shift_lane(shift_lane(lanes[0]) ^ lanes[1]) ^ lanes[2]) ^ lanes[3];
  }
  for (; bytes - at >= 8; at += 8) {
    const uint64_t word = load_word(source + at);
    crc = STEPWELL_CRC_WORD(crc, word);
    put(at, word);
  }
  for (; at < bytes; ++at) {
    const std::byte byte = source[at];
    crc = STEPWELL_CRC_BYTE(crc, static_cast<uint8_t>(byte));
    if constexpr (store) target[at] = byte;
  }
  return crc;
}

STEPWELL_CRC uint32_t update_armv8(uint32_t crc, const std::byte* from, size_t bytes) noexcept {
  return run_armv8<false>(crc, nullptr, from, bytes);
}

STEPWELL_CRC uint32_t copy_armv8(uint32_t crc, std::byte* target, const std::byte* source, size_t bytes) noexcept {
  return run_armv8<true>(crc, target, source, bytes);
}

constexpr std::array kImplementations = {Kernels{"armv8-crc", update_armv8, copy_armv8, stream_portable}, kPortable};

bool can_run(const Kernels& kernels) noexcept {
  return kernels.update != update_armv8 || (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

#else

constexpr std::array kImplementations = {kPortable};

bool can_run(const Kernels&) noexcept { return true; }

#endif

std::atomic<const Kernels*>& chosen() noexcept {
  static std::atomic<const Kernels*> kernels =
      &*std::find_if(kImplementations.begin(), kImplementations.end(), can_run);
  return kernels;
}

const Kernels& kernels() noexcept { return *chosen().load(std::memory_order_relaxed); }

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) noexcept {
  return ~kernels().update(~crc, static_cast<const std::byte*>(data), bytes);
}

uint32_t crc32c_copy(uint32_t crc, void* target, const void* source, size_t bytes) noexcept {
  return ~kernels().copy(~crc, static_cast<std::byte*>(target), static_cast<const std::byte*>(source), bytes);
}

void stream_copy(void* target, const void* source, size_t bytes) noexcept {
  kernels().stream(static_cast<std::byte*>(target), static_cast<const std::byte*>(source), bytes);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) noexcept {
  // x has order 2^32 - 1 at most modulo a polynomial of degree 32; 8 * bytes_b is taken modulo it so that it cannot
  // overflow.
  constexpr uint64_t kOrder = 0xffffffff;
  return multiply(crc_a, power_of_x(8 * (bytes_b % kOrder) % kOrder)) ^ crc_b;
}

void copy_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  __asm__ volatile("dmb ishst" ::: "memory");
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

const char* crc32c_implementation() noexcept { return kernels().name; }

std::vector<std::string_view> crc32c_implementations() {
  std::vector<std::string_view> names;
  for (const Kernels& each : kImplementations)
    if (can_run(each)) names.push_back(each.name);
  return names;
}

bool use_crc32c(std::string_view implementation) noexcept {
  for (const Kernels& each : kImplementations) {
    if (each.name != implementation || !can_run(each)) continue;
    chosen().store(&each, std::memory_order_relaxed);
    return true;
  }
  return false;
}

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) noexcept {
  return ~update_portable(~crc, static_cast<const std::byte*>(data), bytes);
}

}  // namespace stepwell
