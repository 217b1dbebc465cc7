#include "volume_reader.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "crc32c.h"
#include "fence.h"

namespace stepwell {

namespace {

constexpr uint32_t kSlotsAtOnce = 4096;       // of records and stamps read at once: 768 KiB
constexpr uint64_t kOpaquePiece = 64 * 1024;  // FORMAT.md 2.3
constexpr uint64_t kSearchAPage = 4;          // times its bytes: false matches are rare, so one pass is enough
constexpr uint64_t kSearchAVolume = uint64_t{1} << 30;  // bytes: some seconds
constexpr int kTries = 4;

std::vector<uint64_t> pieces(uint64_t page_bytes) {
  std::vector<uint64_t> sizes(page_bytes / kOpaquePiece, kOpaquePiece);
  if (page_bytes % kOpaquePiece != 0) sizes.push_back(page_bytes % kOpaquePiece);
  return sizes;
}

}  // namespace

// One try at one page: the record that was found, and where the bytes go.
struct VolumeReader::Reading {
  uint32_t slot;
  SlotRecord record;
  std::byte* target;
};

VolumeReader::VolumeReader(const VolumeHeader& header, Descriptor metadata, Descriptor pages)
    : header_(header), metadata_(std::move(metadata)), pages_(std::move(pages)), search_left_(kSearchAVolume) {
  if ((header_.medium == VolumeMedium::kDisk) != pages_.valid())
    throw std::invalid_argument("a disk volume has a file of pages, a shared one has none");
  const uint64_t bytes = header_.page_bytes, layers = header_.layers;
  if ((bytes + kOpaquePiece - 1) / kOpaquePiece == layers) guesses_.emplace_back(pieces(bytes), header_.fingerprint);
  if (bytes % layers == 0) guesses_.emplace_back(std::vector<uint64_t>(layers, bytes / layers), header_.fingerprint);
  if (guesses_.empty()) {  // one is needed to have the bytes at all, in which the layers are then looked for
    std::vector<uint64_t> sizes(layers, 1);
    sizes.back() = bytes - (layers - 1);
    guesses_.emplace_back(std::move(sizes), header_.fingerprint);
  }
}

void VolumeReader::use_layers(std::vector<uint64_t> layer_bytes) {
  PageShape shape(std::move(layer_bytes), header_.fingerprint);
  if (shape.layers() != header_.layers || shape.page_bytes() != header_.page_bytes)
    throw std::invalid_argument(std::to_string(shape.layers()) + " layers of " + std::to_string(shape.page_bytes()) +
                                " bytes are not a page of this volume: " + std::to_string(header_.layers) +
                                " layers of " + std::to_string(header_.page_bytes));
  shape_ = std::move(shape);
}

bool VolumeReader::record_right(const std::byte* bytes, SlotRecord* record) const noexcept {
  return SlotRecord::decode(bytes, record) && record->is_of(header_);
}

Status VolumeReader::read_records(uint32_t first, uint32_t count, std::vector<RecoveredPage>* pages,
                                  std::vector<uint32_t>* damaged, EmptySlots* empty) const noexcept {
  if (first > header_.slots || count > header_.slots - first) return Status::kInvalid;
  try {
    std::vector<std::byte> records(size_t{kRecordBytes} * std::min(count, kSlotsAtOnce));
    std::vector<std::byte> stamps(size_t{kRecencyBytes} * std::min(count, kSlotsAtOnce));
    for (uint32_t done = 0; done < count; done += kSlotsAtOnce) {
      const uint32_t base = first + done, here = std::min(kSlotsAtOnce, count - done);
      const uint64_t records_at = header_.records_offset + uint64_t{kRecordBytes} * base;
      const uint64_t stamps_at = header_.recency_offset + uint64_t{kRecencyBytes} * base;
      if (file::pread_all(metadata_.get(), records.data(), size_t{kRecordBytes} * here, records_at) < 0)
        return Status::kIOError;
      if (file::pread_all(metadata_.get(), stamps.data(), size_t{kRecencyBytes} * here, stamps_at) < 0)
        return Status::kIOError;
      for (uint32_t i = 0; i < here; ++i) {
        std::byte* bytes = records.data() + size_t{kRecordBytes} * i;
        SlotRecord record;
        switch (settle(bytes, records_at + uint64_t{kRecordBytes} * i, &record)) {
          case Status::kOk: {
            const uint64_t stamp = first_word(stamps.data() + size_t{kRecencyBytes} * i);
            pages->push_back({base + i, record.label, record.generation, stamp < kStampLimit ? stamp : 0});
            break;
          }
          case Status::kChecksum: damaged->push_back(base + i); break;
          case Status::kStale: {
            const uint64_t generation = first_word(bytes);
            const bool worn = generation >= kGenerationLimit - 1;
            empty->never_written += generation == 0;
            empty->worn += worn;
            empty->odd += generation != 0 && !worn;
            break;
          }
          default: return Status::kIOError;
        }
      }
    }
  } catch (const std::bad_alloc&) {
    return Status::kIOError;
  }
  return Status::kOk;
}

// A record that is torn by its writer looks damaged. It is, if it still does when read after its generation, and the
// generation is the same before and behind that. One that moves each time counts as being written.
Status VolumeReader::settle(std::byte* bytes, uint64_t at, SlotRecord* record) const noexcept {
  for (int i = 0; i < kTries; ++i) {
    const uint64_t generation = first_word(bytes);
    if (!holds_page(generation)) return Status::kStale;
    if (record_right(bytes, record)) return Status::kOk;
    acquire_fence();
    if (file::pread_all(metadata_.get(), bytes, kRecordBytes, at) < 0) return Status::kIOError;
    if (first_word(bytes) != generation || record_right(bytes, record)) continue;
    acquire_fence();
    uint64_t now = 0;
    if (file::pread_all(metadata_.get(), &now, sizeof(now), at) < 0) return Status::kIOError;
    if (now == generation) return Status::kChecksum;
    if (file::pread_all(metadata_.get(), bytes, kRecordBytes, at) < 0) return Status::kIOError;
  }
  return Status::kStale;
}

PageCheck VolumeReader::check_page(uint32_t slot) {
  PageCheck check;
  for (int i = 0; i < kTries; ++i) {
    check = PageCheck();
    const Status status = check_once(slot, &check);
    if (status == Status::kStale) {
      check.verdict = PageVerdict::kChanged;
      continue;
    }
    if (status == Status::kOk) check.verdict = PageVerdict::kRight;
    if (status == Status::kChecksum) check.verdict = PageVerdict::kDamaged;
    if (status == Status::kPending) check.verdict = PageVerdict::kNoLayout;
    return check;
  }
  return check;
}

Status VolumeReader::read_with(const PageShape& shape, const Reading& reading, ForeignDetail* detail) {
  return read_foreign_page(shape, header_, metadata_.get(), pages_.valid() ? pages_.get() : metadata_.get(), nullptr,
                           reading.slot, reading.record.generation, reading.record.label, reading.target, detail);
}

// kPending: the page's layout is not known.
Status VolumeReader::check_once(uint32_t slot, PageCheck* check) {
  if (slot >= header_.slots) return Status::kInvalid;
  const uint64_t at = header_.records_offset + uint64_t{kRecordBytes} * slot;
  std::array<std::byte, kRecordBytes> bytes;
  if (file::pread_all(metadata_.get(), bytes.data(), bytes.size(), at) < 0) return Status::kIOError;
  Reading reading{slot, SlotRecord(), scratch_.target(header_.page_bytes)};
  if (reading.target == nullptr) return Status::kIOError;
  if (const Status status = settle(bytes.data(), at, &reading.record); status != Status::kOk) {
    if (status == Status::kChecksum) check->damage = PageDamage::kRecord;
    return status;
  }
  if (!shape_.has_value()) return find_shape(reading, check);
  ForeignDetail detail;
  const Status status = read_with(*shape_, reading, &detail);
  if (status != Status::kChecksum) return status;
  check->damage = detail.found.empty() ? PageDamage::kChecksums : PageDamage::kLayers;
  for (uint32_t i = 0; i < detail.found.size(); ++i) {
    if (detail.found[i] != detail.expected[i]) check->layers.push_back(i);
  }
  return status;
}

Status VolumeReader::find_shape(const Reading& reading, PageCheck* check) {
  ForeignDetail detail;
  for (const PageShape& guess : guesses_) {
    const Status status = read_with(guess, reading, &detail);
    if (status == Status::kOk) {
      shape_ = guess;
      return status;
    }
    if (status != Status::kChecksum) return status;
    check->damage = detail.found.empty() ? PageDamage::kChecksums : PageDamage::kLayers;
    if (check->damage == PageDamage::kChecksums) return status;
  }
  // The bytes delivered last are of a generation that stood still: damage of one layer is all that can spoil the search.
  const uint64_t allowed = std::min(kSearchAPage * header_.page_bytes, search_left_);
  uint64_t steps = allowed;
  std::vector<uint64_t> sizes = find_layers(reading.target, header_.page_bytes, detail.expected,
                                            guesses_.back().page_seed(reading.record.label), &steps);
  search_left_ -= allowed - steps;
  if (sizes.empty()) return steps == 0 ? Status::kPending : Status::kChecksum;
  PageShape found(std::move(sizes), header_.fingerprint);
  const Status status = read_with(found, reading, &detail);
  if (status == Status::kOk) shape_ = std::move(found);
  return status;
}

std::vector<uint64_t> find_layers(const std::byte* page, uint64_t page_bytes, const std::vector<uint32_t>& checksums,
                                  uint32_t page_seed, uint64_t* steps) {
  struct Layer {
    uint64_t first, end;
    uint32_t crc;
  };
  const size_t count = checksums.size();
  std::vector<Layer> layers{{0, 0, PageShape::layer_seed(page_seed, 0)}};
  while (!layers.empty()) {
    Layer& layer = layers.back();
    const size_t number = layers.size() - 1;
    const uint64_t reserved = count - layers.size();  // a byte for each layer behind
    bool ends_here = false;
    while (!ends_here && layer.end + reserved < page_bytes) {
      if (*steps == 0) return {};
      --*steps;
      layer.crc = crc32c(layer.crc, page + layer.end, 1);
      ++layer.end;
      ends_here = layer.crc == checksums[number] && (reserved > 0 || layer.end == page_bytes);
    }
    if (!ends_here) {
      layers.pop_back();  // the layer before it ends further on, by a checksum that is right by chance here
    } else if (reserved > 0) {
      const uint64_t next = layer.end;
      layers.push_back({next, next, PageShape::layer_seed(page_seed, static_cast<uint32_t>(number + 1))});
    } else {
      std::vector<uint64_t> sizes;
      for (const Layer& found : layers) sizes.push_back(found.end - found.first);
      return sizes;
    }
  }
  return {};
}

}  // namespace stepwell
