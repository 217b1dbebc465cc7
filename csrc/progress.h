// What the mover keeps about a transfer while it runs. Private to transfer.cc and mover.cc.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <vector>

#include "transfer.h"

namespace stepwell {

using ColumnMask = uint8_t;  // 1 << column
constexpr ColumnMask column_mask(int column) { return static_cast<ColumnMask>(1u << column); }
constexpr ColumnMask kPoolMask = column_mask(kPoolColumn);
constexpr int kStages = 2;

// One page's way through its stages. Written only by the worker that runs the unit the page is in; the units of one
// stage are over before the next one is queued, so stages never meet.
struct PageProgress {
  std::array<ColumnMask, kStages> sinks{};  // what each stage fills; fixed at submit
  uint8_t source_stage = 0;                 // the last stage that reads the page's own source; fixed at submit
  // sinks whose claim was committed or aborted (pool: landed or given up); of a check, the source once it was right
  ColumnMask settled = 0;
  bool is_lost = false;         // it was awaited, and did not come: nothing is tried
  ColumnMask published = 0;     // record written, claim not committed yet
  ColumnMask unsettled = 0;     // of these: to be made durable by the medium first, after the stage's last unit
  bool source_settled = false;  // a LEAVING source was finished, kept or quarantined
  // Another tier that has the page, pinned there, and its slot: it is asked once where the first source failed. 0: none.
  uint8_t second_source = 0;
  bool was_retried = false;
  Status first_failure = Status::kOk;  // of the first source
  uint32_t second_slot = 0;
  Status failure = Status::kOk;  // the first one that decides the page's status

  bool is_check() const { return (sinks[0] | sinks[1]) == 0; }
};

// Consecutive entries of Progress::order that one worker runs in one go.
struct UnitPlan {
  uint32_t first = 0;
  uint32_t count = 0;
  bool io = false;
  bool layered = false;
  bool retry = false;  // one page, read from its second source
};

struct Transfer::Progress {
  // Fixed at submit.
  std::shared_ptr<Inbox> inbox;
  std::vector<uint32_t> order;                       // page indices, each unit's contiguous
  std::array<std::vector<UnitPlan>, kStages> units;  // whether they do I/O: fixed when the first one is queued
  std::array<bool, kStages> uses_pool{};
  bool pool_is_sink = false;
  bool awaits = false;  // some page is to be brought by a transfer before, or nearer by it
  pid_t pid = 0;
  std::chrono::steady_clock::time_point submitted;

  std::vector<PageProgress> pages;

  // GUARDED_BY(Transfer::mutex_)
  std::vector<Status> status;  // kPending, then the first that was set
  std::vector<uint8_t> landed;
  std::vector<bool> pool_over;  // all of the page's bytes are in (or out of) the pool
  uint32_t units_left = 0;      // of the stage under way
  bool done = false;
  bool gate_closed = false;
  std::list<std::shared_ptr<Transfer>> followers;  // that wait for this one
  Watchers watchers;                               // of done, or of the gate's being closed
  double seconds = 0;

  std::atomic<uint32_t> waits_for{0};  // transfers that are to be done first, and the submit itself
  std::atomic<bool> cancelled{false};
  std::atomic<bool> source_released{false};
  std::atomic<uint32_t> layers_done{0};
  std::atomic<uint64_t> bytes_moved{0};
  std::atomic<ColumnMask> asked{0};  // tiers that were asked for a page as its second source
};

}  // namespace stepwell
