#include "recorder.h"

#include <sys/stat.h>

#include <new>
#include <utility>

namespace stepwell::recorder {

std::atomic<bool> armed{false};

namespace {

std::mutex mutex;
// GUARDED_BY(mutex)
std::vector<Call> log;
bool is_cut = false;  // a call could not be noted

}  // namespace

void start() {
  const std::lock_guard lock(mutex);
  log.clear();
  is_cut = false;
  armed.store(true, std::memory_order_relaxed);
}

size_t count() {
  const std::lock_guard lock(mutex);
  return log.size();
}

std::vector<Call> stop() {
  const std::lock_guard lock(mutex);
  armed.store(false, std::memory_order_relaxed);
  if (is_cut) throw std::bad_alloc();
  return std::exchange(log, {});
}

Step::Step() : lock_(mutex, std::defer_lock) {
  if (!armed.load(std::memory_order_relaxed)) [[likely]]
    return;
  lock_.lock();
  if (!armed.load(std::memory_order_relaxed)) lock_.unlock();  // it was stopped meanwhile
}

void note(Kind kind, int fd, const std::string& path, const std::string& target, uint64_t offset, const void* data,
          size_t bytes) noexcept {
  if (is_cut) return;
  try {
    Call call{kind, 0, 0, path, target, offset, {}};
    struct ::stat status;
    if (fd >= 0 && ::fstat(fd, &status) == 0) {
      call.device = status.st_dev;
      call.inode = status.st_ino;
    }
    const auto* first = static_cast<const std::byte*>(data);
    call.data.assign(first, first + bytes);
    log.push_back(std::move(call));
  } catch (const std::bad_alloc&) {
    is_cut = true;
  }
}

}  // namespace stepwell::recorder
