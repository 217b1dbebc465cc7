#include "status.h"

#include <cstdio>
#include <cstdlib>

namespace stepwell {

const char* status_name(Status status) noexcept {
  switch (status) {
    case Status::kOk: return "ok";
    case Status::kPending: return "pending";
    case Status::kQueueFull: return "queue_full";
    case Status::kFull: return "full";
    case Status::kCancelled: return "cancelled";
    case Status::kDeadline: return "deadline";
    case Status::kIOError: return "io_error";
    case Status::kChecksum: return "checksum";
    case Status::kStale: return "stale";
    case Status::kBusFault: return "bus_fault";
    case Status::kClosed: return "closed";
    case Status::kPoisoned: return "poisoned";
    case Status::kInvalid: return "invalid";
    case Status::kFailed: return "failed";
    case Status::kGone: return "gone";
  }
  return "unknown";
}

void assertion_failed(const char* condition, const char* file, int line) {
  const std::string message = std::string(file) + ":" + std::to_string(line) + ": assertion failed: " + condition;
#ifdef STEPWELL_ABORT_ON_ASSERT
  std::fprintf(stderr, "stepwell: %s\n", message.c_str());
  std::abort();
#else
  throw AssertionFailure(message);
#endif
}

}  // namespace stepwell
