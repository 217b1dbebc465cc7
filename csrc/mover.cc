#include "mover.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <list>
#include <stdexcept>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "crc32c.h"
#include "fault.h"
#include "file.h"
#include "guard.h"
#include "progress.h"

namespace stepwell {

namespace {

constexpr int kCopyQueue = 0;
constexpr int kIoQueue = 1;
constexpr int kQueues = 2;
constexpr double kLongestWait_s = 1e8;
constexpr uint64_t kThinUnitBytes = 512 << 10;  // from here on a larger call gains little
// How much may wait while units that write more are queued: by then a sync is shared by enough, or its 1 to 3 ms (as
// measured) matter less than the wait.
constexpr size_t kMostSettling = 256;
constexpr std::chrono::milliseconds kLongestUnsettled{5};

using Instant = std::chrono::steady_clock::time_point;

Instant now() { return std::chrono::steady_clock::now(); }

uint64_t ns_between(Instant began, Instant ended) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(ended - began).count());
}

Tier tier_of(int column) { return static_cast<Tier>(column); }

bool fills_a_tier(const PageCopy& copy) {
  return std::any_of(copy.roles.begin() + 1, copy.roles.end(), [](Role role) { return role == Role::kSink; });
}

bool is_to_near(const PageCopy& copy) { return copy.nearer != Tier::kDevice; }

// The tests' way to make any worker fail at any of these points: an armed errno stands for an exception.
void reach(const char* point) {
  const fault::Outcome outcome = fault::reach(point);
  if (outcome.error != 0) throw std::system_error(outcome.error, std::generic_category(), point);
}

// Workers take no asynchronous signal: Python's handlers belong on the main thread. The synchronous ones stay, SIGBUS
// for the guard. Set while threads are started, so that they are born with it.
class WorkerSignalMask {
 public:
  WorkerSignalMask() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int synchronous : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS})
      sigdelset(&blocked, synchronous);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~WorkerSignalMask() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WorkerSignalMask(const WorkerSignalMask&) = delete;
  WorkerSignalMask& operator=(const WorkerSignalMask&) = delete;

 private:
  sigset_t before_;
};

// A stay in the caller's memory.
class GateStay {
 public:
  explicit GateStay(Gate& gate) : gate_(gate), inside_(gate.enter()) {}
  ~GateStay() {
    if (inside_) gate_.leave();
  }
  GateStay(const GateStay&) = delete;
  GateStay& operator=(const GateStay&) = delete;
  bool inside() const { return inside_; }

 private:
  Gate& gate_;
  bool inside_;
};

struct Unit {
  std::shared_ptr<Transfer> transfer;
  UnitPlan plan;
  int stage = 0;
  int lane = kPoolColumn;  // MoverFlow::queued
  Instant queued_at{};
};

// The pages of the unit that a worker is in: those it tried, and by lane those it tried there, and had.
struct UnitTally {
  struct Pages {
    uint32_t tried = 0, had = 0;
  };
  uint32_t tried = 0;
  std::array<Pages, kLanes> read{}, written{};
};

struct Worker {
  Scratch scratch;
  std::vector<uint32_t> checksums;  // of the page that is being gathered
  ForeignDetail foreign;            // of the page that is being read from a neighbour
  PageRun run;                      // the pages that are being read or written together
  UnitTally tally;                  // its own thread's alone
  // The unit that it is in, GUARDED_BY(queue_mutex); units 0: none.
  struct {
    uint32_t pages = 0;
    int lane = kPoolColumn;
    WorkClass work_class = WorkClass::kLoad;
    Instant began{};
  } unit;
  // Serial number of the call it is in, times 8, plus its column plus 1; that is 0 while it is idle.
  std::atomic<uint64_t> call{0};

  // From here on it is in the memory of a column (-1: in none). Written by its own thread alone.
  void enter(int column) noexcept {
    const uint64_t serial = (call.load(std::memory_order_relaxed) >> 3) + 1;
    call.store(serial << 3 | static_cast<uint64_t>(column + 1), std::memory_order_relaxed);
    file::forget_error();
  }
};

// A stage whose bytes are written, and whose pages are to be made durable before they are committed.
struct Settling {
  std::shared_ptr<Transfer> transfer;
  int stage = 0;
};

// Where the bytes of a page come from just now.
struct OpenSource {
  int column = kPoolColumn;
  PageSource bytes;  // for the pool: null
  bool is_pool() const { return bytes.bytes == nullptr; }
};

// Pages of a unit, one behind the other, that move together: their slots in one column follow each other.
struct Stretch {
  uint32_t count = 1;
  int column = kPoolColumn;
  bool is_sink = false;
};

// A page of a layer-order unit on its way.
struct LayeredPage {
  uint32_t index;
  OpenSource source;
  uint32_t seed;
  size_t first_checksum;
};

}  // namespace

struct Mover::Impl {
  Impl(MoverOptions options_, const PageShape& shape_, Index* index_, std::array<Medium*, kTiers> media_,
       Foreign* foreign_)
      : options(options_),
        shape(shape_),
        index(index_),
        media(media_),
        foreign(foreign_),
        pid(::getpid()),
        is_stepped(options_.copy_threads == 0),
        queues{WeightedQueue<Unit>(options_.queue_units), WeightedQueue<Unit>(options_.queue_units)} {}

  // ---- planning ------------------------------------------------------------------------------------------------
  bool does_io(int column) const { return column != kPoolColumn && media[static_cast<size_t>(column)]->does_io(); }
  ColumnMask io_mask() const;
  bool is_valid(const TransferSpec& spec) const;
  void plan(Transfer& transfer) const;

  // ---- running -------------------------------------------------------------------------------------------------
  void work(std::stop_token stop, int queue, Worker& worker, const std::string& name);
  bool run_one(int queue, Worker& worker);
  void run_unit(const Unit& unit, Worker& worker) noexcept;
  void run_layered(Transfer& transfer, const UnitPlan& unit, Worker& worker);
  Stretch find_stretch(const Transfer& transfer, const uint32_t* pages, uint32_t most, int stage) const;
  int run_column(const Transfer& transfer, uint32_t page, int stage, bool* is_sink) const;
  void open_run(const Transfer& transfer, const uint32_t* pages, const Stretch& stretch, Worker& worker);
  bool write_run(Transfer& transfer, const uint32_t* pages, const Stretch& stretch, int stage, Worker& worker);
  void finish_run(Transfer& transfer, const uint32_t* pages, uint32_t first, uint32_t count, int column,
                  Worker& worker);
  // `ahead`: the page as it was read with others; without bytes, or null: it is read here.
  void run_page(Transfer& transfer, uint32_t page, int stage, Worker& worker, const PageSource* ahead);
  bool open_source(Transfer& transfer, uint32_t page, int stage, Worker& worker, const PageSource* ahead,
                   OpenSource* source);
  // All bytes of a page, verified, or from the pool with their checksums made. kOk; else why, and *source_is_bad: whose.
  Status fill(Transfer& transfer, uint32_t page, const OpenSource& source, const PageTarget& target,
              uint32_t* checksums, bool* source_is_bad);
  void written(Transfer& transfer, uint32_t page, int column, Status status, Worker& worker);
  // The two copies: into a tier, which ends in a commit, and into the lent pool. False: the source is of no more use.
  bool fill_tier(Transfer& transfer, uint32_t page, int column, Worker& worker, OpenSource* source);
  void fill_from_neighbour(Transfer& transfer, uint32_t page, Worker& worker);
  bool land(Transfer& transfer, uint32_t page, Worker& worker, const OpenSource& source);
  void check(Transfer& transfer, uint32_t page, const OpenSource& source);
  Status land_layer(Transfer& transfer, uint32_t page, uint32_t layer, uint32_t seed, const PageSource& source,
                    uint32_t expected);
  void landed_whole(Transfer& transfer, uint32_t page);
  void commit(Transfer& transfer, uint32_t page, int column);

  // ---- deciding ------------------------------------------------------------------------------------------------
  bool stopped(const Transfer& transfer) const {
    return transfer.progress_->cancelled.load(std::memory_order_relaxed) || is_poisoned.load(std::memory_order_relaxed);
  }
  Status stop_reason() const {
    return is_poisoned.load(std::memory_order_relaxed) ? Status::kPoisoned : Status::kCancelled;
  }
  void count(Status status, int column, bool is_read) noexcept {
    if (status == Status::kIOError) io_errors.fetch_add(1, std::memory_order_relaxed);
    if (status == Status::kBusFault) bus_faults.fetch_add(1, std::memory_order_relaxed);
    if ((status != Status::kIOError && status != Status::kBusFault) || column == kPoolColumn) return;
    const auto c = static_cast<size_t>(column);
    (is_read ? read_errno : write_errno)[c].store(file::last_error(), std::memory_order_relaxed);
    (is_read ? read_errors : write_errors)[c].fetch_add(1, std::memory_order_release);
  }
  // After a call for several pages: where it failed it counts as one error, also where each page's own call works then.
  // Else a device that fails now and then would be seen by nobody.
  void count_run(int column, bool is_read) noexcept {
    if (file::last_error() != 0) count(Status::kIOError, column, is_read);
  }
  // False: the record may name its page still, and a restart would find it: whose slot it is, is owed.
  bool frees_record(uint32_t slot, int column) noexcept {
    const Status status = media[static_cast<size_t>(column)]->retire(slot);
    count(status, column, false);
    return status == Status::kOk;
  }
  void fail(Transfer& transfer, uint32_t page, int column, Status status);
  void fail_source(Transfer& transfer, uint32_t page, int column, Status status);
  bool find_second_source(Transfer& transfer, uint32_t page);
  // `reason`: of what is neither committed nor failed by now.
  void settle_stage(Transfer& transfer, uint32_t page, int stage, Status reason) noexcept;
  void settle_source(Transfer& transfer, uint32_t page) noexcept;
  void resolve(Transfer& transfer, uint32_t page) noexcept;
  void end_unit(const Unit& unit, Worker* worker) noexcept;
  int lane_of(const Transfer& transfer, const UnitPlan& plan, int stage) const noexcept;
  void queue_unit(Unit unit, Instant at);
  void begin_tally(const Unit& unit, int queue, Worker& worker) noexcept;
  void add_tally(const Unit& unit, Worker& worker, Instant ended) noexcept;
  void end_stage(const std::shared_ptr<Transfer>& transfer, int ended) noexcept;
  void settle_later(const Settling& stage) noexcept;
  bool may_settle() const;
  void settle_round(const std::vector<Settling>& round, Worker& worker) noexcept;
  void settle(const std::vector<Settling>& round, int column, Worker& worker, Status* reason);
  void end_settling(const Settling& stage, Status reason) noexcept;
  void settle_unit(const Unit& unit, Status reason, Worker* worker) noexcept;
  bool queue_retry(const Unit& unit, uint32_t position) noexcept;
  void end_retry(const Unit& unit) noexcept;
  void begin_stage(const std::shared_ptr<Transfer>& transfer, int stage) noexcept;
  // One of those that it waits for is done; after the last of them it begins.
  void release(const std::shared_ptr<Transfer>& transfer) noexcept;
  void look_what_came(Transfer& transfer);
  void leave_io(Transfer& transfer) noexcept;
  void end_transfer(const std::shared_ptr<Transfer>& transfer) noexcept;
  void poison(const char* reason) noexcept;
  void poison_by_current_exception() noexcept;
  Status note_current_exception() noexcept;
  // Runs a continuation whatever it throws: the next one still has to run.
  template <typename Call>
  void surely(Call&& call) noexcept {
    try {
      call();
    } catch (...) {
      poison_by_current_exception();
    }
  }

