#include "file.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string_view>

#include "fault.h"
#include "recorder.h"

namespace stepwell {

std::atomic<uint32_t> fork_generation{0};

namespace {

// The descriptors that a forked child closes: one bit for each number. A fixed table, because the child's handler may
// run while another thread of the parent held malloc's lock.
constexpr int kMaxDescriptors = 1 << 20;
std::atomic<uint64_t> registry[kMaxDescriptors / 64];

// Held while a descriptor is made and registered, or unregistered and closed, and over a fork: so at a fork a
// descriptor is open if and only if its bit is set. Opening is rare and never on a data path; a mutex, unlike a lock
// with readers, can be unlocked by the child, whose thread is the one that locked it.
std::mutex fork_mutex;

void before_fork() { fork_mutex.lock(); }

void after_fork_in_parent() { fork_mutex.unlock(); }

void after_fork_in_child() {
  for (size_t word = 0; word < kMaxDescriptors / 64; ++word) {
    uint64_t bits = registry[word].load(std::memory_order_relaxed);
    if (bits == 0) continue;
    registry[word].store(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) ::close(static_cast<int>(word * 64) + std::countr_zero(bits));
  }
  fork_generation.fetch_add(1, std::memory_order_relaxed);
  fork_mutex.unlock();
}

// Keeps forks away while it lives.
class NoFork {
 public:
  NoFork() : lock_(fork_mutex, std::defer_lock) {
    static const int installed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (installed != 0) std::abort();  // Out of memory at first use: without the handler locks would outlive us unseen.
    lock_.lock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

bool register_descriptor(int fd) noexcept {
  if (fd >= kMaxDescriptors) return false;
  registry[fd / 64].fetch_or(uint64_t{1} << (fd % 64), std::memory_order_relaxed);
  return true;
}

void unregister_descriptor(int fd) noexcept {
  if (fd < kMaxDescriptors) registry[fd / 64].fetch_and(~(uint64_t{1} << (fd % 64)), std::memory_order_relaxed);
}

// Repeats a system call while it is interrupted. Returns its value or -errno.
template <typename Call>
auto retried(Call call) noexcept -> decltype(call()) {
  for (;;) {
    const auto value = call();
    if (value >= 0) return value;
    if (errno != EINTR) return -errno;
  }
}

thread_local int last_transfer_error = 0;

// Passes on what pread or pwrite came to, and keeps the errno for last_error().
int64_t noted(int64_t result) noexcept {
  if (result < 0) last_transfer_error = static_cast<int>(-result);
  return result;
}

// A fault point that can only fail: -errno or 0.
int reach(const char* point) noexcept { return -fault::reach(point).error; }

using recorder::Kind;

// Makes a call that changes what names stand for, and notes it where it works.
template <typename Call>
auto recorded(Kind kind, const std::string& path, const std::string& target, Call call) noexcept -> decltype(call()) {
  const recorder::Step step;
  const auto value = retried(call);
  if (step && value >= 0) recorder::note(kind, -1, path, target, 0, nullptr, 0);
  return value;
}

void convert(const struct ::stat& from, FileStat* to) noexcept {
  to->size = static_cast<uint64_t>(from.st_size);
  to->inode = from.st_ino;
  to->device = from.st_dev;
  to->mode = from.st_mode;
  to->uid = from.st_uid;
  to->links = static_cast<uint32_t>(from.st_nlink);
  to->is_directory = S_ISDIR(from.st_mode);
  to->is_regular = S_ISREG(from.st_mode);
  to->is_symlink = S_ISLNK(from.st_mode);
}

// f_type of file systems on which another machine may hold the same file, so that flock and mappings are not what they
// are on a local one. Numbers as of statfs(2) and the file systems' own sources.
constexpr uint64_t kNetworkTypes[] = {
    0x6969,      // NFS
    0x517B,      // SMB
    0xFF534D42,  // CIFS
    0xFE534D42,  // SMB2
    0x564C,      // NCP
    0x73757245,  // Coda
    0x5346414F,  // OpenAFS
    0x6B414653,  // AFS of the kernel
    0x01021997,  // 9p
    0x00C36400,  // Ceph
    0x0BD00BD0,  // Lustre
    0x47504653,  // GPFS
    0x7461636F,  // OCFS2
    0x01161970,  // GFS2
    0x19830326,  // BeeGFS
    0x20030528,  // OrangeFS
    0xAAD7AAEA,  // PanFS
    0x786F4256,  // VirtualBox shared folders
    0xBACBACBC,  // VMware shared folders
    0x7C7C6673,  // Parallels shared folders
};
constexpr uint64_t kFuseType = 0x65735546;

// FUSE has one number for all its kinds; the mount table tells them apart. Local: a block device's (ntfs-3g, exfat),
// and the overlay of rootless containers. Everything else (sshfs, gluster, virtiofs, object stores, unknown ones)
// counts as remote.
bool is_remote_fuse(const std::string& path) noexcept {
  struct ::stat status;
  if (::stat(path.c_str(), &status) != 0) return true;
  const std::unique_ptr<FILE, int (*)(FILE*)> mounts(std::fopen("/proc/self/mountinfo", "re"), std::fclose);
  if (!mounts) return true;
  char* line = nullptr;
  size_t capacity = 0;
  bool remote = true;
  while (::getline(&line, &capacity, mounts.get()) > 0) {
    unsigned major_number = 0, minor_number = 0;
    // "36 35 98:0 /root /mount options - type source options"
    if (std::sscanf(line, "%*u %*u %u:%u", &major_number, &minor_number) != 2) continue;
    if (major_number != major(status.st_dev) || minor_number != minor(status.st_dev)) continue;
    const std::string_view text(line);
    const size_t separator = text.find(" - ");
    if (separator == std::string_view::npos) continue;
    const std::string_view rest = text.substr(separator + 3);
    const std::string_view kind = rest.substr(0, rest.find(' '));
    remote = kind != "fuseblk" && kind != "fuse.fuse-overlayfs";
    break;
  }
  std::free(line);
  return remote;
}

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd), fork_(fork_generation.load(std::memory_order_relaxed)) {
  if (fd < 0) return;
  const NoFork no_fork;
  if (!register_descriptor(fd)) throw std::length_error("descriptor " + std::to_string(fd) + " is above 2^20");
}

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(other.fd_), fork_(other.fork_) { other.fd_ = -1; }

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.fd_;
    fork_ = other.fork_;
    other.fd_ = -1;
  }
  return *this;
}

Descriptor::~Descriptor() { reset(); }

void Descriptor::reset() noexcept {
  const int fd = release();
  if (fd >= 0) file::close(fd);
}

int Descriptor::release() noexcept {
  const int fd = get();
  fd_ = -1;
  return fd;
}

namespace file {

int open(const std::string& path, int flags, uint32_t mode) noexcept {
  if (const int error = reach("file.open"); error != 0) return error;
  const recorder::Step step;
  struct ::stat before;
  const bool creates = step && (flags & O_CREAT) != 0 && ::lstat(path.c_str(), &before) != 0;
  const NoFork no_fork;
  const int fd = retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode); });
  if (fd >= 0 && creates) recorder::note(Kind::kCreate, fd, path, "", 0, nullptr, 0);
  if (fd >= 0 && !register_descriptor(fd)) {
    ::close(fd);
    return -EMFILE;
  }
  return fd;
}

