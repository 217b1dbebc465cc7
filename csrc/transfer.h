// A batch of page copies and what follows them, as data; the gate; the inbox; the waker of an event loop.
//
// A page of a transfer has one source and up to four sinks:
//     source: the lent pool (column kPoolColumn) or a tier;  sinks: tiers (each an ARRIVING claim) and, for a load, the
//                                                            lent pool; a check of a tier's page has none.
// What follows, executed by the mover, page by page: commit or abort of each sink's claim; quarantine of a source whose
// checksum is wrong; finish or keep of a source that is LEAVING; at the end: unpin of the pages, release of the lease,
// the completion into the inbox, the keep-alive tokens into the retire list. Nobody has to poll for the state to be
// right.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy.h"
#include "foreign.h"
#include "index.h"
#include "medium.h"
#include "queue.h"
#include "status.h"

namespace stepwell {

class Mover;
class Transfer;

// Columns of a page: the lent pool, then the tiers that have a medium (device pages travel as a lent pool).
constexpr int kPoolColumn = 0;  // in place of Tier::kDevice
enum class Role : uint8_t { kUnused = 0, kSource = 1, kSink = 2 };

struct PageCopy {
  PageId page = kNoPage;
  Label label;
  std::array<Role, kTiers> roles{};      // [column]
  std::array<uint32_t, kTiers> slots{};  // [column]; for the pool: its slot
  // [column]; claim number of a tier sink; of a LEAVING source (leaving == true); of a source that is awaited
  std::array<uint32_t, kTiers> numbers{};
  // Known: the source is a neighbour's page, and no column is one. Its one sink is host memory.
  ForeignPlace foreign;
  // The source is still to come, by a transfer of `after` that commits this number of this page there.
  bool is_awaited = false;
  // A tier that a transfer of `after` brings the page to, kDevice: none. Its slot and claim number are in that column,
  // whose role is kUnused: where it has come there, that is its source in place of the one named. A page pin of its own
  // keeps it there, which is returned at the end.
  Tier nearer = Tier::kDevice;
};

struct TransferSpec {
  std::vector<PageCopy> pages;
  std::shared_ptr<const PoolLayout> pool;  // where a page uses the pool column
  bool layer_order = false;                // loads: layer by layer, all pages of a layer before the next
  // sources are LEAVING claims (tier of the source column; column 0 = Tier::kDevice, pool slot = device slot)
  bool source_leaving = false;
  WorkClass work_class = WorkClass::kLoad;
  // the page pin of each page that has a tier sink (its claim's) is returned at the end
  bool unpin_pages = false;
  uint64_t lease = 0;       // released at the end (the submitter retained it for the transfer)
  uint64_t tag = 0;         // comes back in the inbox
  uint64_t keep_alive = 0;  // token for the retire list; 0: none
  uint64_t epoch = 0;       // informational
  // Begins once all of these are done. A page that is awaited and that none of them has brought fails with their
  // reason; one that was to come nearer is read from its own source then.
  std::vector<std::shared_ptr<Transfer>> after;
};

// Lets workers into the caller's memory until it is closed.
class Gate {
 public:
  bool enter() noexcept;  // false once closed
  void leave() noexcept;
  void close() noexcept;  // returns when nobody is inside; each stay is one layer copy
 private:
  std::atomic<uint32_t> state_{0};  // bit 31: closed; low bits: how many are inside
};

struct Completion {
  uint64_t tag = 0;
  uint32_t pages = 0;
  uint32_t ok_pages = 0;
  Status status = Status::kOk;  // first failure, or kOk
};

// The one descriptor that an event loop watches for all it waits for here, and the tokens of what has come about.
// A token is taken by watch() and comes back through drain() once, or is given up by unwatch(). Room for it is taken
// with it, so the list is as long as there are waiters, and push() does not allocate.
class Waker {
 public:
  Waker();  // throws std::system_error where eventfd fails
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;
  int fileno() const noexcept;  // readable while tokens wait; -1 once closed
  std::vector<uint64_t> drain();
  // Closes the descriptor at once, whoever still refers to the waker: what comes later is dropped, and never reaches a
  // descriptor that was given the same number since.
  void close() noexcept;

 private:
  friend class Watchers;
  void reserve();
  void unreserve() noexcept;
  void push(uint64_t token) noexcept;  // REQUIRES a reservation

  mutable std::mutex mutex_;
  size_t promised_ = 0;  // reserved and not drained yet
  std::vector<uint64_t> ready_;
  int event_fd_ = -1;
};

// Who waits for one thing to come about: told once, and then forgotten. GUARDED_BY its owner's mutex.
class Watchers {
 public:
  void add(const std::shared_ptr<Waker>& waker, uint64_t token);  // token: of its own at that waker
  void remove(const Waker* waker, uint64_t token) noexcept;       // nothing where it has been told
  void tell() noexcept;