  const MoverOptions options;
  const PageShape shape;
  Index* const index;
  const std::array<Medium*, kTiers> media;
  Foreign* const foreign;
  RetireList retired;
  const pid_t pid;
  const bool is_stepped;  // no threads: step() does the work

  std::atomic<bool> is_poisoned{false};
  mutable std::mutex reason_mutex;  // a leaf: nothing is locked under it
  // GUARDED_BY(reason_mutex); the first one, of fixed size: noting it must not throw
  std::array<char, 256> poison_reason{};
  std::array<char, 256> failure_reason{};  // GUARDED_BY(reason_mutex); the last one
  std::array<std::atomic<uint64_t>, kTiers> bytes_read{}, bytes_written{}, read_errors{}, write_errors{};
  std::array<std::atomic<int>, kTiers> read_errno{}, write_errno{};
  std::atomic<uint64_t> failed_units{0}, retried_pages{0}, rescued_pages{0};
  std::atomic<TierMask> readable{static_cast<TierMask>(~TierMask{0})};
  std::atomic<uint64_t> checksum_failures{0}, bus_faults{0}, io_errors{0}, transfers{0}, commits{0}, aborts{0};

  mutable std::mutex queue_mutex;
  std::array<std::condition_variable_any, kQueues> work_waits;
  std::condition_variable idle;  // a transfer has ended
  // GUARDED_BY(queue_mutex)
  std::array<WeightedQueue<Unit>, kQueues> queues;
  std::unordered_map<const Transfer*, std::shared_ptr<Transfer>> live;  // submitted, not ended
  bool closed = false;
  MoverFlow flow;                  // without `running`
  std::vector<Settling> settling;  // waits to be settled
  bool is_settling = false;        // a worker does it
  Instant settling_since;

  std::vector<std::unique_ptr<Worker>> workers;  // one a thread; of step() with 0 threads
  std::vector<std::jthread> threads;             // last: joined before anything above goes
};

// ---- planning --------------------------------------------------------------------------------------------------

ColumnMask Mover::Impl::io_mask() const {
  ColumnMask columns = 0;
  for (int column = 1; column < kTiers; ++column) {
    if (media[static_cast<size_t>(column)] != nullptr && does_io(column)) columns |= column_mask(column);
  }
  return columns;
}

bool Mover::Impl::is_valid(const TransferSpec& spec) const {
  if (spec.pool != nullptr && spec.pool->layers() != shape.layers()) return false;
  if (static_cast<size_t>(spec.work_class) >= kWorkClasses) return false;
  if (std::find(spec.after.begin(), spec.after.end(), nullptr) != spec.after.end()) return false;
  for (const PageCopy& copy : spec.pages) {
    if (copy.page == kNoPage) return false;
    int sources = 0, sinks = 0;
    for (size_t column = 0; column < kTiers; ++column) {
      const Role role = copy.roles[column];
      if (role == Role::kUnused) continue;
      if (role != Role::kSource && role != Role::kSink) return false;
      (role == Role::kSource ? sources : sinks) += 1;
      if (column != kPoolColumn) {
        if (media[column] == nullptr) return false;
      } else if (spec.pool == nullptr || copy.slots[column] >= spec.pool->slots() ||
                 (role == Role::kSink && !spec.pool->writable())) {
        return false;
      }
    }
    if (copy.foreign.is_known()) {
      const bool is_staging = sources == 0 && sinks == 1 &&
                              copy.roles[static_cast<size_t>(Tier::kHost)] == Role::kSink && foreign != nullptr;
      if (!is_staging || copy.is_awaited || copy.nearer != Tier::kDevice || spec.source_leaving) return false;
      continue;
    }
    if (const auto nearer = static_cast<size_t>(copy.nearer); copy.nearer != Tier::kDevice) {
      if (nearer >= kTiers || media[nearer] == nullptr || copy.roles[nearer] != Role::kUnused ||
          copy.roles[kPoolColumn] == Role::kSource || copy.is_awaited || spec.source_leaving)
        return false;
    }
    if (copy.is_awaited && copy.roles[static_cast<size_t>(Tier::kHost)] != Role::kSource) return false;
    // Without a sink it is a check: of a tier's page, which stays where it is.
    if (sources != 1 || (sinks == 0 && (copy.roles[kPoolColumn] == Role::kSource || spec.source_leaving))) return false;
  }
  return true;
}

// Splits each page's sinks into stages and the pages of each stage into units: see the table at the top of mover.h.
void Mover::Impl::plan(Transfer& transfer) const {
  const TransferSpec& spec = transfer.spec_;
  Transfer::Progress& progress = *transfer.progress_;
  const ColumnMask io = io_mask();
  const size_t count = spec.pages.size();
  progress.pages.resize(count);
  progress.status.assign(count, Status::kPending);
  progress.landed.assign(count, 0);
  progress.pool_over.assign(count, false);

  // [stage][queue]; a layer-order landing is one unit of its own.
  std::array<std::array<std::vector<uint32_t>, kQueues>, kStages> runs;
  std::vector<uint32_t> layered, nearing;  // nearing: of stage 0, of I/O unless they have come nearer by then
  for (uint32_t i = 0; i < count; ++i) {
    ColumnMask source = 0, sinks = 0;
    for (int column = 0; column < kTiers; ++column) {
      const Role role = spec.pages[i].roles[static_cast<size_t>(column)];
      if (role == Role::kSource) source |= column_mask(column);
      if (role == Role::kSink) sinks |= column_mask(column);
    }
    PageProgress& page = progress.pages[i];
    page.sinks[0] = sinks;
    const ColumnMask memory = sinks & static_cast<ColumnMask>(~(io | kPoolMask));
    if (source == kPoolMask) {
      if (memory != 0) page.sinks = {memory, static_cast<ColumnMask>(sinks & ~memory)};
    } else if ((sinks & kPoolMask) != 0 && spec.layer_order && ((source & io) == 0 || memory != 0)) {
      page.sinks = {static_cast<ColumnMask>(sinks & ~kPoolMask), kPoolMask};
      if ((source & io) == 0) page.source_stage = 1;
    }
    const bool does_io = ((source | page.sinks[0]) & io) != 0 || spec.pages[i].foreign.is_known();
    if (page.sinks[0] != 0 || page.sinks[1] == 0)
      (does_io && is_to_near(spec.pages[i]) ? nearing : runs[0][does_io ? kIoQueue : kCopyQueue]).push_back(i);
    if (page.sinks[1] == kPoolMask) {
      layered.push_back(i);
    } else if (page.sinks[1] != 0) {
      runs[1][kIoQueue].push_back(i);
    }
    progress.awaits |= spec.pages[i].is_awaited || is_to_near(spec.pages[i]);
    progress.pool_is_sink |= (sinks & kPoolMask) != 0;
    progress.uses_pool[0] |= ((source | page.sinks[0]) & kPoolMask) != 0;
  }
  progress.uses_pool[1] = !layered.empty();

  // Units of about unit_bytes, but never so many that an empty queue could not take them.
  const size_t most_units = std::max<size_t>(1, options.queue_units > 2 ? options.queue_units - 2 : 1);
  const size_t least_pages = (count + most_units - 1) / most_units;
  const size_t unit_pages =
      std::max({size_t{1}, static_cast<size_t>(options.unit_bytes / shape.page_bytes()), least_pages});
  // A transfer that few units hold is spread over all I/O workers, but not so thin that calls become small.
  const auto io_unit_pages = [&](size_t pages) {
    if (options.io_threads < 2) return unit_pages;
    const size_t share = (pages + options.io_threads - 1) / options.io_threads;
    const auto thin = static_cast<size_t>(kThinUnitBytes / shape.page_bytes());
    return std::min(unit_pages, std::max({size_t{1}, thin, share, least_pages}));
  };
  // Within a unit of I/O pages go in the order of their slots there: neighbours are moved together.
  const auto place_of = [&](uint32_t page) {
    for (size_t column = 1; column < kTiers; ++column) {
      if (spec.pages[page].roles[column] != Role::kUnused && (io & column_mask(static_cast<int>(column))) != 0)
        return spec.pages[page].slots[column];
    }
    return kNoSlot;
  };
  const auto lies_before = [&](uint32_t a, uint32_t b) { return place_of(a) < place_of(b); };
  auto cut = [&](int stage, int queue, const std::vector<uint32_t>& run, size_t pages, bool is_layered) {
    for (size_t first = 0; first < run.size(); first += pages) {
      const size_t taken = std::min(pages, run.size() - first);
      progress.units[static_cast<size_t>(stage)].push_back(UnitPlan{
          static_cast<uint32_t>(progress.order.size()), static_cast<uint32_t>(taken), queue == kIoQueue, is_layered});
      const auto begin = run.begin() + static_cast<std::ptrdiff_t>(first);
      progress.order.insert(progress.order.end(), begin, begin + static_cast<std::ptrdiff_t>(taken));
      if (queue != kIoQueue) continue;
      const auto unit = progress.order.end() - static_cast<std::ptrdiff_t>(taken);
      if (!std::is_sorted(unit, progress.order.end(), lies_before))
        std::stable_sort(unit, progress.order.end(), lies_before);
    }
  };
  cut(0, kIoQueue, nearing, io_unit_pages(nearing.size()), false);
  for (int stage = 0; stage < kStages; ++stage) {
    for (int queue = 0; queue < kQueues; ++queue) {
      const std::vector<uint32_t>& run = runs[static_cast<size_t>(stage)][static_cast<size_t>(queue)];
      cut(stage, queue, run, queue == kIoQueue ? io_unit_pages(run.size()) : unit_pages, false);
    }
  }
  cut(1, kCopyQueue, layered, std::max<size_t>(1, layered.size()), true);
}

