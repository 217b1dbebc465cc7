#include "image.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>

#include "crc32c.h"
#include "targets.h"

namespace stepwell::fuzz {

namespace {

constexpr uint64_t kMostBytes = 1u << 20;  // what a file grows to in earnest; beyond it is sparse
const std::vector<uint64_t> kLayerBytes{40, 24, 64};

struct Field {
  uint32_t offset, bytes;
};
// FORMAT.md 2.1 and 2.2.
constexpr std::array<Field, 27> kHeaderFields{{{0, 8},   {8, 4},   {12, 4},  {16, 8},  {32, 8},   {64, 1},  {65, 1},
                                               {66, 2},  {68, 4},  {72, 4},  {76, 4},  {80, 8},   {88, 8},  {96, 8},
                                               {104, 8}, {112, 8}, {120, 8}, {128, 8}, {136, 8},  {144, 8}, {152, 8},
                                               {160, 8}, {176, 8}, {184, 8}, {192, 8}, {4084, 8}, {4092, 4}}};
constexpr std::array<Field, 13> kRecordFields{{{0, 8},
                                               {8, 8},
                                               {16, 1},
                                               {17, 1},
                                               {18, 1},
                                               {19, 1},
                                               {20, 4},
                                               {24, 4},
                                               {28, 4},
                                               {32, 8},
                                               {96, 8},
                                               {160, 8},
                                               {188, 4}}};

int memory_file(const std::vector<std::byte>& bytes) {
  const int fd = ::memfd_create("stepwell-fuzz", MFD_CLOEXEC);
  STEPWELL_FUZZ_CHECK(fd >= 0);
  STEPWELL_FUZZ_CHECK(::pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return fd;
}

uint64_t size_of(int fd) {
  struct ::stat status;
  STEPWELL_FUZZ_CHECK(::fstat(fd, &status) == 0);
  return static_cast<uint64_t>(status.st_size);
}

// Zeros behind the end of the file.
void get(int fd, uint64_t offset, void* out, size_t bytes) {
  std::memset(out, 0, bytes);
  if (offset < INT64_MAX - bytes && ::pread(fd, out, bytes, static_cast<off_t>(offset)) < 0) std::abort();
}

// Nothing is written behind the end of the file: sizes are changed by edit_size() only.
void put(int fd, uint64_t offset, const void* data, size_t bytes) {
  const uint64_t end = size_of(fd);
  if (offset >= end) return;
  bytes = std::min<uint64_t>(bytes, end - offset);
  STEPWELL_FUZZ_CHECK(::pwrite(fd, data, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes));
}

std::vector<std::byte> content(uint32_t number) {
  std::mt19937 random(number + 1);
  uint64_t bytes = 0;
  for (const uint64_t layer : kLayerBytes) bytes += layer;
  std::vector<std::byte> page(bytes);
  for (std::byte& byte : page) byte = static_cast<std::byte>(random());
  return page;
}

void put_field(int fd, uint64_t at, Field field, Script& script) {
  uint64_t value = 0;
  get(fd, at + field.offset, &value, field.bytes);
  value = script.value(value);
  put(fd, at + field.offset, &value, field.bytes);
}

}  // namespace

PageShape base_shape() {
  std::array<uint8_t, 32> fingerprint{};
  fingerprint.fill(7);
  return PageShape(kLayerBytes, fingerprint);
}

Label label_of_key(uint32_t number, uint64_t epoch) {
  Label label;
  label.key.length = 8;
  label.key.bytes[0] = static_cast<uint8_t>(number + 1);
  label.key.bytes[7] = 'k';
  label.depth = number;
  label.parent_state = number == 0 ? ParentState::kRoot : ParentState::kKnown;
  if (number > 0) {
    label.parent.length = 8;
    label.parent.bytes[0] = static_cast<uint8_t>(number);
    label.parent.bytes[7] = 'k';
  }
  label.epoch = epoch;
  return label;
}

const std::vector<std::byte>* bytes_of(const Label& label) {
  static const std::vector<std::vector<std::byte>> pages = [] {
    std::vector<std::vector<std::byte>> made;
    for (uint32_t number = 0; number < kKeys; ++number) made.push_back(content(number));
    return made;
  }();
  for (uint32_t number = 0; number < kKeys; ++number) {
    if (label_of_key(number).key == label.key && label.kind == 1) return &pages[number];
  }
  return nullptr;
}

struct Image::Base {
  VolumeHeader header;
  std::vector<std::byte> metadata, pages;
};

const Image::Base& Image::base_of(VolumeMedium medium) {
  const auto make = [](VolumeMedium of) {
    Base base;
    const PageShape shape = base_shape();
    const uint64_t alignment = of == VolumeMedium::kShared ? 64 : 512;
    base.header = VolumeHeader::plan(of, shape, 5 * 4096 + 12 * alignment, alignment, 64);
    base.header.volume_id.fill(3);
    base.metadata.resize(base.header.metadata_bytes);
    base.pages.resize(base.header.pages_bytes);
    base.header.encode(base.metadata.data());
    const int metadata = memory_file(base.metadata);
    const int pages = of == VolumeMedium::kDisk ? memory_file(base.pages) : -1;
    {
      Volume volume(shape, base.header, Descriptor(::dup(metadata)), Descriptor(pages >= 0 ? ::dup(pages) : -1), false);
      Scratch scratch;
      for (uint32_t i = 0; i < kKeys - 2; ++i) {  // some keys and some slots are left for writes
        const Label label = label_of_key(i);
        STEPWELL_FUZZ_CHECK(write_page(volume, shape, i, label, bytes_of(label)->data(), scratch) == Status::kOk);
      }
      const std::array<uint32_t, 3> used{2, 0, 1};
      const std::array<uint64_t, 3> stamps{1, 2, 3};
      STEPWELL_FUZZ_CHECK(volume.write_recency(used.data(), stamps.data(), used.size()) == Status::kOk);
      STEPWELL_FUZZ_CHECK(volume.retire(4) == Status::kOk);
    }
    get(metadata, 0, base.metadata.data(), base.metadata.size());
    if (pages >= 0) get(pages, 0, base.pages.data(), base.pages.size());
    ::close(metadata);
    if (pages >= 0) ::close(pages);
    return base;
  };
  static const Base shared = make(VolumeMedium::kShared), disk = make(VolumeMedium::kDisk);
  return medium == VolumeMedium::kShared ? shared : disk;
}

Image::Image(VolumeMedium medium) {
  const Base& base = base_of(medium);
  base_ = base.header;
  metadata_ = memory_file(base.metadata);
  if (medium == VolumeMedium::kDisk) pages_ = memory_file(base.pages);
}

Image::~Image() {
  ::close(metadata_);
  if (pages_ >= 0) ::close(pages_);
}

uint64_t Image::metadata_bytes() const noexcept { return size_of(metadata_); }
uint64_t Image::pages_bytes() const noexcept { return pages_ >= 0 ? size_of(pages_) : 0; }

std::string Image::decode(VolumeHeader* out) const {
  std::array<std::byte, kHeaderBytes> bytes;
  get(metadata_, 0, bytes.data(), bytes.size());
  return VolumeHeader::decode(bytes.data(), metadata_bytes(), pages_bytes(), out);
}

void Image::edit(Script& script) {
  switch (script.take<uint8_t>() % 8) {
    case 0:
    case 1: edit_header(script); break;
    case 2:
    case 3: edit_record(script); break;
    case 4:
    case 5: edit_page(script); break;
    case 6: edit_size(script); break;
    default: edit_raw(script); break;
  }
}

void Image::edit_header(Script& script) {
  if (script.take<uint8_t>() % 8 == 0) {  // arrays that change places, each where it may be
    const uint64_t at = 104 + 8 * script.below(5), other = 104 + 8 * script.below(5);
    uint64_t a = 0, b = 0;
    get(metadata_, at, &a, sizeof(a));
    get(metadata_, other, &b, sizeof(b));
    put(metadata_, at, &b, sizeof(b));
    put(metadata_, other, &a, sizeof(a));
  } else {
    put_field(metadata_, 0, kHeaderFields[script.take<uint8_t>() % kHeaderFields.size()], script);
  }
  if (script.flag()) {  // a header that fits the sizes of its files
    const uint64_t metadata_size = metadata_bytes(), pages_size = pages_bytes();
    put(metadata_, 144, &metadata_size, sizeof(metadata_size));
    put(metadata_, 152, &pages_size, sizeof(pages_size));
  }
  if (script.take<uint8_t>() % 4 != 0) {
    std::array<std::byte, kHeaderBytes> bytes;
    get(metadata_, 0, bytes.data(), bytes.size());
    std::memset(bytes.data() + 160, 0, 16);  // the boot id counts as zeros
    const uint32_t checksum = crc32c(0, bytes.data(), 4092);
    put(metadata_, 4092, &checksum, sizeof(checksum));
  }
}

void Image::make_record_right(uint32_t slot) {
  std::array<std::byte, kRecordBytes> bytes;
  get(metadata_, record_at(slot), bytes.data(), bytes.size());
  const uint32_t checksum = crc32c(0, bytes.data(), 188);
  put(metadata_, record_at(slot) + 188, &checksum, sizeof(checksum));
}

void Image::edit_record(Script& script) {
  const uint32_t slot = script.below(base_.slots), other = script.below(base_.slots);
  std::array<std::byte, kRecordBytes> bytes;
  switch (script.take<uint8_t>() % 4) {
    case 0:  // twice the same page
      get(metadata_, record_at(other), bytes.data(), bytes.size());
      put(metadata_, record_at(slot), bytes.data(), bytes.size());
      break;
    case 1: {  // a key of another slot as parent: chains that part, and rings
      get(metadata_, record_at(other) + 32, bytes.data(), 64);
      put(metadata_, record_at(slot) + 96, bytes.data(), 64);
      const std::array<uint8_t, 2> known{8, 1};
      put(metadata_, record_at(slot) + 18, known.data(), known.size());
      break;
    }
    default:
      put_field(metadata_, record_at(slot), kRecordFields[script.take<uint8_t>() % kRecordFields.size()], script);
  }
  if (script.take<uint8_t>() % 4 != 0) make_record_right(slot);
}

void Image::edit_page(Script& script) {
  const uint32_t slot = script.below(base_.slots), layer = script.below(kLayerBytes.size());
  const uint64_t page_at = base_.pages_offset + base_.slot_bytes * slot;
  const uint64_t checksums_at = base_.checksums_offset + uint64_t{4} * base_.layers * slot;
  const uint8_t how = script.take<uint8_t>() % 8;
  if (how < 3) {  // a byte of the page
    const uint64_t at = page_at + script.below(base_.slot_bytes);
    uint8_t byte = 0;
    get(pages(), at, &byte, 1);
    byte ^= static_cast<uint8_t>(1u << script.take<uint8_t>() % 8);
    put(pages(), at, &byte, 1);
  } else if (how < 5) {  // a layer checksum
    put_field(metadata_, checksums_at + 4 * layer, {0, 4}, script);
  } else if (how == 5) {  // the page of another slot, with its checksums
    const uint32_t other = script.below(base_.slots);
    std::vector<std::byte> bytes(base_.slot_bytes);
    get(pages(), base_.pages_offset + base_.slot_bytes * other, bytes.data(), bytes.size());
    put(pages(), page_at, bytes.data(), bytes.size());
    get(metadata_, base_.checksums_offset + uint64_t{4} * base_.layers * other, bytes.data(), 4 * base_.layers);
    put(metadata_, checksums_at, bytes.data(), 4 * base_.layers);
  } else if (how == 6) {  // a stamp, or the ring
    const bool ring = script.flag();
    const uint64_t at = ring ? base_.ring_offset + 8 * script.below(16) : base_.recency_offset + 16 * slot;
    put_field(metadata_, at, {0, 8}, script);
  } else {  // forged: all checksums of what lies there now
    SlotRecord record;
    std::array<std::byte, kRecordBytes> bytes;
    get(metadata_, record_at(slot), bytes.data(), bytes.size());
    if (!SlotRecord::decode(bytes.data(), &record)) return;
    const PageShape shape = base_shape();
    const uint32_t seed = shape.page_seed(record.label);
    std::vector<std::byte> page(shape.page_bytes());
    get(pages(), page_at, page.data(), page.size());
    std::vector<uint32_t> checksums;
    for (uint32_t i = 0; i < shape.layers(); ++i)
      checksums.push_back(
          crc32c(PageShape::layer_seed(seed, i), page.data() + shape.layer_offset(i), shape.layer_bytes(i)));
    put(metadata_, checksums_at, checksums.data(), 4 * checksums.size());
    record.page_checksum = crc32c(0, checksums.data(), 4 * checksums.size());
    record.encode(bytes.data());
    put(metadata_, record_at(slot), bytes.data(), bytes.size());
    is_forged_ = true;
  }
}

void Image::edit_size(Script& script) {
  const int fd = script.flag() ? pages() : metadata_;
  const uint64_t before = size_of(fd);
  uint64_t size = script.flag() ? script.take<uint16_t>() % (before + 1) : script.value(before);
  if (script.take<uint8_t>() % 16 != 0) size %= kMostBytes;
  if (::ftruncate(fd, static_cast<off_t>(size & INT64_MAX)) != 0) return;  // more than the file system takes
}

void Image::edit_raw(Script& script) {
  const int fd = script.flag() ? pages() : metadata_;
  const uint64_t at = script.take<uint32_t>() % std::max<uint64_t>(1, size_of(fd));
  const uint64_t word = script.take<uint64_t>();
  put(fd, at, &word, 1 + script.take<uint8_t>() % 8);
}

}  // namespace stepwell::fuzz
