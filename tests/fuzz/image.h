// A small volume as bytes, and the edits that a script makes to them: fields, records, pages, sizes, with or without right
// checksums behind them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "script.h"
#include "volume.h"

namespace stepwell::fuzz {

constexpr uint32_t kKeys = 8;  // of pages that may be there; each has bytes of its own

PageShape base_shape();
Label label_of_key(uint32_t number, uint64_t epoch = 0);
// The bytes that the page of this key has; null where no page of the base has it.
const std::vector<std::byte>* bytes_of(const Label& label);

// The files of one volume, in memory files that a test may change behind a reader's back.
class Image {
 public:
  // A volume of a few pages and some free slots.
  explicit Image(VolumeMedium medium);
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  // One change, as the script says. Whatever is changed, what is delivered as right has its own bytes, unless
  // `is_forged()`: the checksums of changed bytes were made right.
  void edit(Script& script);
  bool is_forged() const noexcept { return is_forged_; }

  int metadata() const noexcept { return metadata_; }
  int pages() const noexcept { return pages_ >= 0 ? pages_ : metadata_; }
  bool has_pages_file() const noexcept { return pages_ >= 0; }
  uint64_t metadata_bytes() const noexcept;
  uint64_t pages_bytes() const noexcept;
  // The header as a process reads it that takes the volume; the reason where it does not.
  std::string decode(VolumeHeader* out) const;
  const VolumeHeader& base() const noexcept { return base_; }

 private:
  struct Base;
  static const Base& base_of(VolumeMedium medium);
  void edit_header(Script& script);
  void edit_record(Script& script);
  void edit_page(Script& script);
  void edit_size(Script& script);
  void edit_raw(Script& script);
  uint64_t record_at(uint32_t slot) const noexcept { return base_.records_offset + uint64_t{kRecordBytes} * slot; }
  void make_record_right(uint32_t slot);

  VolumeHeader base_;
  int metadata_ = -1, pages_ = -1;
  bool is_forged_ = false;
};

}  // namespace stepwell::fuzz