// ---- running ---------------------------------------------------------------------------------------------------

void Mover::Impl::work(std::stop_token stop, int queue, Worker& worker, const std::string& name) {
  pthread_setname_np(pthread_self(), name.c_str());
  for (;;) {
    {
      std::unique_lock lock(queue_mutex);
      auto& mine = queues[static_cast<size_t>(queue)];
      const auto has_work = [&] { return mine.size() > 0 || (queue == kIoQueue && !settling.empty() && !is_settling); };
      if (!work_waits[static_cast<size_t>(queue)].wait(lock, stop, has_work)) return;
    }
    run_one(queue, worker);
  }
}

bool Mover::Impl::run_one(int queue, Worker& worker) {
  std::optional<Unit> unit;
  std::vector<Settling> round;
  {
    std::lock_guard lock(queue_mutex);
    if (queue == kIoQueue && may_settle()) {
      round.swap(settling);
      is_settling = true;
    } else {
      unit = queues[static_cast<size_t>(queue)].pop();
      if (unit) begin_tally(*unit, queue, worker);
    }
  }
  if (!round.empty()) {
    settle_round(round, worker);
    return true;
  }
  if (!unit) return false;
  run_unit(*unit, worker);
  return true;
}

void Mover::Impl::run_unit(const Unit& unit, Worker& worker) noexcept {
  Transfer& transfer = *unit.transfer;
  const std::vector<uint32_t>& order = transfer.progress_->order;
  Status reason = stop_reason();
  worker.enter(kPoolColumn);
  try {
    reach("mover.unit");
    if (fault::reach("mover.assertion").error != 0) throw AssertionFailure("armed at mover.assertion");
    if (unit.plan.layered) {
      run_layered(transfer, unit.plan, worker);
    } else {
      for (uint32_t done = 0; done < unit.plan.count;) {
        const uint32_t* const pages = &order[unit.plan.first + done];
        Stretch stretch;
        if (!unit.plan.retry) stretch = find_stretch(transfer, pages, unit.plan.count - done, unit.stage);
        const bool is_run = stretch.count > 1 && !stopped(transfer);
        if (is_run) open_run(transfer, pages, stretch, worker);
        const bool is_written = is_run && stretch.is_sink && write_run(transfer, pages, stretch, unit.stage, worker);
        for (uint32_t i = 0; i < stretch.count; ++i) {
          const bool is_ahead = is_run && !stretch.is_sink;
          if (!is_written)
            run_page(transfer, pages[i], unit.stage, worker, is_ahead ? &worker.run.sources[i] : nullptr);
          if (transfer.progress_->pages[pages[i]].second_source == 0 || unit.plan.retry)
            settle_stage(transfer, pages[i], unit.stage, stop_reason());
        }
        done += stretch.count;
      }
    }
    reason = stop_reason();
  } catch (...) {
    reason = note_current_exception();
  }
  if (unit.plan.retry) end_retry(unit);
  settle_unit(unit, reason, &worker);
}

// Whatever happened before, each page of the unit leaves its stage decided.
void Mover::Impl::settle_unit(const Unit& unit, Status reason, Worker* worker) noexcept {
  const Transfer::Progress& progress = *unit.transfer->progress_;
  for (uint32_t i = 0; i < unit.plan.count; ++i) {
    const uint32_t position = unit.plan.first + i;
    const uint32_t page = progress.order[position];
    // A page that is queued again is another worker's from there on.
    if (progress.pages[page].second_source != 0 && queue_retry(unit, position)) continue;
    settle_stage(*unit.transfer, page, unit.stage, reason);
  }
  if (worker != nullptr) worker->enter(-1);  // before anyone can see the transfer done
  end_unit(unit, worker);
}

// Has a page of a unit read from its second source, by a unit of its own. False: there is no room for that, and the page
// is as its first source left it.
bool Mover::Impl::queue_retry(const Unit& unit, uint32_t position) noexcept {
  Transfer& transfer = *unit.transfer;
  const uint32_t page = transfer.progress_->order[position];
  PageProgress& progress = transfer.progress_->pages[page];
  Unit again = unit;
  again.plan = UnitPlan{position, 1, unit.plan.io || does_io(progress.second_source), false, true};
  const size_t queue = again.plan.io ? kIoQueue : kCopyQueue;
  bool has_room = false;
  {
    std::lock_guard lock(queue_mutex);
    has_room = !stopped(transfer) && queues[queue].try_reserve(1);
  }
  if (has_room) {
    {
      std::lock_guard lock(transfer.mutex_);
      ++transfer.progress_->units_left;  // this unit still counts: the stage cannot end in between
    }
    try {
      const Instant at = now();
      again.lane = lane_of(transfer, again.plan, again.stage);
      std::lock_guard lock(queue_mutex);
      queue_unit(again, at);
      return true;
    } catch (...) {
      static_cast<void>(note_current_exception());
    }
    {
      std::lock_guard lock(transfer.mutex_);
      --transfer.progress_->units_left;
    }
    std::lock_guard lock(queue_mutex);
    queues[queue].unreserve(1);
  }
  if (progress.failure == Status::kOk) progress.failure = progress.first_failure;
  end_retry(again);
  return false;
}

// The second source is not read any more.
void Mover::Impl::end_retry(const Unit& unit) noexcept {
  Transfer& transfer = *unit.transfer;
  const uint32_t page = transfer.progress_->order[unit.plan.first];
  PageProgress& progress = transfer.progress_->pages[page];
  const ColumnMask wanted = progress.sinks[static_cast<size_t>(unit.stage)];
  if (progress.failure == Status::kOk && (progress.settled & wanted) == wanted)
    rescued_pages.fetch_add(1, std::memory_order_relaxed);
  progress.second_source = 0;
  surely([&] { index->unpin_pages(&transfer.spec_.pages[page].page, 1); });
}

// The column in which a page may be of a run: where its source does I/O, or, from memory, its only sink. -1: none.
int Mover::Impl::run_column(const Transfer& transfer, uint32_t page, int stage, bool* is_sink) const {
  const PageCopy& copy = transfer.spec_.pages[page];
  const PageProgress& progress = transfer.progress_->pages[page];
  const ColumnMask open_sinks = progress.sinks[static_cast<size_t>(stage)] & static_cast<ColumnMask>(~progress.settled);
  if ((open_sinks == 0 && !progress.is_check()) || progress.is_lost || copy.foreign.is_known()) return -1;
  const ColumnMask io = io_mask();
  for (int column = 1; column < kTiers && stage <= progress.source_stage; ++column) {
    if (copy.roles[static_cast<size_t>(column)] != Role::kSource || (io & column_mask(column)) == 0) continue;
    *is_sink = false;
    return column;
  }
  if (std::popcount(open_sinks) != 1 || (open_sinks & io) == 0) return -1;
  *is_sink = true;
  return std::bit_width(open_sinks) - 1;
}

Stretch Mover::Impl::find_stretch(const Transfer& transfer, const uint32_t* pages, uint32_t most, int stage) const {
  Stretch stretch;
  const int column = run_column(transfer, pages[0], stage, &stretch.is_sink);
  if (column < 0) return {};
  stretch.column = column;
  const auto slot_of = [&](uint32_t i) { return transfer.spec_.pages[pages[i]].slots[static_cast<size_t>(column)]; };
  most = std::min(most, media[static_cast<size_t>(column)]->longest_run(slot_of(0)));
  for (bool is_sink = false; stretch.count < most; ++stretch.count) {
    if (run_column(transfer, pages[stretch.count], stage, &is_sink) != column || is_sink != stretch.is_sink) break;
    if (slot_of(stretch.count) != slot_of(0) + stretch.count) break;
  }
  return stretch;
}

// What is to be read is read here; what is to be written comes later, page by page.
void Mover::Impl::open_run(const Transfer& transfer, const uint32_t* pages, const Stretch& stretch, Worker& worker) {
  const auto column = static_cast<size_t>(stretch.column);
  worker.run.reset(transfer.spec_.pages[pages[0]].slots[column], stretch.count, shape.layers());
  for (uint32_t i = 0; i < stretch.count; ++i) worker.run.labels[i] = &transfer.spec_.pages[pages[i]].label;
  if (stretch.is_sink) return;
  worker.enter(stretch.column);
  media[column]->read_run(&worker.run, worker.scratch);
  count_run(stretch.column, true);
}

// False: nothing has happened, the pages are to be written one by one. A page that drops out on the way leaves its slot
// as it was begun, and parts the run.
bool Mover::Impl::write_run(Transfer& transfer, const uint32_t* pages, const Stretch& stretch, int stage,
                            Worker& worker) {
  PageRun& run = worker.run;
  const auto column = static_cast<size_t>(stretch.column);
  worker.enter(stretch.column);
  const bool is_begun = media[column]->begin_run(&run, worker.scratch);
  count_run(stretch.column, false);
  if (!is_begun) return false;
  uint32_t first = 0, i = 0;  // those between are filled and not finished
  for (; i < stretch.count && !stopped(transfer); ++i) {
    bool is_filled = false, source_is_bad = false;
    OpenSource source;
    ++worker.tally.tried;
    ++worker.tally.written[column].tried;
    if (run.statuses[i] != Status::kOk) {
      fail(transfer, pages[i], stretch.column, run.statuses[i]);
    } else if (open_source(transfer, pages[i], stage, worker, nullptr, &source)) {
      reach("mover.before_copy");
      uint32_t* const checksums = run.checksums.data() + size_t{i} * shape.layers();
      const Status status = fill(transfer, pages[i], source, run.targets[i], checksums, &source_is_bad);
      is_filled = status == Status::kOk;
      if (is_filled && source.is_pool()) ++worker.tally.read[kPoolColumn].had;
      if (source_is_bad) {
        fail_source(transfer, pages[i], source.column, status);
      } else if (!is_filled) {
        fail(transfer, pages[i], stretch.column, status);
      }
    }
    if (is_filled) continue;
    finish_run(transfer, pages, first, i - first, stretch.column, worker);
    first = i + 1;
  }
  finish_run(transfer, pages, first, i - first, stretch.column, worker);
  return true;
}

