#include "guard.h"

#include <setjmp.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "crc32c.h"

namespace stepwell::guard {
namespace {

constexpr size_t kMaxRanges = 4096;
constexpr uintptr_t kReserved = 1;  // an entry that add_range is filling

// first == 0: free. The handler reads entries without a lock: `first` is stored last when an entry is filled and
// cleared first when it is emptied, and the handler looks at it on both sides of `last`.
struct Range {
  std::atomic<uintptr_t> first{0};
  std::atomic<uintptr_t> last{0};  // one past the end
};
std::array<Range, kMaxRanges> ranges;
std::atomic<size_t> ranges_used{0};  // entries ever used: how far the handler has to look

std::atomic<uint64_t> faults_caught{0};
std::atomic<bool> installed{false};
struct sigaction previous;  // written once, before the handler can run

// ThreadSanitizer runs our handler with all signals blocked, whatever we asked for; only there must the mask be saved.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STEPWELL_TSAN
#endif
#elif defined(__SANITIZE_THREAD__)
#define STEPWELL_TSAN
#endif
#ifdef STEPWELL_TSAN
constexpr int kSaveMask = 1;
#else
constexpr int kSaveMask = 0;
#endif

// Where this thread goes when the guarded operation it is in faults. Guards nest.
struct Frame {
  sigjmp_buf jump;
  Frame* outer;
};
// initial-exec: the handler must not make the thread's storage on first use, that would allocate.
thread_local Frame* volatile current __attribute__((tls_model("initial-exec"))) = nullptr;

// ThreadSanitizer performs an atomic access inside its runtime, under a lock that a fault would leave locked for good.
#ifdef STEPWELL_TSAN
#define STEPWELL_PLAIN_ATOMIC __attribute__((no_sanitize("thread"), noinline))
#else
#define STEPWELL_PLAIN_ATOMIC
#endif

struct AtomicAccess {
  uint64_t* address;
  uint64_t value;
};

STEPWELL_PLAIN_ATOMIC void load_leaf(void* argument) noexcept {
  auto& job = *static_cast<AtomicAccess*>(argument);
  job.value = __atomic_load_n(job.address, __ATOMIC_ACQUIRE);
}

STEPWELL_PLAIN_ATOMIC void store_leaf(void* argument) noexcept {
  const auto& job = *static_cast<AtomicAccess*>(argument);
  __atomic_store_n(job.address, job.value, __ATOMIC_RELEASE);
}

bool is_registered(uintptr_t address) noexcept {
  const size_t used = ranges_used.load(std::memory_order_acquire);
  for (size_t i = 0; i < used; ++i) {
    const uintptr_t first = ranges[i].first.load(std::memory_order_acquire);
    if (first <= kReserved || address < first) continue;
    const uintptr_t last = ranges[i].last.load(std::memory_order_acquire);
    if (address < last && ranges[i].first.load(std::memory_order_acquire) == first) return true;
  }
  return false;
}

void chain(int signal, siginfo_t* info, void* context) noexcept {
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
    return;
  }
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
    return;
  }
  const bool is_sent = info->si_code <= 0;  // by kill() or raise(): does not come again when we return
  if (previous.sa_handler == SIG_IGN && is_sent) return;
  // The default action. A fault that is ignored would come again for ever, so the kernel kills for it too.
  struct sigaction fallback = {};
  fallback.sa_handler = SIG_DFL;
  sigaction(SIGBUS, &fallback, nullptr);
  if (is_sent) raise(SIGBUS);
}

void on_sigbus(int signal, siginfo_t* info, void* context) {
  Frame* frame = current;
  if (frame != nullptr) {
    if (info->si_code > 0 && is_registered(reinterpret_cast<uintptr_t>(info->si_addr))) {
      faults_caught.fetch_add(1, std::memory_order_relaxed);
      siglongjmp(frame->jump, 1);
    }
    // A handler installed after ours (Python's faulthandler) reports, puts ours back and raises the signal again
    // without an address. Go on: if the fault was real, the access faults once more, and then it comes here with its
    // address.
    if (info->si_code <= 0 && info->si_pid == getpid()) return;
  }
  chain(signal, info, context);
}

}  // namespace

bool install() noexcept {
  static std::mutex once;
  std::lock_guard lock(once);
  if (installed.load(std::memory_order_relaxed)) return true;
  if (sigaction(SIGBUS, nullptr, &previous) != 0) return false;
  struct sigaction action = {};
  action.sa_sigaction = on_sigbus;
  sigemptyset(&action.sa_mask);
  // SA_NODEFER: siglongjmp leaves the handler without restoring the signal mask (saving it would be a system call for
  // every guarded copy), so SIGBUS must not be blocked in it. SA_ONSTACK: runtimes with small stacks ask for it.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  if (sigaction(SIGBUS, &action, nullptr) != 0) return false;
  installed.store(true, std::memory_order_release);
  return true;
}

bool is_ours() noexcept {
  struct sigaction now;
  return sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_sigbus;
}

bool add_range(const void* address, uint64_t bytes) noexcept {
  const auto first = reinterpret_cast<uintptr_t>(address);
  if (first <= kReserved || bytes == 0 || bytes > UINTPTR_MAX - first) return false;
  for (size_t i = 0; i < kMaxRanges; ++i) {
    uintptr_t expected = 0;
    if (!ranges[i].first.compare_exchange_strong(expected, kReserved, std::memory_order_acq_rel)) continue;
    ranges[i].last.store(first + bytes, std::memory_order_release);
    ranges[i].first.store(first, std::memory_order_release);
    size_t used = ranges_used.load(std::memory_order_relaxed);
    while (used < i + 1 && !ranges_used.compare_exchange_weak(used, i + 1, std::memory_order_release)) {
    }
    return true;
  }
  return false;
}

void remove_range(const void* address) noexcept {
  const auto first = reinterpret_cast<uintptr_t>(address);
  if (first <= kReserved) return;
  const size_t used = ranges_used.load(std::memory_order_acquire);
  for (size_t i = 0; i < used; ++i) {
    uintptr_t expected = first;
    if (ranges[i].first.compare_exchange_strong(expected, 0, std::memory_order_acq_rel)) return;
  }
}

// Not inlined and without anything to destroy: between sigsetjmp and siglongjmp no value lives in a register that is
// read afterwards.
[[gnu::noinline]] Status run(void (*leaf)(void*) noexcept, void* argument) noexcept {
  Frame frame;
  frame.outer = current;
  if (sigsetjmp(frame.jump, kSaveMask) != 0) {
    current = frame.outer;
    return Status::kBusFault;
  }
  current = &frame;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  leaf(argument);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  current = frame.outer;
  return Status::kOk;
}

Status copy(void* target, const void* source, size_t bytes, uint32_t* crc) noexcept {
  struct Job {
    void* target;
    const void* source;
    size_t bytes;
    bool with_crc;
    uint32_t crc;
  } job{target, source, bytes, crc != nullptr, crc != nullptr ? *crc : 0};
  const Status status = run(
      [](void* argument) noexcept {
        Job& it = *static_cast<Job*>(argument);
        if (it.with_crc)
          it.crc = crc32c_copy(it.crc, it.target, it.source, it.bytes);
        else
          stream_copy(it.target, it.source, it.bytes);
      },
      &job);
  if (status == Status::kOk && crc != nullptr) *crc = job.crc;
  return status;
}

Status checksum(const void* source, size_t bytes, uint32_t* crc) noexcept {
  struct Job {
    const void* source;
    size_t bytes;
    uint32_t crc;
  } job{source, bytes, *crc};
  const Status status = run(
      [](void* argument) noexcept {
        Job& it = *static_cast<Job*>(argument);
        it.crc = crc32c(it.crc, it.source, it.bytes);
      },
      &job);
  if (status == Status::kOk) *crc = job.crc;
  return status;
}

Status fill_zero(void* target, size_t bytes) noexcept {
  struct Job {
    void* target;
    size_t bytes;
  } job{target, bytes};
  return run(
      [](void* argument) noexcept {
        Job& it = *static_cast<Job*>(argument);
        std::memset(it.target, 0, it.bytes);
      },
      &job);
}

Status load_acquire(const void* address, uint64_t* value) noexcept {
  AtomicAccess job{static_cast<uint64_t*>(const_cast<void*>(address)), 0};
  const Status status = run(load_leaf, &job);
  if (status == Status::kOk) *value = job.value;
  return status;
}

Status store_release(void* address, uint64_t value) noexcept {
  AtomicAccess job{static_cast<uint64_t*>(address), value};
  return run(store_leaf, &job);
}

uint64_t caught() noexcept { return faults_caught.load(std::memory_order_relaxed); }

}  // namespace stepwell::guard
