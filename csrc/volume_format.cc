// The bytes of a volume's header and records, FORMAT.md 2. What is decoded here was written by anybody.
#include <bit>
#include <limits>
#include <stdexcept>

#include "crc32c.h"
#include "volume.h"

namespace stepwell {

static_assert(std::endian::native == std::endian::little, "volumes are little-endian and are read in place");

namespace {

constexpr std::array<char, 8> kMagic{'S', 'T', 'E', 'P', 'W', 'E', 'L', 'V'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxLayers = 1u << 16;
constexpr uint32_t kMinRing = 64, kMaxRing = 1u << 20;
constexpr uint64_t kMaxAlignment = 4096;

template <typename T>
void put(std::byte* out, size_t offset, const T& value) noexcept {
  std::memcpy(out + offset, &value, sizeof(T));
}

template <typename T>
T get(const std::byte* in, size_t offset) noexcept {
  T value;
  std::memcpy(&value, in + offset, sizeof(T));
  return value;
}

bool all_zero(const std::byte* in, size_t first, size_t last) noexcept {
  for (size_t i = first; i < last; ++i) {
    if (in[i] != std::byte{0}) return false;
  }
  return true;
}

uint64_t round_up(uint64_t value, uint64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

bool alignment_right(VolumeMedium medium, uint64_t alignment) noexcept {
  const uint64_t least = medium == VolumeMedium::kShared ? 64 : 512;
  return std::has_single_bit(alignment) && alignment >= least && alignment <= kMaxAlignment;
}

bool ring_right(uint32_t entries) noexcept {
  return std::has_single_bit(entries) && entries >= kMinRing && entries <= kMaxRing;
}

// Sets slots, offsets and sizes. No overflow: slots <= 2^20, page bytes < 2^32, layers <= 2^16.
void lay_out(VolumeHeader* header, uint32_t slots) noexcept {
  header->slots = slots;
  header->records_offset = kHeaderBytes;
  header->checksums_offset = round_up(header->records_offset + uint64_t{kRecordBytes} * slots, kMetadataAlignment);
  header->recency_offset =
      round_up(header->checksums_offset + uint64_t{4} * header->layers * slots, kMetadataAlignment);
  header->ring_offset = round_up(header->recency_offset + uint64_t{kRecencyBytes} * slots, kMetadataAlignment);
  const uint64_t end = round_up(header->ring_offset + kRingHeadBytes + uint64_t{kRingEntryBytes} * header->ring_entries,
                                kMetadataAlignment);
  const uint64_t pages = header->slot_bytes * slots;
  const bool shared = header->medium == VolumeMedium::kShared;
  header->pages_offset = shared ? end : 0;
  header->metadata_bytes = shared ? end + pages : end;
  header->pages_bytes = shared ? 0 : pages;
}

uint64_t total_bytes(const VolumeHeader& header) noexcept { return header.metadata_bytes + header.pages_bytes; }

// The boot id counts as zeros: it is rewritten in place, and a power loss in the midst of that must not cost a volume.
uint32_t header_checksum(const std::byte header[4096]) noexcept {
  constexpr size_t kBootIdBytes = sizeof(VolumeHeader::boot_id);
  constexpr std::array<std::byte, kBootIdBytes> kZeros{};
  const size_t behind = kBootIdOffset + kBootIdBytes;
  return crc32c(crc32c(crc32c(0, header, kBootIdOffset), kZeros.data(), kBootIdBytes), header + behind, 4092 - behind);
}

std::string wrong(const char* what, uint64_t value) { return std::string(what) + " " + std::to_string(value); }

}  // namespace

VolumeHeader VolumeHeader::plan(VolumeMedium medium, const PageShape& shape, uint64_t volume_bytes, uint64_t alignment,
                                uint32_t ring_entries) {
  if (medium != VolumeMedium::kShared && medium != VolumeMedium::kDisk)
    throw std::invalid_argument(wrong("volume medium", static_cast<uint64_t>(medium)));
  if (!alignment_right(medium, alignment))
    throw std::invalid_argument(wrong("slot alignment must be a power of two, 64 (disk: 512) to 4096, not", alignment));
  if (!ring_right(ring_entries))
    throw std::invalid_argument(wrong("ring entries must be a power of two, 64 to 2^20, not", ring_entries));
  if (shape.layers() > kMaxLayers)
    throw std::invalid_argument(wrong("a volume holds at most 65536 layers, not", shape.layers()));
  if (shape.page_bytes() > std::numeric_limits<uint32_t>::max())
    throw std::invalid_argument(wrong("a page of a volume is smaller than 4 GiB, not", shape.page_bytes()));
  VolumeHeader header;
  header.medium = medium;
  header.fingerprint = shape.fingerprint();
  header.layers = shape.layers();
  header.ring_entries = ring_entries;
  header.page_bytes = shape.page_bytes();
  header.alignment = alignment;
  header.slot_bytes = round_up(header.page_bytes, alignment);

  // The most slots that fit; slot numbers of a set have kSlotBits bits for the slot.
  uint32_t fits = 0, beyond = (1u << kSlotBits) + 1;
  while (beyond - fits > 1) {
    const uint32_t middle = fits + (beyond - fits) / 2;
    lay_out(&header, middle);
    (total_bytes(header) <= volume_bytes ? fits : beyond) = middle;
  }
  if (fits == 0) {
    lay_out(&header, 1);
    throw std::invalid_argument("a volume of " + std::to_string(volume_bytes) + " bytes holds no page: one page of " +
                                std::to_string(header.page_bytes) + " bytes needs " +
                                std::to_string(total_bytes(header)));
  }
  lay_out(&header, fits);
  return header;
}

void VolumeHeader::encode(std::byte out[4096]) const noexcept {
  std::memset(out, 0, kHeaderBytes);
  put(out, 0, kMagic);
  put(out, 8, kVersion);
  put(out, 12, kHeaderBytes);
  put(out, 16, volume_id);
  put(out, 32, fingerprint);
  put(out, 64, kind);
  put(out, 65, medium);
  put(out, 68, slots);
  put(out, 72, layers);
  put(out, 76, ring_entries);
  put(out, 80, page_bytes);
  put(out, 88, slot_bytes);
  put(out, 96, alignment);
  put(out, 104, records_offset);
  put(out, 112, checksums_offset);
  put(out, 120, recency_offset);
  put(out, 128, ring_offset);
  put(out, 136, pages_offset);
  put(out, 144, metadata_bytes);
  put(out, 152, pages_bytes);
  put(out, kBootIdOffset, boot_id);
  put(out, 176, birth_ns);
  put(out, 184, epoch);
  put(out, 4092, header_checksum(out));
}

std::string VolumeHeader::decode(const std::byte in[4096], uint64_t metadata_file_bytes, uint64_t pages_file_bytes,
                                 VolumeHeader* out) {
  if (get<std::array<char, 8>>(in, 0) != kMagic) return "magic";
  if (get<uint32_t>(in, 8) != kVersion) return wrong("format version", get<uint32_t>(in, 8));
  if (get<uint32_t>(in, 12) != kHeaderBytes) return wrong("header bytes", get<uint32_t>(in, 12));
  if (get<uint32_t>(in, 4092) != header_checksum(in)) return "header checksum";
  if (!all_zero(in, 66, 68) || !all_zero(in, 192, 4092)) return "reserved bytes are not zero";

  VolumeHeader header;
  header.volume_id = get<std::array<uint8_t, 16>>(in, 16);
  header.fingerprint = get<std::array<uint8_t, 32>>(in, 32);
  header.kind = get<uint8_t>(in, 64);
  if (header.kind == 0) return wrong("kind", header.kind);  // another kind than ours is another's volume, not damage
  const uint8_t medium = get<uint8_t>(in, 65);
  if (medium != 1 && medium != 2) return wrong("medium", medium);
  header.medium = static_cast<VolumeMedium>(medium);
  header.slots = get<uint32_t>(in, 68);
  if (header.slots < 1 || header.slots > kMaxVolumeSlots) return wrong("slots", header.slots);
  header.layers = get<uint32_t>(in, 72);
  if (header.layers < 1 || header.layers > kMaxLayers) return wrong("layers", header.layers);
  header.ring_entries = get<uint32_t>(in, 76);
  if (!ring_right(header.ring_entries)) return wrong("ring entries", header.ring_entries);
  header.page_bytes = get<uint64_t>(in, 80);
  if (header.page_bytes < header.layers || header.page_bytes > std::numeric_limits<uint32_t>::max())
    return wrong("page bytes", header.page_bytes);
  header.slot_bytes = get<uint64_t>(in, 88);
  header.alignment = get<uint64_t>(in, 96);
  if (!alignment_right(header.medium, header.alignment)) return wrong("alignment", header.alignment);
  if (header.slot_bytes != round_up(header.page_bytes, header.alignment)) return wrong("slot bytes", header.slot_bytes);

  // The file sizes are facts; once every offset lies inside the file, no sum below can overflow: the largest array has
  // 2^56 bytes.
  header.metadata_bytes = get<uint64_t>(in, 144);
  if (header.metadata_bytes != metadata_file_bytes || header.metadata_bytes > std::numeric_limits<int64_t>::max())
    return "metadata file has " + std::to_string(metadata_file_bytes) + " bytes, header says " +
           std::to_string(header.metadata_bytes);
  header.pages_bytes = get<uint64_t>(in, 152);
  if (header.pages_bytes != pages_file_bytes || header.pages_bytes > std::numeric_limits<int64_t>::max())
    return "pages file has " + std::to_string(pages_file_bytes) + " bytes, header says " +
           std::to_string(header.pages_bytes);
  header.records_offset = get<uint64_t>(in, 104);
  header.checksums_offset = get<uint64_t>(in, 112);
  header.recency_offset = get<uint64_t>(in, 120);
  header.ring_offset = get<uint64_t>(in, 128);
  header.pages_offset = get<uint64_t>(in, 136);
  const bool shared = header.medium == VolumeMedium::kShared;
  const uint64_t slots = header.slots;
  struct Array {
    const char* name;
    uint64_t offset, bytes;
  };
  const std::array<Array, 5> arrays{
      Array{"records", header.records_offset, kRecordBytes * slots},
      Array{"checksums", header.checksums_offset, uint64_t{4} * header.layers * slots},
      Array{"recency", header.recency_offset, kRecencyBytes * slots},
      Array{"ring", header.ring_offset, kRingHeadBytes + uint64_t{kRingEntryBytes} * header.ring_entries},
      Array{"pages", header.pages_offset, header.slot_bytes * slots},
  };
  const char* before = "header";
  uint64_t end = kHeaderBytes;
  for (const Array& array : arrays) {
    if (!shared && array.name == arrays.back().name) break;
    if (array.offset % kMetadataAlignment != 0 || array.offset > header.metadata_bytes)
      return std::string(array.name) + wrong(" offset", array.offset);
    if (array.offset < end) return std::string(before) + " overlaps " + array.name;
    end = array.offset + array.bytes;
    if (end > header.metadata_bytes) return std::string(array.name) + " end behind the metadata file";
    before = array.name;
  }
  if (shared && header.pages_bytes != 0) return wrong("pages bytes of a shared volume", header.pages_bytes);
  if (!shared && header.pages_offset != 0) return wrong("pages offset of a disk volume", header.pages_offset);
  if (!shared && header.slot_bytes * slots > header.pages_bytes) return "pages end behind the pages file";

  header.boot_id = get<std::array<uint8_t, 16>>(in, kBootIdOffset);
  header.birth_ns = get<uint64_t>(in, 176);
  header.epoch = get<uint64_t>(in, 184);
  *out = header;
  return "";
}

void SlotRecord::encode(std::byte out[192]) const noexcept {
  std::memset(out, 0, kRecordBytes);
  put(out, 0, generation);
  put(out, 8, label.epoch);
  put(out, 16, label.kind);
  put(out, 17, label.key.length);
  const bool has_parent = label.parent_state == ParentState::kKnown;
  put(out, 18, has_parent ? label.parent.length : uint8_t{0});
  put(out, 19, label.parent_state);
  put(out, 20, label.depth);
  put(out, 24, length);
  put(out, 28, page_checksum);
  std::memcpy(out + 32, label.key.bytes.data(), label.key.length);
  if (has_parent) std::memcpy(out + 96, label.parent.bytes.data(), label.parent.length);
  put(out, 188, crc32c(0, out, 188));
}

bool SlotRecord::decode(const std::byte in[192], SlotRecord* out) noexcept {
  if (get<uint32_t>(in, 188) != crc32c(0, in, 188)) return false;
  SlotRecord record;
  record.generation = get<uint64_t>(in, 0);
  if (!holds_page(record.generation)) return false;
  record.label.epoch = get<uint64_t>(in, 8);
  record.label.kind = get<uint8_t>(in, 16);
  if (record.label.kind == 0) return false;
  record.label.key.length = get<uint8_t>(in, 17);
  if (record.label.key.length < 1 || record.label.key.length > kMaxKeyBytes) return false;
  record.label.parent.length = get<uint8_t>(in, 18);
  if (record.label.parent.length > kMaxKeyBytes) return false;
  const uint8_t parent_state = get<uint8_t>(in, 19);
  if (parent_state > static_cast<uint8_t>(ParentState::kUnknown)) return false;
  record.label.parent_state = static_cast<ParentState>(parent_state);
  if ((record.label.parent_state == ParentState::kKnown) != (record.label.parent.length > 0)) return false;
  record.label.depth = get<uint32_t>(in, 20);
  record.length = get<uint32_t>(in, 24);
  record.page_checksum = get<uint32_t>(in, 28);
  if (!all_zero(in, 32 + record.label.key.length, 96)) return false;
  if (!all_zero(in, 96 + record.label.parent.length, 188)) return false;
  std::memcpy(record.label.key.bytes.data(), in + 32, record.label.key.length);
  std::memcpy(record.label.parent.bytes.data(), in + 96, record.label.parent.length);
  *out = record;
  return true;
}

}  // namespace stepwell