void Mover::Impl::finish_run(Transfer& transfer, const uint32_t* pages, uint32_t first, uint32_t count, int column,
                             Worker& worker) {
  if (count == 0) return;
  PageRun& run = worker.run;
  Medium& medium = *media[static_cast<size_t>(column)];
  // From here on records may be readable: the way back leads over retire().
  for (uint32_t i = first; i < first + count; ++i) transfer.progress_->pages[pages[i]].published |= column_mask(column);
  worker.enter(column);
  const bool is_finished = count > 1 && medium.finish_run(&run, first, count);
  count_run(column, false);
  for (uint32_t i = first; i < first + count; ++i) {
    if (!is_finished && run.statuses[i] == Status::kOk) {
      worker.enter(column);
      run.statuses[i] = medium.finish_write(run.slot + i, *run.labels[i],
                                            run.checksums.data() + size_t{i} * shape.layers(), run.targets[i]);
    }
    written(transfer, pages[i], column, run.statuses[i], worker);
  }
}

void Mover::Impl::run_page(Transfer& transfer, uint32_t page, int stage, Worker& worker, const PageSource* ahead) {
  PageProgress& progress = transfer.progress_->pages[page];
  const ColumnMask open_sinks = progress.sinks[static_cast<size_t>(stage)] & static_cast<ColumnMask>(~progress.settled);
  if ((open_sinks == 0 && !progress.is_check()) || progress.is_lost || stopped(transfer)) return;
  ++worker.tally.tried;
  if (transfer.spec_.pages[page].foreign.is_known()) {
    fill_from_neighbour(transfer, page, worker);
    return;
  }
  OpenSource source;
  if (!open_source(transfer, page, stage, worker, ahead, &source)) return;
  if (progress.is_check()) {
    check(transfer, page, source);
    return;
  }
  ColumnMask committed = 0;
  for (int column = 0; column < kTiers; ++column) {
    if ((open_sinks & column_mask(column)) == 0) continue;
    reach("mover.before_copy");
    const bool good = column == kPoolColumn ? land(transfer, page, worker, source)
                                            : fill_tier(transfer, page, column, worker, &source);
    if ((progress.settled & column_mask(column)) != 0) committed |= column_mask(column);
    if (!good) return;
  }
  // A layer-order landing was to read the memory tier that this stage has filled. None could be: the bytes are here,
  // land them now.
  const bool awaits_landing = stage == 0 && progress.sinks[1] == kPoolMask && progress.source_stage == 0;
  const ColumnMask memory = committed & static_cast<ColumnMask>(~io_mask());
  if (awaits_landing && memory == 0 && !stopped(transfer)) land(transfer, page, worker, source);
}

bool Mover::Impl::open_source(Transfer& transfer, uint32_t page, int stage, Worker& worker, const PageSource* ahead,
                              OpenSource* source) {
  const PageCopy& copy = transfer.spec_.pages[page];
  const PageProgress& progress = transfer.progress_->pages[page];
  int column = 0;
  if (progress.second_source != 0) {
    column = progress.second_source;
  } else if (stage <= progress.source_stage) {
    while (copy.roles[static_cast<size_t>(column)] != Role::kSource) ++column;
  } else {
    // The memory tier that the first stage has committed, the lower one first: it is the one that stays.
    ColumnMask memory = 0;
    {
      std::lock_guard lock(transfer.mutex_);
      memory = transfer.progress_->landed[page];
    }
    memory &= static_cast<ColumnMask>(~(io_mask() | kPoolMask));
    if (memory == 0) return false;  // its failure has been noted
    column = std::bit_width(memory) - 1;
  }
  source->column = column;
  UnitTally::Pages& tally = worker.tally.read[static_cast<size_t>(column)];
  ++tally.tried;
  if (column == kPoolColumn) return true;
  Medium& medium = *media[static_cast<size_t>(column)];
  const uint32_t slot = progress.second_source != 0 ? progress.second_slot : copy.slots[static_cast<size_t>(column)];
  if (ahead != nullptr && ahead->bytes != nullptr) {
    source->bytes = *ahead;
  } else {
    worker.enter(column);
    const Status status = medium.prepare_read(slot, copy.label, worker.scratch, &source->bytes);
    if (status != Status::kOk) {
      fail_source(transfer, page, column, status);
      return false;
    }
  }
  bytes_read[static_cast<size_t>(column)].fetch_add(shape.page_bytes(), std::memory_order_relaxed);
  ++tally.had;
  return true;
}

Status Mover::Impl::fill(Transfer& transfer, uint32_t page, const OpenSource& source, const PageTarget& target,
                         uint32_t* checksums, bool* source_is_bad) {
  const PageCopy& copy = transfer.spec_.pages[page];
  const uint32_t seed = shape.page_seed(copy.label);
  const bool gathers = source.is_pool();
  Status status = Status::kOk;
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    std::byte* const to = target.bytes + shape.layer_offset(layer);
    uint32_t crc = PageShape::layer_seed(seed, layer);
    if (gathers) {
      const GateStay stay(transfer.gate_);
      status = stay.inside()
                   ? transfer.spec_.pool->gather_layer(copy.slots[kPoolColumn], layer, to, &crc, target.guarded)
                   : Status::kDeadline;
    } else {
      const std::byte* const from = source.bytes.bytes + shape.layer_offset(layer);
      const size_t bytes = shape.layer_bytes(layer);
      if (source.bytes.guarded || target.guarded) {
        status = guard::copy(to, from, bytes, &crc);
      } else {
        crc = crc32c_copy(crc, to, from, bytes);
      }
      if (status == Status::kOk && crc != source.bytes.checksums[layer]) status = Status::kChecksum;
      uint32_t unused = 0;
      const bool source_is_gone = status == Status::kBusFault && source.bytes.guarded &&
                                  guard::checksum(from, bytes, &unused) == Status::kBusFault;
      *source_is_bad = status == Status::kChecksum || source_is_gone;
    }
    checksums[layer] = crc;
    if (status != Status::kOk) return status;
  }
  if (gathers) {
    bytes_read[kPoolColumn].fetch_add(shape.page_bytes(), std::memory_order_relaxed);
    std::lock_guard lock(transfer.mutex_);
    transfer.progress_->pool_over[page] = true;
  }
  return Status::kOk;
}

// A page's bytes and record are written, or are not: it is committed at once, or when its medium settles.
void Mover::Impl::written(Transfer& transfer, uint32_t page, int column, Status status, Worker& worker) {
  if (status != Status::kOk) {
    fail(transfer, page, column, status);
    return;
  }
  ++worker.tally.written[static_cast<size_t>(column)].had;
  reach("mover.after_copy");
  if (media[static_cast<size_t>(column)]->settles()) {
    transfer.progress_->pages[page].unsettled |= column_mask(column);
    return;
  }
  commit(transfer, page, column);
  reach("mover.after_commit");
}

bool Mover::Impl::fill_tier(Transfer& transfer, uint32_t page, int column, Worker& worker, OpenSource* source) {
  const PageCopy& copy = transfer.spec_.pages[page];
  Medium& medium = *media[static_cast<size_t>(column)];
  const uint32_t slot = copy.slots[static_cast<size_t>(column)];
  PageTarget target;
  ++worker.tally.written[static_cast<size_t>(column)].tried;
  worker.enter(column);
  Status status = medium.begin_write(slot, worker.scratch, &target);
  if (status != Status::kOk) {
    fail(transfer, page, column, status);
    return true;
  }
  const bool gathers = source->is_pool();
  worker.checksums.resize(shape.layers());
  bool source_is_bad = false;
  status = fill(transfer, page, *source, target, worker.checksums.data(), &source_is_bad);
  if (source_is_bad) {
    fail_source(transfer, page, source->column, status);
    return false;
  }
  if (status != Status::kOk) {
    fail(transfer, page, column, status);
    return true;
  }
  if (gathers) ++worker.tally.read[kPoolColumn].had;
  // From here on a record may be readable: the way back leads over retire().
  transfer.progress_->pages[page].published |= column_mask(column);
  worker.enter(column);
  status = medium.finish_write(slot, copy.label, worker.checksums.data(), target);
  written(transfer, page, column, status, worker);
  if (status != Status::kOk || medium.settles()) return true;
  // What was gathered once is read from there for further sinks: fewer strided reads, and a stay less in the caller's
  // memory.
  const bool committed = (transfer.progress_->pages[page].settled & column_mask(column)) != 0;
  if (gathers && committed && !medium.does_io() && target.bytes != worker.scratch.target(0)) {
    source->column = column;
    source->bytes = PageSource{target.bytes, worker.checksums.data(), target.guarded};
  }
  return true;
}

// A neighbour may do whatever it likes meanwhile: the bytes count once they are here and verified, and nobody finds the
// slot before the commit.
void Mover::Impl::fill_from_neighbour(Transfer& transfer, uint32_t page, Worker& worker) {
  constexpr int column = static_cast<int>(Tier::kHost);
  const PageCopy& copy = transfer.spec_.pages[page];
  Medium& medium = *media[column];
  reach("mover.before_copy");
  PageTarget target;
  UnitTally::Pages& read = worker.tally.read[static_cast<size_t>(foreign_lane(static_cast<int>(copy.foreign.tier)))];
  UnitTally::Pages& written = worker.tally.written[column];
  ++read.tried;
  ++written.tried;
  worker.enter(static_cast<int>(copy.foreign.tier));  // its files lie beside that tier's own
  Status status = medium.begin_write(copy.slots[column], worker.scratch, &target);
  const TierMask usable = readable.load(std::memory_order_relaxed);
  if (status == Status::kOk) status = foreign->read(copy.foreign, copy.label, usable, target.bytes, &worker.foreign);
  if (status == Status::kOk) {
    ++read.had;
    transfer.progress_->pages[page].published |= column_mask(column);
    status = medium.finish_write(copy.slots[column], copy.label, worker.foreign.expected.data(), target);
  }
  if (status != Status::kOk) {
    fail(transfer, page, column, status);
    return;
  }
  ++written.had;
  reach("mover.after_copy");
  commit(transfer, page, column);
  reach("mover.after_commit");
}

