// Runs of a disk volume: pages in consecutive slots by one call for their bytes, one for their checksums, one for their
// records. Each page keeps the order of FORMAT.md 3: no step begins for any of them before the one before is over for
// all.
#include <algorithm>
#include <array>
#include <cstring>

#include "crc32c.h"
#include "fault.h"
#include "fence.h"
#include "volume.h"

namespace stepwell {

namespace {

// What one call moves: from 1 MiB on it is the device that bounds, and a page waits for few others.
constexpr uint64_t kRunBytes = 1u << 20;
constexpr uint32_t kRunPages = 256;  // small pages: one that fails makes so many be tried one by one
constexpr uint32_t kRecordsAtOnce = 64;
using Records = std::array<std::byte, size_t{kRecordBytes} * kRecordsAtOnce>;

void set_generation(std::byte* record, uint64_t generation) noexcept {
  std::memcpy(record, &generation, sizeof(generation));
}

// A fault point that each page passes by itself, and at which it can fail alone.
void pass(const char* point, uint32_t count, Status* statuses) noexcept {
  for (uint32_t i = 0; i < count; ++i) {
    if (statuses[i] == Status::kOk && fault::reach(point).error != 0) statuses[i] = Status::kIOError;
  }
}

}  // namespace

uint32_t Volume::longest_run(uint32_t slot) const noexcept {
  if (!does_io() || slot >= header_.slots) return 1;
  const auto fits = static_cast<uint32_t>(std::min<uint64_t>(kRunPages, kRunBytes / header_.slot_bytes));
  return std::max(1u, std::min(fits, header_.slots - slot));
}

Status Volume::read_records(uint32_t slot, uint32_t count, std::byte* records) const noexcept {
  return read_metadata(record_offset(slot), records, size_t{kRecordBytes} * count);
}

Status Volume::write_records(uint32_t slot, uint32_t count, const std::byte* records) noexcept {
  return write_metadata(record_offset(slot), records, size_t{kRecordBytes} * count);
}

void Volume::read_run(PageRun* run, Scratch& scratch) noexcept {
  const uint32_t slot = run->slot, count = run->count();
  if (!does_io() || slot >= header_.slots || count > header_.slots - slot) return;
  std::byte* const bytes = scratch.run(header_.slot_bytes * count);
  if (bytes == nullptr) return;
  const size_t checksum_bytes = sizeof(uint32_t) * header_.layers;
  if (read_metadata(checksums_offset(slot), run->checksums.data(), checksum_bytes * count) != Status::kOk) return;
  Records records;
  bool any = false;
  for (uint32_t first = 0; first < count; first += kRecordsAtOnce) {
    const uint32_t taken = std::min(kRecordsAtOnce, count - first);
    if (read_records(slot + first, taken, records.data()) != Status::kOk) return;
    for (uint32_t i = first; i < first + taken; ++i) {
      const std::byte* const encoded = records.data() + size_t{kRecordBytes} * (i - first);
      SlotRecord record;
      if (!holds_page(first_word(encoded)) || !SlotRecord::decode(encoded, &record)) continue;
      if (!same_page(record.label, *run->labels[i]) || record.length != header_.page_bytes) continue;
      const uint32_t* const checksums = run->checksums.data() + size_t{header_.layers} * i;
      if (crc32c(0, checksums, checksum_bytes) != record.page_checksum) continue;
      run->sources[i].checksums = checksums;
      any = true;
    }
  }
  if (!any) return;
  const uint64_t wanted = header_.slot_bytes * (count - 1) + (direct_io_ ? header_.slot_bytes : header_.page_bytes);
  // Which page is at fault is found by reading each.
  if (file::pread_all(pages_fd(), bytes, wanted, page_offset(slot)) < 0) return;
  for (uint32_t i = 0; i < count; ++i) {
    if (run->sources[i].checksums != nullptr) run->sources[i].bytes = bytes + header_.slot_bytes * i;
  }
}

// FORMAT.md 3.1 without its fence, of those whose status is kOk.
Status Volume::make_odd_run(uint32_t slot, uint32_t count, uint64_t* odd, Status* statuses) noexcept {
  Records records;
  for (uint32_t first = 0; first < count; first += kRecordsAtOnce) {
    const uint32_t taken = std::min(kRecordsAtOnce, count - first);
    Status status = read_records(slot + first, taken, records.data());
    if (status != Status::kOk) return status;
    std::array<uint64_t, kRecordsAtOnce> before;
    bool changes = false;
    for (uint32_t i = 0; i < taken; ++i) {
      std::byte* const record = records.data() + size_t{kRecordBytes} * i;
      before[i] = first_word(record);
      odd[first + i] = before[i] | 1;
      if (statuses[first + i] != Status::kOk || odd[first + i] == before[i]) continue;
      set_generation(record, odd[first + i]);
      changes = true;
    }
    if (!changes) continue;
    status = write_records(slot + first, taken, records.data());
    // Also where it failed: what it wrote before that is odd, and no sync has it yet.
    for (uint32_t i = 0; i < taken && settles(); ++i) {
      if (statuses[first + i] != Status::kOk || odd[first + i] == before[i]) continue;
      // As store_generation() and make_odd() have it: 0 where no page was ever here.
      freed_in_[slot + first + i] = before[i] == 0 ? 0 : next_sync_.load();
    }
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

bool Volume::begin_run(PageRun* run, Scratch& scratch) noexcept {
  const uint32_t slot = run->slot, count = run->count();
  if (!does_io() || slot >= header_.slots || count > header_.slots - slot) return false;
  std::byte* const bytes = scratch.run(header_.slot_bytes * count);
  if (bytes == nullptr) return false;
  Status* const statuses = run->statuses.data();
  pass("volume.begin", count, statuses);
  if (make_odd_run(slot, count, run->generations.data(), statuses) != Status::kOk) {
    std::fill_n(statuses, count, Status::kOk);
    return false;
  }
  full_fence();  // FORMAT.md 3.1, as in begin_write()
  for (uint32_t i = 0; i < count; ++i) {
    if (statuses[i] == Status::kOk && run->generations[i] >= kGenerationLimit - 1) statuses[i] = Status::kInvalid;
  }
  pass("volume.odd", count, statuses);
  for (uint32_t i = 0; i < count; ++i) {
    if (statuses[i] == Status::kOk) statuses[i] = ensure_free_is_durable(slot + i);
    run->targets[i] = PageTarget{bytes + header_.slot_bytes * i, false};
    std::memset(run->targets[i].bytes + header_.page_bytes, 0, header_.slot_bytes - header_.page_bytes);
  }
  return true;
}

// FORMAT.md 3.4: the records of pages of a run, not published yet.
Status Volume::describe_run(const PageRun& run, uint32_t first, uint32_t count) noexcept {
  Records records;
  for (uint32_t done = 0; done < count; done += kRecordsAtOnce) {
    const uint32_t taken = std::min(kRecordsAtOnce, count - done);
    for (uint32_t i = 0; i < taken; ++i) {
      const uint32_t page = first + done + i;
      std::byte* const encoded = records.data() + size_t{kRecordBytes} * i;
      SlotRecord record;
      record.generation = run.generations[page] + 1;
      record.label = *run.labels[page];
      record.length = static_cast<uint32_t>(header_.page_bytes);
      record.page_checksum =
          crc32c(0, run.checksums.data() + size_t{header_.layers} * page, sizeof(uint32_t) * header_.layers);
      record.encode(encoded);
      set_generation(encoded, run.generations[page]);
    }
    const Status status = write_records(run.slot + first + done, taken, records.data());
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

bool Volume::finish_run(PageRun* run, uint32_t first, uint32_t count) noexcept {
  for (uint32_t i = first; i < first + count; ++i) {
    const Label& label = *run->labels[i];
    if (label.kind != header_.kind || label.key.length < 1 || label.key.length > kMaxKeyBytes ||
        label.parent.length > kMaxKeyBytes || run->generations[i] % 2 == 0)
      return false;
  }
  const uint32_t slot = run->slot + first;
  Status* const statuses = run->statuses.data() + first;
  if (file::pwrite_all(pages_fd(), run->targets[first].bytes, header_.slot_bytes * count, page_offset(slot)) < 0)
    return false;
  pass("volume.after_bytes", count, statuses);
  const size_t checksum_bytes = sizeof(uint32_t) * header_.layers;
  const uint32_t* const checksums = run->checksums.data() + size_t{header_.layers} * first;
  if (write_metadata(checksums_offset(slot), checksums, checksum_bytes * count) != Status::kOk) return false;
  pass("volume.after_checksums", count, statuses);
  if (describe_run(*run, first, count) != Status::kOk) return false;
  pass("volume.after_record", count, statuses);
  if (!settles()) publish_run(slot, count, statuses);
  return true;
}

void Volume::publish_run(uint32_t slot, uint32_t count, Status* statuses) noexcept {
  for (uint32_t first = 0; first < count; first += kRecordsAtOnce)
    publish_records(slot + first, std::min(kRecordsAtOnce, count - first), statuses + first);
}

void Volume::publish_records(uint32_t slot, uint32_t count, Status* statuses) noexcept {
  Records records;
  const Status status = read_records(slot, count, records.data());
  std::array<uint32_t, kRecordsAtOnce> pages, slots;
  std::array<uint64_t, kRecordsAtOnce> generations;
  uint32_t published = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (statuses[i] != Status::kOk) continue;
    std::byte* const record = records.data() + size_t{kRecordBytes} * i;
    statuses[i] = status;
    if (status == Status::kOk && first_word(record) % 2 == 0) statuses[i] = Status::kInvalid;  // not begun
    if (statuses[i] != Status::kOk) continue;
    pages[published] = i;
    slots[published] = slot + i;
    generations[published] = first_word(record) + 1;
    set_generation(record, generations[published++]);
  }
  if (published == 0) return;
  if (write_records(slot, count, records.data()) != Status::kOk) {
    for (uint32_t i = 0; i < published; ++i) statuses[pages[i]] = publish(slots[i], generations[i]);
    return;
  }
  pass("volume.after_publish", count, statuses);
  std::array<uint64_t, kRecordsAtOnce> told_generations;
  std::array<uint32_t, kRecordsAtOnce> told_slots;
  uint32_t told = 0;
  for (uint32_t i = 0; i < published; ++i) {
    if (statuses[pages[i]] != Status::kOk) continue;
    told_slots[told] = slots[i];
    told_generations[told++] = generations[i];
  }
  if (append_ring(told_slots.data(), told_generations.data(), told) != Status::kOk) {
    for (uint32_t i = 0; i < published; ++i) {
      if (statuses[pages[i]] == Status::kOk) statuses[pages[i]] = append_ring(slots[i], generations[i]);
    }
  }
  pass("volume.after_ring", count, statuses);
  // Who is told that the write failed gives the slot back: nobody may find the page then.
  for (uint32_t i = 0; i < published; ++i) {
    if (statuses[pages[i]] != Status::kOk) store_generation(slots[i], generations[i] + 1);
  }
}

void Volume::retire_run(uint32_t slot, uint32_t count, Status* statuses) noexcept {
  uint32_t first = 0;
  if (does_io() && slot < header_.slots && count <= header_.slots - slot) {
    for (; first < count; first += kRecordsAtOnce) {
      if (!retire_records(slot + first, std::min(kRecordsAtOnce, count - first), statuses + first)) break;
    }
  }
  for (; first < count; ++first) statuses[first] = retire(slot + first);
}

// False: nothing was done that retire() does not do again.
bool Volume::retire_records(uint32_t slot, uint32_t count, Status* statuses) noexcept {
  if (count == 1) return false;
  Records records;
  if (read_records(slot, count, records.data()) != Status::kOk) return false;
  std::fill_n(statuses, count, Status::kOk);
  pass("volume.retire", count, statuses);
  std::array<uint32_t, kRecordsAtOnce> slots;
  std::array<uint64_t, kRecordsAtOnce> generations;
  std::array<uint32_t, kRecordsAtOnce> pages;
  uint32_t freed = 0;
  for (uint32_t i = 0; i < count; ++i) {
    std::byte* const record = records.data() + size_t{kRecordBytes} * i;
    const uint64_t generation = first_word(record);
    if (statuses[i] != Status::kOk || generation == 0 || generation % 2 == 1) continue;
    pages[freed] = i;
    slots[freed] = slot + i;
    generations[freed] = generation + 1;
    set_generation(record, generations[freed++]);
  }
  if (freed == 0) return true;
  const Status status = write_records(slot, count, records.data());
  // After the write: a sync that has this number then begins after it. Also where it failed, as in make_odd_run().
  for (uint32_t i = 0; i < freed && settles(); ++i) freed_in_[slots[i]] = next_sync_.load();
  const bool is_told = status == Status::kOk && append_ring(slots.data(), generations.data(), freed) == Status::kOk;
  for (uint32_t i = 0; i < freed && !is_told; ++i) {
    Status& of_page = statuses[pages[i]];
    // retire() tells nobody of a page that it finds freed, as one may be that the failed write came to.
    of_page = status == Status::kOk ? Status::kOk : store_generation(slots[i], generations[i]);
    if (of_page == Status::kOk) of_page = append_ring(slots[i], generations[i]);
  }
  return true;
}

}  // namespace stepwell
