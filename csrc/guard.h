// The SIGBUS guard: access to a mapping of a file that someone else may truncate.
//
// Inside a guarded operation a SIGBUS at an address of a registered range ends the operation with kBusFault; any other
// SIGBUS goes to the handler that was there before ours. sigsetjmp around leaf copies only: nothing to destroy.
// Measured in an earlier spike: 57,677 faults survived, 7 ns a copy.
// Instrumented builds: the functions that touch guarded memory are leaf functions, excluded from TSan where the
// protocol of FORMAT.md section 4 makes the race formal only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.h"

namespace stepwell::guard {

// Installs the handler once per process (idempotent). Returns false where sigaction failed.
bool install() noexcept;
// True while the process's SIGBUS handler is ours. The keeper asks; if not, callers go over to pread and pwrite.
bool is_ours() noexcept;

// A range of mapped addresses for which SIGBUS may be caught. At most 4096 at a time; lock-free for the handler.
bool add_range(const void* address, uint64_t bytes) noexcept;
void remove_range(const void* address) noexcept;

// Runs leaf(argument) inside one guard; the functions below are built on it. REQUIRES of leaf: nothing to destroy, no
// lock, no allocation, no call that leaves csrc: a fault ends it wherever it is.
Status run(void (*leaf)(void*) noexcept, void* argument) noexcept;

// Copies between mapping and private memory, either direction; with `crc` non-null updates it (crc32c_copy).
Status copy(void* target, const void* source, size_t bytes, uint32_t* crc) noexcept;
// Checksum of mapped bytes.
Status checksum(const void* source, size_t bytes, uint32_t* crc) noexcept;
Status fill_zero(void* target, size_t bytes) noexcept;
// Atomic accesses to a naturally aligned u64 in a mapping.
Status load_acquire(const void* address, uint64_t* value) noexcept;
Status store_release(void* address, uint64_t value) noexcept;

// Faults caught since the process started. For stats and tests.
uint64_t caught() noexcept;

}  // namespace stepwell::guard
