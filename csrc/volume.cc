#include "volume.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <numeric>
#include <stdexcept>
#include <system_error>

#include "crc32c.h"
#include "fault.h"
#include "fence.h"
#include "guard.h"

namespace stepwell {

namespace {

constexpr size_t kChunkBytes = 1u << 20;      // of records or stamps read at once
constexpr uint64_t kPrefaultStep = 2u << 20;  // 512 first touches of about 4 us: 2 ms between looks at the stop flag
constexpr uint64_t kSmallestPage = 4096;
constexpr size_t kGenerationBytes = sizeof(uint64_t);

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

Status from_errno(int result) noexcept { return result < 0 ? Status::kIOError : Status::kOk; }

// A fault point that can fail the step that follows it.
bool fails(const char* point) noexcept { return fault::reach(point).error != 0; }

// What a step ends with that failed itself, or at the fault point behind it.
Status failed(Status status) noexcept { return status == Status::kOk ? Status::kIOError : status; }

struct TouchJob {
  std::byte* first;
  uint64_t bytes;
};

// Without TSan: it performs atomic accesses inside its runtime, under a lock that a fault would leave locked.
__attribute__((no_sanitize("thread"), noinline)) void touch_leaf(void* argument) noexcept {
  const auto& job = *static_cast<const TouchJob*>(argument);
  for (uint64_t offset = 0; offset < job.bytes; offset += kSmallestPage)
    __atomic_fetch_or(reinterpret_cast<uint8_t*>(job.first + offset), uint8_t{0}, __ATOMIC_RELAXED);
}

// First touch of every page of a mapping that leaves its content alone, whatever a worker stores there meanwhile.
Status touch(std::byte* first, uint64_t bytes) noexcept {
  TouchJob job{first, bytes};
  return guard::run(touch_leaf, &job);
}

// The world failed, not the volume: another try may work, so that nobody must take it for damaged.
[[noreturn]] void throw_io_error(int result, const std::string& what) {
  throw std::system_error(-result, std::generic_category(), what);
}

uint64_t file_bytes(const Descriptor& descriptor, const char* name) {
  FileStat stat;
  if (const int result = file::fstat(descriptor.get(), &stat); result < 0)
    throw_io_error(result, std::string("cannot stat the ") + name + " file of a volume");
  if (!stat.is_regular) throw std::runtime_error(std::string("the ") + name + " file of a volume is no regular file");
  return stat.size;
}

void check_header(const VolumeHeader& header, const Descriptor& metadata, const Descriptor& pages) {
  if (!metadata.valid()) throw std::runtime_error("volume without a metadata file");
  const bool shared = header.medium == VolumeMedium::kShared;
  if (shared == pages.valid())
    throw std::runtime_error(shared ? "a shared volume has no pages file" : "a disk volume needs its pages file");
  const uint64_t metadata_bytes = file_bytes(metadata, "metadata");
  const uint64_t pages_bytes = pages.valid() ? file_bytes(pages, "pages") : 0;
  std::array<std::byte, kHeaderBytes> found, expected;
  if (const int result = file::pread_all(metadata.get(), found.data(), found.size(), 0); result < 0)
    throw_io_error(result, "cannot read the header of a volume");
  VolumeHeader decoded;
  const std::string reason = VolumeHeader::decode(found.data(), metadata_bytes, pages_bytes, &decoded);
  if (!reason.empty()) throw std::runtime_error("volume header damaged: " + reason);
  header.encode(expected.data());
  if (found != expected) throw std::runtime_error("the header of the volume is not the one given");
}

void check_shape(const VolumeHeader& header, const PageShape& shape) {
  if (header.page_bytes != shape.page_bytes() || header.layers != shape.layers()) {
    throw std::runtime_error("volume of pages of " + std::to_string(header.page_bytes) + " bytes in " +
                             std::to_string(header.layers) + " layers does not fit pages of " +
                             std::to_string(shape.page_bytes()) + " bytes in " + std::to_string(shape.layers()));
  }
  if (header.fingerprint != shape.fingerprint()) throw std::runtime_error("volume of another fingerprint");
}

}  // namespace

Volume::Volume(const PageShape& shape, VolumeHeader header, Descriptor metadata, Descriptor pages, bool direct_io,
               Durability durability)
    : shape_(shape),
      header_(header),
      metadata_(std::move(metadata)),
      pages_(std::move(pages)),
      direct_io_(direct_io),
      durability_(durability) {
  if (durability == Durability::kPower && header.medium != VolumeMedium::kDisk)
    throw std::invalid_argument("only a disk volume outlives the machine's power");
  check_header(header_, metadata_, pages_);
  check_shape(header_, shape_);
  if (const int result = file::pread_all(metadata_.get(), &ring_counter_, sizeof(ring_counter_), header_.ring_offset);
      result < 0)
    throw_io_error(result, "cannot read the ring counter of a volume");
  if (settles()) freed_in_.resize(header_.slots);
  if (header_.medium == VolumeMedium::kShared) {
    if (!guard::install()) throw_io_error(-errno, "cannot install the SIGBUS guard");
    void* address = nullptr;
    if (const int result = file::map(metadata_.get(), header_.metadata_bytes, &address); result < 0)
      throw_io_error(result, "cannot map a shared volume");
    if (!guard::add_range(address, header_.metadata_bytes)) {
      file::unmap(address, header_.metadata_bytes);
      throw_io_error(-ENOMEM, "cannot guard the mapping of a volume: 4096 ranges are in use");
    }
    mapping_ = static_cast<std::byte*>(address);
  }
}

Volume::~Volume() {
  // In a forked child the mapping was never there, and its addresses may be another's.
  if (mapping_ == nullptr || !metadata_.valid()) return;
  // The range goes first: between the two calls no address of the range can be another mapping's.
  guard::remove_range(mapping_);
  file::unmap(mapping_, header_.metadata_bytes);
}

void Volume::look_at_handler() noexcept {
  if (by_mapping() && !guard::is_ours()) leave_mapping();
}

// --- metadata, by mapping or by descriptor

Status Volume::read_metadata(uint64_t offset, void* out, size_t bytes) const noexcept {
  if (by_mapping()) return guard::copy(out, mapping_ + offset, bytes, nullptr);
  return from_errno(file::pread_all(metadata_.get(), out, bytes, offset));
}

Status Volume::write_metadata(uint64_t offset, const void* data, size_t bytes) noexcept {
  if (by_mapping()) return guard::copy(mapping_ + offset, data, bytes, nullptr);
  return from_errno(file::pwrite_all(metadata_.get(), data, bytes, offset));
}

Status Volume::load_word(uint64_t offset, uint64_t* word) const noexcept {
  if (by_mapping()) return guard::load_acquire(mapping_ + offset, word);
  return from_errno(file::pread_all(metadata_.get(), word, sizeof(*word), offset));
}

Status Volume::store_word(uint64_t offset, uint64_t word) noexcept {
  if (by_mapping()) return guard::store_release(mapping_ + offset, word);
  return from_errno(file::pwrite_all(metadata_.get(), &word, sizeof(word), offset));
}

Status Volume::load_generation(uint32_t slot, uint64_t* generation) noexcept {
  return load_word(record_offset(slot), generation);
}

Status Volume::store_generation(uint32_t slot, uint64_t generation) noexcept {
  const Status status = store_word(record_offset(slot), generation);
  // After the store: a sync that has this number then begins after it.
  if (settles() && generation % 2 == 1) freed_in_[slot] = next_sync_.load();
  return status;
}

Status Volume::append_ring(const uint32_t* slots, const uint64_t* generations, size_t count) noexcept {
  constexpr size_t kMost = 256;
  std::array<std::array<uint64_t, 2>, kMost> words;
  const size_t most = std::min<size_t>(kMost, header_.ring_entries / kRingAheadPart);
  const std::lock_guard lock(meta_mutex_);
  for (size_t first = 0, taken = 0; first < count; first += taken) {
    // As many as lie together before the ring's end.
    const uint64_t at = ring_counter_ % header_.ring_entries;
    taken = std::min({most, count - first, static_cast<size_t>(header_.ring_entries - at)});
    for (size_t i = 0; i < taken; ++i) words[i] = {slots[first + i], generations[first + i]};
    const uint64_t entry = header_.ring_offset + kRingHeadBytes + kRingEntryBytes * at;
    Status status = write_metadata(entry, words.data(), kRingEntryBytes * taken);
    if (status != Status::kOk) return status;
    copy_fence();
    status = store_word(header_.ring_offset, ring_counter_ + taken);
    if (status != Status::kOk) return status;
    ring_counter_ += taken;
  }
  return Status::kOk;
}

Status Volume::skip_ring() noexcept {
  const std::lock_guard lock(meta_mutex_);
  const uint64_t counter = ring_counter_ + header_.ring_entries + 1;
  const Status status = store_word(header_.ring_offset, counter);
  if (status == Status::kOk) ring_counter_ = counter;
  return status;
}

// --- reading and writing a page

Status Volume::prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept {
  if (slot >= header_.slots) return Status::kInvalid;
  look_at_handler();
  std::array<std::byte, kRecordBytes> bytes;
  if (Status status = read_metadata(record_offset(slot), bytes.data(), bytes.size()); status != Status::kOk)
    return status;
  if (!holds_page(first_word(bytes.data()))) return Status::kStale;
  SlotRecord record;
  if (!SlotRecord::decode(bytes.data(), &record)) return Status::kChecksum;
  if (!same_page(record.label, label)) return Status::kStale;
  if (record.length != header_.page_bytes) return Status::kChecksum;

  if (Status status = resize_checksums(&scratch.source_checksums, header_.layers); status != Status::kOk) return status;
  const size_t checksum_bytes = sizeof(uint32_t) * header_.layers;
  Status status = read_metadata(checksums_offset(slot), scratch.source_checksums.data(), checksum_bytes);
  if (status != Status::kOk) return status;
  if (crc32c(0, scratch.source_checksums.data(), checksum_bytes) != record.page_checksum) return Status::kChecksum;

  source->checksums = scratch.source_checksums.data();
  if (by_mapping()) {
    source->bytes = mapping_ + page_offset(slot);
    source->guarded = true;
    return Status::kOk;
  }
  std::byte* target = scratch.source(header_.slot_bytes);
  if (target == nullptr) return Status::kIOError;
  const size_t wanted = direct_io_ ? header_.slot_bytes : header_.page_bytes;
  source->bytes = target;
  source->guarded = false;
  return from_errno(file::pread_all(pages_fd(), target, wanted, page_offset(slot)));
}

Status Volume::make_odd(uint32_t slot, uint64_t* odd) noexcept {
  uint64_t generation = 0;
  if (Status status = load_generation(slot, &generation); status != Status::kOk) return status;
  *odd = generation | 1;
  if (*odd == generation) return Status::kOk;
  const Status status = store_generation(slot, *odd);
  if (settles() && generation == 0) freed_in_[slot] = 0;  // no page was ever here: nothing to come back
  return status;
}

Status Volume::begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept {
  if (slot >= header_.slots) return Status::kInvalid;
  look_at_handler();
  if (fails("volume.begin")) return Status::kIOError;
  uint64_t odd = 0;
  if (Status status = make_odd(slot, &odd); status != Status::kOk) return status;
  full_fence();  // FORMAT.md 3.1: no store of the page may be seen before the odd generation
  if (odd >= kGenerationLimit - 1) return Status::kInvalid;
  if (fails("volume.odd")) return Status::kIOError;
  if (Status status = ensure_free_is_durable(slot); status != Status::kOk) return status;
  if (by_mapping()) {
    target->bytes = mapping_ + page_offset(slot);
    target->guarded = true;
    return Status::kOk;
  }
  target->bytes = scratch.target(header_.slot_bytes);
  target->guarded = false;
  if (target->bytes == nullptr) return Status::kIOError;
  std::memset(target->bytes + header_.page_bytes, 0, header_.slot_bytes - header_.page_bytes);
  return Status::kOk;
}

Status Volume::finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                            const PageTarget& target) noexcept {
  if (slot >= header_.slots || label.kind != header_.kind) return Status::kInvalid;
  if (label.key.length < 1 || label.key.length > kMaxKeyBytes || label.parent.length > kMaxKeyBytes)
    return Status::kInvalid;
  uint64_t odd = 0;
  if (Status status = load_generation(slot, &odd); status != Status::kOk) return status;
  if (odd % 2 == 0 || odd >= kGenerationLimit - 1) return Status::kInvalid;  // not begun

  Status status = Status::kOk;
  if (target.guarded) {
    copy_fence();
  } else {
    status = from_errno(file::pwrite_all(pages_fd(), target.bytes, header_.slot_bytes, page_offset(slot)));
  }
  if (status != Status::kOk || fails("volume.after_bytes")) return failed(status);

  const size_t checksum_bytes = sizeof(uint32_t) * header_.layers;
  status = write_metadata(checksums_offset(slot), checksums, checksum_bytes);
  if (status != Status::kOk || fails("volume.after_checksums")) return failed(status);

  SlotRecord record;
  record.generation = odd + 1;
  record.label = label;
  record.length = static_cast<uint32_t>(header_.page_bytes);
  record.page_checksum = crc32c(0, checksums, checksum_bytes);
  std::array<std::byte, kRecordBytes> bytes;
  record.encode(bytes.data());
  status = write_metadata(record_offset(slot) + kGenerationBytes, bytes.data() + kGenerationBytes,
                          kRecordBytes - kGenerationBytes);
  copy_fence();
  if (status != Status::kOk || fails("volume.after_record")) return failed(status);
  return settles() ? Status::kOk : publish(slot, record.generation);
}

Status Volume::publish(uint32_t slot, uint64_t generation) noexcept {
  Status status = store_generation(slot, generation);
  if (status == Status::kOk && !fails("volume.after_publish"))
    status = append_ring(slot, generation);
  else
    status = failed(status);
  if (status == Status::kOk && fails("volume.after_ring")) status = Status::kIOError;
  // Who is told that the write failed gives the slot back: nobody may find the page then.
  if (status != Status::kOk) store_generation(slot, generation + 1);
  return status;
}

// --- durability `power`

Status Volume::sync_file(const Descriptor& file) noexcept {
  if (is_suspect()) return Status::kIOError;
  const Status status = from_errno(file::sync(file.get()));
  syncs_.fetch_add(1, std::memory_order_relaxed);
  if (status != Status::kOk) is_suspect_.store(true, std::memory_order_relaxed);
  return status;
}

Status Volume::sync_metadata() noexcept {
  const uint64_t number = next_sync_.fetch_add(1);
  const Status status = sync_file(metadata_);
  if (status == Status::kOk) done_sync_.store(number);
  return status;
}

Status Volume::sync() noexcept {
  const std::lock_guard lock(sync_mutex_);
  if (pages_.valid()) {
    if (Status status = sync_file(pages_); status != Status::kOk) return status;
  }
  return sync_metadata();
}

Status Volume::ensure_free_is_durable(uint32_t slot) noexcept {
  if (!settles()) return Status::kOk;
  if (is_suspect()) return Status::kIOError;
  if (freed_in_[slot] <= done_sync_.load()) return Status::kOk;
  const std::lock_guard lock(sync_mutex_);
  return freed_in_[slot] <= done_sync_.load() ? Status::kOk : sync_metadata();
}

void Volume::settle(const uint32_t* slots, size_t count, Status* statuses) noexcept {
  const std::lock_guard lock(sync_mutex_);
  Status all = fails("volume.settle") ? Status::kIOError : sync_file(pages_);
  if (all == Status::kOk && fails("volume.after_bytes_sync")) all = Status::kIOError;
  std::fill_n(statuses, count, all);
  for (size_t first = 0, end = 0; first < count && all == Status::kOk; first = end) {
    for (end = first + 1; end < count && slots[end] == slots[end - 1] + 1;) ++end;
    publish_run(slots[first], static_cast<uint32_t>(end - first), statuses + first);
  }
  if (all != Status::kOk) return;
  all = sync_metadata();
  if (all == Status::kOk && !fails("volume.after_sync")) return;
  // Who is told that a write failed gives the slot back: nobody may find the page then.
  for (size_t i = 0; i < count; ++i) {
    if (statuses[i] == Status::kOk) retire(slots[i]);
    statuses[i] = Status::kIOError;
  }
}

// --- freeing a page

Status Volume::retire(uint32_t slot) noexcept {
  if (slot >= header_.slots) return Status::kInvalid;
  look_at_handler();
  if (fails("volume.retire")) return Status::kIOError;
  uint64_t generation = 0;
  if (Status status = load_generation(slot, &generation); status != Status::kOk) return status;
  if (generation == 0 || generation % 2 == 1) return Status::kOk;
  if (Status status = store_generation(slot, generation + 1); status != Status::kOk) return status;
  return append_ring(slot, generation + 1);
}

Status Volume::generation_of(uint32_t slot, uint64_t* generation) noexcept {
  return slot < header_.slots ? load_generation(slot, generation) : Status::kInvalid;
}

Status Volume::rewrite_and_check(uint32_t slot, Scratch& scratch) noexcept {
  if (slot >= header_.slots) return Status::kInvalid;
  if (Status status = retire(slot); status != Status::kOk) return status;
  uint64_t odd = 0;
  if (Status status = make_odd(slot, &odd); status != Status::kOk) return status;
  full_fence();
  // A damaged page that came back would be taken for the right one that was saved since elsewhere.
  if (Status status = ensure_free_is_durable(slot); status != Status::kOk) return status;
  for (const uint64_t pattern : {0xa5a5a5a5a5a5a5a5ull, 0x5a5a5a5a5a5a5a5aull}) {
    if (Status status = check_pattern(slot, pattern, scratch); status != Status::kOk) return status;
  }
  return Status::kOk;
}

// Writes the pattern over page, checksums and record (but not the generation) and reads all of it back.
Status Volume::check_pattern(uint32_t slot, uint64_t pattern, Scratch& scratch) noexcept {
  const size_t page_bytes = header_.slot_bytes;
  const size_t checksum_bytes = sizeof(uint32_t) * header_.layers;
  const size_t record_bytes = kRecordBytes - kGenerationBytes;
  const size_t most = std::max(page_bytes, std::max(checksum_bytes, record_bytes));
  std::byte* out = scratch.target(most);
  std::byte* in = scratch.source(most);
  if (out == nullptr || in == nullptr) return Status::kIOError;
  for (size_t i = 0; i + sizeof(uint64_t) <= most; i += sizeof(uint64_t)) {
    const uint64_t word = pattern ^ i;
    std::memcpy(out + i, &word, sizeof(word));
  }
  for (size_t i = most / 8 * 8; i < most; ++i) out[i] = static_cast<std::byte>(pattern);

  Status status;
  if (by_mapping()) {
    status = guard::copy(mapping_ + page_offset(slot), out, page_bytes, nullptr);
    copy_fence();
    if (status == Status::kOk) status = guard::copy(in, mapping_ + page_offset(slot), page_bytes, nullptr);
  } else {
    status = from_errno(file::pwrite_all(pages_fd(), out, page_bytes, page_offset(slot)));
    if (status == Status::kOk) status = from_errno(file::pread_all(pages_fd(), in, page_bytes, page_offset(slot)));
  }
  if (status != Status::kOk) return status;
  copy_fence();
  if (std::memcmp(in, out, page_bytes) != 0) return Status::kChecksum;

  struct Piece {
    uint64_t offset;
    size_t bytes;
  };
  for (const Piece& piece :
       {Piece{checksums_offset(slot), checksum_bytes}, Piece{record_offset(slot) + kGenerationBytes, record_bytes}}) {
    status = write_metadata(piece.offset, out, piece.bytes);
    copy_fence();
    if (status == Status::kOk) status = read_metadata(piece.offset, in, piece.bytes);
    if (status != Status::kOk) return status;
    copy_fence();
    if (std::memcmp(in, out, piece.bytes) != 0) return Status::kChecksum;
  }
  return Status::kOk;
}

// --- adoption

Status Volume::recover(std::vector<RecoveredPage>* pages, RecoveryCounts* counts) noexcept {
  pages->clear();
  *counts = {};
  try {
    std::vector<uint64_t> stamps;
    Status status = scan_recency(&stamps);
    if (status == Status::kOk) status = scan_records(stamps, pages, counts);
    if (status == Status::kOk) status = drop_duplicates(pages, counts);
    if (status != Status::kOk) pages->clear();
    // One jump of the counter in place of an entry for each: whoever follows the ring reads all records.
    if (status == Status::kOk && counts->freed() > 0) status = skip_ring();
    return status;
  } catch (const std::bad_alloc&) {
    pages->clear();
    return Status::kIOError;
  }
}

Status Volume::labels_of(const uint32_t* slots, const uint64_t* generations, size_t count,
                         std::vector<Label>* labels) const noexcept {
  labels->clear();
  try {
    for (size_t i = 0; i < count; ++i) {
      if (slots[i] >= header_.slots || !holds_page(generations[i])) continue;
      std::array<std::byte, kRecordBytes> bytes;
      if (Status status = read_metadata(record_offset(slots[i]), bytes.data(), bytes.size()); status != Status::kOk)
        return status;
      SlotRecord record;
      if (first_word(bytes.data()) != generations[i] || !SlotRecord::decode(bytes.data(), &record)) continue;
      if (record.is_of(header_)) labels->push_back(record.label);
    }
    return Status::kOk;
  } catch (const std::bad_alloc&) {
    return Status::kIOError;
  }
}

Status Volume::scan_recency(std::vector<uint64_t>* stamps) {
  stamps->resize(header_.slots);
  std::vector<std::byte> chunk(kChunkBytes / kRecencyBytes * kRecencyBytes);
  const auto slots_a_chunk = static_cast<uint32_t>(chunk.size() / kRecencyBytes);
  for (uint32_t first = 0; first < header_.slots; first += slots_a_chunk) {
    const uint32_t count = std::min(slots_a_chunk, header_.slots - first);
    Status status = read_metadata(header_.recency_offset + uint64_t{kRecencyBytes} * first, chunk.data(),
                                  size_t{kRecencyBytes} * count);
    if (status != Status::kOk) return status;
    copy_fence();
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t stamp = first_word(chunk.data() + size_t{kRecencyBytes} * i);
      if (stamp < kStampLimit) (*stamps)[first + i] = stamp;
    }
  }
  return Status::kOk;
}

Status Volume::scan_records(const std::vector<uint64_t>& stamps, std::vector<RecoveredPage>* pages,
                            RecoveryCounts* counts) {
  std::vector<std::byte> chunk(kChunkBytes / kRecordBytes * kRecordBytes);
  const auto slots_a_chunk = static_cast<uint32_t>(chunk.size() / kRecordBytes);
  for (uint32_t first = 0; first < header_.slots; first += slots_a_chunk) {
    const uint32_t count = std::min(slots_a_chunk, header_.slots - first);
    Status status = read_metadata(record_offset(first), chunk.data(), size_t{kRecordBytes} * count);
    if (status != Status::kOk) return status;
    copy_fence();
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t slot = first + i;
      const std::byte* bytes = chunk.data() + size_t{kRecordBytes} * i;
      const uint64_t generation = first_word(bytes);
      if (generation == 0 || generation % 2 == 1) {
        if (generation >= kGenerationLimit - 1) ++counts->worn;  // at its limit: never used again
        continue;
      }
      SlotRecord record;
      if (SlotRecord::decode(bytes, &record) && record.is_of(header_)) {
        pages->push_back({slot, record.label, generation, stamps[slot]});
        continue;
      }
      ++counts->damaged;
      if (status = store_generation(slot, generation + 1); status != Status::kOk) return status;
    }
  }
  return Status::kOk;
}

// Sorted, not hashed: keys were chosen by whoever wrote the volume. One key in two epochs is two pages.
Status Volume::drop_duplicates(std::vector<RecoveredPage>* pages, RecoveryCounts* counts) {
  std::vector<uint32_t> order(pages->size());
  std::iota(order.begin(), order.end(), 0u);
  const auto key_order = [](const Key& a, const Key& b) {
    if (a.length != b.length) return a.length < b.length ? -1 : 1;
    return std::memcmp(a.bytes.data(), b.bytes.data(), a.length);
  };
  std::sort(order.begin(), order.end(), [&](uint32_t i, uint32_t j) {
    const RecoveredPage &a = (*pages)[i], &b = (*pages)[j];
    if (const int keys = key_order(a.label.key, b.label.key); keys != 0) return keys < 0;
    if (a.label.epoch != b.label.epoch) return a.label.epoch < b.label.epoch;
    if (a.stamp != b.stamp) return a.stamp > b.stamp;
    if (a.generation != b.generation) return a.generation > b.generation;
    return a.slot < b.slot;
  });
  std::vector<bool> loses(pages->size());
  for (size_t i = 1; i < order.size(); ++i) {
    const RecoveredPage& page = (*pages)[order[i]];
    if (!same_page(page.label, (*pages)[order[i - 1]].label)) continue;
    if (Status status = store_generation(page.slot, page.generation + 1); status != Status::kOk) return status;
    loses[order[i]] = true;
    ++counts->duplicate;
  }
  size_t kept = 0;
  for (size_t i = 0; i < pages->size(); ++i) {
    if (!loses[i]) (*pages)[kept++] = (*pages)[i];
  }
  pages->resize(kept);
  return Status::kOk;
}

Status Volume::write_recency(const uint32_t* slots, const uint64_t* stamps, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) {
    if (slots[i] >= header_.slots) return Status::kInvalid;
  }
  const auto offset_of = [&](uint32_t slot) { return header_.recency_offset + uint64_t{kRecencyBytes} * slot; };
  if (by_mapping()) {
    look_at_handler();
    for (size_t i = 0; i < count; ++i) {
      const Status status = store_word(offset_of(slots[i]), stamps[i]);
      if (status != Status::kOk) return status;
    }
    return Status::kOk;
  }
  // One read and one write of what lies together, in place of a call for each slot.
  constexpr uint32_t kFarApart = 4096 / kRecencyBytes;
  try {
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return slots[a] < slots[b]; });
    std::vector<std::byte> entries;
    for (size_t first = 0, end; first < count; first = end) {
      for (end = first + 1; end < count && slots[order[end]] - slots[order[end - 1]] < kFarApart;) ++end;
      const uint32_t least = slots[order[first]];
      entries.resize(size_t{kRecencyBytes} * (slots[order[end - 1]] - least + 1));
      Status status = read_metadata(offset_of(least), entries.data(), entries.size());
      if (status != Status::kOk) return status;
      for (size_t i = first; i < end; ++i)
        std::memcpy(entries.data() + size_t{kRecencyBytes} * (slots[order[i]] - least), &stamps[order[i]], 8);
      status = write_metadata(offset_of(least), entries.data(), entries.size());
      if (status != Status::kOk) return status;
    }
    return Status::kOk;
  } catch (const std::bad_alloc&) {
    return Status::kIOError;
  }
}

Status Volume::write_boot_id(const std::array<uint8_t, 16>& boot_id) noexcept {
  VolumeHeader changed = header_;
  changed.boot_id = boot_id;
  std::array<std::byte, kHeaderBytes> bytes;
  changed.encode(bytes.data());
  // Within one sector, and no part of the checksum: whatever a kill or a power loss leaves of it, the header holds.
  const Status status = from_errno(
      file::pwrite_all(metadata_.get(), bytes.data() + kBootIdOffset, changed.boot_id.size(), kBootIdOffset));
  if (status == Status::kOk) header_ = changed;
  return status;
}

Status Volume::prefault(const std::atomic<bool>* stop) noexcept {
  if (mapping_ == nullptr) return Status::kOk;
  bool populate = true;
  for (uint64_t first = 0; first < header_.metadata_bytes; first += kPrefaultStep) {
    if (stop->load(std::memory_order_relaxed)) return Status::kCancelled;
    if (!by_mapping()) return Status::kOk;
    const uint64_t bytes = std::min(kPrefaultStep, header_.metadata_bytes - first);
    if (populate) {
      int result = 0;
      do {
        result = ::madvise(mapping_ + first, bytes, MADV_POPULATE_WRITE);
      } while (result != 0 && (errno == EINTR || errno == EAGAIN));
      if (result == 0) continue;
      if (errno != EINVAL) return errno == EFAULT ? Status::kBusFault : Status::kIOError;
      populate = false;  // a kernel before 5.14
    }
    const Status status = touch(mapping_ + first, bytes);
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

// --- another's page

namespace {

// Step 3 of FORMAT.md 4: the page into target, the checksum of each layer delivered into `found`.
Status deliver(const PageShape& shape, const VolumeHeader& header, int pages, const std::byte* mapping, uint32_t slot,
               uint32_t page_seed, std::byte* target, uint32_t* found) noexcept {
  const uint64_t offset = header.pages_offset + header.slot_bytes * slot;
  Scratch bounce;
  const std::byte* delivered = target;
  if (mapping == nullptr) {
    // O_DIRECT wants address and length aligned; a caller's buffer that already is needs no second copy.
    const bool aligned =
        reinterpret_cast<uintptr_t>(target) % header.alignment == 0 && header.page_bytes == header.slot_bytes;
    const bool shared = header.medium == VolumeMedium::kShared;
    std::byte* landing = shared || aligned ? target : bounce.source(header.slot_bytes);
    if (landing == nullptr) return Status::kIOError;
    const size_t bytes = landing == target ? header.page_bytes : header.slot_bytes;
    if (file::pread_all(pages, landing, bytes, offset) < 0) return Status::kIOError;
    delivered = landing;
  }
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    const uint64_t at = shape.layer_offset(layer);
    const uint64_t bytes = shape.layer_bytes(layer);
    uint32_t crc = PageShape::layer_seed(page_seed, layer);
    Status status = Status::kOk;
    if (mapping != nullptr) {
      status = guard::copy(target + at, mapping + offset + at, bytes, &crc);
    } else if (delivered == target) {
      crc = crc32c(crc, target + at, bytes);
    } else {
      crc = crc32c_copy(crc, target + at, delivered + at, bytes);
    }
    if (status != Status::kOk) return status;
    found[layer] = crc;
  }
  copy_fence();
  return Status::kOk;
}

}  // namespace

Status read_foreign_page(const PageShape& shape, const VolumeHeader& header, int metadata, int pages,
                         const std::byte* mapping, uint32_t slot, uint64_t generation, const Label& wanted,
                         std::byte* target, ForeignDetail* detail) noexcept {
  ForeignDetail own;
  if (detail == nullptr) detail = &own;
  detail->expected.clear();
  detail->found.clear();
  if (slot >= header.slots || !holds_page(generation)) return Status::kInvalid;
  if (shape.layers() != header.layers || shape.page_bytes() != header.page_bytes ||
      shape.fingerprint() != header.fingerprint)
    return Status::kInvalid;
  const uint64_t record_offset = header.records_offset + uint64_t{kRecordBytes} * slot;
  // What looks damaged and was rewritten meanwhile is only stale.
  const auto verdict = [&](Status damage) {
    uint64_t now = 0;
    acquire_fence();
    if (file::pread_all(metadata, &now, sizeof(now), record_offset) < 0) return Status::kIOError;
    return now == generation ? damage : Status::kStale;
  };

  std::array<std::byte, kRecordBytes> bytes;
  if (file::pread_all(metadata, bytes.data(), bytes.size(), record_offset) < 0) return Status::kIOError;
  acquire_fence();  // the page is read after its generation, or what is stale would count as damaged
  if (first_word(bytes.data()) != generation) return Status::kStale;
  SlotRecord record;
  if (!SlotRecord::decode(bytes.data(), &record)) return verdict(Status::kChecksum);
  if (!same_page(record.label, wanted)) return Status::kStale;
  if (record.length != header.page_bytes) return verdict(Status::kChecksum);

  std::vector<uint32_t>&expected = detail->expected, &found = detail->found;
  if (resize_checksums(&expected, header.layers) != Status::kOk) return Status::kIOError;
  const size_t checksum_bytes = sizeof(uint32_t) * header.layers;
  const uint64_t checksums_offset = header.checksums_offset + checksum_bytes * slot;
  if (file::pread_all(metadata, expected.data(), checksum_bytes, checksums_offset) < 0) return Status::kIOError;
  if (crc32c(0, expected.data(), checksum_bytes) != record.page_checksum) return verdict(Status::kChecksum);

  if (resize_checksums(&found, header.layers) != Status::kOk) return Status::kIOError;
  const Status status = deliver(shape, header, pages, mapping, slot, shape.page_seed(wanted), target, found.data());
  if (status != Status::kOk) return status;
  return verdict(found == expected ? Status::kOk : Status::kChecksum);
}

}  // namespace stepwell
