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
// Each layer copied is checked against the checksum its source recorded; a pool source makes the checksums. A page
// fails alone. A LEAVING source is finished, its record retired and its slot freed once every sink that was filled from
// it holds the page; else it is kept.
// What a stage has written to a medium that settles is committed by a round of the io workers when the stage is over.
// Fault points: mover.unit, mover.before_copy, mover.after_copy (before a commit, or before a page is said to have
// landed), mover.after_commit; an armed errno stands for an exception there.
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
  uint64_t transfers = 0;
  uint64_t commits = 0, aborts = 0;         // sink claims decided: together all that were submitted, once idle
  uint64_t queued_copy = 0, queued_io = 0;  // units waiting
};

class Mover {
 public:
  // media[tier]: null where the store lacks the tier (kDevice always null). All outlive the mover.
  Mover(MoverOptions options, const PageShape& shape, Index* index, std::array<Medium*, kTiers> media);
  ~Mover();  // drain(0) and join

  // kOk: *out is queued and everything in spec will be decided, whatever happens. kQueueFull, kClosed, kPoisoned,
  // kInvalid: nothing was started and nothing of spec was consumed: claims, pins and lease stay the caller's. inbox may
  // be null.
  Status submit(TransferSpec spec, const std::shared_ptr<Inbox>& inbox, std::shared_ptr<Transfer>* out);
  // Waits until nothing is queued or running, at most timeout_s; then cancels the rest, and waits for what is being
  // copied.
  // True: all finished without cancelling. With `close` the workers are joined, and submit says kClosed from now on.
  bool drain(double timeout_s, bool close);
  // Runs one unit of the given queue (0 copy, 1 io) on the calling thread. False: none was waiting. Only with 0
  // threads.
  bool step(int queue);
  MoverStats stats() const;
  RetireList& retired() noexcept { return retired_; }
  bool poisoned() const noexcept;
  std::string poison_reason() const;  // what failed first in a worker; "" if nothing did

 private:
  struct Impl;
  RetireList retired_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepwell
