// Headers and records: what decodes lies inside its file, and is what encode() writes.
#include <array>
#include <cstring>
#include <string>

#include "image.h"
#include "targets.h"

namespace stepwell::fuzz {

namespace {

void check_decoded(const VolumeHeader& header, const std::array<std::byte, kHeaderBytes>& bytes) {
  const uint64_t slots = header.slots;
  const std::array<std::array<uint64_t, 2>, 5> arrays{{
      {header.records_offset, kRecordBytes * slots},
      {header.checksums_offset, uint64_t{4} * header.layers * slots},
      {header.recency_offset, kRecencyBytes * slots},
      {header.ring_offset, kRingHeadBytes + uint64_t{kRingEntryBytes} * header.ring_entries},
      {header.pages_offset, header.slot_bytes * slots},
  }};
  uint64_t end = kHeaderBytes;
  const size_t in_metadata = header.medium == VolumeMedium::kShared ? 5 : 4;
  for (size_t i = 0; i < in_metadata; ++i) {
    STEPWELL_FUZZ_CHECK(arrays[i][0] >= end && arrays[i][0] % kMetadataAlignment == 0);
    end = arrays[i][0] + arrays[i][1];
    STEPWELL_FUZZ_CHECK(end >= arrays[i][0] && end <= header.metadata_bytes);
  }
  if (in_metadata == 4) STEPWELL_FUZZ_CHECK(arrays[4][1] <= header.pages_bytes);
  STEPWELL_FUZZ_CHECK(header.page_bytes <= header.slot_bytes && header.layers <= header.page_bytes);
  std::array<std::byte, kHeaderBytes> again;
  header.encode(again.data());
  STEPWELL_FUZZ_CHECK(again == bytes);
}

}  // namespace

void fuzz_header(const uint8_t* data, size_t size) {
  Script script(data, size);
  std::array<std::byte, kHeaderBytes> bytes{};
  uint64_t metadata_bytes, pages_bytes;
  if (script.flag()) {  // what the fuzzer makes of the bytes themselves
    for (std::byte& byte : bytes) byte = script.take<std::byte>();
    metadata_bytes = script.take<uint64_t>();
    pages_bytes = script.take<uint64_t>();
  } else {
    Image image(script.flag() ? VolumeMedium::kShared : VolumeMedium::kDisk);
    while (!script.is_over()) image.edit(script);
    if (::pread(image.metadata(), bytes.data(), bytes.size(), 0) < 0) return;
    std::memcpy(&metadata_bytes, bytes.data() + 144, sizeof(metadata_bytes));  // files of the sizes that it says
    std::memcpy(&pages_bytes, bytes.data() + 152, sizeof(pages_bytes));
  }
  VolumeHeader header;
  if (VolumeHeader::decode(bytes.data(), metadata_bytes, pages_bytes, &header).empty()) check_decoded(header, bytes);
}

void fuzz_record(const uint8_t* data, size_t size) {
  Script script(data, size);
  Image image(VolumeMedium::kShared);
  std::array<std::byte, kRecordBytes> bytes{};
  if (script.flag()) {
    for (std::byte& byte : bytes) byte = script.take<std::byte>();
  } else {
    while (!script.is_over()) image.edit(script);
    const auto at = static_cast<off_t>(image.base().records_offset + kRecordBytes * uint64_t{size % 8});
    if (::pread(image.metadata(), bytes.data(), bytes.size(), at) < 0) return;
  }
  SlotRecord record;
  if (!SlotRecord::decode(bytes.data(), &record)) return;
  STEPWELL_FUZZ_CHECK(holds_page(record.generation) && record.label.kind != 0);
  STEPWELL_FUZZ_CHECK(record.label.key.length >= 1 && record.label.key.length <= kMaxKeyBytes);
  STEPWELL_FUZZ_CHECK(record.label.parent.length <= kMaxKeyBytes);
  std::array<std::byte, kRecordBytes> again;
  record.encode(again.data());
  STEPWELL_FUZZ_CHECK(again == bytes);
}

}  // namespace stepwell::fuzz
