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
// both. Allocated on first use, grown never shrunk; owned by one worker, so it stays valid while a stalled call writes
// to it.
class Scratch {
 public:
  // Null where memory is short: the caller reports kIOError.
  std::byte* source(size_t bytes) noexcept;
  std::byte* target(size_t bytes) noexcept;
  std::vector<uint32_t> source_checksums;
  std::vector<uint32_t> target_checksums;

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  static std::byte* grow(std::unique_ptr<std::byte, Free>* memory, size_t* have, size_t want) noexcept;
  std::unique_ptr<std::byte, Free> source_, target_;
  size_t source_bytes_ = 0, target_bytes_ = 0;
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