int close(int fd) noexcept {
  const int error = reach("file.close");
  const NoFork no_fork;
  unregister_descriptor(fd);
  // Not repeated after EINTR: Linux has freed the number by then, and another thread may have it.
  if (::close(fd) != 0 && errno != EINTR) return -errno;
  return error;
}

int last_error() noexcept { return last_transfer_error; }

void forget_error() noexcept { last_transfer_error = 0; }

int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) noexcept {
  const fault::Outcome outcome = fault::reach("file.pread");
  if (outcome.error != 0) return noted(-outcome.error);
  if (outcome.short_bytes >= 0) bytes = std::min(bytes, static_cast<size_t>(outcome.short_bytes));
  return noted(retried([&]() -> int64_t { return ::pread(fd, data, bytes, static_cast<off_t>(offset)); }));
}

int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) noexcept {
  const fault::Outcome outcome = fault::reach("file.pwrite");
  if (outcome.error != 0) return noted(-outcome.error);
  if (outcome.short_bytes >= 0) bytes = std::min(bytes, static_cast<size_t>(outcome.short_bytes));
  const recorder::Step step;
  const int64_t moved = retried([&]() -> int64_t { return ::pwrite(fd, data, bytes, static_cast<off_t>(offset)); });
  if (step && moved > 0) recorder::note(Kind::kWrite, fd, "", "", offset, data, static_cast<size_t>(moved));
  return noted(moved);
}

