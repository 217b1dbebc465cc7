// The file layer: outcomes, ownership of descriptors, fork. Faults at its points: tests/test_file.py.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "fault.h"
#include "file.h"

namespace {

using stepwell::Descriptor;
namespace fault = stepwell::fault;
namespace file = stepwell::file;

class Directory {
 public:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "stepwell-file-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Faults {
 public:
  Faults(const std::string& name, fault::Action action, uint64_t nth, int64_t value) {
    fault::arm(name, action, nth, value);
  }
  ~Faults() { fault::clear(); }
};

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// Runs `body` in a forked child; returns its exit code.
template <typename Body>
int in_child(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Descriptor create(const std::string& path) { return Descriptor(file::open(path, O_RDWR | O_CREAT, 0600)); }

TEST_CASE("a descriptor is closed by its owner, once, and is close-on-exec") {
  const Directory directory;
  Descriptor first = create(directory / "a");
  REQUIRE(first.valid());
  const int fd = first.get();
  CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  Descriptor second(std::move(first));
  CHECK(!first.valid());
  CHECK(second.get() == fd);
  first = std::move(second);
  CHECK(is_open(fd));
  first.reset();
  CHECK(!is_open(fd));
  first.reset();
  CHECK(first.release() == -1);
}

TEST_CASE("a released descriptor stays open and stays registered for a fork") {
  const Directory directory;
  const int fd = create(directory / "a").release();
  REQUIRE(is_open(fd));
  CHECK(in_child([fd] { return is_open(fd) ? 1 : 0; }) == 0);
  CHECK(is_open(fd));
  CHECK(file::close(fd) == 0);
  CHECK(file::close(fd) == -EBADF);
}

TEST_CASE("a forked child has no descriptor of its parent, and its objects close nothing of the child's own") {
  const Directory directory;
  Descriptor owned = create(directory / "a");
  const int fd = owned.get();
  const int code = in_child([&] {
    if (is_open(fd) || owned.valid()) return 1;
    const Descriptor own = create(directory / "b");  // gets the number that the parent's had
    if (own.get() != fd) return 2;
    owned.reset();
    return is_open(fd) ? 0 : 3;
  });
  CHECK(code == 0);
  CHECK(is_open(fd));
}

TEST_CASE("a child neither frees nor keeps the lock of its parent") {
  const Directory directory;
  Descriptor holder = create(directory / "a");
  REQUIRE(file::lock(holder.get()) == 0);
  const Descriptor other = create(directory / "a");
  int ready[2], end[2];
  REQUIRE(::pipe(ready) == 0);
  REQUIRE(::pipe(end) == 0);
  char byte = 0;
  const pid_t pid = ::fork();
  if (pid == 0) {  // Says that it runs, then lives on until the parent closes its end.
    ::close(end[1]);
    const bool said = ::write(ready[1], &byte, 1) == 1;
    ::_exit(said && ::read(end[0], &byte, 1) == 0 ? 0 : 1);
  }
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK(file::lock(other.get()) == -EWOULDBLOCK);
  holder.reset();
  CHECK(file::lock(other.get()) == 0);
  for (const int fd : {ready[0], ready[1], end[0], end[1]}) ::close(fd);
  int status = 1;
  ::waitpid(pid, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("no fork leaks a descriptor while other threads open and close") {
  const Directory directory;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      while (!stop.load()) create(directory / std::to_string(i));
    });
  }
  const std::string root = directory.path();
  for (int round = 0; round < 100; ++round) {
    const int leaked = in_child([&root] {  // No malloc in here: another thread may have held its lock.
      char link[32], target[512];
      for (int fd = 3; fd < 64; ++fd) {
        std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        const ssize_t length = ::readlink(link, target, sizeof target);
        if (length > static_cast<ssize_t>(root.size()) && std::memcmp(target, root.data(), root.size()) == 0) return 1;
      }
      return 0;
    });
    CHECK(leaked == 0);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("a symbolic link is not opened, listed or followed by stat") {
  const Directory directory;
  create(directory / "a");
  REQUIRE(::symlink("a", (directory / "link").c_str()) == 0);
  REQUIRE(::symlink(directory.path().c_str(), (directory / "itself").c_str()) == 0);
  CHECK(file::open(directory / "link", O_RDONLY, 0) == -ELOOP);
  std::vector<std::string> names;
  CHECK(file::list(directory / "itself", &names) == -ENOTDIR);
  stepwell::FileStat status;
  REQUIRE(file::stat(directory / "link", &status) == 0);
  CHECK(status.is_symlink);
  CHECK(!status.is_regular);
  CHECK(file::list(directory.path(), &names) == 0);
  CHECK(names == std::vector<std::string>{"a", "itself", "link"});
}

TEST_CASE("a range is moved whole, or the caller is told") {
  const Directory directory;
  const Descriptor descriptor = create(directory / "a");
  std::vector<char> data(10000, 'x'), read(10000);
  {
    const Faults faults("file.pwrite", fault::Action::kShort, 0, 999);
    CHECK(file::pwrite_all(descriptor.get(), data.data(), data.size(), 5) == 0);
    CHECK(fault::reached("file.pwrite") == 11);
  }
  {
    const Faults faults("file.pread", fault::Action::kShort, 0, 999);
    CHECK(file::pread_all(descriptor.get(), read.data(), read.size(), 5) == 0);
  }
  CHECK(read == data);
  CHECK(file::pread_all(descriptor.get(), read.data(), read.size(), 6) == -EIO);
  {
    const Faults faults("file.pread", fault::Action::kErrno, 2, ENXIO);
    CHECK(file::pread(descriptor.get(), read.data(), 1, 0) == 1);
    CHECK(file::pread(descriptor.get(), read.data(), 1, 0) == -ENXIO);
    CHECK(file::pread(descriptor.get(), read.data(), 1, 0) == 1);
  }
}

TEST_CASE("a reserved file has its blocks, a truncated one its size") {
  const Directory directory;
  const Descriptor descriptor = create(directory / "a");
  stepwell::FileStat status;
  CHECK(file::truncate(descriptor.get(), 1 << 20) == 0);
  CHECK(file::reserve(descriptor.get(), 0, 1 << 20) == 0);
  CHECK(file::fstat(descriptor.get(), &status) == 0);
  CHECK(status.size == 1 << 20);
  CHECK(status.is_regular);
  CHECK(std::filesystem::exists(directory / "a"));
  CHECK(file::rename(directory / "a", directory / "b") == 0);
  CHECK(file::unlink(directory / "a") == -ENOENT);
  CHECK(file::unlink(directory / "b") == 0);
  CHECK(file::fstat(descriptor.get(), &status) == 0);
  CHECK(status.links == 0);
}

TEST_CASE("a mapping shows the file and is not in a child") {
  const Directory directory;
  const Descriptor descriptor = create(directory / "a");
  REQUIRE(file::truncate(descriptor.get(), 8192) == 0);
  void* address = nullptr;
  REQUIRE(file::map(descriptor.get(), 8192, &address) == 0);
  static_cast<char*>(address)[8000] = 'q';
  char byte = 0;
  CHECK(file::pread(descriptor.get(), &byte, 1, 8000) == 1);
  CHECK(byte == 'q');
  CHECK(in_child([address] {
          unsigned char present;
          return ::mincore(address, 4096, &present) == -1 && errno == ENOMEM ? 0 : 1;
        }) == 0);
  CHECK(file::unmap(address, 8192) == 0);
  CHECK(file::map(descriptor.get(), 0, &address) == -EINVAL);
  CHECK(address == nullptr);
}

TEST_CASE("the memory and disk file systems of a host are local and name an alignment") {
  const Directory directory;
  create(directory / "a");
  stepwell::FileSystemStat status;
  CHECK(file::statfs(directory.path(), &status) == 0);
  CHECK(!status.is_network);
  CHECK(status.free_bytes > 0);
  CHECK(status.free_bytes <= status.total_bytes);
  uint32_t alignment = 1;
  CHECK(file::direct_alignment(directory / "a", &alignment) == 0);
  CHECK((alignment & (alignment - 1)) == 0);
  CHECK(file::direct_alignment(directory / "missing", &alignment) == -ENOENT);
  CHECK(alignment == 0);
}

}  // namespace
