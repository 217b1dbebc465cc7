// What the mover asks of any place that holds pages: the C++ half of the tier contract.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "geometry.h"
#include "status.h"

namespace stepwell {

// A worker's private memory: one page-sized, 4096-aligned buffer for a source, one for a target, and the checksums of
// both; and one buffer for the pages of a run. From 64 KiB on they lie in huge pages, where the kernel gives them:
// all in one as long as they fit, the others in whole ones of their own. Allocated on first use, grown never shrunk;
// owned by one worker, so it stays valid while a stalled call writes to it.
class Scratch {
 public:
  // Null where memory is short: the caller reports kIOError.
  std::byte* source(size_t bytes) noexcept { return grow(&source_, bytes); }
  std::byte* target(size_t bytes) noexcept { return grow(&target_, bytes); }
  std::byte* run(size_t bytes) noexcept { return grow(&run_, bytes); }
  std::vector<uint32_t> source_checksums;
  std::vector<uint32_t> target_checksums;

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  using Memory = std::unique_ptr<std::byte, Free>;
  struct Buffer {
    std::byte* first = nullptr;
    size_t bytes = 0;
    Memory own;  // null: it lies in the common huge page
  };
  std::byte* grow(Buffer* buffer, size_t want) noexcept;
  Memory common_;  // one huge page
  size_t common_taken_ = 0;
  Buffer source_, target_, run_;
};

// A page that can be read: contiguous canonical bytes and the layer checksums they must have.
struct PageSource {
  const std::byte* bytes = nullptr;
  const uint32_t* checksums = nullptr;
  bool guarded = false;  // bytes lie in a mapping: touch them through guard:: only
};

// A page that is being written: fill bytes, layer by layer, then finish_write().
struct PageTarget {
  std::byte* bytes = nullptr;
  bool guarded = false;
};

// Pages in consecutive slots of one medium that move together. Who uses it fills labels; the rest is the medium's to
// fill, or, where a run is written, the writer's of the bytes.
struct PageRun {
  uint32_t slot = 0;  // of the first page
  std::vector<const Label*> labels;
  std::vector<uint32_t> checksums;  // [page * layers + layer]
  std::vector<PageSource> sources;
  std::vector<PageTarget> targets;
  std::vector<uint64_t> generations;
  std::vector<Status> statuses;

  uint32_t count() const noexcept { return static_cast<uint32_t>(labels.size()); }
  // Room for `count` pages from `first` on; throws std::bad_alloc.
  void reset(uint32_t first, uint32_t count, uint32_t layers);
};

// Threads: all methods may be called from any worker, on different slots at once; on one slot only by the holder of its
// claim (writes, retire) or of a pin (reads). No method takes the index mutex.
class Medium {
 public:
  virtual ~Medium() = default;
  // True where reading or writing is file I/O: such work belongs on sw-io threads.
  virtual bool does_io() const noexcept = 0;
  // Makes the page readable under a pin. kStale: the record names another page (key, epoch, kind) or none;
  // kChecksum: record or checksum array damaged; kBusFault, kIOError.
  virtual Status prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept = 0;
  // FORMAT.md 3.1. Opens the slot for writing; the bytes then go to target->bytes.
  virtual Status begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept = 0;
  // FORMAT.md 3.2-3.6: orders the bytes, writes checksums and record, publishes; the last only where nothing settles.
  virtual Status finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                              const PageTarget& target) noexcept = 0;
  // Whether a page that finish_write has written is published by settle() only: where it must be durable first.
  virtual bool settles() const noexcept { return false; }
  // Makes pages durable and publishes them, all of them together: FORMAT.md 3, durability `power`. statuses[i] is of
  // slots[i]; of one that fails nothing is published. One call at a time. REQUIRES finish_write said kOk for each.
  virtual void settle(const uint32_t* slots, size_t count, Status* statuses) noexcept;
  // Frees the slot's record: nobody can find the page any more. Done before the index gets the slot back.
  virtual Status retire(uint32_t slot) noexcept = 0;
  // Runs. What the medium cannot do for all pages of a run together it leaves undone: the methods above then do it page
  // by page, and say of each what it comes to. That a call for all of them failed is seen in file::last_error().
  // How many pages may be in one run that begins at this slot; 1: nothing would be gained.
  virtual uint32_t longest_run(uint32_t) const noexcept { return 1; }
  // prepare_read() of each: sources[i] stays valid until the scratch's next run, and has no bytes where it is for
  // prepare_read() to say what is wrong.
  virtual void read_run(PageRun* run, Scratch& scratch) noexcept;
  // begin_write() of each, into targets and statuses. False: they are to be begun one by one.
  virtual bool begin_run(PageRun* run, Scratch& scratch) noexcept;
  // finish_write() of pages first .. first + count - 1 of a run that was begun, into statuses. False: those whose status
  // is still kOk are to be finished one by one. REQUIRES that their statuses are kOk and their bytes and checksums there.
  virtual bool finish_run(PageRun* run, uint32_t first, uint32_t count) noexcept;
  // retire() of consecutive slots, whatever they hold.
  virtual void retire_run(uint32_t slot, uint32_t count, Status* statuses) noexcept;
  // Writes a pattern over the slot and reads it back: the way out of quarantine.
  virtual Status rewrite_and_check(uint32_t slot, Scratch& scratch) noexcept = 0;
};

// True where both labels name the same page: key, kind and epoch. Parent and depth are what is told of it.
inline bool same_page(const Label& a, const Label& b) noexcept {
  return a.key == b.key && a.kind == b.kind && a.epoch == b.epoch;
}

// One whole page in and out of a medium, checksums made or verified on the way: what the mover does page by page, for
// tools and tests. data, out: shape.page_bytes() of private memory, out undefined unless kOk. REQUIRES the claim or pin
// that the medium's methods require.
Status write_page(Medium& medium, const PageShape& shape, uint32_t slot, const Label& label, const std::byte* data,
                  Scratch& scratch) noexcept;
Status read_page(Medium& medium, const PageShape& shape, uint32_t slot, const Label& label, std::byte* out,
                 Scratch& scratch) noexcept;
// Room for one page's checksums; kIOError where memory is short.
Status resize_checksums(std::vector<uint32_t>* checksums, uint32_t layers) noexcept;

}  // namespace stepwell
