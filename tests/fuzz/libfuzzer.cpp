// One target as a libFuzzer program: compiled once for each, with its function's name as STEPWELL_FUZZ_TARGET.
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stepwell::fuzz::STEPWELL_FUZZ_TARGET(data, size);
  return 0;
}
