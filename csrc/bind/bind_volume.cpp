// Slab, VolumeHeader, Volume, VolumeSet and the reading of another's page. No view of a mapping of a file leaves here.
#include <nanobind/stl/tuple.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bind.h"
#include "guard.h"
#include "medium.h"
#include "slab.h"
#include "volume.h"
#include "volume_reader.h"

namespace stepwell::bind {
namespace {

using PageBytes = Array1<uint8_t>;
using MutablePageBytes = MutableArray1<uint8_t>;
using BytesColumn = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>;

template <typename T>
using Column = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

class StopFlag {
 public:
  void set() noexcept { flag_.store(true, std::memory_order_relaxed); }
  bool is_set() const noexcept { return flag_.load(std::memory_order_relaxed); }
  const std::atomic<bool>* address() const noexcept { return &flag_; }

 private:
  std::atomic<bool> flag_{false};
};

[[noreturn]] void raise_os_error(int error) {
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

Key key_of(const nb::bytes& bytes, const char* name, size_t least) {
  if (bytes.size() < least || bytes.size() > kMaxKeyBytes)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) + " bytes, not " +
                                std::to_string(least) + " to 64");
  Key key;
  key.length = static_cast<uint8_t>(bytes.size());
  std::memcpy(key.bytes.data(), bytes.c_str(), bytes.size());
  return key;
}

nb::bytes bytes_of(const Key& key) { return nb::bytes(key.bytes.data(), key.length); }

Label label_of(const nb::bytes& key, uint8_t kind, uint64_t epoch, const nb::bytes& parent, uint8_t parent_state,
               uint32_t depth) {
  if (parent_state > static_cast<uint8_t>(ParentState::kUnknown))
    throw std::invalid_argument("parent state " + std::to_string(parent_state) + " is not 0, 1 or 2");
  Label label;
  label.key = key_of(key, "key", 1);
  label.parent = key_of(parent, "parent", 0);
  label.parent_state = static_cast<ParentState>(parent_state);
  if ((label.parent_state == ParentState::kKnown) != (label.parent.length > 0))
    throw std::invalid_argument("a parent key is given if and only if parent_state is 1 (known)");
  label.kind = kind;
  label.epoch = epoch;
  label.depth = depth;
  return label;
}

void check_page(const PageShape& shape, size_t bytes) {
  if (bytes != shape.page_bytes())
    throw std::invalid_argument("page of " + std::to_string(bytes) + " bytes, not " +
                                std::to_string(shape.page_bytes()));
}

// The scratch is given where many pages are moved: a fresh one pays its first touch each time.
Status write_whole(Medium& medium, const PageShape& shape, uint32_t slot, const Label& label, const PageBytes& data,
                   Scratch* scratch) {
  check_page(shape, data.size());
  const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
  const GilRelease release;
  Scratch own;
  return write_page(medium, shape, slot, label, bytes, scratch == nullptr ? own : *scratch);
}

Status read_whole(Medium& medium, const PageShape& shape, uint32_t slot, const Label& label,
                  const MutablePageBytes& out, Scratch* scratch) {
  check_page(shape, out.size());
  auto* bytes = reinterpret_cast<std::byte*>(out.data());
  const GilRelease release;
  Scratch own;
  return read_page(medium, shape, slot, label, bytes, scratch == nullptr ? own : *scratch);
}

void bind_medium(nb::module_& module) {
  nb::class_<Medium> cls(module, "Medium", "A place that holds pages.");
  cls.def(
      "retire",
      [](Medium& medium, Array1<uint32_t> slots) {
        std::vector<uint8_t> statuses(slots.size());
        {
          const GilRelease release;
          for (size_t i = 0; i < slots.size(); ++i) statuses[i] = static_cast<uint8_t>(medium.retire(slots.data()[i]));
        }
        return to_numpy(std::move(statuses));
      },
      nb::arg("slots"),
      "Free the records of slots: nobody finds their pages any more. Returns a status each, uint8[n].");
  cls.def(
      "rewrite_and_check",
      [](Medium& medium, uint32_t slot) {
        const GilRelease release;
        Scratch scratch;
        return medium.rewrite_and_check(slot, scratch);
      },
      nb::arg("slot"), "Write patterns over a slot and read them back: the way out of quarantine.");
  cls.def_prop_ro("does_io", &Medium::does_io, "Whether reading and writing is file I/O.");
}

template <typename M>
void bind_pages(nb::class_<M, Medium>& cls) {
  cls.def(
      "write_page",
      [](M& medium, uint32_t slot, PageBytes data, nb::bytes key, uint8_t kind, uint64_t epoch, nb::bytes parent,
         uint8_t parent_state, uint32_t depth, Scratch* scratch) {
        const Label label = label_of(key, kind, epoch, parent, parent_state, depth);
        return write_whole(medium, medium.shape(), slot, label, data, scratch);
      },
      nb::arg("slot"), nb::arg("data"), nb::kw_only(), nb::arg("key"), nb::arg("kind") = 1, nb::arg("epoch") = 0,
      nb::arg("parent") = nb::bytes(""), nb::arg("parent_state") = 2, nb::arg("depth") = kUnknownDepth,
      nb::arg("scratch").none() = nb::none(),
      "Write one whole page, data: uint8[page_bytes], and publish it. For tools and tests: the caller holds the slot.");
  cls.def(
      "read_page",
      [](M& medium, uint32_t slot, MutablePageBytes out, nb::bytes key, uint8_t kind, uint64_t epoch,
         Scratch* scratch) {
        const Label label = label_of(key, kind, epoch, nb::bytes(""), 2, kUnknownDepth);
        return read_whole(medium, medium.shape(), slot, label, out, scratch);
      },
      nb::arg("slot"), nb::arg("out"), nb::kw_only(), nb::arg("key"), nb::arg("kind") = 1, nb::arg("epoch") = 0,
      nb::arg("scratch").none() = nb::none(),
      "Read one whole page, verified, into out: uint8[page_bytes]. Nothing in out may be used unless the status is "
      "OK.");
}

struct RecoveredColumns {
  std::vector<uint32_t> slots, depths;
  std::vector<uint8_t> keys, key_lengths, parents, parent_lengths, parent_states, kinds;
  std::vector<uint64_t> epochs, stamps, generations;
};

RecoveredColumns columns_of(const std::vector<RecoveredPage>& pages) {
  RecoveredColumns columns;
  columns.keys.reserve(pages.size() * kMaxKeyBytes);
  columns.parents.reserve(pages.size() * kMaxKeyBytes);
  for (const RecoveredPage& page : pages) {
    const Label& label = page.label;
    columns.slots.push_back(page.slot);
    columns.keys.insert(columns.keys.end(), label.key.bytes.begin(), label.key.bytes.end());
    columns.key_lengths.push_back(label.key.length);
    columns.parents.insert(columns.parents.end(), label.parent.bytes.begin(), label.parent.bytes.end());
    columns.parent_lengths.push_back(label.parent.length);
    columns.parent_states.push_back(static_cast<uint8_t>(label.parent_state));
    columns.depths.push_back(label.depth);
    columns.kinds.push_back(label.kind);
    columns.epochs.push_back(label.epoch);
    columns.stamps.push_back(page.stamp);
    columns.generations.push_back(page.generation);
  }
  return columns;
}

using Arrays = std::tuple<Column<uint32_t>, BytesColumn, Column<uint8_t>, BytesColumn, Column<uint8_t>, Column<uint8_t>,
                          Column<uint32_t>, Column<uint8_t>, Column<uint64_t>, Column<uint64_t>, Column<uint64_t>>;

Arrays arrays_of(RecoveredColumns&& columns) {
  const size_t rows = columns.slots.size();
  return {to_numpy(std::move(columns.slots)),          to_numpy(std::move(columns.keys), rows, kMaxKeyBytes),
          to_numpy(std::move(columns.key_lengths)),    to_numpy(std::move(columns.parents), rows, kMaxKeyBytes),
          to_numpy(std::move(columns.parent_lengths)), to_numpy(std::move(columns.parent_states)),
          to_numpy(std::move(columns.depths)),         to_numpy(std::move(columns.kinds)),
          to_numpy(std::move(columns.epochs)),         to_numpy(std::move(columns.stamps)),
          to_numpy(std::move(columns.generations))};
}

auto recover(Volume& volume) {
  RecoveryCounts counts;
  Status status;
  RecoveredColumns columns;
  {
    const GilRelease release;
    std::vector<RecoveredPage> pages;
    status = volume.recover(&pages, &counts);
    columns = columns_of(pages);
  }
  if (status != Status::kOk) raise_os_error(EIO);
  const std::tuple rest(counts.duplicate, counts.damaged + counts.worn);
  return std::tuple_cat(arrays_of(std::move(columns)), rest);
}

template <size_t N>
std::array<uint8_t, N> array_of(const nb::bytes& bytes, const char* name) {
  if (bytes.size() != N)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) + " bytes, not " +
                                std::to_string(N));
  std::array<uint8_t, N> array;
  std::memcpy(array.data(), bytes.c_str(), N);
  return array;
}

VolumeMedium medium_of(int medium) {
  if (medium != 1 && medium != 2)
    throw std::invalid_argument("medium " + std::to_string(medium) + " is neither 1 (shared) nor 2 (disk)");
  return static_cast<VolumeMedium>(medium);
}

void bind_header(nb::module_& module) {
  nb::class_<VolumeHeader>(module, "VolumeHeader", "The header of a volume, FORMAT.md 2.1.")
      .def_static(
          "plan",
          [](int medium, const PageShape& shape, uint64_t volume_bytes, uint64_t alignment, uint32_t ring_entries) {
            return VolumeHeader::plan(medium_of(medium), shape, volume_bytes, alignment, ring_entries);
          },
          nb::arg("medium"), nb::arg("shape"), nb::arg("volume_bytes"), nb::arg("alignment"),
          nb::arg("ring_entries") = 4096,
          "Lay out a volume of at most volume_bytes in all its files. Raises ValueError where not one page fits.")
      .def(
          "encode",
          [](const VolumeHeader& header) {
            std::array<std::byte, kHeaderBytes> bytes;
            header.encode(bytes.data());
            return nb::bytes(bytes.data(), bytes.size());
          },
          "Return the 4096 bytes of the header.")
      .def_static(
          "decode",
          [](nb::bytes bytes, uint64_t metadata_file_bytes, uint64_t pages_file_bytes) {
            if (bytes.size() != kHeaderBytes)
              throw std::invalid_argument("a header has 4096 bytes, not " + std::to_string(bytes.size()));
            VolumeHeader header;
            const std::string reason = VolumeHeader::decode(reinterpret_cast<const std::byte*>(bytes.c_str()),
                                                            metadata_file_bytes, pages_file_bytes, &header);
            if (!reason.empty()) throw std::invalid_argument("volume header: " + reason);
            return header;
          },
          nb::arg("data"), nb::arg("metadata_file_bytes"), nb::arg("pages_file_bytes"),
          "Check every field against every other and the file sizes. Raises ValueError with what is wrong.")
      .def_prop_ro("medium", [](const VolumeHeader& header) { return static_cast<int>(header.medium); })
      .def_ro("slots", &VolumeHeader::slots)
      .def_ro("layers", &VolumeHeader::layers)
      .def_ro("ring_entries", &VolumeHeader::ring_entries)
      .def_ro("page_bytes", &VolumeHeader::page_bytes)
      .def_ro("slot_bytes", &VolumeHeader::slot_bytes)
      .def_ro("alignment", &VolumeHeader::alignment)
      .def_ro("records_offset", &VolumeHeader::records_offset)
      .def_ro("checksums_offset", &VolumeHeader::checksums_offset)
      .def_ro("recency_offset", &VolumeHeader::recency_offset)
      .def_ro("ring_offset", &VolumeHeader::ring_offset)
      .def_ro("pages_offset", &VolumeHeader::pages_offset)
      .def_ro("metadata_bytes", &VolumeHeader::metadata_bytes)
      .def_ro("pages_bytes", &VolumeHeader::pages_bytes)
      .def_rw("kind", &VolumeHeader::kind)
      .def_rw("birth_ns", &VolumeHeader::birth_ns)
      .def_rw("epoch", &VolumeHeader::epoch)
      .def_prop_rw(
          "volume_id",
          [](const VolumeHeader& header) { return nb::bytes(header.volume_id.data(), header.volume_id.size()); },
          [](VolumeHeader& header, nb::bytes id) { header.volume_id = array_of<16>(id, "volume_id"); })
      .def_prop_rw(
          "boot_id", [](const VolumeHeader& header) { return nb::bytes(header.boot_id.data(), header.boot_id.size()); },
          [](VolumeHeader& header, nb::bytes id) { header.boot_id = array_of<16>(id, "boot_id"); })
      .def_prop_rw(
          "fingerprint",
          [](const VolumeHeader& header) { return nb::bytes(header.fingerprint.data(), header.fingerprint.size()); },
          [](VolumeHeader& header, nb::bytes value) { header.fingerprint = array_of<32>(value, "fingerprint"); });
}

