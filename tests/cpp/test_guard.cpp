#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "crc32c.h"
#include "guard.h"

using namespace stepwell;

namespace {

constexpr size_t kBytes = size_t{1} << 20;

// A mapping of an unlinked file on tmpfs, registered with the guard unless said otherwise.
class Mapping {
 public:
  explicit Mapping(bool registered = true) {
    std::string name = "/dev/shm/stepwell-test-XXXXXX";
    file_ = mkstemp(name.data());
    REQUIRE(file_ >= 0);
    REQUIRE(unlink(name.c_str()) == 0);
    resize(kBytes);
    void* address = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    REQUIRE(address != MAP_FAILED);
    bytes_ = static_cast<std::byte*>(address);
    if (registered) REQUIRE(guard::add_range(bytes_, kBytes));
  }
  ~Mapping() {
    guard::remove_range(bytes_);
    munmap(bytes_, kBytes);
    close(file_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void resize(size_t bytes) { REQUIRE(ftruncate(file_, static_cast<off_t>(bytes)) == 0); }
  std::byte* bytes() const { return bytes_; }

 private:
  int file_ = -1;
  std::byte* bytes_ = nullptr;
};

// Tells whether a forked child that does `work` dies of SIGBUS.
template <typename Work>
bool dies_of_sigbus(Work work) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    close(STDERR_FILENO);  // a sanitizer reports at length
    work();
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  // A sanitizer has a SIGBUS handler of its own, to which the guard must chain: it reports and exits.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) return true;
#endif
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
}

}  // namespace

TEST_CASE("guarded operations on an intact mapping do what the plain ones do") {
  REQUIRE(guard::install());
  REQUIRE(guard::is_ours());
  Mapping mapping;
  std::vector<std::byte> data(5000), back(5000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 31);
  uint32_t crc = 9;
  CHECK(guard::copy(mapping.bytes() + 3, data.data(), data.size(), &crc) == Status::kOk);
  const uint32_t expected = crc32c(9, data.data(), data.size());
  CHECK(crc == expected);
  uint32_t again = 9;
  CHECK(guard::checksum(mapping.bytes() + 3, data.size(), &again) == Status::kOk);
  CHECK(again == expected);
  CHECK(guard::copy(back.data(), mapping.bytes() + 3, back.size(), nullptr) == Status::kOk);
  CHECK(back == data);
  CHECK(guard::fill_zero(mapping.bytes(), 5003) == Status::kOk);
  CHECK(mapping.bytes()[100] == std::byte{0});
  uint64_t value = 0;
  CHECK(guard::store_release(mapping.bytes() + 64, 0x1122334455667788) == Status::kOk);
  CHECK(guard::load_acquire(mapping.bytes() + 64, &value) == Status::kOk);
  CHECK(value == 0x1122334455667788);
}

TEST_CASE("every access to a truncated mapping ends with bus_fault and changes no result") {
  REQUIRE(guard::install());
  Mapping mapping;
  mapping.resize(0);
  const uint64_t before = guard::caught();
  std::vector<std::byte> data(8192);
  uint32_t crc = 5;
  uint64_t value = 6;
  CHECK(guard::copy(data.data(), mapping.bytes(), data.size(), &crc) == Status::kBusFault);
  CHECK(guard::copy(data.data(), mapping.bytes(), data.size(), nullptr) == Status::kBusFault);
  CHECK(guard::copy(mapping.bytes(), data.data(), data.size(), &crc) == Status::kBusFault);
  CHECK(guard::checksum(mapping.bytes(), data.size(), &crc) == Status::kBusFault);
  CHECK(guard::fill_zero(mapping.bytes(), 100) == Status::kBusFault);
  CHECK(guard::load_acquire(mapping.bytes() + 8, &value) == Status::kBusFault);
  CHECK(guard::store_release(mapping.bytes() + 8, 1) == Status::kBusFault);
  CHECK(crc == 5);
  CHECK(value == 6);
  CHECK(guard::caught() == before + 7);
  mapping.resize(kBytes);
  CHECK(guard::copy(data.data(), mapping.bytes(), data.size(), &crc) == Status::kOk);
}

TEST_CASE("guards nest: the inner fault is the inner one's, the outer goes on") {
  REQUIRE(guard::install());
  Mapping mapping;
  mapping.resize(4096);
  struct Job {
    std::byte* bytes;
    Status inner;
    bool went_on;
  } job{mapping.bytes(), Status::kOk, false};
  const Status outer = guard::run(
      [](void* argument) noexcept {
        Job& it = *static_cast<Job*>(argument);
        uint64_t value;
        it.inner = guard::load_acquire(it.bytes + 8192, &value);
        it.went_on = true;
        *reinterpret_cast<volatile char*>(it.bytes + 8192);
      },
      &job);
  CHECK(job.inner == Status::kBusFault);
  CHECK(job.went_on);
  CHECK(outer == Status::kBusFault);
}

TEST_CASE("threads survive a file that is truncated and regrown under their copies") {
  REQUIRE(guard::install());
  Mapping mapping;
  constexpr int kThreads = 4;
  constexpr uint64_t kFaults = 200;  // each thread goes on until it has met so many
  std::atomic<int> running{kThreads};
  std::atomic<uint64_t> wrong{0};
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::vector<std::byte> data(kBytes);
      for (uint64_t faults = 0; faults < kFaults;) {
        uint32_t crc = 1;
        const Status status = t % 2 ? guard::copy(data.data(), mapping.bytes(), kBytes, &crc)
                                    : guard::checksum(mapping.bytes(), kBytes, &crc);
        if (status == Status::kBusFault)
          ++faults;
        else if (status != Status::kOk)
          wrong.fetch_add(1);
        // The file holds zeros whenever it is whole; a copy that says ok delivered what it checksummed.
        if (status == Status::kOk && t % 2 && crc != crc32c(1, data.data(), kBytes)) wrong.fetch_add(1);
      }
      running.fetch_sub(1);
    });
  while (running.load() > 0) {
    mapping.resize(kBytes / 2);
    mapping.resize(0);
    mapping.resize(kBytes);
  }
  threads.clear();
  CHECK(wrong.load() == 0);
  CHECK(guard::caught() >= kThreads * kFaults);
}

