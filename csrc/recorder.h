// A log of the calls that change files, for tests: what a power loss may undo (stepwell.testing.powerloss replays it).
//
// Off by default; while off a call costs one relaxed load. While on, calls are made one at a time, so that the log's
// order is the order in which they took effect. Stores through a mapping are not calls and are not seen: a mapping is
// memory, and gone with the machine. Threads: any. Not for a process that forks while it records.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace stepwell::recorder {

enum class Kind : uint8_t {
  kCreate = 0,  // path; the file it names is new
  kWrite = 1,   // file, offset, data
  kResize = 2,  // file, offset = the new size (truncate, or fallocate past the end)
  kSync = 3,    // file
  kSyncDirectory = 4,
  kRename = 5,  // path, target
  kUnlink = 6,
  kMakeDirectory = 7,
  kRemoveDirectory = 8,
};

struct Call {
  Kind kind;
  uint64_t device = 0, inode = 0;  // the file, whatever names it has
  std::string path, target;
  uint64_t offset = 0;
  std::vector<std::byte> data;
};

extern std::atomic<bool> armed;

void start();              // drops what was recorded before
size_t count();            // calls so far: a position in the log
std::vector<Call> stop();  // hands the log over

// Held over one call. What succeeds is noted by one of the functions below, while a Step is.
class Step {
 public:
  Step();
  explicit operator bool() const noexcept { return lock_.owns_lock(); }

 private:
  std::unique_lock<std::mutex> lock_;
};

// Memory may be short here as anywhere: the log then ends, and stop() throws std::bad_alloc.
void note(Kind kind, int fd, const std::string& path, const std::string& target, uint64_t offset, const void* data,
          size_t bytes) noexcept;

}  // namespace stepwell::recorder
