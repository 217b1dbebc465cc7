#include "foreign.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "fault.h"
#include "fence.h"
#include "sha256.h"

namespace stepwell {

namespace {

constexpr uint8_t kKv = 1;
constexpr uint8_t kNoTier = 0xff;
constexpr uint32_t kSlotsAtOnce = 4096;      // of records read with one call: 768 KiB
constexpr uint32_t kSlotsAPoll = 16 * 4096;  // of one volume: about 10 ms
constexpr uint32_t kFirstHashPages = 32;     // as in index.cc
constexpr uint32_t kMostHashPages = 1024;
constexpr uint32_t kAhead = 16;
constexpr int kPlacesTried = 4;  // of one page, one after the other

uint32_t hash_of(const Key& key, uint8_t kind, uint64_t epoch) noexcept {
  uint64_t hash = epoch ^ (uint64_t{kind} << 56) ^ (uint64_t{key.length} << 48);
  for (size_t i = 0; i < key.length; i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, key.bytes.data() + i, sizeof(word));
    hash = mix64(hash ^ word);
  }
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

}  // namespace

struct Foreign::Attached {
  uint32_t number;
  VolumeHeader header;
  Descriptor metadata, pages;
  // The poller's: how far its ring was read, and from which slot on its records are still to be read.
  bool has_position = false;
  uint64_t position = 0;
  uint32_t records_from = 0;
  std::atomic<bool> is_failed{false};
  // GUARDED_BY(Foreign::mutex_)
  std::vector<uint32_t> by_slot;                   // entry, or kNone
  std::unordered_map<uint32_t, uint64_t> refused;  // slot -> the generation that is not to be offered

  Tier tier() const noexcept { return header.medium == VolumeMedium::kDisk ? Tier::kDisk : Tier::kShared; }
  int pages_fd() const noexcept { return pages.valid() ? pages.get() : metadata.get(); }
};

Foreign::Foreign(const PageShape& shape, uint32_t most_pages)
    : shape_(shape), most_pages_(std::max(most_pages, uint32_t{1})) {}
Foreign::~Foreign() = default;

uint32_t Foreign::attach(const VolumeHeader& header, Descriptor metadata, Descriptor pages) {
  if (header.fingerprint != shape_.fingerprint() || header.page_bytes != shape_.page_bytes() ||
      header.layers != shape_.layers() || header.kind != kKv)
    throw std::invalid_argument("the volume is of pages of another kind or shape");
  if (header.slots > 1u << kSlotBits)
    throw std::invalid_argument(std::to_string(header.slots) + " slots are more than a volume in use has");
  if (!metadata.valid() || (header.medium == VolumeMedium::kDisk) != pages.valid())
    throw std::invalid_argument("a disk volume has a file of pages, a shared one has none");
  auto volume = std::make_shared<Attached>();
  volume->header = header;
  volume->metadata = std::move(metadata);
  volume->pages = std::move(pages);
  volume->by_slot.assign(header.slots, kNone);
  volume->records_from = header.slots;
  const std::lock_guard lock(mutex_);
  volume->number = next_volume_;
  volumes_.emplace(volume->number, volume);
  return next_volume_++;
}

void Foreign::detach(uint32_t number) {
  std::shared_ptr<Attached> volume;  // its files are closed without the mutex
  const std::lock_guard lock(mutex_);
  const auto found = volumes_.find(number);
  if (found == volumes_.end()) return;
  volume = std::move(found->second);
  volumes_.erase(found);
  for (const uint32_t id : volume->by_slot) {
    if (id != kNone) forget(id);
  }
}

std::shared_ptr<Foreign::Attached> Foreign::volume_of(uint32_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = volumes_.find(number);
  return found == volumes_.end() ? nullptr : found->second;
}

// ---- what is where -------------------------------------------------------------------------------------------------

std::vector<uint32_t> Foreign::poll() {
  std::vector<std::shared_ptr<Attached>> volumes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, volume] : volumes_) volumes.push_back(volume);
  }
  std::vector<uint32_t> failed;
  std::vector<Change> changes;
  for (const std::shared_ptr<Attached>& volume : volumes) {
    changes.clear();
    if (volume->is_failed.load(std::memory_order_relaxed) || !read_changes(*volume, &changes)) {
      failed.push_back(volume->number);
      continue;
    }
    // In pieces: a look-up waits for one of them at most.
    for (size_t first = 0; first < changes.size(); first += kMostHashPages) {
      const std::lock_guard lock(mutex_);
      const size_t last = std::min<size_t>(changes.size(), first + kMostHashPages);
      for (size_t i = first; i < last; ++i) apply(*volume, changes[i]);
    }
  }
  return failed;
}