int pread_all(int fd, void* data, size_t bytes, uint64_t offset) noexcept {
  for (size_t done = 0; done < bytes;) {
    const int64_t moved = pread(fd, static_cast<char*>(data) + done, bytes - done, offset + done);
    if (moved < 0) return static_cast<int>(moved);
    if (moved == 0) return static_cast<int>(noted(-EIO));
    done += static_cast<size_t>(moved);
  }
  return 0;
}

int pwrite_all(int fd, const void* data, size_t bytes, uint64_t offset) noexcept {
  for (size_t done = 0; done < bytes;) {
    const int64_t moved = pwrite(fd, static_cast<const char*>(data) + done, bytes - done, offset + done);
    if (moved < 0) return static_cast<int>(moved);
    if (moved == 0) return static_cast<int>(noted(-EIO));
    done += static_cast<size_t>(moved);
  }
  return 0;
}

int truncate(int fd, uint64_t bytes) noexcept {
  if (const int error = reach("file.truncate"); error != 0) return error;
  const recorder::Step step;
  const int result = retried([&] { return ::ftruncate(fd, static_cast<off_t>(bytes)); });
  if (step && result == 0) recorder::note(Kind::kResize, fd, "", "", bytes, nullptr, 0);
  return result;
}

int reserve(int fd, uint64_t offset, uint64_t bytes) noexcept {
  if (const int error = reach("file.reserve"); error != 0) return error;
  const recorder::Step step;
  struct ::stat before = {};
  if (step) ::fstat(fd, &before);
  const int result = retried([&] { return ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)); });
  if (step && result == 0 && offset + bytes > static_cast<uint64_t>(before.st_size))
    recorder::note(Kind::kResize, fd, "", "", offset + bytes, nullptr, 0);
  return result;
}

int sync(int fd) noexcept {
  if (const int error = reach("file.sync"); error != 0) return error;
  const recorder::Step step;
  const int result = retried([&] { return ::fdatasync(fd); });
  if (step && result == 0) recorder::note(Kind::kSync, fd, "", "", 0, nullptr, 0);
  return result;
}

int sync_directory(const std::string& path) noexcept {
  if (const int error = reach("file.sync_directory"); error != 0) return error;
  const int fd = open(path, O_RDONLY | O_DIRECTORY, 0);
  if (fd < 0) return fd;
  const int result = recorded(Kind::kSyncDirectory, path, "", [&] { return ::fsync(fd); });
  const int closed = close(fd);
  return result < 0 ? result : closed;
}

int lock(int fd) noexcept {
  if (const int error = reach("file.lock"); error != 0) return error;
  return retried([&] { return ::flock(fd, LOCK_EX | LOCK_NB); });
}

int unlock(int fd) noexcept {
  if (const int error = reach("file.unlock"); error != 0) return error;
  return retried([&] { return ::flock(fd, LOCK_UN); });
}

int rename(const std::string& from, const std::string& to) noexcept {
  if (const int error = reach("file.rename"); error != 0) return error;
  return recorded(Kind::kRename, from, to, [&] { return ::rename(from.c_str(), to.c_str()); });
}

int unlink(const std::string& path) noexcept {
  if (const int error = reach("file.unlink"); error != 0) return error;
  return recorded(Kind::kUnlink, path, "", [&] { return ::unlink(path.c_str()); });
}

int make_directory(const std::string& path, uint32_t mode) noexcept {
  if (const int error = reach("file.mkdir"); error != 0) return error;
  return recorded(Kind::kMakeDirectory, path, "", [&] { return ::mkdir(path.c_str(), mode); });
}