void Mover::Impl::commit(Transfer& transfer, uint32_t page, int column) {
  const PageCopy& copy = transfer.spec_.pages[page];
  PageProgress& progress = transfer.progress_->pages[page];
  const Status status = index->commit(copy.page, tier_of(column), copy.numbers[static_cast<size_t>(column)]);
  if (status != Status::kOk) {
    // The claim is not ours any more, nor is the slot: its record is left alone.
    progress.published &= static_cast<ColumnMask>(~column_mask(column));
    fail(transfer, page, column, status);
    return;
  }
  commits.fetch_add(1, std::memory_order_relaxed);
  bytes_written[static_cast<size_t>(column)].fetch_add(shape.page_bytes(), std::memory_order_relaxed);
  transfer.progress_->bytes_moved.fetch_add(shape.page_bytes(), std::memory_order_relaxed);
  progress.published &= static_cast<ColumnMask>(~column_mask(column));
  progress.settled |= column_mask(column);
  std::lock_guard lock(transfer.mutex_);
  transfer.progress_->landed[page] |= column_mask(column);
}

void Mover::Impl::check(Transfer& transfer, uint32_t page, const OpenSource& source) {
  const uint32_t seed = shape.page_seed(transfer.spec_.pages[page].label);
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    const std::byte* const bytes = source.bytes.bytes + shape.layer_offset(layer);
    uint32_t crc = PageShape::layer_seed(seed, layer);
    Status status = Status::kOk;
    if (source.bytes.guarded) {
      status = guard::checksum(bytes, shape.layer_bytes(layer), &crc);
    } else {
      crc = crc32c(crc, bytes, shape.layer_bytes(layer));
    }
    if (status == Status::kOk && crc != source.bytes.checksums[layer]) status = Status::kChecksum;
    if (status != Status::kOk) {
      fail_source(transfer, page, source.column, status);
      return;
    }
  }
  transfer.progress_->pages[page].settled |= column_mask(source.column);
  std::lock_guard lock(transfer.mutex_);
  transfer.progress_->landed[page] |= column_mask(source.column);
}

bool Mover::Impl::land(Transfer& transfer, uint32_t page, Worker& worker, const OpenSource& source) {
  STEPWELL_ASSERT(source.bytes.checksums != nullptr);  // what lands comes from a tier, with its checksums
  worker.enter(kPoolColumn);
  ++worker.tally.written[kPoolColumn].tried;
  const uint32_t seed = shape.page_seed(transfer.spec_.pages[page].label);
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    const Status status = land_layer(transfer, page, layer, seed, source.bytes, source.bytes.checksums[layer]);
    if (status == Status::kChecksum || status == Status::kBusFault) {  // the pool is private: a fault is the source's
      fail_source(transfer, page, source.column, status);
      return false;
    }
    if (status != Status::kOk) {
      fail(transfer, page, kPoolColumn, status);
      return true;
    }
  }
  ++worker.tally.written[kPoolColumn].had;
  reach("mover.after_copy");
  landed_whole(transfer, page);
  return true;
}

Status Mover::Impl::land_layer(Transfer& transfer, uint32_t page, uint32_t layer, uint32_t seed,
                               const PageSource& source, uint32_t expected) {
  uint32_t crc = PageShape::layer_seed(seed, layer);
  const uint32_t slot = transfer.spec_.pages[page].slots[kPoolColumn];
  const GateStay stay(transfer.gate_);
  if (!stay.inside()) return Status::kDeadline;
  const Status status =
      transfer.spec_.pool->scatter_layer(slot, layer, source.bytes + shape.layer_offset(layer), &crc, source.guarded);
  copy_fence();  // inside the stay: nothing may land after a close() that found nobody inside
  if (status != Status::kOk) return status;
  return crc == expected ? Status::kOk : Status::kChecksum;
}

void Mover::Impl::landed_whole(Transfer& transfer, uint32_t page) {
  transfer.progress_->pages[page].settled |= kPoolMask;
  bytes_written[kPoolColumn].fetch_add(shape.page_bytes(), std::memory_order_relaxed);
  transfer.progress_->bytes_moved.fetch_add(shape.page_bytes(), std::memory_order_relaxed);
  std::lock_guard lock(transfer.mutex_);
  Transfer::Progress& progress = *transfer.progress_;
  if (progress.status[page] != Status::kPending) return;  // the gate was closed before we could say so
  progress.pool_over[page] = true;
  progress.landed[page] |= kPoolMask;
  progress.status[page] = Status::kOk;
}

void Mover::Impl::run_layered(Transfer& transfer, const UnitPlan& unit, Worker& worker) {
  const std::vector<uint32_t>& order = transfer.progress_->order;
  std::vector<LayeredPage> pages;
  std::vector<uint32_t> checksums;
  bool is_whole = true;  // until a page comes later, from a second source
  pages.reserve(unit.count);
  checksums.reserve(static_cast<size_t>(unit.count) * shape.layers());
  for (uint32_t i = 0; i < unit.count; ++i) {
    const uint32_t page = order[unit.first + i];
    const PageProgress& progress = transfer.progress_->pages[page];
    if ((progress.settled & kPoolMask) != 0 || progress.failure != Status::kOk || stopped(transfer)) continue;
    OpenSource source;
    ++worker.tally.tried;
    if (!open_source(transfer, page, 1, worker, nullptr, &source)) {
      is_whole &= progress.second_source == 0;
      continue;
    }
    reach("mover.before_copy");
    if (source.bytes.bytes == worker.scratch.source(0)) {
      // The medium could not show the page in place, and the next one will want the scratch page.
      land(transfer, page, worker, source);
      continue;
    }
    ++worker.tally.written[kPoolColumn].tried;
    pages.push_back({page, source, shape.page_seed(transfer.spec_.pages[page].label), checksums.size()});
    checksums.insert(checksums.end(), source.bytes.checksums, source.bytes.checksums + shape.layers());
  }
  worker.enter(kPoolColumn);
  for (uint32_t layer = 0; layer < shape.layers() && !pages.empty(); ++layer) {
    if (stopped(transfer)) return;
    std::erase_if(pages, [&](const LayeredPage& page) {
      const uint32_t expected = checksums[page.first_checksum + layer];
      const Status status = land_layer(transfer, page.index, layer, page.seed, page.source.bytes, expected);
      if (status == Status::kChecksum || status == Status::kBusFault) {
        fail_source(transfer, page.index, page.source.column, status);
        is_whole &= transfer.progress_->pages[page.index].second_source == 0;
      } else if (status != Status::kOk) {
        fail(transfer, page.index, kPoolColumn, status);
      }
      return status != Status::kOk;
    });
    if (pages.empty()) return;
    if (layer + 1 == shape.layers()) {
      reach("mover.after_copy");
      worker.tally.written[kPoolColumn].had += static_cast<uint32_t>(pages.size());
      for (const LayeredPage& page : pages) landed_whole(transfer, page.index);
    }
    if (is_whole) transfer.progress_->layers_done.store(layer + 1, std::memory_order_release);
  }
}

// ---- what the units come to ------------------------------------------------------------------------------------

// Where a unit's bytes take their time: a load's source, what others write.
int Mover::Impl::lane_of(const Transfer& transfer, const UnitPlan& plan, int stage) const noexcept {
  const uint32_t page = transfer.progress_->order[plan.first];
  const PageCopy& copy = transfer.spec_.pages[page];
  const PageProgress& progress = transfer.progress_->pages[page];
  if (copy.foreign.is_known()) return foreign_lane(static_cast<int>(copy.foreign.tier));
  if (plan.retry) return progress.second_source;
  int source = kPoolColumn;
  while (copy.roles[static_cast<size_t>(source)] != Role::kSource) ++source;
  const ColumnMask filled = progress.sinks[static_cast<size_t>(stage)] & static_cast<ColumnMask>(~kPoolMask);
  if (transfer.spec_.work_class != WorkClass::kLoad && filled != 0) return std::bit_width(filled) - 1;
  if (stage <= progress.source_stage) return source;
  const ColumnMask memory = progress.sinks[0] & static_cast<ColumnMask>(~(io_mask() | kPoolMask));
  return memory == 0 ? source : std::bit_width(memory) - 1;
}

// REQUIRES queue_mutex and room in the queue
void Mover::Impl::queue_unit(Unit unit, Instant at) {
  const size_t queue = unit.plan.io ? kIoQueue : kCopyQueue;
  const WorkClass work_class = unit.transfer->spec_.work_class;
  const auto lane = static_cast<size_t>(unit.lane);
  const uint64_t bytes = uint64_t{unit.plan.count} * shape.page_bytes();
  unit.queued_at = at;
  queues[queue].push(work_class, std::move(unit));
  flow.queued[static_cast<size_t>(work_class)][lane] += bytes;
  work_waits[queue].notify_one();
}

// REQUIRES queue_mutex
void Mover::Impl::begin_tally(const Unit& unit, int queue, Worker& worker) noexcept {
  const WorkClass work_class = unit.transfer->spec_.work_class;
  worker.tally = {};
  worker.unit = {unit.plan.count, unit.lane, work_class, now()};
  QueueWait& wait = flow.waits[static_cast<size_t>(queue)][static_cast<size_t>(work_class)];
  wait.units += 1;
  wait.ns += ns_between(unit.queued_at, worker.unit.began);
}

// REQUIRES queue_mutex
void Mover::Impl::add_tally(const Unit& unit, Worker& worker, Instant ended) noexcept {
  const auto work_class = static_cast<size_t>(worker.unit.work_class);
  const uint64_t ns = ns_between(worker.unit.began, ended);
  const uint64_t page_bytes = shape.page_bytes();
  const UnitTally& tally = worker.tally;
  const auto add = [&](const UnitTally::Pages& pages, Flow& flow_of_lane) {
    flow_of_lane.bytes += pages.had * page_bytes;
    if (pages.tried != 0) flow_of_lane.ns += ns * pages.tried / tally.tried;
  };
  for (size_t lane = 0; lane < kLanes; ++lane) {
    add(tally.read[lane], flow.reads[work_class][lane]);
    add(tally.written[lane], flow.writes[work_class][lane]);
  }
  flow.queued[work_class][static_cast<size_t>(unit.lane)] -= uint64_t{unit.plan.count} * page_bytes;
  worker.unit.pages = 0;
}

// ---- deciding --------------------------------------------------------------------------------------------------

// A load is as good as its landing in the pool; anything else is as good as its worst sink.
void Mover::Impl::fail(Transfer& transfer, uint32_t page, int column, Status status) {
  count(status, column, false);
  const bool is_load = transfer.spec_.pages[page].roles[kPoolColumn] == Role::kSink;
  PageProgress& progress = transfer.progress_->pages[page];
  if ((!is_load || column == kPoolColumn) && progress.failure == Status::kOk) progress.failure = status;
}

