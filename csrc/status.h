// Outcomes that cross threads, and the assertion that stays on in release.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace stepwell {

// The outcome of one page, one call or one transfer. Expected ones and failures of the world alike:
// functions that run on workers are noexcept and return one of these.
enum class Status : uint8_t {
  kOk = 0,
  kPending = 1,    // not decided yet
  kQueueFull = 2,  // a bounded queue or inbox had no room; nothing was started
  kFull = 3,       // a tier had no slot
  kCancelled = 4,  // cancelled before this page was copied
  kDeadline = 5,   // the gate was closed before this page landed
  kIOError = 6,    // a system call failed or came back short
  kChecksum = 7,   // bytes read do not have the checksum that was recorded for them
  kStale = 8,      // the page was rewritten, freed, or is another one than wanted
  kBusFault = 9,   // the guard caught SIGBUS: the file behind a mapping was truncated
  kClosed = 10,    // the object is closed
  kPoisoned = 11,  // an assertion failed earlier
  kInvalid = 12,   // an argument is out of range
  kFailed = 13,    // an exception in the job that had it (no memory, most likely); nothing is wrong with the bytes
  kGone = 14,      // a neighbour's page was freed or rewritten before it was copied
};

const char* status_name(Status status) noexcept;

// A bug of ours, found by STEPWELL_ASSERT. Never used for bad input.
class AssertionFailure : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

}  // namespace stepwell

#define STEPWELL_ASSERT(condition)                                  \
  do {                                                              \
    if (!(condition)) [[unlikely]]                                  \
      ::stepwell::assertion_failed(#condition, __FILE__, __LINE__); \
  } while (false)
