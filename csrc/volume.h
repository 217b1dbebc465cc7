// Shared and disk volumes as media: the format and the protocols of src/stepwell/tiers/FORMAT.md.
//
// One Volume = the files of one volume, opened by its one writer (who holds its lock; taking locks, names and budget is
// src/stepwell/tiers/volumes.py's business). VolumeSet = all volumes of one tier of this process as one medium.
// Slot numbers outside this file are global: volume number << 20 | slot in the volume.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "file.h"
#include "medium.h"

namespace stepwell {

constexpr uint32_t kSlotBits = 20;
constexpr uint32_t kSlotMask = (1u << kSlotBits) - 1;
constexpr uint32_t kMaxVolumes = 1u << (32 - kSlotBits);

// Sizes and limits of FORMAT.md 2.
constexpr uint32_t kHeaderBytes = 4096;
constexpr uint32_t kBootIdOffset = 160;
constexpr uint32_t kRecordBytes = 192;
constexpr uint32_t kRecencyBytes = 16;
constexpr uint32_t kRingHeadBytes = 64;
constexpr uint32_t kRingEntryBytes = 16;
constexpr uint32_t kRingAheadPart = 4;  // entries are stored ahead of the counter by this part of the ring at most
constexpr uint64_t kMetadataAlignment = 4096;
constexpr uint32_t kMaxVolumeSlots = 1u << 24;
constexpr uint64_t kGenerationLimit = uint64_t{1} << 63;
constexpr uint64_t kStampLimit = uint64_t{1} << 62;  // beyond it (year 2116) a stamp is damage

constexpr bool holds_page(uint64_t generation) noexcept {
  return generation != 0 && generation % 2 == 0 && generation < kGenerationLimit;
}

// The generation at the head of a record; the stamp of a recency entry.
inline uint64_t first_word(const std::byte* bytes) noexcept {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

enum class VolumeMedium : uint8_t { kShared = 1, kDisk = 2 };

// What a committed page of a disk volume survives: the end of the process, or of the machine's power too.
enum class Durability : uint8_t { kProcess, kPower };

// FORMAT.md 2.1, as numbers. encode() writes the 4096 bytes; decode() checks every field against every other and the
// file sizes.
struct VolumeHeader {
  std::array<uint8_t, 16> volume_id{};
  std::array<uint8_t, 32> fingerprint{};
  uint8_t kind = 1;
  VolumeMedium medium = VolumeMedium::kShared;
  uint32_t slots = 0;
  uint32_t layers = 0;
  uint32_t ring_entries = 4096;
  uint64_t page_bytes = 0, slot_bytes = 0, alignment = 64;
  uint64_t records_offset = 0, checksums_offset = 0, recency_offset = 0, ring_offset = 0, pages_offset = 0;
  uint64_t metadata_bytes = 0, pages_bytes = 0;
  std::array<uint8_t, 16> boot_id{};
  uint64_t birth_ns = 0;
  uint64_t epoch = 0;

  // Lays out a volume of at most `volume_bytes` in all its files together. Throws std::invalid_argument where not one
  // page fits.
  static VolumeHeader plan(VolumeMedium medium, const PageShape& shape, uint64_t volume_bytes, uint64_t alignment,
                           uint32_t ring_entries);
  void encode(std::byte out[4096]) const noexcept;
  // Empty string if right, else what is wrong with which value ("magic", "slots 0", "records overlap checksums", ...).
  static std::string decode(const std::byte in[4096], uint64_t metadata_file_bytes, uint64_t pages_file_bytes,
                            VolumeHeader* out);
};

// A slot record, FORMAT.md 2.2.
struct SlotRecord {
  uint64_t generation = 0;
  Label label;
  uint32_t length = 0;
  uint32_t page_checksum = 0;
  void encode(std::byte out[192]) const noexcept;  // computes the record checksum
  // false: a field out of bounds or a wrong checksum
  static bool decode(const std::byte in[192], SlotRecord* out) noexcept;
  // Whether it may be a record of that volume's: its kind, the length of its pages.
  bool is_of(const VolumeHeader& header) const noexcept {
    return label.kind == header.kind && length == header.page_bytes;
  }
};

struct RecoveredPage {
  uint32_t slot;  // in the volume
  Label label;
  uint64_t generation;
  uint64_t stamp;
};

// Slots that recovery found of no use, by why: the first two were freed, a worn one is never used again.
struct RecoveryCounts {
  uint64_t damaged = 0, duplicate = 0, worn = 0;
  uint64_t freed() const noexcept { return damaged + duplicate; }
};

// Invariant: this process holds the volume's lock while a Volume exists.
class Volume final : public Medium {
 public:
  // Opens files that hold a complete volume. metadata: `.vol` or `.meta`; pages: invalid for a shared volume.
  // Throws std::runtime_error with the reason (header damaged or not the given one, sizes wrong, map failed, shape does
  // not fit: names both). durability: kPower for a disk volume only.
  Volume(const PageShape& shape, VolumeHeader header, Descriptor metadata, Descriptor pages, bool direct_io,
         Durability durability = Durability::kProcess);
  // REQUIRES that no other thread is inside a method or holds bytes of the mapping (PageSource, PageTarget): its
  // addresses go.
  ~Volume() override;

  bool does_io() const noexcept override { return header_.medium == VolumeMedium::kDisk; }
  Status prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept override;
  Status begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept override;
  Status finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                      const PageTarget& target) noexcept override;
  Status retire(uint32_t slot) noexcept override;
  // What the record of a slot says its generation is.
  Status generation_of(uint32_t slot, uint64_t* generation) noexcept;
  uint32_t longest_run(uint32_t slot) const noexcept override;
  void read_run(PageRun* run, Scratch& scratch) noexcept override;
  bool begin_run(PageRun* run, Scratch& scratch) noexcept override;
  bool finish_run(PageRun* run, uint32_t first, uint32_t count) noexcept override;
  void retire_run(uint32_t slot, uint32_t count, Status* statuses) noexcept override;
  Status rewrite_and_check(uint32_t slot, Scratch& scratch) noexcept override;
  bool settles() const noexcept override { return durability_ == Durability::kPower; }
  void settle(const uint32_t* slots, size_t count, Status* statuses) noexcept override;

  // Makes all that the files hold durable: before pages of an adopted volume count as such.
  Status sync() noexcept;
  // A sync failed. What was written since the one before may be lost although the kernel no longer calls it dirty, and
  // a later sync would not say so: the volume takes no page any more until it is opened anew. What it holds is read on,
  // each page verified, as always.
  bool is_suspect() const noexcept { return is_suspect_.load(std::memory_order_relaxed); }
  uint64_t syncs() const noexcept { return syncs_.load(std::memory_order_relaxed); }

  const VolumeHeader& header() const noexcept { return header_; }
  const PageShape& shape() const noexcept { return shape_; }
  // Reads all records (adoption, FORMAT.md 7): frees what is damaged or twice there, keeps generations. Pages of all
  // epochs come, by slot. A slot whose generation has reached its limit counts as worn each time.
  // REQUIRES that nobody reads or writes pages here meanwhile.
  Status recover(std::vector<RecoveredPage>* pages, RecoveryCounts* counts) noexcept;
  // Labels of pages by slot and generation, in that order, of those that are still there: what neighbours say that they
  // used. Slots and generations are not trusted.
  Status labels_of(const uint32_t* slots, const uint64_t* generations, size_t count,
                   std::vector<Label>* labels) const noexcept;
  // Writes the stamps of slots, FORMAT.md 2.4; a slot given twice gets the last. One thread at a time.
  Status write_recency(const uint32_t* slots, const uint64_t* stamps, size_t count) noexcept;
  // Changes header(): REQUIRES that no other thread reads it meanwhile (adoption).
  Status write_boot_id(const std::array<uint8_t, 16>& boot_id) noexcept;
  // Touches the pages of the mapping in the background so that no save pays for first touch; stops when *stop. Shared
  // only.
  Status prefault(const std::atomic<bool>* stop) noexcept;
  // From now on a shared volume is read and written by pread and pwrite: for when the SIGBUS handler is no longer ours.
  void leave_mapping() noexcept { use_mapping_.store(false, std::memory_order_relaxed); }
  // Does so where it is not: under a handler that returns (Python's), a fault would come again for ever. About 0.1 us.
  void look_at_handler() noexcept;

 private:
  // A forked child has no mapping (MADV_DONTFORK) and no descriptor: every call of it fails.
  bool by_mapping() const noexcept {
    return mapping_ != nullptr && use_mapping_.load(std::memory_order_relaxed) && metadata_.valid();
  }
  uint64_t record_offset(uint32_t slot) const noexcept {
    return header_.records_offset + uint64_t{kRecordBytes} * slot;
  }
  uint64_t checksums_offset(uint32_t slot) const noexcept {
    return header_.checksums_offset + uint64_t{4} * header_.layers * slot;
  }
  uint64_t page_offset(uint32_t slot) const noexcept { return header_.pages_offset + header_.slot_bytes * slot; }
  int pages_fd() const noexcept { return pages_.valid() ? pages_.get() : metadata_.get(); }
  Status read_metadata(uint64_t offset, void* out, size_t bytes) const noexcept;
  Status write_metadata(uint64_t offset, const void* data, size_t bytes) noexcept;
  Status load_word(uint64_t offset, uint64_t* word) const noexcept;
  Status store_word(uint64_t offset, uint64_t word) noexcept;
  // FORMAT.md 3.1 without its fence: the slot's generation is *odd when it returns kOk.
  Status make_odd(uint32_t slot, uint64_t* odd) noexcept;
  Status scan_recency(std::vector<uint64_t>* stamps);
  Status scan_records(const std::vector<uint64_t>& stamps, std::vector<RecoveredPage>* pages, RecoveryCounts* counts);
  Status drop_duplicates(std::vector<RecoveredPage>* pages, RecoveryCounts* counts);
  Status check_pattern(uint32_t slot, uint64_t pattern, Scratch& scratch) noexcept;
  Status load_generation(uint32_t slot, uint64_t* generation) noexcept;
  Status store_generation(uint32_t slot, uint64_t generation) noexcept;
  Status append_ring(uint32_t slot, uint64_t generation) noexcept { return append_ring(&slot, &generation, 1); }
  // One counter for up to a quarter of the ring: what is stored ahead of it overwrites nothing that a reader relies on.
  Status append_ring(const uint32_t* slots, const uint64_t* generations, size_t count) noexcept;
  Status skip_ring() noexcept;  // every reader of the ring reads all records next
  Status publish(uint32_t slot, uint64_t generation) noexcept;
  // Reads the records of consecutive slots as they are; writes them back, generations and all. REQUIRES the claims of
  // all these slots: nobody else writes their records meanwhile.
  Status read_records(uint32_t slot, uint32_t count, std::byte* records) const noexcept;
  Status write_records(uint32_t slot, uint32_t count, const std::byte* records) noexcept;
  Status make_odd_run(uint32_t slot, uint32_t count, uint64_t* odd, Status* statuses) noexcept;
  Status describe_run(const PageRun& run, uint32_t first, uint32_t count) noexcept;
  // publish() of consecutive slots whose records are in place, of those whose status is kOk.
  void publish_run(uint32_t slot, uint32_t count, Status* statuses) noexcept;
  void publish_records(uint32_t slot, uint32_t count, Status* statuses) noexcept;
  bool retire_records(uint32_t slot, uint32_t count, Status* statuses) noexcept;
  // REQUIRES sync_mutex_
  Status sync_file(const Descriptor& file) noexcept;
  Status sync_metadata() noexcept;
  // The slot is free, odd; with kPower its bytes may be overwritten once that is durable.
  Status ensure_free_is_durable(uint32_t slot) noexcept;

  PageShape shape_;
  VolumeHeader header_;
  Descriptor metadata_, pages_;
  bool direct_io_;
  std::byte* mapping_ = nullptr;  // shared: the whole file; disk: none
  std::atomic<bool> use_mapping_{true};
  Durability durability_;
  // One sync at a time: of two at once only one is told that it failed. Held over the sync.
  std::mutex sync_mutex_;
  std::atomic<bool> is_suspect_{false};
  std::atomic<uint64_t> syncs_{0};
  // Syncs of the metadata are numbered. freed_in_[slot]: the first of them that makes its odd generation durable, 0:
  // it is. Written by the holder of the slot. Empty with kProcess.
  std::atomic<uint64_t> next_sync_{1}, done_sync_{0};
  std::vector<uint64_t> freed_in_;
  std::mutex meta_mutex_;      // ring counter and the append of its entry
  uint64_t ring_counter_ = 0;  // GUARDED_BY(meta_mutex_)
};

// What read_foreign_page compared: the layer checksums that were recorded, and those of the bytes. Both empty where it
// did not come so far; found is empty where the recorded ones are damaged.
struct ForeignDetail {
  std::vector<uint32_t> expected, found;
};

// Reads one page of a volume that another process may be writing: FORMAT.md 4. Metadata by pread on `metadata`; bytes
// by pread on `pages` (the same descriptor for a shared volume), or from `mapping` by guarded copy if that is not null.
// target: page bytes of private memory. kOk: verified, of the wanted key at the wanted generation. kStale, kChecksum,
// kIOError, kBusFault: nothing may be used. `pages` may be an O_DIRECT descriptor (and should be one where the writer's
// is: it goes past the page cache). detail: filled if not null.
Status read_foreign_page(const PageShape& shape, const VolumeHeader& header, int metadata, int pages,
                         const std::byte* mapping, uint32_t slot, uint64_t generation, const Label& wanted,
                         std::byte* target, ForeignDetail* detail = nullptr) noexcept;

// All volumes of a tier in this process as one medium. add/remove: keeper or constructor only; remove REQUIRES that no
// slot of it is claimed, resident or pinned (then no worker can be inside it).
class VolumeSet final : public Medium {
 public:
  // durability: of each volume in it.
  explicit VolumeSet(bool does_io, Durability durability = Durability::kProcess)
      : does_io_(does_io), durability_(durability) {}
  // returns the volume number; throws std::length_error when 4096 are in use
  uint32_t add(std::shared_ptr<Volume> volume);
  std::shared_ptr<Volume> remove(uint32_t number);
  std::shared_ptr<Volume> get(uint32_t number) const;

  bool does_io() const noexcept override { return does_io_; }
  Status prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept override;
  Status begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept override;
  Status finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                      const PageTarget& target) noexcept override;
  Status retire(uint32_t slot) noexcept override;
  uint32_t longest_run(uint32_t slot) const noexcept override;
  void read_run(PageRun* run, Scratch& scratch) noexcept override;
  bool begin_run(PageRun* run, Scratch& scratch) noexcept override;
  bool finish_run(PageRun* run, uint32_t first, uint32_t count) noexcept override;
  void retire_run(uint32_t slot, uint32_t count, Status* statuses) noexcept override;
  Status rewrite_and_check(uint32_t slot, Scratch& scratch) noexcept override;
  bool settles() const noexcept override { return durability_ == Durability::kPower; }
  void settle(const uint32_t* slots, size_t count, Status* statuses) noexcept override;

 private:
  Volume* volume_of(uint32_t slot) const noexcept;  // null: no such volume

  bool does_io_;
  Durability durability_;
  mutable std::mutex mutex_;  // owners_
  std::vector<std::shared_ptr<Volume>> owners_;
  std::array<std::atomic<Volume*>, kMaxVolumes> table_{};
};

}  // namespace stepwell