 private:
  struct Entry {
    std::shared_ptr<Waker> waker;
    uint64_t token;
  };
  std::vector<Entry> entries_;
};

struct InboxCounts {
  size_t capacity = 0;
  size_t reserved = 0;  // of transfers under way, and of completions that wait
  size_t ready = 0;     // completions that wait
};

// Completions of one submitter. Room for a transfer's completion is taken when it is submitted, or, where nothing was
// to move, with try_post().
class Inbox {
 public:
  explicit Inbox(size_t capacity);  // throws std::system_error where eventfd fails
  ~Inbox();
  bool try_reserve();
  void unreserve();
  void push(const Completion& completion) noexcept;        // REQUIRES a reservation
  bool try_post(const Completion& completion);             // takes the room too; false: none, or closed
  size_t poll(size_t most, std::vector<Completion>* out);  // never waits
  int fileno() const noexcept { return event_fd_; }        // readable while completions wait
  // Drops what waits and refuses what comes; the descriptor stays until the last owner of the inbox has gone.
  void close() noexcept;
  bool is_closed() const noexcept;
  InboxCounts counts() const noexcept;
  // Tells the waker when a completion comes or the inbox is closed. False: one is here, or it is closed already, and
  // nothing was taken. Every watcher is told of each; who finds nothing left watches again.
  bool watch(const std::shared_ptr<Waker>& waker, uint64_t token);
  void unwatch(const Waker* waker, uint64_t token) noexcept;

 private:
  mutable std::mutex mutex_;
  size_t capacity_;
  size_t reserved_ = 0;
  bool closed_ = false;
  std::vector<Completion> ready_;
  Watchers watchers_;
  int event_fd_ = -1;
};

// Tokens of Python buffers whose last use has passed; drained by any call that holds the GIL.
class RetireList {
 public:
  void reserve(size_t count);  // room for so many more push() calls, which then do not allocate
  void unreserve(size_t count) noexcept;
  void push(uint64_t token) noexcept;  // REQUIRES a reservation
  std::vector<uint64_t> drain();

 private:
  std::mutex mutex_;
  size_t promised_ = 0;  // reserved and not drained yet
  std::vector<uint64_t> tokens_;
};

// A submitted transfer. Shared by the mover and whoever watches it; dropping the watcher's reference detaches.
// States: (waiting for others ->) queued -> running -> done. `done` means: every page decided, every continuation executed.
class Transfer {
 public:
  bool done() const noexcept;
  // True once no worker will touch the caller's memory again (saves: after the first stage; always at the end).
  bool source_released() const noexcept;
  // Layers of the pool sink that have landed verified for all pages that did not fail. Readable without any lock.
  uint32_t layers_done() const noexcept;
  // True when done within timeout_s (< 0: no limit).
  bool wait(double timeout_s) const;
  // Stops what has not started; a page (in layer order: a layer of all pages) that is being copied finishes. Every
  // claim is returned either way.
  void cancel() noexcept;
  // Closes the gate: when it returns no byte can land in the caller's memory; pages that had not landed report
  // kDeadline. The rest of the transfer goes on without the pool.
  void close_gate() noexcept;
  // Gives up on a call that does not return: as cancel() and close_gate(); every page that is not decided reports
  // `status`, and the inbox has its completion. The claims stay with the worker that is in that call.
  void abandon(Status status) noexcept;
  // Whether the caller has nothing more to wait for: done, or the gate is closed.
  bool decided() const noexcept;
  bool wait_decided(double timeout_s) const;
  // Tells the waker when the transfer is decided. False: it is already, and nothing was taken.
  bool watch(const std::shared_ptr<Waker>& waker, uint64_t token);
  void unwatch(const Waker* waker, uint64_t token) noexcept;
  // Per page; kPending where not decided. A load: kOk = all its bytes are in the pool, verified. A save: kOk = resident
  // in every sink. A check: kOk = its bytes are right.
  std::vector<Status> page_status() const;
  // Bit c: column c's sink was committed (tiers) or landed (pool), or what a check found there is right.
  std::vector<uint8_t> landed() const;
  // Bit c: a page was asked for in tier c because its source had failed.
  uint8_t asked() const noexcept;
  uint64_t tag() const noexcept { return spec_.tag; }
  size_t pages() const noexcept { return spec_.pages.size(); }
  uint64_t bytes_moved() const noexcept;  // payload bytes copied into sinks
  double seconds() const noexcept;        // submit to done; 0 before

 private:
  friend class Mover;
  explicit Transfer(TransferSpec spec);
  template <typename Predicate>
  bool wait_for(double timeout_s, Predicate is_over) const;
  TransferSpec spec_;
  mutable std::mutex mutex_;
  mutable std::condition_variable condition_;
  Gate gate_;
  // The mover's bookkeeping: see progress.h.
  struct Progress;
  std::unique_ptr<Progress, void (*)(Progress*)> progress_;
};

}  // namespace stepwell
