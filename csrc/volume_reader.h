// Another's volume as tools read it: its records in bulk, each page checked. FORMAT.md 4, for a volume whose writer may
// be at work, and whose bytes anybody may have written.
//
// By pread alone: no mapping that a truncation could take away, no write, no lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "volume.h"

namespace stepwell {

// The slots that hold no page, by why.
struct EmptySlots {
  uint64_t never_written = 0;
  uint64_t odd = 0;   // free, or being written
  uint64_t worn = 0;  // of a generation at its limit: never used again
};

enum class PageVerdict : uint8_t {
  kRight = 0,
  kDamaged = 1,
  kChanged = 2,     // freed or rewritten while it was read, each time it was tried
  kUnreadable = 3,  // a system call failed, or came back short
  kNoLayout = 4,    // where its layers end was not found, nor that they are damaged
};

// What of a damaged page is wrong.
enum class PageDamage : uint8_t { kNone = 0, kRecord = 1, kChecksums = 2, kLayers = 3 };

struct PageCheck {
  PageVerdict verdict = PageVerdict::kUnreadable;
  PageDamage damage = PageDamage::kNone;
  std::vector<uint32_t> layers;  // kLayers: those that are wrong; empty where it is not known where layers end
};

// Threads: one at a time.
//
// A header does not say where the layers of a page end. They are equal, or 64 KiB pieces (an opaque page), or are given
// (`use_layers`), or are found: the checksum of each layer is known, so the first right page shows its own layers. What
// no layout fits is damaged.
class VolumeReader {
 public:
  // header: decoded against the sizes of these files. pages: invalid for a shared volume; may be O_DIRECT.
  VolumeReader(const VolumeHeader& header, Descriptor metadata, Descriptor pages);

  // Reads the records of `count` slots from `first`: pages (with stamps), slots whose record is damaged, the others
  // counted. A record that is being written is no damage: it is read again. Returns kOk, kIOError or kInvalid.
  Status read_records(uint32_t first, uint32_t count, std::vector<RecoveredPage>* pages, std::vector<uint32_t>* damaged,
                      EmptySlots* empty) const noexcept;
  // Reads a slot's page with all its layers; one that changes meanwhile is tried again.
  PageCheck check_page(uint32_t slot);

  // Throws std::invalid_argument where they do not add up to a page of the header's.
  void use_layers(std::vector<uint64_t> layer_bytes);
  // What is known or was found; null: nothing yet.
  const PageShape* shape() const noexcept { return shape_.has_value() ? &*shape_ : nullptr; }
  const VolumeHeader& header() const noexcept { return header_; }

 private:
  struct Reading;
  Status check_once(uint32_t slot, PageCheck* check);
  Status find_shape(const Reading& reading, PageCheck* check);
  Status read_with(const PageShape& shape, const Reading& reading, ForeignDetail* detail);
  // REQUIRES bytes as read at `at`. kStale: no page is there; kChecksum: the record is damaged.
  Status settle(std::byte* bytes, uint64_t at, SlotRecord* record) const noexcept;
  bool record_right(const std::byte* bytes, SlotRecord* record) const noexcept;

  VolumeHeader header_;
  Descriptor metadata_, pages_;
  std::optional<PageShape> shape_;
  std::vector<PageShape> guesses_;  // tried on each page while the shape is not known
  uint64_t search_left_;            // bytes that searches for layers may still take
  Scratch scratch_;
};

// The sizes of the layers of a page from their checksums; empty: none fits, or *steps (one a byte) are used up.
std::vector<uint64_t> find_layers(const std::byte* page, uint64_t page_bytes, const std::vector<uint32_t>& checksums,
                                  uint32_t page_seed, uint64_t* steps);

}  // namespace stepwell