// A page of our own under a pin that reads wrong is damage, whether its bytes or its record say so; one that cannot be
// read must not be offered again either: a lookup that said hit would loop.
void Mover::Impl::fail_source(Transfer& transfer, uint32_t page, int column, Status status) {
  PageProgress& progress = transfer.progress_->pages[page];
  count(status, column, true);
  const bool is_wrong = status == Status::kChecksum || status == Status::kStale;
  if (is_wrong) {
    checksum_failures.fetch_add(1, std::memory_order_relaxed);
    status = Status::kChecksum;
  }
  if (is_wrong || status == Status::kIOError || status == Status::kBusFault) {
    const PageCopy& copy = transfer.spec_.pages[page];
    // A LEAVING source is kept by it first: nothing is left to settle.
    if (copy.roles[static_cast<size_t>(column)] == Role::kSource) progress.source_settled = true;
    const bool is_second = progress.second_source == column;
    const uint32_t slot = is_second ? progress.second_slot : copy.slots[static_cast<size_t>(column)];
    index->quarantine(copy.page, tier_of(column), slot);
    if (find_second_source(transfer, page)) {
      progress.first_failure = status;
      return;
    }
  }
  if (progress.failure == Status::kOk) progress.failure = status;
}

// Pins the page in another tier that holds it, for a load that has not asked one yet.
bool Mover::Impl::find_second_source(Transfer& transfer, uint32_t page) {
  PageProgress& progress = transfer.progress_->pages[page];
  const TransferSpec& spec = transfer.spec_;
  if (spec.work_class != WorkClass::kLoad || spec.source_leaving || progress.is_check() || progress.was_retried ||
      stopped(transfer)) {
    return false;
  }
  TierMask others = 0;
  for (int column = 1; column < kTiers; ++column) {
    if (media[static_cast<size_t>(column)] != nullptr) others |= column_mask(column);
  }
  others &= readable.load(std::memory_order_relaxed);
  const Tier found = index->pin_in_any(spec.pages[page].page, others, &progress.second_slot);
  if (found == Tier::kDevice) return false;
  progress.second_source = static_cast<uint8_t>(found);
  progress.was_retried = true;
  transfer.progress_->asked.fetch_or(column_mask(progress.second_source), std::memory_order_relaxed);
  retried_pages.fetch_add(1, std::memory_order_relaxed);
  return true;
}

// Ends a page's part in a stage: what was not committed is aborted. Idempotent.
void Mover::Impl::settle_stage(Transfer& transfer, uint32_t page, int stage, Status reason) noexcept {
  const PageCopy& copy = transfer.spec_.pages[page];
  PageProgress& progress = transfer.progress_->pages[page];
  if (progress.unsettled != 0) return;  // end_settling() decides
  for (int column = 0; column < kTiers; ++column) {
    const ColumnMask bit = column_mask(column);
    if ((progress.sinks[static_cast<size_t>(stage)] & bit) == 0 || (progress.settled & bit) != 0) continue;
    progress.settled |= bit;
    if (column != kPoolColumn) {
      const auto c = static_cast<size_t>(column);
      const bool is_free = (progress.published & bit) == 0 || frees_record(copy.slots[c], column);
      progress.published &= static_cast<ColumnMask>(~bit);
      surely([&] {
        if (is_free) {
          index->abort(copy.page, tier_of(column), copy.numbers[c]);
        } else {
          index->abort_owed(copy.page, tier_of(column), copy.numbers[c]);
        }
      });
      aborts.fetch_add(1, std::memory_order_relaxed);
    }
    const bool is_load = copy.roles[kPoolColumn] == Role::kSink;
    if ((!is_load || column == kPoolColumn) && progress.failure == Status::kOk) progress.failure = reason;
  }
  if (progress.is_check() && progress.settled == 0 && progress.failure == Status::kOk) progress.failure = reason;
  if (stage >= progress.source_stage) settle_source(transfer, page);
  resolve(transfer, page);
}

// A LEAVING source may go once every sink that was filled from it holds the page; else it is kept.
void Mover::Impl::settle_source(Transfer& transfer, uint32_t page) noexcept {
  PageProgress& progress = transfer.progress_->pages[page];
  if (!transfer.spec_.source_leaving || progress.source_settled) return;
  progress.source_settled = true;
  const PageCopy& copy = transfer.spec_.pages[page];
  size_t column = 0;
  while (copy.roles[column] != Role::kSource) ++column;
  ColumnMask wanted = 0, landed = 0;
  for (int stage = 0; stage <= progress.source_stage; ++stage) wanted |= progress.sinks[static_cast<size_t>(stage)];
  {
    std::lock_guard lock(transfer.mutex_);
    landed = transfer.progress_->landed[page];
  }
  const Tier tier = tier_of(static_cast<int>(column));
  surely([&] {
    if ((landed & wanted) != wanted) {
      index->keep(copy.page, tier, copy.numbers[column]);
    } else if (index->finish(copy.page, tier, copy.numbers[column]) == Status::kOk) {
      // The record first: once the index has the slot, another page may be written there.
      if (media[column] == nullptr || frees_record(copy.slots[column], static_cast<int>(column))) {
        index->free_slots(tier, &copy.slots[column], 1);
      } else {
        index->owe_slots(tier, &copy.slots[column], 1);
      }
    }
  });
}

void Mover::Impl::resolve(Transfer& transfer, uint32_t page) noexcept {
  const PageCopy& copy = transfer.spec_.pages[page];
  const PageProgress& progress = transfer.progress_->pages[page];
  const bool is_load = copy.roles[kPoolColumn] == Role::kSink;
  const ColumnMask deciding = is_load ? kPoolMask : static_cast<ColumnMask>(progress.sinks[0] | progress.sinks[1]);
  std::lock_guard lock(transfer.mutex_);
  Status& status = transfer.progress_->status[page];
  if (status != Status::kPending) return;
  if (is_load ? (progress.settled & kPoolMask) != 0 : progress.failure != Status::kOk) {
    status = progress.failure;  // a landing that worked has set kOk before
  } else if ((progress.settled & deciding) == deciding) {
    status = Status::kOk;
  }
}

void Mover::Impl::begin_stage(const std::shared_ptr<Transfer>& transfer, int stage) noexcept {
  const std::vector<UnitPlan>& units = transfer->progress_->units[static_cast<size_t>(stage)];
  {
    std::lock_guard lock(transfer->mutex_);
    transfer->progress_->units_left = static_cast<uint32_t>(units.size());
  }
  const Instant at = now();
  for (const UnitPlan& plan : units) {
    const Unit unit{transfer, plan, stage, lane_of(*transfer, plan, stage)};
    try {
      std::lock_guard lock(queue_mutex);
      queue_unit(unit, at);
    } catch (...) {  // no memory even for the queue: the unit is over before it began
      settle_unit(unit, note_current_exception(), nullptr);
    }
  }
}

