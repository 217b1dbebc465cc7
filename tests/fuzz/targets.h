// The readers of bytes that anybody may have written, each as one function of an input: what it must hold to is checked
// inside, and a fault aborts.
//
// With -DSTEPWELL_FUZZ=ON each is a libFuzzer program (libfuzzer.cpp); driver.cpp runs them all with inputs from a seed,
// wherever there is a compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Ends the process where a reader did what it must never do.
#define STEPWELL_FUZZ_CHECK(condition)                                             \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace stepwell::fuzz {

void fuzz_header(const uint8_t* data, size_t bytes);   // VolumeHeader::decode
void fuzz_record(const uint8_t* data, size_t bytes);   // SlotRecord::decode
void fuzz_volume(const uint8_t* data, size_t bytes);   // Volume: opened, recovered, read and written while it changes
void fuzz_foreign(const uint8_t* data, size_t bytes);  // read_foreign_page, by pread and from a mapping
void fuzz_reader(const uint8_t* data, size_t bytes);   // VolumeReader
void fuzz_index(const uint8_t* data, size_t bytes);    // Index::recover: labels that contradict each other
void fuzz_ring(const uint8_t* data, size_t bytes);     // Foreign: a neighbour's ring and records, while they change

}  // namespace stepwell::fuzz