void bind_slab(nb::module_& module) {
  nb::class_<Scratch>(module, "Scratch", "A worker's private memory, kept between calls. One thread at a time.")
      .def(nb::init<>());
  bind_medium(module);
  nb::class_<Slab, Medium> slab(module, "Slab", "Private host memory: fixed slots of one page.");
  slab.def(nb::new_(&made_to_end_without_gil<Slab, const PageShape&, uint32_t>), nb::arg("shape"), nb::arg("slots"))
      .def_prop_ro("slot_bytes", &Slab::slot_bytes)
      .def_prop_ro("slots", &Slab::slots)
      .def(
          "address",
          [](const Slab& self, uint32_t slot) {
            if (slot >= self.slots()) throw nb::index_error("slot out of range");
            return reinterpret_cast<uintptr_t>(self.slot_address(slot));
          },
          nb::arg("slot"), "Return the address of a slot's first byte.")
      .def(
          "view",
          [](Slab& self) {
            const std::array<size_t, 2> shape{self.slots(), self.slot_bytes()};
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(self.slot_address(0), 2, shape.data(), nb::find(&self));
          },
          "Return all slots as uint8[slots, slot_bytes]; the array keeps the slab alive.");
  bind_pages(slab);
}

void bind_volumes(nb::module_& module) {
  nb::class_<StopFlag>(module, "StopFlag", "Tells a long call on another thread to stop.")
      .def(nb::init<>())
      .def("set", &StopFlag::set)
      .def_prop_ro("is_set", &StopFlag::is_set);

  nb::class_<Volume, Medium> volume(module, "Volume", "One shared or disk volume, opened by its one writer.");
  volume
      .def(nb::new_([](const PageShape& shape, const VolumeHeader& header, int metadata_fd, int pages_fd,
                       bool direct_io, bool durable) {
             Descriptor metadata(metadata_fd);
             Descriptor pages(pages_fd);
             try {
               return made_to_end_without_gil<Volume>(shape, header, std::move(metadata), std::move(pages), direct_io,
                                                      durable ? Durability::kPower : Durability::kProcess);
             } catch (const std::system_error& error) {
               raise_os_error(error.code().value());
             }
           }),
           nb::arg("shape"), nb::arg("header"), nb::arg("metadata_fd"), nb::arg("pages_fd") = -1,
           nb::arg("direct_io") = false, nb::arg("durable") = false,
           "Open the files of a complete volume; durable: what is written survives power loss. Takes ownership of both "
           "descriptors, also where it raises: OSError where a system call failed, RuntimeError where the volume is "
           "damaged or another's.")
      .def_prop_ro(
          "header", [](const Volume& self) { return self.header(); }, "A copy of the header.")
      .def("recover", &recover,
           "Read all records (adoption), of whatever epoch, and free those that are damaged or twice there.\n\n"
           "Returns (slots u32[n], keys u8[n, 64], key_lengths u8[n], parents u8[n, 64], parent_lengths u8[n],\n"
           "parent_states u8[n], depths u32[n], kinds u8[n], epochs u64[n], stamps u64[n], generations u64[n],\n"
           "duplicate int, damaged int). Raises OSError where the records cannot be read.")
      .def(
          "generations",
          [](Volume& self, Array1<uint32_t> slots) {
            std::vector<uint64_t> generations(slots.size());
            {
              const GilRelease release;
              for (size_t i = 0; i < slots.size(); ++i) {
                if (self.generation_of(slots.data()[i], &generations[i]) != Status::kOk) generations[i] = 0;
              }
            }
            return to_numpy(std::move(generations));
          },
          nb::arg("slots"), "Return the generations of slots, u64[n]; 0 also where one cannot be read.")
      .def(
          "write_recency",
          [](Volume& self, Array1<uint32_t> slots, Array1<uint64_t> stamps) {
            if (slots.size() != stamps.size()) throw nb::value_error("slots and stamps differ in length");
            const GilRelease release;
            return self.write_recency(slots.data(), stamps.data(), slots.size());
          },
          nb::arg("slots"), nb::arg("stamps"), "Write the stamps of slots: the order of pages, FORMAT.md 2.4.")
      .def(
          "write_boot_id",
          [](Volume& self, nb::bytes boot_id) {
            const auto id = array_of<16>(boot_id, "boot_id");
            const GilRelease release;
            return self.write_boot_id(id);
          },
          nb::arg("boot_id"), "Rewrite the header with another boot id: bytes, 16 of them.")
      .def(
          "prefault",
          [](Volume& self, const StopFlag& stop) {
            const GilRelease release;
            return self.prefault(stop.address());
          },
          nb::arg("stop"), "Touch every page of the mapping; CANCELLED where stop was set. Nothing to do on disk.")
      .def("sync", &Volume::sync, nb::call_guard<GilRelease>(), "Make all that the files hold durable.")
      .def_prop_ro("is_suspect", &Volume::is_suspect, "Whether a sync failed: it takes no page until opened anew.")
      .def_prop_ro("syncs", &Volume::syncs, "Syncs so far.")
      .def("leave_mapping", &Volume::leave_mapping,
           "Use pread and pwrite from now on: for when the SIGBUS handler is no longer ours.");
  bind_pages(volume);

  nb::class_<VolumeSet, Medium> set(module, "VolumeSet",
                                    "All volumes of a tier as one medium: slot = number << 20 | slot.");
  set.def(
         "__init__",
         [](VolumeSet* self, bool does_io, bool durable) {
           new (self) VolumeSet(does_io, durable ? Durability::kPower : Durability::kProcess);
         },
         nb::arg("does_io"), nb::arg("durable") = false)
      .def("add", &VolumeSet::add, nb::arg("volume"), "Add a volume and return its number.")
      .def("remove", &VolumeSet::remove, nb::arg("number"),
           "Take a volume out; None where there is none. Requires that no slot of it is claimed, resident or pinned.")
      .def("get", &VolumeSet::get, nb::arg("number"), "Return the volume of a number, or None.");
  set.def(
      "write_page",
      [](VolumeSet& self, uint32_t slot, PageBytes data, nb::bytes key, uint8_t kind, uint64_t epoch, nb::bytes parent,
         uint8_t parent_state, uint32_t depth, Scratch* scratch) {
        const Label label = label_of(key, kind, epoch, parent, parent_state, depth);
        const std::shared_ptr<Volume> member = self.get(slot >> kSlotBits);
        if (member == nullptr) return Status::kInvalid;
        return write_whole(self, member->shape(), slot, label, data, scratch);
      },
      nb::arg("slot"), nb::arg("data"), nb::kw_only(), nb::arg("key"), nb::arg("kind") = 1, nb::arg("epoch") = 0,
      nb::arg("parent") = nb::bytes(""), nb::arg("parent_state") = 2, nb::arg("depth") = kUnknownDepth,
      nb::arg("scratch").none() = nb::none(), "As Volume.write_page, slot of the whole set.");
  set.def(
      "read_page",
      [](VolumeSet& self, uint32_t slot, MutablePageBytes out, nb::bytes key, uint8_t kind, uint64_t epoch,
         Scratch* scratch) {
        const Label label = label_of(key, kind, epoch, nb::bytes(""), 2, kUnknownDepth);
        const std::shared_ptr<Volume> member = self.get(slot >> kSlotBits);
        if (member == nullptr) return Status::kInvalid;
        return read_whole(self, member->shape(), slot, label, out, scratch);
      },
      nb::arg("slot"), nb::arg("out"), nb::kw_only(), nb::arg("key"), nb::arg("kind") = 1, nb::arg("epoch") = 0,
      nb::arg("scratch").none() = nb::none(), "As Volume.read_page, slot of the whole set.");
}