void Mover::Impl::release(const std::shared_ptr<Transfer>& transfer) noexcept {
  Transfer::Progress& progress = *transfer->progress_;
  if (progress.waits_for.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (progress.awaits) {
    try {
      reach("mover.begin_after");
      look_what_came(*transfer);
      leave_io(*transfer);
    } catch (...) {  // which of them have come is not known: none is tried
      const Status reason = note_current_exception();
      for (size_t i = 0; i < progress.pages.size(); ++i) {
        if (!transfer->spec_.pages[i].is_awaited) continue;
        progress.pages[i].is_lost = true;
        progress.pages[i].failure = reason;
      }
    }
  }
  transfer->spec_.after.clear();
  if (progress.order.empty()) {
    end_transfer(transfer);
  } else {
    begin_stage(transfer, progress.units[0].empty() ? 1 : 0);
  }
}

// Of what is awaited, gives up all but what has come; what has come nearer is read there. By page and claim number,
// because a page that failed to come may be on its way again by then, to another slot, for somebody else.
void Mover::Impl::look_what_came(Transfer& transfer) {
  std::array<std::unordered_map<uint64_t, Status>, kTiers> came_to;
  const auto claim_of = [](const PageCopy& copy, size_t column) {
    return uint64_t{copy.page} << 32 | copy.numbers[column];
  };
  for (const std::shared_ptr<Transfer>& before : transfer.spec_.after) {
    std::lock_guard lock(before->mutex_);
    for (size_t i = 0; i < before->spec_.pages.size(); ++i) {
      const PageCopy& copy = before->spec_.pages[i];
      for (size_t column = 1; column < kTiers; ++column) {
        if (copy.roles[column] != Role::kSink) continue;
        const bool is_here = (before->progress_->landed[i] & column_mask(static_cast<int>(column))) != 0;
        came_to[column][claim_of(copy, column)] = is_here ? Status::kOk : before->progress_->status[i];
      }
    }
  }
  for (size_t i = 0; i < transfer.spec_.pages.size(); ++i) {
    PageCopy& copy = transfer.spec_.pages[i];
    if (!copy.is_awaited && !is_to_near(copy)) continue;
    const auto column = static_cast<size_t>(copy.is_awaited ? Tier::kHost : copy.nearer);
    const auto& came = came_to[column];
    const auto found = came.find(claim_of(copy, column));
    const Status status = found == came.end() ? Status::kGone : found->second;
    if (copy.is_awaited && status != Status::kOk) {
      transfer.progress_->pages[i].is_lost = true;
      transfer.progress_->pages[i].failure = status == Status::kStale ? Status::kGone : status;
    } else if (!copy.is_awaited && status == Status::kOk) {
      // Nobody else looks at its roles before the transfer is done, but for the pool's.
      std::replace(copy.roles.begin(), copy.roles.end(), Role::kSource, Role::kUnused);
      copy.roles[column] = Role::kSource;
    }
  }
}

// What was to be read by I/O and is in memory now does not wait for what is.
void Mover::Impl::leave_io(Transfer& transfer) noexcept {
  const ColumnMask io = io_mask();
  for (UnitPlan& unit : transfer.progress_->units[0]) {
    const auto needs_io = [&](uint32_t page) {
      const PageCopy& copy = transfer.spec_.pages[page];
      for (size_t column = 0; column < kTiers; ++column) {
        if (copy.roles[column] != Role::kUnused && (io & column_mask(static_cast<int>(column))) != 0) return true;
      }
      return copy.foreign.is_known();
    };
    const auto first = transfer.progress_->order.begin() + unit.first;
    if (!unit.io || std::any_of(first, first + unit.count, needs_io)) continue;
    std::lock_guard lock(queue_mutex);
    if (!queues[kCopyQueue].try_reserve(1)) return;
    queues[kIoQueue].unreserve(1);
    unit.io = false;
  }
}

void Mover::Impl::end_unit(const Unit& unit, Worker* worker) noexcept {
  const Instant ended = now();
  {
    // Before anyone can see the transfer done: who then submits the next finds this unit's room, and its time.
    std::lock_guard lock(queue_mutex);
    if (worker != nullptr) add_tally(unit, *worker, ended);
    queues[unit.plan.io ? kIoQueue : kCopyQueue].unreserve(1);
  }
  Transfer::Progress& progress = *unit.transfer->progress_;
  {
    std::lock_guard lock(unit.transfer->mutex_);
    if (--progress.units_left > 0) return;
  }
  const bool waits = std::any_of(progress.pages.begin(), progress.pages.end(),
                                 [](const PageProgress& page) { return page.unsettled != 0; });
  if (waits) {
    settle_later({unit.transfer, unit.stage});
  } else {
    end_stage(unit.transfer, unit.stage);
  }
}

void Mover::Impl::end_stage(const std::shared_ptr<Transfer>& transfer, int ended) noexcept {
  Transfer::Progress& progress = *transfer->progress_;
  for (int stage = ended + 1; stage < kStages; ++stage) {
    const auto next = static_cast<size_t>(stage);
    if (progress.units[next].empty()) continue;
    if (!progress.uses_pool[next]) progress.source_released.store(true, std::memory_order_release);
    begin_stage(transfer, stage);
    return;
  }
  end_transfer(transfer);
}

// Settling is file I/O: an I/O worker comes for it. The pool is the caller's again before.
void Mover::Impl::settle_later(const Settling& stage) noexcept {
  Transfer::Progress& progress = *stage.transfer->progress_;
  bool needs_pool = false;
  for (auto next = static_cast<size_t>(stage.stage) + 1; next < kStages; ++next) needs_pool |= progress.uses_pool[next];
  if (!needs_pool) progress.source_released.store(true, std::memory_order_release);
  try {
    std::lock_guard lock(queue_mutex);
    settling.push_back(stage);
    if (settling.size() == 1) settling_since = now();
    work_waits[kIoQueue].notify_one();
  } catch (...) {  // no memory even for the list
    end_settling(stage, note_current_exception());
  }
}

// Whether to settle now what waits: units that write more come first, so that their pages share its syncs, but not for
// ever. REQUIRES queue_mutex
bool Mover::Impl::may_settle() const {
  if (settling.empty() || is_settling) return false;
  if (queues[kIoQueue].size() == 0 || settling.size() >= kMostSettling) return true;
  return now() - settling_since >= kLongestUnsettled;
}

// One call of each medium for the pages of all transfers of the round.
void Mover::Impl::settle_round(const std::vector<Settling>& round, Worker& worker) noexcept {
  Status reason = stop_reason();
  try {
    for (int column = 1; column < kTiers; ++column) {
      if (const Medium* medium = media[static_cast<size_t>(column)]; medium != nullptr && medium->settles())
        settle(round, column, worker, &reason);
    }
  } catch (...) {
    reason = note_current_exception();
  }
  worker.enter(-1);
  for (const Settling& each : round) end_settling(each, reason);
  std::lock_guard lock(queue_mutex);
  is_settling = false;
  if (!settling.empty()) work_waits[kIoQueue].notify_one();
}

// *reason: of pages that an exception kept from being committed.
void Mover::Impl::settle(const std::vector<Settling>& round, int column, Worker& worker, Status* reason) {
  struct Page {
    uint32_t slot;
    Transfer* transfer;
    uint32_t page;
  };
  std::vector<Page> pages;
  for (const Settling& each : round) {
    if (stopped(*each.transfer)) continue;
    const std::vector<PageProgress>& progress = each.transfer->progress_->pages;
    for (uint32_t page = 0; page < progress.size(); ++page) {
      if ((progress[page].unsettled & column_mask(column)) == 0) continue;
      pages.push_back({each.transfer->spec_.pages[page].slots[static_cast<size_t>(column)], each.transfer.get(), page});
    }
  }
  std::sort(pages.begin(), pages.end(), [](const Page& a, const Page& b) { return a.slot < b.slot; });
  std::vector<uint32_t> slots;
  slots.reserve(pages.size());
  for (const Page& page : pages) slots.push_back(page.slot);
  std::vector<Status> statuses(pages.size(), Status::kIOError);
  worker.enter(column);
  const Instant began = now();
  media[static_cast<size_t>(column)]->settle(slots.data(), slots.size(), statuses.data());
  {
    const uint64_t ns = ns_between(began, now());
    std::lock_guard lock(queue_mutex);
    flow.writes[static_cast<size_t>(WorkClass::kSave)][static_cast<size_t>(column)].ns += ns;
  }
  // What a page says itself is counted with it.
  if (std::all_of(statuses.begin(), statuses.end(), [](Status status) { return status == Status::kOk; }))
    count_run(column, false);
  for (size_t i = 0; i < pages.size(); ++i) {
    Transfer& transfer = *pages[i].transfer;
    transfer.progress_->pages[pages[i].page].unsettled &= static_cast<ColumnMask>(~column_mask(column));
    try {
      if (statuses[i] == Status::kOk) {
        commit(transfer, pages[i].page, column);
        reach("mover.after_commit");
      } else {
        fail(transfer, pages[i].page, column, statuses[i]);
      }
    } catch (...) {
      *reason = note_current_exception();
    }
  }
}

// What was not settled is aborted, as anything else that a stage leaves undone.
void Mover::Impl::end_settling(const Settling& stage, Status reason) noexcept {
  std::vector<PageProgress>& pages = stage.transfer->progress_->pages;
  for (uint32_t page = 0; page < pages.size(); ++page) {
    pages[page].unsettled = 0;
    settle_stage(*stage.transfer, page, stage.stage, reason);
  }
  end_stage(stage.transfer, stage.stage);
}

void Mover::Impl::end_transfer(const std::shared_ptr<Transfer>& transfer) noexcept {
  const TransferSpec& spec = transfer->spec_;
  Transfer::Progress& progress = *transfer->progress_;
  if (spec.unpin_pages && !spec.pages.empty()) {
    surely([&] {
      std::vector<PageId> ids;
      ids.reserve(spec.pages.size());
      for (const PageCopy& copy : spec.pages) {
        if (fills_a_tier(copy)) ids.push_back(copy.page);
      }
      index->unpin_pages(ids.data(), ids.size());
    });
  }
  if (progress.awaits) {
    surely([&] {
      std::vector<PageId> ids;
      for (const PageCopy& copy : spec.pages) {
        if (is_to_near(copy)) ids.push_back(copy.page);
      }
      index->unpin_pages(ids.data(), ids.size());
    });
  }
  if (spec.lease != 0) surely([&] { index->release(spec.lease); });
  transfers.fetch_add(1, std::memory_order_relaxed);
  std::list<std::shared_ptr<Transfer>> followers;
  {
    // One step for whoever looks: done, the completion and the tokens come together.
    std::lock_guard lock(transfer->mutex_);
    Completion completion{spec.tag, static_cast<uint32_t>(spec.pages.size()), 0, Status::kOk};
    bool any_landed = false;
    for (size_t i = 0; i < spec.pages.size(); ++i) {
      any_landed |= (progress.landed[i] & kPoolMask) != 0;
      if (progress.status[i] == Status::kOk) {
        ++completion.ok_pages;
      } else if (completion.status == Status::kOk) {
        completion.status = progress.status[i];
      }
    }
    if (progress.pool_is_sink && any_landed) progress.layers_done.store(shape.layers(), std::memory_order_release);
    progress.source_released.store(true, std::memory_order_release);
    progress.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - progress.submitted).count();
    progress.done = true;
    followers.swap(progress.followers);
    if (progress.inbox != nullptr) progress.inbox->push(completion);
    if (spec.keep_alive != 0) retired.push(spec.keep_alive);
    progress.watchers.tell();
    transfer->condition_.notify_all();
  }
  for (const std::shared_ptr<Transfer>& follower : followers) release(follower);
  std::lock_guard lock(queue_mutex);
  live.erase(transfer.get());
  if (live.empty()) idle.notify_all();
}

void Mover::Impl::poison(const char* reason) noexcept {
  {
    const std::lock_guard lock(reason_mutex);
    if (poison_reason[0] == '\0') std::snprintf(poison_reason.data(), poison_reason.size(), "%s", reason);
  }
  is_poisoned.store(true, std::memory_order_relaxed);
  index->poison();
}

void Mover::Impl::poison_by_current_exception() noexcept {
  try {
    throw;
  } catch (const std::exception& error) {
    poison(error.what());
  } catch (...) {
    poison("an exception of unknown type");
  }
}

// An exception that ends a unit: a bug poisons, anything else (no memory, most likely) costs that unit's pages alone.
// Returns what those of its pages that are not decided are to report.
Status Mover::Impl::note_current_exception() noexcept {
  try {
    throw;
  } catch (const AssertionFailure& error) {
    poison(error.what());
    return Status::kPoisoned;
  } catch (const std::exception& error) {
    const std::lock_guard lock(reason_mutex);
    std::snprintf(failure_reason.data(), failure_reason.size(), "%s", error.what());
  } catch (...) {
    const std::lock_guard lock(reason_mutex);
    std::snprintf(failure_reason.data(), failure_reason.size(), "an exception of unknown type");
  }
  failed_units.fetch_add(1, std::memory_order_release);
  return Status::kFailed;
}

// ---- the mover -------------------------------------------------------------------------------------------------

Mover::Mover(MoverOptions options, const PageShape& shape, Index* index, std::array<Medium*, kTiers> media,
             Foreign* foreign)
    : impl_(std::make_unique<Impl>(options, shape, index, media, foreign)) {
  if ((options.copy_threads == 0) != (options.io_threads == 0)) {
    throw std::invalid_argument("mover: copy_threads " + std::to_string(options.copy_threads) + " and io_threads " +
                                std::to_string(options.io_threads) +
                                ": give both or neither (0 and 0 is the stepped mover)");
  }
  if (options.queue_units == 0) throw std::invalid_argument("mover: queue_units must be at least 1");
  if (media[kPoolColumn] != nullptr)
    throw std::invalid_argument("mover: the device tier travels as a lent pool and has no medium");
  const WorkerSignalMask mask;
  if (impl_->is_stepped) impl_->workers.push_back(std::make_unique<Worker>());
  auto start = [&](int queue, uint32_t count, const char* job) {
    for (uint32_t i = 0; i < count; ++i) {
      impl_->workers.push_back(std::make_unique<Worker>());
      impl_->threads.emplace_back([impl = impl_.get(), queue, worker = impl_->workers.back().get(),
                                   name = "sw-" + std::string(job) + "-" + std::to_string(i)](std::stop_token stop) {
        impl->work(stop, queue, *worker, name);
      });
    }
  };
  start(kCopyQueue, options.copy_threads, "copy");
  start(kIoQueue, options.io_threads, "io");
}

