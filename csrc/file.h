// Every system call on a file, each one a fault point, so that a test can fail, shorten, delay or kill at any of them;
// those that change a file or a name can be recorded (recorder.h).
//
// Functions return a value >= 0 or -errno, as system calls do in the kernel; they retry EINTR. Nothing here throws.
// Descriptors are close-on-exec and are closed in a forked child (pthread_atfork), so that a child keeps no lock alive.
// open() registers what it returns for that, so there is no moment at which a fork in another thread leaks a
// descriptor; hence a descriptor of open() is closed by its Descriptor or by file::close(), never by ::close.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stepwell {

// How many forks lie between the first process and this one, counted by the child's handler.
extern std::atomic<uint32_t> fork_generation;

// Owns one descriptor. Movable. Registered for closing in a forked child while it lives.
// In a forked child the object left over from the parent is invalid: get() is -1, its destructor closes nothing.
class Descriptor {
 public:
  Descriptor() = default;
  // Takes ownership of fd; negative: invalid. Throws std::length_error for a number that the registry cannot hold
  // (2^20).
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();
  int get() const noexcept { return fork_ == fork_generation.load(std::memory_order_relaxed) ? fd_ : -1; }
  bool valid() const noexcept { return get() >= 0; }
  void reset() noexcept;
  // Gives up ownership; the descriptor stays registered for the next owner. Returns it, or -1.
  int release() noexcept;

 private:
  int fd_ = -1;
  uint32_t fork_ = 0;
};

struct FileStat {
  uint64_t size = 0;
  uint64_t inode = 0;
  uint64_t device = 0;
  uint32_t mode = 0;
  uint32_t uid = 0;
  uint32_t links = 0;
  bool is_directory = false;
  bool is_regular = false;
  bool is_symlink = false;
};

struct FileSystemStat {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  uint64_t type = 0;        // statfs f_type: tmpfs, ext4, nfs, ...
  bool is_network = false;  // NFS, SMB/CIFS, FUSE remote kinds, 9p, Ceph, Lustre, GPFS, AFS, OCFS2, GFS2, BeeGFS
};

namespace file {

// flags as of open(2); O_CLOEXEC and O_NOFOLLOW are always added. Returns fd or -errno.   point: file.open
// A name that may be a fifo needs O_NONBLOCK: an open that waits keeps forks and other opens waiting.
int open(const std::string& path, int flags, uint32_t mode) noexcept;
// Closes a descriptor of open() that no Descriptor owns. Closed even where an error is returned.   point: file.close
int close(int fd) noexcept;
int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) noexcept;         // point: file.pread; may be short
int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) noexcept;  // point: file.pwrite; may be short
// The errno of this thread's last pread or pwrite that failed; 0 after forget_error(). Where only a Status comes back.
int last_error() noexcept;
void forget_error() noexcept;
// The whole range or -errno; end of file before it: -EIO. Each underlying call is a point.
int pread_all(int fd, void* data, size_t bytes, uint64_t offset) noexcept;
int pwrite_all(int fd, const void* data, size_t bytes, uint64_t offset) noexcept;
int truncate(int fd, uint64_t bytes) noexcept;                  // point: file.truncate
int reserve(int fd, uint64_t offset, uint64_t bytes) noexcept;  // fallocate; point: file.reserve
int sync(int fd) noexcept;                                      // fdatasync; point: file.sync
// fsync of a directory: the names in it are as durable as they will be. point: file.sync_directory
int sync_directory(const std::string& path) noexcept;
int lock(int fd) noexcept;    // flock LOCK_EX | LOCK_NB; -EWOULDBLOCK if held.  point: file.lock
int unlock(int fd) noexcept;  // flock LOCK_UN.                                  point: file.unlock
int rename(const std::string& from, const std::string& to) noexcept;  // point: file.rename
int unlink(const std::string& path) noexcept;                         // point: file.unlink
int make_directory(const std::string& path, uint32_t mode) noexcept;  // point: file.mkdir
int remove_directory(const std::string& path) noexcept;               // rmdir; point: file.rmdir
// sorted, without . and ..; point: file.list
int list(const std::string& path, std::vector<std::string>* names) noexcept;
int stat(const std::string& path, FileStat* out) noexcept;          // lstat; point: file.stat
int fstat(int fd, FileStat* out) noexcept;                          // point: file.fstat
int statfs(const std::string& path, FileSystemStat* out) noexcept;  // point: file.statfs
// Direct-I/O alignment of the file, bytes (STATX_DIOALIGN, max of memory and offset; else 4096 where an O_DIRECT probe
// read works; 0: refused). point: file.direct_alignment
int direct_alignment(const std::string& path, uint32_t* alignment) noexcept;
// mmap PROT_READ|PROT_WRITE MAP_SHARED + MADV_DONTFORK. point: file.map
int map(int fd, uint64_t bytes, void** address) noexcept;
int unmap(void* address, uint64_t bytes) noexcept;  // point: file.unmap

}  // namespace file
}  // namespace stepwell