// A read-only mapping of another's volume for the length of one call.
class ForeignMapping {
 public:
  ForeignMapping(int fd, uint64_t bytes) : bytes_(bytes) {
    if (!guard::install()) throw std::runtime_error("cannot install the SIGBUS guard");
    void* address = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) raise_os_error(errno);
    if (!guard::add_range(address, bytes)) {
      ::munmap(address, bytes);
      throw std::runtime_error("cannot guard the mapping of a volume: 4096 ranges are in use");
    }
    address_ = static_cast<std::byte*>(address);
  }
  ~ForeignMapping() {
    guard::remove_range(address_);
    ::munmap(address_, bytes_);
  }
  ForeignMapping(const ForeignMapping&) = delete;
  ForeignMapping& operator=(const ForeignMapping&) = delete;
  const std::byte* address() const noexcept { return address_; }

 private:
  std::byte* address_ = nullptr;
  uint64_t bytes_;
};

Status read_foreign(const PageShape& shape, const VolumeHeader& header, int metadata_fd, int pages_fd, uint32_t slot,
                    uint64_t generation, MutablePageBytes out, nb::bytes key, uint8_t kind, uint64_t epoch,
                    bool mapped) {
  const Label wanted = label_of(key, kind, epoch, nb::bytes(""), 2, kUnknownDepth);
  check_page(shape, out.size());
  if (mapped && header.medium != VolumeMedium::kShared)
    throw std::invalid_argument("the pages of a disk volume are never mapped");
  std::unique_ptr<ForeignMapping> mapping;
  if (mapped) mapping = std::make_unique<ForeignMapping>(metadata_fd, header.metadata_bytes);
  const int pages = header.medium == VolumeMedium::kShared ? metadata_fd : pages_fd;
  auto* target = reinterpret_cast<std::byte*>(out.data());
  const GilRelease release;
  return read_foreign_page(shape, header, metadata_fd, pages, mapped ? mapping->address() : nullptr, slot, generation,
                           wanted, target);
}

