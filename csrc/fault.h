// Named fault points: what tests do to a running core. Off by default; an unarmed point costs one relaxed load.
//
// A point is a name ("file.pread", "volume.after_bytes"). A rule says: at the n-th time from now that a point matching
// `name` is reached (0: each time), do `action`. "*" matches every point, "file.*" every point with that prefix.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace stepwell::fault {

enum class Action : uint8_t {
  kCount = 0,  // nothing; counts only
  kErrno = 1,  // the call fails with errno = value (file points only)
  kShort = 2,  // the call moves only value bytes (file.pread, file.pwrite)
  kKill = 3,   // SIGKILL to this process
  kStop = 4,   // SIGSTOP to this process
  kPause = 5,  // block until resume(name) or clear(); a sequence point
  kDelay = 6,  // block for value microseconds
};

extern std::atomic<bool> armed;  // true while any rule exists

// What a reached point must do, for file points. {0, -1} = go on.
struct Outcome {
  int error = 0;             // errno to fail with
  int64_t short_bytes = -1;  // move at most this many bytes
};

void arm(const std::string& name, Action action, uint64_t nth, int64_t value);
void clear();                               // drops all rules, wakes all that are paused, zeroes the counters
void resume(const std::string& name);       // lets those paused at the point go on, once
uint64_t reached(const std::string& name);  // how often, since clear(), while armed
uint64_t paused(const std::string& name);   // threads that now stand at the point
bool wait_paused(const std::string& name, double timeout_s);  // true once at least one thread stands there

Outcome reach_slow(const char* name);

inline Outcome reach(const char* name) {
  if (!armed.load(std::memory_order_relaxed)) [[likely]]
    return {};
  return reach_slow(name);
}

}  // namespace stepwell::fault