// False: it cannot be read any more.
bool Foreign::read_changes(Attached& volume, std::vector<Change>* changes) const {
  uint64_t counter = 0;
  if (file::pread_all(volume.metadata.get(), &counter, sizeof(counter), volume.header.ring_offset) < 0) return false;
  acquire_fence();
  // A counter that goes back, or further ahead than the ring is long, says nothing but: look at everything.
  const uint64_t ahead = counter - volume.position;
  if (!volume.has_position || counter < volume.position || ahead > volume.header.ring_entries) {
    volume.records_from = 0;
  } else if (ahead > 0 && !read_ring(volume, counter, changes)) {
    return false;
  }
  volume.has_position = true;
  volume.position = counter;
  return read_records(volume, kSlotsAPoll, changes);
}

bool Foreign::read_ring(Attached& volume, uint64_t counter, std::vector<Change>* changes) const {
  const VolumeHeader& header = volume.header;
  const uint64_t entries_at = header.ring_offset + kRingHeadBytes;
  std::vector<uint32_t> slots;
  std::vector<std::byte> bytes;
  for (uint64_t next = volume.position; next < counter;) {
    const uint64_t at = next % header.ring_entries;
    const uint64_t count = std::min<uint64_t>(counter - next, header.ring_entries - at);
    bytes.resize(count * kRingEntryBytes);
    if (file::pread_all(volume.metadata.get(), bytes.data(), bytes.size(), entries_at + at * kRingEntryBytes) < 0)
      return false;
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t slot;
      std::memcpy(&slot, bytes.data() + i * kRingEntryBytes, sizeof(slot));
      if (slot < header.slots) slots.push_back(slot);  // one that is none of its slots is damage, or malice
    }
    next += count;
  }
  acquire_fence();
  uint64_t now = 0;
  if (file::pread_all(volume.metadata.get(), &now, sizeof(now), header.ring_offset) < 0) return false;
  // Overwritten while it was read, or about to be: entries are stored before they are counted.
  if (now - volume.position > header.ring_entries - header.ring_entries / kRingAheadPart) volume.records_from = 0;
  // The record is the truth, the entry only says where to look: the last state of a slot is the only one of interest.
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  std::array<std::byte, kRecordBytes> record_bytes;
  for (const uint32_t slot : slots) {
    const uint64_t at = header.records_offset + uint64_t{kRecordBytes} * slot;
    if (file::pread_all(volume.metadata.get(), record_bytes.data(), record_bytes.size(), at) < 0) return false;
    SlotRecord record;
    const bool is_page = holds_page(first_word(record_bytes.data())) &&
                         SlotRecord::decode(record_bytes.data(), &record) && record.is_of(header);
    changes->push_back({slot, is_page ? record.generation : 0, record.label});
  }
  return true;
}

// A record that its writer has under way looks like none; its ring entry is still to come then.
bool Foreign::read_records(Attached& volume, uint32_t count, std::vector<Change>* changes) const {
  const VolumeHeader& header = volume.header;
  std::vector<std::byte> bytes;
  while (count > 0 && volume.records_from < header.slots) {
    const uint32_t here = std::min({kSlotsAtOnce, count, header.slots - volume.records_from});
    bytes.resize(size_t{kRecordBytes} * here);
    const uint64_t at = header.records_offset + uint64_t{kRecordBytes} * volume.records_from;
    if (file::pread_all(volume.metadata.get(), bytes.data(), bytes.size(), at) < 0) return false;
    for (uint32_t i = 0; i < here; ++i) {
      const std::byte* one = bytes.data() + size_t{kRecordBytes} * i;
      SlotRecord record;
      const bool is_page = holds_page(first_word(one)) && SlotRecord::decode(one, &record) && record.is_of(header);
      changes->push_back({volume.records_from + i, is_page ? record.generation : 0, record.label});
    }
    volume.records_from += here;
    count -= here;
  }
  return true;
}