std::tuple<uint64_t, std::optional<SlotRecord>> peek_record(const VolumeHeader& header, int metadata_fd,
                                                            uint32_t slot) {
  if (slot >= header.slots) throw nb::index_error("slot out of range");
  std::array<std::byte, kRecordBytes> bytes;
  int result = 0;
  {
    const GilRelease release;
    result =
        file::pread_all(metadata_fd, bytes.data(), bytes.size(), header.records_offset + uint64_t{kRecordBytes} * slot);
  }
  if (result < 0) raise_os_error(-result);
  SlotRecord record;
  const bool is_right = SlotRecord::decode(bytes.data(), &record);
  return {first_word(bytes.data()), is_right ? std::optional(record) : std::nullopt};
}

void bind_foreign(nb::module_& module) {
  nb::class_<SlotRecord>(module, "SlotRecord", "A slot record that holds a page, FORMAT.md 2.2.")
      .def_ro("generation", &SlotRecord::generation)
      .def_ro("length", &SlotRecord::length)
      .def_ro("page_checksum", &SlotRecord::page_checksum)
      .def_prop_ro("key", [](const SlotRecord& self) { return bytes_of(self.label.key); })
      .def_prop_ro("parent", [](const SlotRecord& self) { return bytes_of(self.label.parent); })
      .def_prop_ro("parent_state", [](const SlotRecord& self) { return static_cast<int>(self.label.parent_state); })
      .def_prop_ro("kind", [](const SlotRecord& self) { return self.label.kind; })
      .def_prop_ro("depth", [](const SlotRecord& self) { return self.label.depth; })
      .def_prop_ro("epoch", [](const SlotRecord& self) { return self.label.epoch; });
  module.def(
      "read_foreign_page", &read_foreign, nb::arg("shape"), nb::arg("header"), nb::arg("metadata_fd"),
      nb::arg("pages_fd"), nb::arg("slot"), nb::arg("generation"), nb::arg("out"), nb::kw_only(), nb::arg("key"),
      nb::arg("kind") = 1, nb::arg("epoch") = 0, nb::arg("mapped") = false,
      "Read one page of a volume that another process may be writing, FORMAT.md 4, into out: uint8[page_bytes].\n\n"
      "mapped: the bytes through a mapping made for this call, else by pread. pages_fd: -1 for a shared volume.\n"
      "Returns OK, STALE, CHECKSUM, IO_ERROR or BUS_FAULT; unless OK nothing in out may be used.");
  module.def(
      "peek_record", &peek_record, nb::arg("header"), nb::arg("metadata_fd"), nb::arg("slot"),
      "Return (generation, SlotRecord) of a slot, None in place of the record where the slot is free or the record "
      "is damaged or just being written. Raises OSError.");
}

