// Inbox, Transfer and Mover. Python holds handles; what workers share is shared in C++ alone, so that the last of them
// to let go never needs the GIL.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <unordered_map>
#include <variant>

#include "bind.h"
#include "bind_taken.h"
#include "mover.h"

namespace stepwell::bind {
namespace {

constexpr double kSignalSlice_s = 0.1;  // how long a wait may ignore ctrl-C

// A mutex of the core may have been held by a thread that a forked child does not have, and an eventfd is its parent's
// too: there a handle only raises.
struct OfThisProcess {
  pid_t pid = ::getpid();

  bool is_forked() const { return pid != ::getpid(); }
  void require_unforked(const char* what) const {
    if (!is_forked()) return;
    const nb::object error = nb::module_::import_("stepwell.errors").attr("ForkedError");
    const std::string message = std::string(what) + " of process " + std::to_string(pid) + " was used in its child " +
                                std::to_string(::getpid()) +
                                ": the threads that would end it are not here; start processes by spawn";
    PyErr_SetString(error.ptr(), message.c_str());
    throw nb::python_error();
  }
};

// Makes what has an eventfd of its own; OSError where there is none to be had.
template <typename T, typename... Args>
std::shared_ptr<T> make_with_eventfd(Args... args) {
  try {
    return std::make_shared<T>(args...);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

struct WakerHandle : OfThisProcess {
  std::shared_ptr<Waker> waker = make_with_eventfd<Waker>();
};

struct InboxHandle : OfThisProcess {
  explicit InboxHandle(size_t capacity) : inbox_(make_with_eventfd<Inbox>(capacity)) {}
  const std::shared_ptr<Inbox>& inbox() const {
    require_unforked("an inbox");
    return inbox_;
  }

 private:
  std::shared_ptr<Inbox> inbox_;
};

class TransferHandle : public OfThisProcess {
 public:
  explicit TransferHandle(std::shared_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  TransferHandle(TransferHandle&&) = default;
  TransferHandle& operator=(TransferHandle&&) = default;
  ~TransferHandle() {
    // A thread of the parent's may be waiting on it, for ever as this child sees it: it is left where it lies.
    if (is_forked()) static_cast<void>(std::make_unique<std::shared_ptr<Transfer>>(std::move(transfer_)).release());
  }
  Transfer& operator*() const {
    require_unforked("a transfer");
    return *transfer_;
  }
  Transfer* operator->() const { return &**this; }
  // What no lock guards can be read anywhere.
  const Transfer& lock_free() const { return *transfer_; }
  const std::shared_ptr<Transfer>& shared() const {
    require_unforked("a transfer");
    return transfer_;
  }

 private:
  std::shared_ptr<Transfer> transfer_;
};

template <typename T>
using Column = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <bool (Transfer::*wait)(double) const>
bool wait_interruptibly(const TransferHandle& self, std::optional<double> timeout) {
  const Transfer& transfer = *self;
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    double slice = kSignalSlice_s;
    bool last = false;
    if (timeout) {
      const double left = *timeout - std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      last = left <= slice;
      slice = std::clamp(left, 0.0, slice);
    }
    {
      GilRelease release;
      if ((transfer.*wait)(slice)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (last) return false;
  }
}

Column<uint8_t> page_status(const TransferHandle& self) {
  const std::vector<Status> statuses = self->page_status();
  std::vector<uint8_t> values(statuses.size());
  std::transform(statuses.begin(), statuses.end(), values.begin(),
                 [](Status status) { return static_cast<uint8_t>(status); });
  return to_numpy(std::move(values));
}

// A mover, and the Python objects whose memory its transfers use. All but `mover` is guarded by the GIL.
class MoverHandle {
 public:
  MoverHandle(Index* index, const PageShape& shape, std::array<Medium*, kTiers> media, Foreign* foreign,
              MoverOptions options)
      : index_(index), mover_(std::make_unique<Mover>(options, shape, index, media, foreign)) {}
  ~MoverHandle() {
    GilRelease release;  // joins workers
    mover_.reset();
  }
  MoverHandle(const MoverHandle&) = delete;
  MoverHandle& operator=(const MoverHandle&) = delete;

  Mover& mover() noexcept { return *mover_; }

  // Drops what transfers that have ended kept alive.
  size_t drain_retired() {
    if (is_forked()) return 0;
    const std::vector<uint64_t> tokens = mover_->retired().drain();
    for (const uint64_t token : tokens) drop(token);
    return tokens.size();
  }

  std::variant<TransferHandle, Status> submit(const Array1<uint32_t>& pages, const Array2<uint8_t>& roles,
                                              const Array2<uint32_t>& slots, const Array2<uint32_t>& numbers,
                                              const PoolHandle* pool, const nb::object& keep_alive,
                                              const InboxHandle* inbox, const std::vector<ForeignPlace>* places,
                                              const std::vector<const TransferHandle*>& after,
                                              const std::optional<Array1<uint8_t>>& awaited,
                                              const std::optional<Array1<uint8_t>>& nearer, TakenHandle* taken,
                                              TransferSpec spec) {
    if (is_forked()) return Status::kClosed;  // before any mutex: the parent's workers may have held it
    if (inbox != nullptr && inbox->is_forked()) return Status::kClosed;
    const std::shared_ptr<Inbox> told =
        inbox != nullptr ? inbox->inbox() : nullptr;  // may raise: while we have the GIL
    drain_retired();
    const size_t count = pages.size();
    require_columns("roles", count, roles.shape(0), roles.shape(1));
    require_columns("slots", count, slots.shape(0), slots.shape(1));
    require_columns("numbers", count, numbers.shape(0), numbers.shape(1));
    if ((places != nullptr && places->size() != count) || (awaited && awaited->size() != count) ||
        (nearer && nearer->size() != count))
      throw std::invalid_argument("places, awaited or nearer are not as many as the pages");
    for (const TransferHandle* before : after) spec.after.push_back(before->shared());
    if (pool != nullptr) spec.pool = pool->layout;
    if (!keep_alive.is_none()) {
      spec.keep_alive = ++last_token_;
      kept_.emplace(spec.keep_alive, keep_alive);
    }
    const uint64_t token = spec.keep_alive;
    std::shared_ptr<Transfer> transfer;
    Status status = Status::kInvalid;
    try {
      GilRelease release;
      std::vector<Label> labels(count);
      index_->labels(pages.data(), count, labels.data());
      spec.pages.resize(count);
      for (size_t i = 0; i < count; ++i) {
        PageCopy& copy = spec.pages[i];
        copy.page = pages.data()[i];
        copy.label = labels[i];
        for (size_t column = 0; column < kTiers; ++column) {
          copy.roles[column] = static_cast<Role>(roles.data()[i * kTiers + column]);
          copy.slots[column] = slots.data()[i * kTiers + column];
          copy.numbers[column] = numbers.data()[i * kTiers + column];
        }
        if (places != nullptr) copy.foreign = (*places)[i];
        copy.is_awaited = awaited && awaited->data()[i] != 0;
        if (nearer) copy.nearer = static_cast<Tier>(nearer->data()[i]);
      }
      status = mover_->submit(std::move(spec), told, &transfer);
      if (status == Status::kOk && taken != nullptr) {
        taken->hand_on();
        taken->transfers.push_back(transfer);
      }
    } catch (...) {
      drop(token);
      throw;
    }
    if (status == Status::kOk) return TransferHandle{std::move(transfer)};
    drop(token);
    return status;
  }

 private:
  bool is_forked() const { return pid_ != ::getpid(); }
  // Out of the table first: dropping an object may run Python code, and that may come back here.
  void drop(uint64_t token) { const auto node = kept_.extract(token); }
  static void require_columns(const char* name, size_t pages, size_t rows, size_t columns) {
    if (rows == pages && columns == kTiers) return;
    throw std::invalid_argument(std::string(name) + " has shape (" + std::to_string(rows) + ", " +
                                std::to_string(columns) + "), not (" + std::to_string(pages) +
                                ", 4): one row a page, one column a tier");
  }

  Index* index_;
  std::unordered_map<uint64_t, nb::object> kept_;
  uint64_t last_token_ = 0;
  const pid_t pid_ = ::getpid();
  std::unique_ptr<Mover> mover_;  // ends before what it keeps alive goes
};

nb::tuple by_column(const std::array<uint64_t, kTiers>& values) {
  return nb::make_tuple(values[0], values[1], values[2], values[3]);
}

nb::typed<nb::dict, nb::str, nb::any> stats(MoverHandle& self) {
  MoverStats stats;
  {
    GilRelease release;
    stats = self.mover().stats();
  }
  nb::typed<nb::dict, nb::str, nb::any> result;
  result["bytes_read"] = by_column(stats.bytes_read);
  result["bytes_written"] = by_column(stats.bytes_written);
  result["checksum_failures"] = stats.checksum_failures;
  result["bus_faults"] = stats.bus_faults;
  result["io_errors"] = stats.io_errors;
  result["read_errors"] = by_column(stats.read_errors);
  result["write_errors"] = by_column(stats.write_errors);
  result["read_errno"] =
      nb::make_tuple(stats.read_errno[0], stats.read_errno[1], stats.read_errno[2], stats.read_errno[3]);
  result["write_errno"] =
      nb::make_tuple(stats.write_errno[0], stats.write_errno[1], stats.write_errno[2], stats.write_errno[3]);
  result["failed_units"] = stats.failed_units;
  result["retried_pages"] = stats.retried_pages;
  result["rescued_pages"] = stats.rescued_pages;
  result["transfers"] = stats.transfers;
  result["commits"] = stats.commits;
  result["aborts"] = stats.aborts;
  result["queued_copy"] = stats.queued_copy;
  result["queued_io"] = stats.queued_io;
  return result;
}

using FlowArray = nb::ndarray<nb::numpy, uint64_t>;

// Hands on numbers in the order in which they lie: one axis for each array around them.
FlowArray to_flow_array(const uint64_t* first, std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (const size_t length : shape) count *= length;
  auto owned = std::make_unique<std::vector<uint64_t>>(first, first + count);
  nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<std::vector<uint64_t>*>(p); });
  return FlowArray(owned.release()->data(), shape, owner);
}

nb::typed<nb::dict, nb::str, nb::any> flow(MoverHandle& self) {
  MoverFlow flow;
  {
    GilRelease release;
    flow = self.mover().flow();
  }
  static_assert(sizeof(Flow) == 2 * sizeof(uint64_t) && sizeof(QueueWait) == 2 * sizeof(uint64_t));
  nb::typed<nb::dict, nb::str, nb::any> result;
  result["reads"] = to_flow_array(&flow.reads[0][0].bytes, {kWorkClasses, kLanes, 2});
  result["writes"] = to_flow_array(&flow.writes[0][0].bytes, {kWorkClasses, kLanes, 2});
  result["waits"] = to_flow_array(&flow.waits[0][0].units, {flow.waits.size(), kWorkClasses, 2});
  result["queued"] = to_flow_array(&flow.queued[0][0], {kWorkClasses, kLanes});
  result["running"] = to_flow_array(&flow.running[0].bytes, {kLanes, 2});
  return result;
}

void bind_words(nb::module_& module) {
  nb::enum_<Role>(module, "Role", nb::is_arithmetic(), "What a column of a page is to its transfer.")
      .value("unused", Role::kUnused)
      .value("source", Role::kSource)
      .value("sink", Role::kSink);
  nb::enum_<WorkClass>(module, "WorkClass", nb::is_arithmetic(),
                       "Whose turn it is: of eight units five loads, two saves, one demotion.")
      .value("load", WorkClass::kLoad)
      .value("save", WorkClass::kSave)
      .value("demote", WorkClass::kDemote);
}

void bind_waker(nb::module_& module) {
  nb::class_<WakerHandle>(module, "Waker", "The one descriptor that an event loop watches for all it waits for here.")
      .def(nb::init<>())
      .def(
          "fileno", [](const WakerHandle& self) { return self.waker->fileno(); },
          "Return an eventfd that is readable while tokens wait; -1 once closed.")
      .def(
          "drain",
          [](const WakerHandle& self) { return self.is_forked() ? std::vector<uint64_t>() : self.waker->drain(); },
          "Take the tokens of what has come about: list[int].")
      .def(
          "close",
          [](const WakerHandle& self) {
            if (!self.is_forked()) self.waker->close();
          },
          "Close the descriptor; what comes later is dropped.");
}

// watch and unwatch of a Transfer or an Inbox.
template <typename Handle, typename Get>
void bind_watch(nb::class_<Handle>& type, Get get) {
  type.def(
          "watch",
          [get](const Handle& self, const WakerHandle& waker, uint64_t token) {
            return get(self).watch(waker.waker, token);
          },
          nb::arg("waker"), nb::arg("token"),
          "Tell the waker this token, once, when there is something to see. Returns False where there is already.")
      .def(
          "unwatch",
          [get](const Handle& self, const WakerHandle& waker, uint64_t token) {
            if (!self.is_forked()) get(self).unwatch(waker.waker.get(), token);
          },
          nb::arg("waker"), nb::arg("token"), "Give up a token; one that was told is no matter.");
}

void bind_inbox(nb::module_& module) {
  nb::class_<InboxHandle> type(module, "Inbox",
                               "Completions of one submitter; its room is taken when a transfer is submitted.");
  type.def(nb::init<size_t>(), nb::arg("capacity"))
      .def(
          "poll",
          [](const InboxHandle& self, size_t most) {
            std::vector<Completion> completions;
            self.inbox()->poll(most, &completions);
            std::vector<uint64_t> tags;
            std::vector<uint32_t> ok_pages;
            std::vector<uint8_t> statuses;
            for (const Completion& completion : completions) {
              tags.push_back(completion.tag);
              ok_pages.push_back(completion.ok_pages);
              statuses.push_back(static_cast<uint8_t>(completion.status));
            }
            return std::tuple<Column<uint64_t>, Column<uint32_t>, Column<uint8_t>>(
                to_numpy(std::move(tags)), to_numpy(std::move(ok_pages)), to_numpy(std::move(statuses)));
          },
          nb::arg("most") = 256,
          "Take at most `most` completions, never waiting. Returns tags: uint64[n], pages that are ok: uint32[n], "
          "first failure or ok: uint8[n].")
      .def(
          "post",
          [](const InboxHandle& self, uint64_t tag, uint32_t pages, uint8_t status) {
            return !self.is_forked() && self.inbox()->try_post({tag, pages, 0, static_cast<Status>(status)});
          },
          nb::arg("tag"), nb::arg("pages"), nb::arg("status"),
          "Add the completion of what ended with no page moved. Returns False where there is no room for it, or the "
          "inbox is closed or a parent process's.")
      .def(
          "fileno", [](const InboxHandle& self) { return self.inbox()->fileno(); },
          "Return an eventfd that is readable while completions wait.")
      .def_prop_ro(
          "closed", [](const InboxHandle& self) { return self.inbox()->is_closed(); }, "Whether it was closed.")
      .def(
          "counts",
          [](const InboxHandle& self) {
            const InboxCounts counts = self.inbox()->counts();
            return std::tuple(counts.capacity, counts.reserved, counts.ready);
          },
          "Return (capacity, places taken by transfers under way and completions that wait, completions that wait).")
      .def("close", [](const InboxHandle& self) { self.inbox()->close(); }, "Drop what waits, refuse what comes.");
  bind_watch(type, [](const InboxHandle& self) -> Inbox& { return *self.inbox(); });
}

void bind_transfer(nb::module_& module) {
  nb::class_<TransferHandle> type(module, "Transfer",
                                  "Watch a submitted batch of page copies; dropping it changes nothing.");
  type.def_prop_ro(
          "done", [](const TransferHandle& self) { return self->done(); },
          "Whether every page is decided and all that follows has been done.")
      .def_prop_ro(
          "decided", [](const TransferHandle& self) { return self->decided(); },
          "Whether it is done, or close_gate() has decided what was open.")
      .def_prop_ro(
          "source_released", [](const TransferHandle& self) { return self.lock_free().source_released(); },
          "Whether no worker will touch the lent pool again.")
      .def_prop_ro(
          "layers_done", [](const TransferHandle& self) { return self.lock_free().layers_done(); },
          "Layers that have landed, verified, for all pages that did not fail.")
      .def_prop_ro("pages", [](const TransferHandle& self) { return self.lock_free().pages(); })
      .def_prop_ro("tag", [](const TransferHandle& self) { return self.lock_free().tag(); })
      .def_prop_ro(
          "asked", [](const TransferHandle& self) { return self.lock_free().asked(); },
          "A mask of the tiers that were asked for a page because its source had failed.")
      .def_prop_ro("bytes_moved", [](const TransferHandle& self) { return self.lock_free().bytes_moved(); })
      .def_prop_ro(
          "seconds", [](const TransferHandle& self) { return self->seconds(); }, "From submit to done; 0 before.")
      .def("wait", &wait_interruptibly<&Transfer::wait>, nb::arg("timeout") = nb::none(),
           "Wait until done, at most `timeout` seconds. Returns whether it is done.")
      .def("wait_decided", &wait_interruptibly<&Transfer::wait_decided>, nb::arg("timeout") = nb::none(),
           "Wait until decided, at most `timeout` seconds. Returns whether it is decided.")
      .def(
          "cancel", [](const TransferHandle& self) { self->cancel(); },
          "Stop what has not started; every claim is returned either way.")
      .def(
          "close_gate",
          [](const TransferHandle& self) {
            Transfer& transfer = *self;
            GilRelease release;
            transfer.close_gate();
          },
          "Return when no byte can land in the lent pool any more; pages that had not landed report `deadline`.")
      .def(
          "abandon",
          [](const TransferHandle& self, Status status) {
            Transfer& transfer = *self;
            GilRelease release;
            transfer.abandon(status);
          },
          nb::arg("status"),
          "Give up on a call that does not return: cancel, close the gate, and let what is not decided report "
          "`status`.")
      .def("page_status", &page_status, "Return the Status of each page: uint8[pages]; `pending` where not decided.")
      .def(
          "landed", [](const TransferHandle& self) { return to_numpy(self->landed()); },
          "Return uint8[pages]: bit c is set where the sink in column c was committed (0: landed in the pool).");
  bind_watch(type, [](const TransferHandle& self) -> Transfer& { return *self; });
}

void bind_mover_class(nb::module_& module) {
  nb::class_<MoverHandle>(module, "Mover",
                          "The workers that move pages. With 0 and 0 threads nothing runs until step().")
      .def(
          "__init__",
          [](MoverHandle* self, Index& index, const PageShape& shape, Medium* host, Medium* shared, Medium* disk,
             uint32_t copy_threads, uint32_t io_threads, uint32_t queue_units, uint32_t unit_bytes, Foreign* foreign) {
            new (self) MoverHandle(&index, shape, {nullptr, host, shared, disk}, foreign,
                                   {.copy_threads = copy_threads,
                                    .io_threads = io_threads,
                                    .queue_units = queue_units,
                                    .unit_bytes = unit_bytes});
          },
          nb::arg("index"), nb::arg("shape"), nb::kw_only(), nb::arg("host").none() = nb::none(),
          nb::arg("shared").none() = nb::none(), nb::arg("disk").none() = nb::none(), nb::arg("copy_threads") = 1,
          nb::arg("io_threads") = 2, nb::arg("queue_units") = 4096, nb::arg("unit_bytes") = 4 << 20,
          nb::arg("foreign").none() = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 11>())
      .def(
          "submit",
          [](MoverHandle& self, const Array1<uint32_t>& pages, const Array2<uint8_t>& roles,
             const Array2<uint32_t>& slots, const Array2<uint32_t>& numbers, const PoolHandle* pool, bool layer_order,
             bool source_leaving, uint8_t work_class, bool unpin_pages, uint64_t lease, uint64_t tag,
             const nb::object& keep_alive, const InboxHandle* inbox, const ForeignRun* run,
             const std::optional<Array1<uint32_t>>& rows, const std::vector<const TransferHandle*>& after,
             const std::optional<Array1<uint8_t>>& awaited, const std::optional<Array1<uint8_t>>& nearer,
             TakenHandle* taken) {
            std::vector<ForeignPlace> places;
            if (run != nullptr && rows) {
              for (size_t i = 0; i < rows->size(); ++i) places.push_back(run->places.at(rows->data()[i]));
            }
            TransferSpec spec;
            spec.layer_order = layer_order;
            spec.source_leaving = source_leaving;
            spec.work_class = static_cast<WorkClass>(work_class);
            spec.unpin_pages = unpin_pages;
            spec.lease = lease;
            spec.tag = tag;
            return self.submit(pages, roles, slots, numbers, pool, keep_alive, inbox,
                               run == nullptr ? nullptr : &places, after, awaited, nearer, taken, std::move(spec));
          },
          nb::arg("pages"), nb::arg("roles"), nb::arg("slots"), nb::arg("numbers"), nb::kw_only(),
          nb::arg("pool").none() = nb::none(), nb::arg("layer_order") = false, nb::arg("source_leaving") = false,
          nb::arg("work_class") = 0, nb::arg("unpin_pages") = false, nb::arg("lease") = 0, nb::arg("tag") = 0,
          nb::arg("keep_alive").none() = nb::none(), nb::arg("inbox").none() = nb::none(),
          nb::arg("run").none() = nb::none(), nb::arg("rows").none() = nb::none(),
          nb::arg("after") = std::vector<const TransferHandle*>(), nb::arg("awaited").none() = nb::none(),
          nb::arg("nearer").none() = nb::none(), nb::arg("taken").none() = nb::none(),
          "Queue a batch of page copies and what follows them.\n\n"
          "pages: uint32[n] ids; roles: uint8[n, 4] of Role, slots and numbers: uint32[n, 4], one column a tier, "
          "column 0 the lent\n"
          "pool. Each page has one source and at least one sink. `keep_alive` is held until the transfer has ended.\n"
          "With `run`, page i comes from a neighbour, from place rows[i] of it, and has no source. `after`: begins "
          "once "
          "these\n"
          "are done; page i with awaited[i] != 0 is one that they are to bring to host memory under its number there; "
          "one with\n"
          "nearer[i] != 0 is read in that tier, where they bring it under its number there, and its pin goes with the "
          "transfer.\n"
          "`taken`: what the transfer has from now on, all of it.\n"
          "Returns a Transfer, or the Status that refused it (queue_full, closed, poisoned, invalid): then nothing was "
          "consumed.")
      .def(
          "drain",
          [](MoverHandle& self, double timeout, bool close) {
            self.drain_retired();
            bool finished = false;
            {
              GilRelease release;
              finished = self.mover().drain(timeout, close);
            }
            self.drain_retired();
            return finished;
          },
          nb::arg("timeout"), nb::arg("close") = false,
          "Wait until nothing is queued or running, at most `timeout` seconds (< 0: no limit); then cancel the "
          "rest.\n\n"
          "Returns whether all finished without that. With `close`, submit says `closed` from now on.")
      .def(
          "step",
          [](MoverHandle& self, int queue) {
            self.drain_retired();
            GilRelease release;
            return self.mover().step(queue);
          },
          nb::arg("queue"),
          "Run one unit of a queue (0 copy, 1 io) here. Returns False where none waits, or where threads do it.")
      .def("drain_retired", &MoverHandle::drain_retired,
           "Drop what ended transfers kept alive; return how many there were.")
      .def("stats", &stats, "Return the counters: dict; bytes_read and bytes_written are tuples by column.")
      .def(
          "flow", &flow,
          "Return what the units have moved and what waits, at one moment: dict of uint64 arrays; a lane is a column, "
          "or "
          "4 + column for\n"
          "a neighbour's pages beside that tier.\n\n"
          "reads, writes: [3 classes, 8 lanes, (bytes, ns)]; waits: [2 queues, 3 classes, (units, ns)]; queued: bytes, "
          "[3 classes,\n"
          "8 lanes]; running: the slowest unit of a load under way, [8 lanes, (bytes, ns)].")
      .def(
          "join",
          [](MoverHandle& self) {
            bool joined = false;
            {
              GilRelease release;
              joined = self.mover().join();
            }
            if (joined) self.drain_retired();
            return joined;
          },
          "After drain(close=True): join the workers unless one is still in a call. Returns whether they are joined.")
      .def_prop_ro(
          "stuck", [](MoverHandle& self) { return self.mover().stuck(); },
          "After drain(close=True): whether a worker is still in a call.")
      .def(
          "set_readable", [](MoverHandle& self, int tiers) { self.mover().set_readable(static_cast<TierMask>(tiers)); },
          nb::arg("tiers"), "Name the tiers (a mask) that a load may ask where its first source has failed.")
      .def(
          "calls",
          [](MoverHandle& self) {
            std::vector<std::tuple<uint64_t, int>> calls;
            for (const WorkerCall& call : self.mover().calls()) calls.emplace_back(call.serial, call.column);
            return calls;
          },
          "Return for each worker (serial number of the call it is in, column; -1: idle).")
      .def_prop_ro(
          "failure", [](MoverHandle& self) { return self.mover().failure(); },
          "The last exception that ended a unit of work; empty if none did.")
      .def_prop_ro("poisoned", [](MoverHandle& self) { return self.mover().poisoned(); })
      .def_prop_ro(
          "poison_reason", [](MoverHandle& self) { return self.mover().poison_reason(); },
          "What failed first in a worker; empty if nothing did.");
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def(
      "plan_sources",
      [](const Array1<uint8_t>& tiers, const Array1<uint32_t>& slots) {
        const size_t count = tiers.shape(0);
        if (slots.shape(0) != count) throw nb::value_error("tiers and slots differ in length");
        std::vector<uint8_t> roles(count * kTiers);
        std::vector<uint32_t> columns(count * kTiers), numbers(count * kTiers);
        for (size_t row = 0; row < count; ++row) {
          const size_t tier = tiers.data()[row];
          if (tier >= kTiers) throw nb::value_error("a tier is 0 (device), 1 (host), 2 (shared) or 3 (disk)");
          roles[row * kTiers + tier] = static_cast<uint8_t>(Role::kSource);
          columns[row * kTiers + tier] = slots.data()[row];
        }
        return std::tuple(to_numpy(std::move(roles), count, kTiers), to_numpy(std::move(columns), count, kTiers),
                          to_numpy(std::move(numbers), count, kTiers));
      },
      nb::arg("tiers"), nb::arg("slots"),
      "Begin a plan: page i comes from slots[i] of tiers[i]. Returns roles, slots, numbers as Mover.submit() takes "
      "them.");
}

void bind_mover(nb::module_& module) {
  bind_words(module);
  bind_plan(module);
  bind_waker(module);
  bind_inbox(module);
  bind_transfer(module);
  bind_mover_class(module);
}

}  // namespace stepwell::bind
