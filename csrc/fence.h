// Fences between accesses to memory that other processes map too. FORMAT.md 3 and 4 say where they stand.
#pragma once

#include <atomic>

namespace stepwell {

// TSan does not model fences; nothing here relies on it to.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wtsan"
#endif
// What stands behind it happens later, reads and writes.
inline void full_fence() noexcept { std::atomic_thread_fence(std::memory_order_seq_cst); }
// What is read behind it is read later.
inline void acquire_fence() noexcept { std::atomic_thread_fence(std::memory_order_acquire); }
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

}  // namespace stepwell