TEST_CASE("a fault outside every registered range still kills the process") {
  REQUIRE(guard::install());
  CHECK(dies_of_sigbus([] {
    Mapping mapping(false);
    mapping.resize(0);
    uint64_t value;
    (void)guard::load_acquire(mapping.bytes(), &value);
  }));
}

TEST_CASE("a fault in a registered range outside the guard still kills the process") {
  REQUIRE(guard::install());
  CHECK(dies_of_sigbus([] {
    Mapping mapping;
    mapping.resize(0);
    *reinterpret_cast<volatile char*>(mapping.bytes());
  }));
}

TEST_CASE("a SIGBUS that somebody sends still kills the process") {
  REQUIRE(guard::install());
  CHECK(dies_of_sigbus([] { kill(getpid(), SIGBUS); }));
}

TEST_CASE("a range that was removed is no longer caught") {
  REQUIRE(guard::install());
  CHECK(dies_of_sigbus([] {
    Mapping mapping;
    guard::remove_range(mapping.bytes());
    mapping.resize(0);
    uint64_t value;
    (void)guard::load_acquire(mapping.bytes(), &value);
  }));
}

TEST_CASE("a handler installed after ours is noticed") {
  REQUIRE(guard::install());
  struct sigaction ours, other = {};
  other.sa_handler = [](int) {};
  REQUIRE(sigaction(SIGBUS, &other, &ours) == 0);
  CHECK_FALSE(guard::is_ours());
  REQUIRE(sigaction(SIGBUS, &ours, nullptr) == 0);
  CHECK(guard::is_ours());
}

TEST_CASE("a later handler that restores ours and raises again ends in the guard") {
  // What Python's faulthandler does when it was enabled after the guard.
  REQUIRE(guard::install());
  static struct sigaction ours;
  struct sigaction other = {};
  other.sa_handler = [](int signal) {
    sigaction(SIGBUS, &ours, nullptr);
    raise(signal);
  };
  other.sa_flags = SA_NODEFER;
  REQUIRE(sigaction(SIGBUS, &other, &ours) == 0);
  Mapping mapping;
  mapping.resize(0);
  uint64_t value;
  CHECK(guard::load_acquire(mapping.bytes(), &value) == Status::kBusFault);
  CHECK(guard::is_ours());
}

TEST_CASE("4096 ranges fit, and one that was removed makes room") {
  REQUIRE(guard::install());
  std::vector<char> memory(5000);
  std::vector<const void*> added;
  for (size_t i = 0; i < memory.size() && guard::add_range(&memory[i], 1); ++i) added.push_back(&memory[i]);
  CHECK(added.size() == 4096);
  guard::remove_range(added[17]);
  CHECK(guard::add_range(added[17], 1));
  CHECK_FALSE(guard::add_range(&memory[4999], 1));
  for (const void* address : added) guard::remove_range(address);
  CHECK_FALSE(guard::add_range(nullptr, 10));
  CHECK_FALSE(guard::add_range(memory.data(), 0));
}
