// The pages of volumes that other processes hold, or nobody does: learnt from their rings, read as FORMAT.md 4 says.
//
// Everything here is a hint: never pinned, never counted as resident, gone when the owner says so or when a read finds
// it gone. Nothing that is read is trusted: a hostile volume costs misses.
//
//     attach -> poll (rings, or all records) -> table: key -> volume, slot, generation -> find -> read, verified
//                                                 ^--- leaves: freed, rewritten, stale or refused at a read, detached
//
// Files are read by pread, never mapped: then nothing a neighbour does to them can raise a signal here. A page is read
// once and kept in host memory from then on. What a new mapping would gain over pread: benchmarks/bench_neighbours.py
// (measured: 9.1 instead of 6.7 GB/s for pages of 2 MiB, without checksums).
//
// Threads: attach, detach and poll one at a time (the keeper); the rest any. No I/O under the mutex.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "index.h"
#include "page_table.h"
#include "volume.h"

namespace stepwell {

struct ForeignPlace {
  static constexpr uint32_t kNoVolume = UINT32_MAX;
  uint32_t volume = kNoVolume;  // the number that attach() gave it; none is given twice
  uint32_t slot = 0;            // in that volume
  uint64_t generation = 0;
  Tier tier = Tier::kShared;  // which of ours lies in the same directory
  bool is_known() const noexcept { return volume != kNoVolume; }
};

// Pages of a chain that are here or with a neighbour, without a gap.
struct ForeignRun {
  uint32_t first = 0;                // depth of the first
  std::vector<Key> keys;             // [n]
  std::vector<ForeignPlace> places;  // [n]; not known: the page is ours
  uint32_t foreign = 0;              // of them, how many only a neighbour has
};

struct ForeignCounts {
  uint64_t volumes = 0;
  uint64_t pages = 0;      // known now
  uint64_t left_out = 0;   // places forgotten because the table was full
  uint64_t delivered = 0;  // reads that brought a page, verified
  uint64_t stale = 0;      // that found the page freed or rewritten
  uint64_t refused = 0;    // that found it damaged, or unreadable: it is not offered again
};

struct ForeignTouch {
  std::array<uint8_t, 16> volume_id;
  uint32_t slot;
  uint64_t generation;
};

class Foreign {
 public:
  static constexpr uint32_t kMostTouches = 1024;  // that wait for take_touches(); more are dropped
  static constexpr uint32_t kMostRefused = 1024;  // pages of one volume; with more it is out of use

  // most_pages: places kept; the oldest go first where there are more. About 100 bytes each, taken as they come.
  Foreign(const PageShape& shape, uint32_t most_pages);
  ~Foreign();
  Foreign(const Foreign&) = delete;
  Foreign& operator=(const Foreign&) = delete;

  // header: as decoded against the sizes of these files. pages: invalid for a shared volume. Its pages are known after
  // the next poll(). Throws std::invalid_argument where it is of another shape than ours.
  uint32_t attach(const VolumeHeader& header, Descriptor metadata, Descriptor pages);
  // Forgets its pages at once. A read that is under way ends first, and the files stay open that long.
  void detach(uint32_t volume);
  // Reads what the rings have to tell. Returns the volumes that cannot be used any more, each time until detached.
  // Cost: one pread a volume where nothing has changed; else one for each changed slot, or, where the reader has fallen
  // behind the ring, all records, kSlotsAPoll of them a call.
  std::vector<uint32_t> poll();

  // Where neighbours have these pages, if they do: in the directories of the tiers in `usable`. A tier that is out of
  // service is not read, whoever owns the volume: their files lie on the same medium.
  void find(const Key* keys, size_t count, uint8_t kind, uint64_t epoch, TierMask usable, ForeignPlace* out) const;
  // The same for the pages behind the first `first` of some tokens, as far as each is RESIDENT with us in `usable` or
  // with a neighbour; prior: key of the page before the first, or the seed, or null. Hashes in batches, and no further
  // than the first page that nobody has.
  ForeignRun find_run(const Index& index, const uint8_t* prior, const int32_t* tokens, uint32_t first, uint32_t total,
                      uint64_t epoch, TierMask usable) const;
  ForeignRun find_keys(const Index& index, const Key* keys, uint32_t count, uint8_t kind, uint64_t epoch,
                       TierMask usable) const;
  // Reads a page into target: page bytes of private memory; not where its tier is not in `usable`. kOk: verified, its checksums in detail->expected. kGone:
  // freed, rewritten, or not to be read; kChecksum: damaged. The place is then forgotten, and what is damaged or
  // unreadable is not offered again at that generation; where another neighbour has the page, that one is tried.
  Status read(const ForeignPlace& place, const Label& label, TierMask usable, std::byte* target,
              ForeignDetail* detail) noexcept;

  uint64_t pages() const noexcept { return known_.load(std::memory_order_relaxed); }
  ForeignCounts counts() const;
  std::vector<ForeignTouch> take_touches();  // what was read since the last call

 private:
  struct Attached;
  struct Entry {
    Key key;  // length 0: no entry
    uint8_t kind = 0;
    uint32_t hash = 0;
    uint64_t epoch = 0;
    ForeignPlace place;
  };
  struct Change {
    uint32_t slot;
    uint64_t generation;  // 0: no page there
    Label label;
  };
  static constexpr uint32_t kNone = UINT32_MAX;

  std::shared_ptr<Attached> volume_of(uint32_t number) const;
  bool read_changes(Attached& volume, std::vector<Change>* changes) const;
  bool read_ring(Attached& volume, uint64_t counter, std::vector<Change>* changes) const;
  bool read_records(Attached& volume, uint32_t count, std::vector<Change>* changes) const;
  // REQUIRES the mutex.
  void apply(Attached& volume, const Change& change);
  void forget(uint32_t id);
  void insert(Attached& volume, const Change& change);
  Status read_once(const ForeignPlace& place, const Label& label, std::byte* target, ForeignDetail* detail);
  void settle(const ForeignPlace& place, Status status);

  const PageShape shape_;
  const uint32_t most_pages_;
  std::atomic<uint64_t> known_{0}, delivered_{0}, stale_{0}, refused_{0};
  mutable std::mutex mutex_;  // a leaf
  // GUARDED_BY(mutex_)
  std::unordered_map<uint32_t, std::shared_ptr<Attached>> volumes_;
  uint32_t next_volume_ = 0;
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_entries_;
  uint32_t oldest_ = 0;  // the entry that goes next where there are too many
  uint64_t left_out_ = 0;
  IdTable by_key_;  // several entries may have one key: of several volumes
  std::vector<ForeignTouch> touches_;
};

}  // namespace stepwell