int remove_directory(const std::string& path) noexcept {
  if (const int error = reach("file.rmdir"); error != 0) return error;
  return recorded(Kind::kRemoveDirectory, path, "", [&] { return ::rmdir(path.c_str()); });
}

int list(const std::string& path, std::vector<std::string>* names) noexcept {
  names->clear();
  if (const int error = reach("file.list"); error != 0) return error;
  // Not registered: a child may have it, there is no lock on it.
  const int fd = retried([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW); });
  if (fd < 0) return fd;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd), ::closedir);
  if (!stream) {
    const int error = -errno;
    ::close(fd);
    return error;
  }
  try {
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(stream.get());
      if (entry == nullptr) break;
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names->emplace_back(name);
    }
    if (errno != 0) return -errno;
    std::sort(names->begin(), names->end());
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}

int stat(const std::string& path, FileStat* out) noexcept {
  if (const int error = reach("file.stat"); error != 0) return error;
  struct ::stat status;
  const int result = retried([&] { return ::lstat(path.c_str(), &status); });
  if (result == 0) convert(status, out);
  return result;
}

int fstat(int fd, FileStat* out) noexcept {
  if (const int error = reach("file.fstat"); error != 0) return error;
  struct ::stat status;
  const int result = retried([&] { return ::fstat(fd, &status); });
  if (result == 0) convert(status, out);
  return result;
}

int statfs(const std::string& path, FileSystemStat* out) noexcept {
  if (const int error = reach("file.statfs"); error != 0) return error;
  struct ::statfs status;
  const int result = retried([&] { return ::statfs(path.c_str(), &status); });
  if (result != 0) return result;
  // f_type is signed, and where long has 32 bits CIFS and SMB2 come out negative.
  const uint64_t type = static_cast<uint32_t>(status.f_type);
  const uint64_t block = static_cast<uint64_t>(status.f_frsize != 0 ? status.f_frsize : status.f_bsize);
  out->free_bytes = block * status.f_bavail;
  out->total_bytes = block * status.f_blocks;
  out->type = type;
  out->is_network = std::find(std::begin(kNetworkTypes), std::end(kNetworkTypes), type) != std::end(kNetworkTypes) ||
                    (type == kFuseType && is_remote_fuse(path));
  return 0;
}

int direct_alignment(const std::string& path, uint32_t* alignment) noexcept {
  *alignment = 0;
  if (const int error = reach("file.direct_alignment"); error != 0) return error;
#ifdef STATX_DIOALIGN
  struct statx extended = {};
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_DIOALIGN, &extended) == 0 &&
      (extended.stx_mask & STATX_DIOALIGN) != 0) {
    *alignment = std::max(extended.stx_dio_mem_align, extended.stx_dio_offset_align);
    return 0;
  }
#endif
  constexpr size_t kProbeBytes = 4096;
  const int fd =
      retried([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECT | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW); });
  if (fd == -EINVAL) return 0;
  if (fd < 0) return fd;
  const std::unique_ptr<void, void (*)(void*)> buffer(std::aligned_alloc(kProbeBytes, kProbeBytes), std::free);
  const int64_t moved =
      buffer ? retried([&]() -> int64_t { return ::pread(fd, buffer.get(), kProbeBytes, 0); }) : -ENOMEM;
  ::close(fd);
  if (moved >= 0) *alignment = kProbeBytes;
  return moved < 0 && moved != -EINVAL ? static_cast<int>(moved) : 0;
}

int map(int fd, uint64_t bytes, void** address) noexcept {
  *address = nullptr;
  if (const int error = reach("file.map"); error != 0) return error;
  if (bytes == 0 || bytes > SIZE_MAX) return -EINVAL;
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return -errno;
  // A child that inherited the mapping would see stores of its parent, and hold the file's memory after the parent's
  // death.
  if (::madvise(mapped, bytes, MADV_DONTFORK) != 0) {
    const int error = -errno;
    ::munmap(mapped, bytes);
    return error;
  }
  *address = mapped;
  return 0;
}

int unmap(void* address, uint64_t bytes) noexcept {
  const int error = reach("file.unmap");
  if (::munmap(address, bytes) != 0) return -errno;
  return error;
}

}  // namespace file
}  // namespace stepwell
