// The workers and their queues: bytes move here, and nowhere else.
//
//     submit -> [copy queue | io queue] -> unit = a run of pages of one transfer -> per page: source, layers, sinks,
//     continuation
//
// A unit goes to the io queue if its source or a sink does I/O, else to the copy queue. Stages of a transfer, each
// queued when the one before is done:
//   a save  (source = pool):  1 copy: pool -> memory tiers (io, where a page has none: pool -> disk);  2 io: memory
//                             tier just committed -> disk.
//           A page that reached no memory tier does not reach disk either: the pool is the caller's again once stage 1
//           is over.
//   a load  (sink = pool), page order:   one stage: io units (disk -> [shared | host] and -> pool), copy units (memory
//                                        -> pool) side by side
//   a load, layer order:  1 io: disk -> [shared | host];  2 copy, one unit: for each layer, for each page: -> pool.
//           Disk pages with no memory sink, or with none that took them, go to the pool in stage 1.
//   a promotion or demotion between tiers: one stage.
//   a check (source = a tier, no sink):  one stage; the page's layers are read and compared, nothing is copied.
//   a staging (source = a neighbour's volume, sink = host):  one stage on the io queue, each page read in one pass
//                                                            straight into its slot, verified there before the commit.
// A transfer that has others to wait for (`after`) holds its room in the queues from the start, and is queued by the
// worker that ends the last of them: gate, deadline, cancel, drain and poison are to it what they are to one that waits
// in a queue. A page that such another has brought nearer meanwhile is read from there: its unit, which has room among the
// I/O for what does not come, goes to the copy queue where that has room, and so past what else is to be read.
// Each layer copied is checked against the checksum its source recorded; a pool source makes the checksums. A page
// fails alone. A LEAVING source is finished, its record retired and its slot freed once every sink that was filled from
// it holds the page; else it is kept.
// What a stage has written to a medium that settles is committed by a round of the io workers when the stage is over.
// A load whose source failed (checksum, record, I/O, bus fault) has that copy quarantined and asks one other tier that
// holds the page, once: a unit of its own, behind the others. Only then is the page lost to the load.
// An exception in a unit fails the pages of that unit that are not decided (kFailed), returns their claims, and the
// worker goes on; a failed assertion poisons.
// Fault points: mover.unit, mover.before_copy, mover.after_copy (before a commit, or before a page is said to have
// landed), mover.after_commit, mover.begin_after (before a transfer is queued that has waited for others); an armed
// errno stands for an exception there, and at mover.assertion for a failed assertion.
//
// Threads: submit from any thread; workers are sw-copy-n and sw-io-n. With copy_threads = io_threads = 0 nothing runs
// until step() is called: the stepped mover of stepwell.testing.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "queue.h"
#include "transfer.h"