void Foreign::apply(Attached& volume, const Change& change) {
  if (!volumes_.contains(volume.number)) return;
  const uint32_t id = volume.by_slot[change.slot];
  if (id != kNone) {
    if (entries_[id].place.generation == change.generation) return;
    forget(id);
  }
  if (change.generation == 0) return;
  const auto refused = volume.refused.find(change.slot);
  if (refused != volume.refused.end()) {
    if (refused->second == change.generation) return;
    volume.refused.erase(refused);
  }
  insert(volume, change);
}

void Foreign::insert(Attached& volume, const Change& change) {
  uint32_t id;
  if (!free_entries_.empty()) {
    id = free_entries_.back();
    free_entries_.pop_back();
  } else if (entries_.size() < most_pages_) {
    id = static_cast<uint32_t>(entries_.size());
    entries_.emplace_back();
    free_entries_.reserve(entries_.capacity());  // forget() must not allocate
  } else {
    // All are taken, in the order of their coming or nearly so.
    id = oldest_;
    oldest_ = (oldest_ + 1) % most_pages_;
    ++left_out_;
    forget(id);
    free_entries_.pop_back();
  }
  Entry& entry = entries_[id];
  entry = {change.label.key,
           change.label.kind,
           hash_of(change.label.key, change.label.kind, change.label.epoch),
           change.label.epoch,
           {volume.number, change.slot, change.generation, volume.tier()}};
  by_key_.insert(entry.hash, id);
  volume.by_slot[change.slot] = id;
  known_.fetch_add(1, std::memory_order_relaxed);
}

void Foreign::forget(uint32_t id) {
  Entry& entry = entries_[id];
  by_key_.erase(entry.hash, id);
  const auto volume = volumes_.find(entry.place.volume);
  if (volume != volumes_.end()) volume->second->by_slot[entry.place.slot] = kNone;
  entry.key.length = 0;
  free_entries_.push_back(id);
  known_.fetch_sub(1, std::memory_order_relaxed);
}

// ---- looking up ----------------------------------------------------------------------------------------------------

void Foreign::find(const Key* keys, size_t count, uint8_t kind, uint64_t epoch, TierMask usable,
                   ForeignPlace* out) const {
  std::fill(out, out + count, ForeignPlace());
  if (pages() == 0) return;
  std::vector<uint32_t> hashes(count);
  for (size_t i = 0; i < count; ++i) hashes[i] = hash_of(keys[i], kind, epoch);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) by_key_.prefetch(hashes[i + kAhead]);
    const uint32_t id = by_key_.find(hashes[i], [&](uint32_t candidate) {
      const Entry& entry = entries_[candidate];
      return entry.kind == kind && entry.epoch == epoch && (usable & mask(entry.place.tier)) != 0 &&
             entry.key == keys[i];
    });
    if (id != IdTable::kNone) out[i] = entries_[id].place;
  }
}

namespace {

// Adds pages of `keys` to the run as far as somebody has them. False: it ends there.
bool add_to_run(const Foreign& foreign, const Index& index, const Key* keys, uint32_t count, uint8_t kind,
                uint64_t epoch, TierMask usable, ForeignRun* run) {
  std::vector<ForeignPlace> places(count);
  std::vector<uint8_t> tiers(count);
  foreign.find(keys, count, kind, epoch, usable, places.data());
  index.probe(keys, count, kind, usable, tiers.data());
  for (uint32_t i = 0; i < count; ++i) {
    const bool is_ours = tiers[i] != kNoTier;
    if (!is_ours && !places[i].is_known()) return false;
    run->keys.push_back(keys[i]);
    run->places.push_back(is_ours ? ForeignPlace() : places[i]);
    run->foreign += is_ours ? 0 : 1;
  }
  return true;
}

}  // namespace

ForeignRun Foreign::find_run(const Index& index, const uint8_t* prior, const int32_t* tokens, uint32_t first,
                             uint32_t total, uint64_t epoch, TierMask usable) const {
  ForeignRun run;
  run.first = first;
  if (pages() == 0) return run;
  const size_t page_tokens = index.page_tokens();
  std::array<uint8_t, kDigestBytes> last{};
  if (prior != nullptr) std::memcpy(last.data(), prior, kDigestBytes);
  bool has_last = prior != nullptr;
  std::vector<uint8_t> digests;
  std::vector<Key> keys;
  for (uint32_t done = first, batch = kFirstHashPages; done < total; batch = std::min(batch * 2, kMostHashPages)) {
    const uint32_t here = std::min(batch, total - done);
    digests.resize(size_t{here} * kDigestBytes);
    hash_chain(has_last ? last.data() : nullptr, tokens + done * page_tokens, here, page_tokens, digests.data());
    keys.assign(here, Key());
    for (uint32_t i = 0; i < here; ++i) {
      std::memcpy(keys[i].bytes.data(), digests.data() + size_t{i} * kDigestBytes, kDigestBytes);
      keys[i].length = kDigestBytes;
    }
    if (!add_to_run(*this, index, keys.data(), here, kKv, epoch, usable, &run)) break;
    std::memcpy(last.data(), digests.data() + size_t{here - 1} * kDigestBytes, kDigestBytes);
    has_last = true;
    done += here;
  }
  return run;
}

ForeignRun Foreign::find_keys(const Index& index, const Key* keys, uint32_t count, uint8_t kind, uint64_t epoch,
                              TierMask usable) const {
  ForeignRun run;
  if (pages() == 0) return run;
  for (uint32_t done = 0, batch = kFirstHashPages; done < count; batch = std::min(batch * 2, kMostHashPages)) {
    const uint32_t here = std::min(batch, count - done);
    if (!add_to_run(*this, index, keys + done, here, kind, epoch, usable, &run)) break;
    done += here;
  }
  return run;
}

// ---- reading -------------------------------------------------------------------------------------------------------

Status Foreign::read(const ForeignPlace& place, const Label& label, TierMask usable, std::byte* target,
                     ForeignDetail* detail) noexcept {
  try {
    ForeignPlace here = place;
    Status status = Status::kGone;
    if ((usable & mask(here.tier)) == 0) find(&label.key, 1, label.kind, label.epoch, usable, &here);
    for (int i = 0; i < kPlacesTried && here.is_known(); ++i) {
      status = read_once(here, label, target, detail);
      if (status == Status::kOk) return status;
      // Another neighbour may have it: the place tried is forgotten.
      find(&label.key, 1, label.kind, label.epoch, usable, &here);
    }
    return status == Status::kChecksum ? status : Status::kGone;
  } catch (const std::bad_alloc&) {
    return Status::kGone;
  }
}

Status Foreign::read_once(const ForeignPlace& place, const Label& label, std::byte* target, ForeignDetail* detail) {
  const std::shared_ptr<Attached> volume = volume_of(place.volume);
  if (volume == nullptr) return Status::kGone;
  Status status = fault::reach("foreign.read").error != 0 ? Status::kIOError : Status::kOk;
  if (status == Status::kOk)
    status = read_foreign_page(shape_, volume->header, volume->metadata.get(), volume->pages_fd(), nullptr, place.slot,
                               place.generation, label, target, detail);
  settle(place, status);
  return status;
}

void Foreign::settle(const ForeignPlace& place, Status status) {
  const std::lock_guard lock(mutex_);
  const auto found = volumes_.find(place.volume);
  if (found == volumes_.end()) return;
  Attached& volume = *found->second;
  if (status == Status::kOk) {
    delivered_.fetch_add(1, std::memory_order_relaxed);
    if (touches_.size() < kMostTouches) touches_.push_back({volume.header.volume_id, place.slot, place.generation});
    return;
  }
  const bool is_stale = status == Status::kStale;
  (is_stale ? stale_ : refused_).fetch_add(1, std::memory_order_relaxed);
  if (!is_stale && place.slot < volume.header.slots) {
    volume.refused[place.slot] = place.generation;
    if (volume.refused.size() > kMostRefused) volume.is_failed.store(true, std::memory_order_relaxed);
  }
  if (place.slot >= volume.header.slots) return;
  const uint32_t id = volume.by_slot[place.slot];
  if (id != kNone && entries_[id].place.generation == place.generation) forget(id);
}

ForeignCounts Foreign::counts() const {
  ForeignCounts counts;
  counts.pages = pages();
  counts.delivered = delivered_.load(std::memory_order_relaxed);
  counts.stale = stale_.load(std::memory_order_relaxed);
  counts.refused = refused_.load(std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  counts.volumes = volumes_.size();
  counts.left_out = left_out_;
  return counts;
}

std::vector<ForeignTouch> Foreign::take_touches() {
  std::vector<ForeignTouch> taken;
  const std::lock_guard lock(mutex_);
  taken.swap(touches_);
  return taken;
}

}  // namespace stepwell