auto read_records(const VolumeReader& reader, uint32_t first, uint32_t count) {
  Status status;
  RecoveredColumns columns;
  std::vector<uint32_t> damaged;
  EmptySlots empty;
  {
    const GilRelease release;
    std::vector<RecoveredPage> pages;
    status = reader.read_records(first, count, &pages, &damaged, &empty);
    columns = columns_of(pages);
  }
  if (status == Status::kInvalid) throw nb::index_error("slots out of range");
  if (status != Status::kOk) raise_os_error(EIO);
  return std::tuple_cat(arrays_of(std::move(columns)), std::tuple(to_numpy(std::move(damaged)), empty));
}

void bind_reader(nb::module_& module) {
  nb::enum_<PageVerdict>(module, "PageVerdict", "What a check of a page found.")
      .value("right", PageVerdict::kRight)
      .value("damaged", PageVerdict::kDamaged)
      .value("changed", PageVerdict::kChanged)
      .value("unreadable", PageVerdict::kUnreadable)
      .value("no_layout", PageVerdict::kNoLayout);
  nb::enum_<PageDamage>(module, "PageDamage", "What of a damaged page is wrong.")
      .value("none", PageDamage::kNone)
      .value("record", PageDamage::kRecord)
      .value("checksums", PageDamage::kChecksums)
      .value("layers", PageDamage::kLayers);
  nb::class_<PageCheck>(module, "PageCheck", "The outcome of a check of one page.")
      .def_ro("verdict", &PageCheck::verdict)
      .def_ro("damage", &PageCheck::damage)
      .def_ro("layers", &PageCheck::layers);
  nb::class_<EmptySlots>(module, "EmptySlots", "How many slots hold no page, by why.")
      .def_ro("never_written", &EmptySlots::never_written)
      .def_ro("odd", &EmptySlots::odd)
      .def_ro("worn", &EmptySlots::worn);
  nb::class_<VolumeReader>(module, "VolumeReader",
                           "Another's volume as tools read it: by pread, no lock, no mapping, no write.")
      .def(
          "__init__",
          [](VolumeReader* self, const VolumeHeader& header, int metadata_fd, int pages_fd) {
            Descriptor metadata(metadata_fd);
            Descriptor pages(pages_fd);
            new (self) VolumeReader(header, std::move(metadata), std::move(pages));
          },
          nb::arg("header"), nb::arg("metadata_fd"), nb::arg("pages_fd") = -1,
          "header: decoded against the sizes of these files. Takes ownership of both descriptors, also where it raises "
          "ValueError.")
      .def("read_records", &read_records, nb::arg("first"), nb::arg("count"),
           "Read the records of slots first .. first + count - 1.\n\n"
           "Returns (slots u32[n], keys u8[n, 64], key_lengths u8[n], parents u8[n, 64], parent_lengths u8[n],\n"
           "parent_states u8[n], depths u32[n], kinds u8[n], epochs u64[n], stamps u64[n], generations u64[n],\n"
           "slots of damaged records u32[m], EmptySlots). Raises OSError where they cannot be read.")
      .def(
          "check_pages",
          [](VolumeReader& self, Array1<uint32_t> slots) {
            std::vector<PageCheck> checks;
            {
              const GilRelease release;
              for (size_t i = 0; i < slots.size(); ++i) checks.push_back(self.check_page(slots.data()[i]));
            }
            return checks;
          },
          nb::arg("slots"), "Read the pages of some slots with all their layers; a PageCheck each.")
      .def_prop_ro("slots", [](const VolumeReader& self) { return self.header().slots; })
      .def_prop_ro("page_bytes", [](const VolumeReader& self) { return self.header().page_bytes; })
      .def("use_layers", &VolumeReader::use_layers, nb::arg("layer_bytes"),
           "Say where layers end. Raises ValueError where that is no page of this volume.")
      .def_prop_ro(
          "layer_bytes",
          [](const VolumeReader& self) {
            std::vector<uint64_t> sizes;
            const PageShape* shape = self.shape();
            for (uint32_t i = 0; shape != nullptr && i < shape->layers(); ++i) sizes.push_back(shape->layer_bytes(i));
            return sizes;
          },
          "The sizes of layers, given or found; empty while they are not known.");
}

}  // namespace

void bind_volume(nb::module_& module) {
  bind_slab(module);
  bind_header(module);
  bind_volumes(module);
  bind_foreign(module);
  bind_reader(module);
}

}  // namespace stepwell::bind