Mover::~Mover() {
  if (impl_->pid != ::getpid()) {
    // A forked child: the threads did not come along, and the mutexes are as they were. Nothing can be joined; it is
    // left where it lies.
    static_cast<void>(impl_.release());
    return;
  }
  drain(0, true);
  if (stuck()) static_cast<void>(impl_.release());  // its worker may come back to it
}

RetireList& Mover::retired() noexcept { return impl_->retired; }

Status Mover::submit(TransferSpec spec, const std::shared_ptr<Inbox>& inbox, std::shared_ptr<Transfer>* out) {
  Impl& impl = *impl_;
  if (impl.pid != ::getpid()) return Status::kClosed;
  if (poisoned()) return Status::kPoisoned;
  if (!impl.is_valid(spec)) return Status::kInvalid;
  if (inbox != nullptr && inbox->is_closed()) return Status::kClosed;

  // Not make_shared: only the mover may make one.
  const std::shared_ptr<Transfer> transfer(new Transfer(std::move(spec)));
  Transfer::Progress& progress = *transfer->progress_;
  impl.plan(*transfer);
  progress.inbox = inbox;
  progress.pid = impl.pid;
  progress.submitted = std::chrono::steady_clock::now();
  progress.source_released.store(!progress.uses_pool[0] && !progress.uses_pool[1], std::memory_order_relaxed);
  std::array<size_t, kQueues> needed{};
  for (const auto& stage : progress.units) {
    for (const UnitPlan& unit : stage) ++needed[unit.io ? kIoQueue : kCopyQueue];
  }
  // Everything that may throw comes before anything is taken.
  std::vector<std::list<std::shared_ptr<Transfer>>> links(transfer->spec_.after.size());
  for (auto& link : links) link.push_back(transfer);
  progress.waits_for.store(1 + static_cast<uint32_t>(links.size()), std::memory_order_relaxed);
  if (transfer->spec_.keep_alive != 0) impl.retired.reserve(1);
  const auto refused = [&](Status status) {
    if (transfer->spec_.keep_alive != 0) impl.retired.unreserve(1);
    return status;
  };
  {
    std::lock_guard lock(impl.queue_mutex);
    if (impl.closed) return refused(Status::kClosed);
    const auto entry = impl.live.emplace(transfer.get(), transfer).first;
    Status status = Status::kOk;
    if (!impl.queues[kCopyQueue].try_reserve(needed[kCopyQueue])) {
      status = Status::kQueueFull;
    } else if (!impl.queues[kIoQueue].try_reserve(needed[kIoQueue])) {
      impl.queues[kCopyQueue].unreserve(needed[kCopyQueue]);
      status = Status::kQueueFull;
    } else if (inbox != nullptr && !inbox->try_reserve()) {
      impl.queues[kCopyQueue].unreserve(needed[kCopyQueue]);
      impl.queues[kIoQueue].unreserve(needed[kIoQueue]);
      status = inbox->is_closed() ? Status::kClosed : Status::kQueueFull;
    }
    if (status != Status::kOk) {
      impl.live.erase(entry);
      return refused(status);
    }
  }
  *out = transfer;
  uint32_t over = 0;  // of those to wait for
  for (size_t i = 0; i < links.size(); ++i) {
    Transfer& before = *transfer->spec_.after[i];
    std::lock_guard lock(before.mutex_);
    if (before.progress_->done) {
      ++over;
    } else {
      before.progress_->followers.splice(before.progress_->followers.end(), links[i]);
    }
  }
  // Not before they are all linked: the last of them clears the list.
  for (uint32_t i = 0; i < over; ++i) impl.release(transfer);
  impl.release(transfer);
  return Status::kOk;
}

bool Mover::drain(double timeout_s, bool close) {
  Impl& impl = *impl_;
  if (impl.pid != ::getpid()) return true;
  const bool forever = timeout_s < 0 || timeout_s > kLongestWait_s;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                             std::chrono::duration<double>(forever ? 0 : timeout_s));
  const auto is_idle = [&impl] { return impl.live.empty(); };
  std::vector<std::jthread> ended;  // joined when this returns, without the lock
  std::unique_lock lock(impl.queue_mutex);
  if (close) impl.closed = true;
  if (impl.is_stepped) {
    lock.unlock();
    while ((forever || std::chrono::steady_clock::now() < deadline) && (step(kCopyQueue) || step(kIoQueue))) {
    }
    lock.lock();
  } else if (forever) {
    impl.idle.wait(lock, is_idle);
  } else {
    impl.idle.wait_until(lock, deadline, is_idle);
  }
  const bool finished = is_idle();
  if (!finished) {
    for (const auto& [key, transfer] : impl.live) transfer->cancel();
    if (impl.is_stepped) {
      lock.unlock();
      while (step(kCopyQueue) || step(kIoQueue)) {
      }
      lock.lock();
    } else if (!impl.idle.wait_for(lock, std::chrono::duration<double>(kLetGo_s), is_idle)) {
      std::vector<std::shared_ptr<Transfer>> stuck;
      for (const auto& [key, transfer] : impl.live) stuck.push_back(transfer);
      lock.unlock();
      for (const auto& transfer : stuck) transfer->abandon(Status::kCancelled);
      lock.lock();
    }
  }
  if (close && is_idle())
    ended.swap(impl.threads);  // nothing can come any more: whoever still refers to this mover keeps no thread alive
  lock.unlock();
  return finished;
}

bool Mover::stuck() const {
  const Impl& impl = *impl_;
  if (impl.pid != ::getpid()) return false;
  std::lock_guard lock(impl.queue_mutex);
  return impl.closed && !impl.live.empty();
}

bool Mover::join() {
  Impl& impl = *impl_;
  if (impl.pid != ::getpid()) return true;
  std::vector<std::jthread> ended;  // joined when this returns, without the lock
  std::lock_guard lock(impl.queue_mutex);
  if (!impl.live.empty()) return false;
  ended.swap(impl.threads);
  return true;
}

void Mover::set_readable(TierMask tiers) noexcept { impl_->readable.store(tiers, std::memory_order_relaxed); }

std::vector<WorkerCall> Mover::calls() const {
  std::vector<WorkerCall> calls;
  for (const auto& worker : impl_->workers) {
    const uint64_t call = worker->call.load(std::memory_order_relaxed);
    calls.push_back({call >> 3, static_cast<int>(call & 7) - 1});
  }
  return calls;
}

bool Mover::step(int queue) {
  Impl& impl = *impl_;
  if (impl.pid != ::getpid() || !impl.is_stepped || queue < 0 || queue >= kQueues) return false;
  return impl.run_one(queue, *impl.workers.front());
}

MoverStats Mover::stats() const {
  const Impl& impl = *impl_;
  MoverStats stats;
  for (size_t column = 0; column < kTiers; ++column) {
    stats.bytes_read[column] = impl.bytes_read[column].load(std::memory_order_relaxed);
    stats.bytes_written[column] = impl.bytes_written[column].load(std::memory_order_relaxed);
  }
  stats.checksum_failures = impl.checksum_failures.load(std::memory_order_relaxed);
  stats.bus_faults = impl.bus_faults.load(std::memory_order_relaxed);
  stats.io_errors = impl.io_errors.load(std::memory_order_relaxed);
  for (size_t column = 0; column < kTiers; ++column) {
    // The count first: the errno read then is that error's, or a later one's.
    stats.read_errors[column] = impl.read_errors[column].load(std::memory_order_acquire);
    stats.write_errors[column] = impl.write_errors[column].load(std::memory_order_acquire);
    stats.read_errno[column] = impl.read_errno[column].load(std::memory_order_relaxed);
    stats.write_errno[column] = impl.write_errno[column].load(std::memory_order_relaxed);
  }
  stats.failed_units = impl.failed_units.load(std::memory_order_acquire);
  stats.retried_pages = impl.retried_pages.load(std::memory_order_relaxed);
  stats.rescued_pages = impl.rescued_pages.load(std::memory_order_relaxed);
  stats.transfers = impl.transfers.load(std::memory_order_relaxed);
  stats.commits = impl.commits.load(std::memory_order_relaxed);
  stats.aborts = impl.aborts.load(std::memory_order_relaxed);
  if (impl.pid != ::getpid()) return stats;  // a worker may have held the mutex when this child was forked
  std::lock_guard lock(impl.queue_mutex);
  stats.queued_copy = impl.queues[kCopyQueue].size();
  stats.queued_io = impl.queues[kIoQueue].size();
  return stats;
}

MoverFlow Mover::flow() const {
  const Impl& impl = *impl_;
  if (impl.pid != ::getpid()) return {};  // a worker may have held the mutex when this child was forked
  const Instant at = now();
  std::lock_guard lock(impl.queue_mutex);
  MoverFlow flow = impl.flow;
  for (const auto& worker : impl.workers) {
    const auto& unit = worker->unit;
    if (unit.pages == 0 || unit.work_class != WorkClass::kLoad || unit.began >= at) continue;
    const Flow mine{unit.pages * impl.shape.page_bytes(), ns_between(unit.began, at)};
    Flow& slowest = flow.running[static_cast<size_t>(unit.lane)];
    const bool is_slower = static_cast<double>(mine.ns) * static_cast<double>(slowest.bytes) >
                           static_cast<double>(slowest.ns) * static_cast<double>(mine.bytes);
    if (slowest.ns == 0 || is_slower) slowest = mine;
  }
  return flow;
}

std::string Mover::poison_reason() const {
  const std::lock_guard lock(impl_->reason_mutex);
  return impl_->poison_reason.data();
}

std::string Mover::failure() const {
  const std::lock_guard lock(impl_->reason_mutex);
  return impl_->failure_reason.data();
}

bool Mover::poisoned() const noexcept {
  return impl_->is_poisoned.load(std::memory_order_relaxed) || impl_->index->poisoned();
}

}  // namespace stepwell