namespace stepwell {

// How long drain() waits for calls under way once it has cancelled: a healthy disk answers within it.
constexpr double kLetGo_s = 2.0;

struct MoverOptions {
  uint32_t copy_threads = 1;
  uint32_t io_threads = 2;
  uint32_t queue_units = 4096;    // each queue's capacity
  uint32_t unit_bytes = 4 << 20;  // about how much one unit moves
};

struct MoverStats {
  std::array<uint64_t, kTiers> bytes_read{};     // by source column
  std::array<uint64_t, kTiers> bytes_written{};  // by sink column
  uint64_t checksum_failures = 0;
  uint64_t bus_faults = 0;
  uint64_t io_errors = 0;
  // Of those, by the column whose medium failed, and the errno of the last one; 0: none is known.
  std::array<uint64_t, kTiers> read_errors{}, write_errors{};
  std::array<int, kTiers> read_errno{}, write_errno{};
  uint64_t failed_units = 0;                      // that an exception ended
  uint64_t retried_pages = 0, rescued_pages = 0;  // asked for in a second tier, and had from there
  uint64_t transfers = 0;
  uint64_t commits = 0, aborts = 0;         // sink claims decided: together all that were submitted, once idle
  uint64_t queued_copy = 0, queued_io = 0;  // units waiting
};

// Where the bytes of a page are read or written: a column, or, behind the columns, a neighbour's page, by the tier that
// its file lies beside.
constexpr int kLanes = 2 * kTiers;
constexpr int foreign_lane(int column) { return kTiers + column; }

// Bytes, and the time that they took or have taken so far.
struct Flow {
  uint64_t bytes = 0;
  uint64_t ns = 0;
};

// Units that have begun, and for how long they had been in their queue by then.
struct QueueWait {
  uint64_t units = 0;
  uint64_t ns = 0;
};

// What the units have moved so far, and what is before those that come next: one moment, by class and lane.
// The time of a unit is that of its worker, from its begin to its end. Each page that it tried has an equal share, which
// counts once for the lane it was read from and once for each it was written to, so that a page which could not be had
// costs time and brings no bytes. A settling round is time of the saves.
struct MoverFlow {
  std::array<std::array<Flow, kLanes>, kWorkClasses> reads{}, writes{};
  std::array<std::array<QueueWait, kWorkClasses>, 2> waits{};  // by queue (0 copy, 1 io) and class
  // Payload bytes of units that wait or run, under the lane that a load reads and that others write, of the unit's first
  // page. Stages that come later are not in it.
  std::array<std::array<uint64_t, kLanes>, kWorkClasses> queued{};
  // Of the units of loads that run, the one that is slowest so far, by lane; ns 0: none runs.
  std::array<Flow, kLanes> running{};
};

// What one worker is in: it is the same call as at the last look where both numbers are the same.
struct WorkerCall {
  uint64_t serial = 0;
  int column = -1;  // the medium that it is in; kPoolColumn: the caller's memory; -1: idle
};

class Mover {
 public:
  // media[tier]: null where the store lacks the tier (kDevice always null). foreign: null where no neighbour's page is
  // read. All outlive the mover.
  Mover(MoverOptions options, const PageShape& shape, Index* index, std::array<Medium*, kTiers> media,
        Foreign* foreign = nullptr);
  // drain(0) and join. Where a call still does not return, after kLetGo_s its worker is left behind with all it refers
  // to but the media and the index: whoever owns those waits for `stuck()` to be false, or the process ends first.
  ~Mover();

  // kOk: *out is queued and everything in spec will be decided, whatever happens. kQueueFull, kClosed, kPoisoned,
  // kInvalid: nothing was started and nothing of spec was consumed: claims, pins and lease stay the caller's. inbox may
  // be null.
  Status submit(TransferSpec spec, const std::shared_ptr<Inbox>& inbox, std::shared_ptr<Transfer>* out);
  // Waits until nothing is queued or running, at most timeout_s; then cancels the rest, and waits for what is being
  // copied, at most kLetGo_s: what is in a call that has not returned by then is abandoned, decided but not ended.
  // True: all finished without cancelling. With `close` submit says kClosed from now on, and the workers are joined,
  // unless stuck(): then the index and the media must outlive it, and so must the locks of the files; call join().
  bool drain(double timeout_s, bool close);
  // After drain(..., true): whether a worker is still in a call.
  bool stuck() const;
  // Joins the workers if none is stuck() any more. True: they are joined.
  bool join();
  // The tiers that a second try of a load may read; all, at first.
  void set_readable(TierMask tiers) noexcept;
  std::vector<WorkerCall> calls() const;
  // Runs one unit of the given queue (0 copy, 1 io) on the calling thread. False: none was waiting. Only with 0
  // threads.
  bool step(int queue);
  MoverStats stats() const;
  MoverFlow flow() const;
  RetireList& retired() noexcept;
  bool poisoned() const noexcept;
  std::string poison_reason() const;  // what failed first in a worker; "" if nothing did
  std::string failure() const;        // the last exception that ended a unit; "" if none did

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepwell
