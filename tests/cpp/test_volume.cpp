#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <thread>

#include "crc32c.h"
#include "fault.h"
#include "guard.h"
#include "volume_files.h"

using namespace stepwell;
using stepwell::testing::label_of;
using stepwell::testing::shape_of;
using stepwell::testing::stamped;
using stepwell::testing::VolumeFiles;

namespace {

constexpr VolumeMedium kMedia[] = {VolumeMedium::kShared, VolumeMedium::kDisk};
constexpr uint64_t kVolumeBytes = 1 << 18;

struct ClearFaults {
  ~ClearFaults() { fault::clear(); }
};

Status write_key(Volume& volume, uint32_t slot, const std::string& key, uint64_t epoch = 0) {
  Scratch scratch;
  return write_page(volume, volume.shape(), slot, label_of(key, epoch), stamped(volume.shape(), key).data(), scratch);
}

// kOk only where every byte is the stamp's; a wrong byte under kOk fails the test here.
Status read_key(Volume& volume, uint32_t slot, const std::string& key, uint64_t epoch = 0) {
  Scratch scratch;
  std::vector<std::byte> out(volume.shape().page_bytes());
  const Status status = read_page(volume, volume.shape(), slot, label_of(key, epoch), out.data(), scratch);
  if (status == Status::kOk) REQUIRE(out == stamped(volume.shape(), key));
  return status;
}

Status read_foreign(const VolumeFiles& files, uint32_t slot, uint64_t generation, const std::string& key) {
  std::vector<std::byte> out(files.shape().page_bytes());
  const Status status = read_foreign_page(files.shape(), files.header(), files.metadata(), files.pages(), nullptr, slot,
                                          generation, label_of(key), out.data());
  if (status == Status::kOk) REQUIRE(out == stamped(files.shape(), key));
  return status;
}

struct Recovery {
  std::vector<RecoveredPage> pages;
  uint64_t damaged = 0;
  std::set<uint32_t> slots() const {
    std::set<uint32_t> all;
    for (const RecoveredPage& page : pages) all.insert(page.slot);
    return all;
  }
};

Recovery recover(Volume& volume) {
  Recovery result;
  RecoveryCounts counts;
  REQUIRE(volume.recover(&result.pages, &counts) == Status::kOk);
  result.damaged = counts.damaged + counts.worn;
  return result;
}

std::array<std::byte, kHeaderBytes> header_bytes(const VolumeHeader& header) {
  std::array<std::byte, kHeaderBytes> bytes;
  header.encode(bytes.data());
  return bytes;
}

std::string decode(const std::array<std::byte, kHeaderBytes>& bytes, const VolumeHeader& like) {
  VolumeHeader out;
  return VolumeHeader::decode(bytes.data(), like.metadata_bytes, like.pages_bytes, &out);
}

template <size_t N>
void seal(std::array<std::byte, N>* bytes) {
  const uint32_t crc = crc32c(0, bytes->data(), N - 4);
  std::memcpy(bytes->data() + N - 4, &crc, 4);
}

}  // namespace

TEST_CASE("a header reads back as it was written") {
  for (const VolumeMedium medium : kMedia) {
    VolumeHeader header = VolumeHeader::plan(medium, shape_of({1000, 24}), 1 << 20, 512, 128);
    for (size_t i = 0; i < 16; ++i) header.volume_id[i] = static_cast<uint8_t>(i + 1);
    header.boot_id.fill(3);
    header.birth_ns = 1234567890123;
    header.epoch = 77;
    VolumeHeader out;
    const auto bytes = header_bytes(header);
    REQUIRE(VolumeHeader::decode(bytes.data(), header.metadata_bytes, header.pages_bytes, &out) == "");
    CHECK(header_bytes(out) == bytes);
    CHECK(out.volume_id == header.volume_id);
    CHECK(out.epoch == 77);
    CHECK(out.slot_bytes == 1024);
  }
}

TEST_CASE("a plan uses all the bytes it is given and no more") {
  for (const VolumeMedium medium : kMedia) {
    for (const uint64_t bytes : {uint64_t{40000}, uint64_t{1} << 20, (uint64_t{1} << 24) + 12345}) {
      const PageShape shape = shape_of({4000, 300});
      const VolumeHeader header = VolumeHeader::plan(medium, shape, bytes, 512, 64);
      const uint64_t total = header.metadata_bytes + header.pages_bytes;
      CHECK(total <= bytes);
      // One slot more would not fit, whatever the rounding of the arrays gives back.
      CHECK(total + header.slot_bytes + 192 + 16 + 8 + 4 * 4096 > bytes);
      CHECK(decode(header_bytes(header), header) == "");
    }
  }
}

TEST_CASE("a plan without room for one page, or of a wrong alignment or ring, is refused") {
  const PageShape shape = shape_of({4096});
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kShared, shape, 20000, 64, 64), std::invalid_argument);
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kShared, shape, 1 << 20, 32, 64), std::invalid_argument);
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kShared, shape, 1 << 20, 96, 64), std::invalid_argument);
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kDisk, shape, 1 << 20, 64, 64), std::invalid_argument);
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kDisk, shape, 1 << 20, 8192, 64), std::invalid_argument);
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kDisk, shape, 1 << 20, 512, 65), std::invalid_argument);
  CHECK_THROWS_AS(VolumeHeader::plan(VolumeMedium::kDisk, shape, 1 << 20, 512, 32), std::invalid_argument);
}

TEST_CASE("each wrong field of a header is named, even under a right checksum") {
  struct Wrong {
    size_t offset;
    uint64_t value;
    size_t bytes;
    const char* reason;
  };
  const VolumeHeader header = VolumeHeader::plan(VolumeMedium::kShared, shape_of({1000, 24}), 1 << 20, 64, 64);
  const uint64_t huge = ~uint64_t{0};
  const Wrong wrongs[] = {
      {0, 0, 8, "magic"},
      {8, 2, 4, "format version 2"},
      {12, 8192, 4, "header bytes 8192"},
      {64, 0, 1, "kind 0"},
      {65, 3, 1, "medium 3"},
      {66, 1, 1, "reserved bytes are not zero"},
      {200, 1, 1, "reserved bytes are not zero"},
      {68, 0, 4, "slots 0"},
      {68, (1u << 24) + 1, 4, "slots 16777217"},
      {68, header.slots + 1000, 4, "records overlaps checksums"},
      {72, 0, 4, "layers 0"},
      {72, 65537, 4, "layers 65537"},
      {72, 3, 4, "checksums overlaps recency"},
      {72, 1000, 4, "checksums end behind the metadata file"},
      {76, 96, 4, "ring entries 96"},
      {76, 1 << 21, 4, "ring entries 2097152"},
      {76, 1 << 10, 4, "ring overlaps pages"},
      {76, 1 << 20, 4, "ring end behind the metadata file"},
      {80, 0, 8, "page bytes 0"},
      {80, huge, 8, "page bytes 18446744073709551615"},
      {88, 960, 8, "slot bytes 960"},
      {88, huge, 8, "slot bytes 18446744073709551615"},
      {96, 0, 8, "alignment 0"},
      {96, 96, 8, "alignment 96"},
      {96, huge, 8, "alignment 18446744073709551615"},
      {104, 0, 8, "header overlaps records"},
      {104, 4097, 8, "records offset 4097"},
      {104, huge - 4095, 8, "records offset 18446744073709547520"},
      {112, 4096, 8, "records overlaps checksums"},
      {136, header.pages_offset + 4096 * 4096, 8, "pages offset "},
      {144, header.metadata_bytes + 1, 8, "metadata file has "},
      {152, 4096, 8, "pages file has 0 bytes, header says 4096"},
  };
  for (const Wrong& wrong : wrongs) {
    auto bytes = header_bytes(header);
    std::memcpy(bytes.data() + wrong.offset, &wrong.value, wrong.bytes);
    seal(&bytes);
    CAPTURE(wrong.offset);
    CAPTURE(wrong.value);
    CHECK(decode(bytes, header).starts_with(wrong.reason));
  }
  auto bytes = header_bytes(header);
  bytes[300] = std::byte{1};
  CHECK(decode(bytes, header) == "header checksum");
}

TEST_CASE("a header that decodes keeps every array inside its file, whatever bytes were changed") {
  const PageShape shape = shape_of({1000, 24});
  std::mt19937_64 random(20261130);
  uint32_t accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const VolumeMedium medium = kMedia[round % 2];
    VolumeHeader header = VolumeHeader::plan(medium, shape, 1 << 20, 512, 64);
    auto bytes = header_bytes(header);
    for (uint64_t changes = random() % 4; changes-- > 0;) {
      // Whole fields more often than single bytes: a byte flip in an offset rarely gives another plausible one.
      const size_t offset = 64 + 4 * (random() % 32);
      const uint64_t values[] = {random(), random() % 65536, 4096 * (random() % 512), uint64_t{1} << random() % 64,
                                 0,        ~uint64_t{0}};
      const uint64_t value = values[random() % std::size(values)];
      std::memcpy(bytes.data() + offset, &value, random() % 2 == 0 ? 4 : 8);
    }
    if (random() % 8 != 0) seal(&bytes);
    VolumeHeader out;
    const uint64_t metadata_bytes = random() % 4 == 0 ? random() % (1 << 22) : header.metadata_bytes;
    if (VolumeHeader::decode(bytes.data(), metadata_bytes, header.pages_bytes, &out) != "") continue;
    ++accepted;
    const bool shared = out.medium == VolumeMedium::kShared;
    REQUIRE(out.records_offset >= 4096);
    REQUIRE(out.records_offset + 192 * uint64_t{out.slots} <= out.checksums_offset);
    REQUIRE(out.checksums_offset + 4 * uint64_t{out.layers} * out.slots <= out.recency_offset);
    REQUIRE(out.recency_offset + 16 * uint64_t{out.slots} <= out.ring_offset);
    const uint64_t ring_end = out.ring_offset + 64 + 16 * uint64_t{out.ring_entries};
    REQUIRE(ring_end <= (shared ? out.pages_offset : metadata_bytes));
    const unsigned __int128 pages_end = out.pages_offset + static_cast<unsigned __int128>(out.slot_bytes) * out.slots;
    REQUIRE(pages_end <= (shared ? metadata_bytes : header.pages_bytes));
    REQUIRE(out.page_bytes <= out.slot_bytes);
  }
  CHECK(accepted > 1000);
}

TEST_CASE("a record reads back as it was written, and no changed bit passes") {
  SlotRecord record;
  record.generation = 42;
  record.label = label_of("the key", 5);
  record.label.parent = label_of("the parent").key;
  record.label.parent_state = ParentState::kKnown;
  record.label.depth = 17;
  record.length = 1024;
  record.page_checksum = 0x12345678;
  std::array<std::byte, kRecordBytes> bytes;
  record.encode(bytes.data());
  SlotRecord out;
  REQUIRE(SlotRecord::decode(bytes.data(), &out));
  CHECK(out.label.parent == record.label.parent);
  CHECK(out.label.depth == 17);
  CHECK(out.page_checksum == 0x12345678);
  for (size_t bit = 0; bit < 8 * kRecordBytes; ++bit) {
    auto changed = bytes;
    changed[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    CAPTURE(bit);
    CHECK_FALSE(SlotRecord::decode(changed.data(), &out));
  }
}

TEST_CASE("a record that decodes has every field in its bounds, even under a right checksum") {
  std::mt19937_64 random(7);
  uint32_t accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    SlotRecord record;
    record.generation = 2 * (1 + random() % 1000);
    record.label = label_of(std::string(1 + random() % 64, 'k'));
    if (round % 2 == 0) {
      record.label.parent_state = ParentState::kKnown;
      record.label.parent = label_of(std::string(1 + random() % 64, 'p')).key;
    }
    record.length = 100;
    std::array<std::byte, kRecordBytes> bytes;
    record.encode(bytes.data());
    for (uint64_t changes = random() % 3; changes-- > 0;) bytes[random() % 188] = static_cast<std::byte>(random());
    seal(&bytes);
    SlotRecord out;
    if (!SlotRecord::decode(bytes.data(), &out)) continue;
    ++accepted;
    REQUIRE(holds_page(out.generation));
    REQUIRE(out.label.key.length >= 1);
    REQUIRE(out.label.key.length <= kMaxKeyBytes);
    REQUIRE(out.label.parent.length <= kMaxKeyBytes);
    REQUIRE(static_cast<uint8_t>(out.label.parent_state) <= 2);
    std::array<std::byte, kRecordBytes> again;
    out.encode(again.data());
    REQUIRE(again == bytes);
  }
  CHECK(accepted > 1000);
}

TEST_CASE("a volume gives back what was written, to its writer and to a neighbour") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({5000, 3000, 1}), kVolumeBytes);
    auto volume = files.open();
    CHECK(volume->does_io() == (medium == VolumeMedium::kDisk));
    for (uint32_t slot = 0; slot < files.header().slots; ++slot)
      REQUIRE(write_key(*volume, slot, "page " + std::to_string(slot)) == Status::kOk);
    for (uint32_t slot = 0; slot < files.header().slots; ++slot) {
      const std::string key = "page " + std::to_string(slot);
      CHECK(read_key(*volume, slot, key) == Status::kOk);
      CHECK(read_key(*volume, slot, "page") == Status::kStale);
      CHECK(read_key(*volume, slot, key, 1) == Status::kStale);
      CHECK(read_foreign(files, slot, 2, key) == Status::kOk);
      CHECK(read_foreign(files, slot, 2, "page") == Status::kStale);
      CHECK(read_foreign(files, slot, 4, key) == Status::kStale);
    }
    CHECK(read_foreign(files, files.header().slots, 2, "page 0") == Status::kInvalid);
    CHECK(read_foreign(files, 0, 3, "page 0") == Status::kInvalid);
    CHECK(read_foreign(files, 0, 0, "page 0") == Status::kInvalid);
  }
}

TEST_CASE("a neighbour's direct read lands in any buffer") {
  // 1000 bytes in slots of 1024: neither length nor buffer is aligned.
  VolumeFiles files(VolumeMedium::kDisk, shape_of({999, 1}), kVolumeBytes);
  auto volume = files.open();
  REQUIRE(write_key(*volume, 3, "k") == Status::kOk);
  std::vector<std::byte> room(1000 + 65);
  const Status status = read_foreign_page(files.shape(), files.header(), files.metadata(), files.pages(), nullptr, 3, 2,
                                          label_of("k"), room.data() + 65);
  CHECK(status == Status::kOk);
  CHECK(std::equal(room.begin() + 65, room.end(), stamped(files.shape(), "k").begin()));
}

TEST_CASE("a slot out of range is refused by every method of a volume") {
  VolumeFiles files(VolumeMedium::kShared, shape_of({64}), kVolumeBytes);
  auto volume = files.open();
  Scratch scratch;
  PageSource source;
  PageTarget target;
  const uint32_t checksum = 0, slot = files.header().slots;
  CHECK(volume->prepare_read(slot, label_of("k"), scratch, &source) == Status::kInvalid);
  CHECK(volume->begin_write(slot, scratch, &target) == Status::kInvalid);
  CHECK(volume->finish_write(slot, label_of("k"), &checksum, target) == Status::kInvalid);
  CHECK(volume->retire(slot) == Status::kInvalid);
  CHECK(volume->rewrite_and_check(slot, scratch) == Status::kInvalid);
  const uint64_t stamp = 1;
  CHECK(volume->write_recency(&slot, &stamp, 1) == Status::kInvalid);
  // Not begun, and labels that no record can hold.
  CHECK(volume->finish_write(0, label_of("k"), &checksum, target) == Status::kInvalid);
  REQUIRE(volume->begin_write(0, scratch, &target) == Status::kOk);
  CHECK(volume->finish_write(0, Label{}, &checksum, target) == Status::kInvalid);
  Label other_kind = label_of("k");
  other_kind.kind = 2;
  CHECK(volume->finish_write(0, other_kind, &checksum, target) == Status::kInvalid);
}

TEST_CASE("labels are told of pages that have the slot and generation asked for, and of nothing else") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    REQUIRE(write_key(*volume, 1, "a") == Status::kOk);
    REQUIRE(write_key(*volume, 2, "b") == Status::kOk);
    REQUIRE(write_key(*volume, 3, "c") == Status::kOk);
    REQUIRE(volume->retire(3) == Status::kOk);
    const std::vector<uint32_t> slots = {2, 1, 1, 3, 3, 0, 0, files.header().slots, UINT32_MAX, 2};
    const std::vector<uint64_t> generations = {2, 2, 4, 2, 3, 0, 2, 2, 2, UINT64_MAX};
    std::vector<Label> labels = {label_of("left over")};
    REQUIRE(volume->labels_of(slots.data(), generations.data(), slots.size(), &labels) == Status::kOk);
    REQUIRE(labels.size() == 2);
    CHECK(labels[0].key == label_of("b").key);
    CHECK(labels[1].key == label_of("a").key);
    REQUIRE(volume->labels_of(nullptr, nullptr, 0, &labels) == Status::kOk);
    CHECK(labels.empty());
  }
}

TEST_CASE("a generation only grows: over writes, retirement and adoption") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    CHECK(files.generation(1) == 0);
    REQUIRE(write_key(*volume, 1, "a") == Status::kOk);
    CHECK(files.generation(1) == 2);
    REQUIRE(volume->retire(1) == Status::kOk);
    CHECK(files.generation(1) == 3);
    REQUIRE(volume->retire(1) == Status::kOk);
    CHECK(files.generation(1) == 3);
    CHECK(read_key(*volume, 1, "a") == Status::kStale);
    REQUIRE(write_key(*volume, 1, "b") == Status::kOk);
    CHECK(files.generation(1) == 4);
    REQUIRE(write_key(*volume, 1, "c") == Status::kOk);
    CHECK(files.generation(1) == 6);
    volume = files.open();
    CHECK(recover(*volume).slots() == std::set<uint32_t>{1});
    CHECK(files.generation(1) == 6);
    REQUIRE(volume->retire(1) == Status::kOk);
    volume = files.open();
    CHECK(recover(*volume).pages.empty());
    CHECK(files.generation(1) == 7);
    CHECK(read_foreign(files, 1, 6, "c") == Status::kStale);
  }
}

TEST_CASE("a slot at the end of its generations is not used again") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    const uint64_t last = kGenerationLimit - 2;
    files.set_word(files.record_at(0), last - 1);
    REQUIRE(write_key(*volume, 0, "a") == Status::kOk);
    CHECK(files.generation(0) == last);
    CHECK(read_foreign(files, 0, last, "a") == Status::kOk);
    CHECK(write_key(*volume, 0, "b") == Status::kInvalid);
    CHECK(files.generation(0) == last + 1);
    CHECK(write_key(*volume, 0, "b") == Status::kInvalid);
    files.set_word(files.record_at(1), ~uint64_t{0});
    files.set_word(files.record_at(2), ~uint64_t{0} - 1);
    CHECK(write_key(*volume, 1, "b") == Status::kInvalid);
    CHECK(recover(*volume).damaged == 3);
    CHECK(files.generation(2) == ~uint64_t{0});
  }
}

TEST_CASE("the ring tells every change in order, and its counter goes on after a restart") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes, 64);
    const uint64_t ring = files.header().ring_offset;
    auto volume = files.open();
    std::vector<std::pair<uint64_t, uint64_t>> expected;
    for (uint64_t k = 0; k < 100; ++k) {
      const auto slot = static_cast<uint32_t>(k % 3);
      if (k == 50) volume = files.open();
      if (k % 4 == 3 && files.generation(slot) % 2 == 0) {
        REQUIRE(volume->retire(slot) == Status::kOk);
      } else {
        REQUIRE(write_key(*volume, slot, "k" + std::to_string(k)) == Status::kOk);
      }
      expected.emplace_back(slot, files.generation(slot));
      REQUIRE(files.word(ring) == k + 1);
    }
    for (uint64_t k = 36; k < 100; ++k) {
      const uint64_t entry = ring + 64 + 16 * (k % 64);
      CHECK(files.word(entry) == expected[k].first);
      CHECK(files.word(entry + 8) == expected[k].second);
    }
  }
}

TEST_CASE("adoption keeps right pages of all epochs, frees the rest, and counts damage") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100, 50}), kVolumeBytes);
    auto volume = files.open();
    for (uint32_t slot = 0; slot < 8; ++slot)
      REQUIRE(write_key(*volume, slot, "k" + std::to_string(slot), 5) == Status::kOk);
    REQUIRE(write_key(*volume, 8, "old", 4) == Status::kOk);
    REQUIRE(volume->retire(2) == Status::kOk);
    VolumeFiles::flip(files.metadata(), files.record_at(3) + 40);
    const uint64_t counter = files.word(files.header().ring_offset);
    volume = files.open();
    const Recovery found = recover(*volume);
    CHECK(found.slots() == std::set<uint32_t>{0, 1, 4, 5, 6, 7, 8});
    CHECK(found.damaged == 1);
    CHECK(found.pages[1].label.epoch == 5);
    CHECK(found.pages[6].label.epoch == 4);
    CHECK(found.pages[2].label.key == label_of("k4").key);
    CHECK(found.pages[2].generation == 2);
    CHECK(files.generation(3) == 3);
    CHECK(files.generation(8) == 2);
    CHECK(read_key(*volume, 8, "old", 4) == Status::kOk);
    // Whoever follows the ring is told to read all records.
    CHECK(files.word(files.header().ring_offset) - counter > files.header().ring_entries);
    CHECK(recover(*volume).damaged == 0);
  }
}

TEST_CASE("pages of one key in two epochs are both kept, and each is one of its own duplicates alone") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    REQUIRE(write_key(*volume, 1, "same", 7) == Status::kOk);
    REQUIRE(write_key(*volume, 2, "same", 3) == Status::kOk);
    REQUIRE(write_key(*volume, 3, "same", 7) == Status::kOk);
    REQUIRE(write_key(*volume, 4, "same", 3) == Status::kOk);
    const uint32_t slots[] = {1, 2, 3, 4};
    const uint64_t stamps[] = {40, 10, 20, 30};
    REQUIRE(volume->write_recency(slots, stamps, 4) == Status::kOk);
    volume = files.open();
    std::vector<RecoveredPage> pages;
    RecoveryCounts counts;
    REQUIRE(volume->recover(&pages, &counts) == Status::kOk);
    REQUIRE(pages.size() == 2);
    CHECK((pages[0].slot == 1 && pages[0].label.epoch == 7));
    CHECK((pages[1].slot == 4 && pages[1].label.epoch == 3));
    CHECK(counts.duplicate == 2);
    CHECK(read_key(*volume, 1, "same", 3) == Status::kStale);
    CHECK(read_key(*volume, 1, "same", 7) == Status::kOk);
    CHECK(read_key(*volume, 4, "same", 3) == Status::kOk);
  }
}

TEST_CASE("of two pages of one key the one with the higher stamp is kept, then that of the higher generation") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    REQUIRE(write_key(*volume, 1, "same") == Status::kOk);
    REQUIRE(write_key(*volume, 4, "same") == Status::kOk);
    REQUIRE(write_key(*volume, 9, "same") == Status::kOk);
    REQUIRE(write_key(*volume, 2, "tie") == Status::kOk);
    REQUIRE(write_key(*volume, 3, "x") == Status::kOk);
    REQUIRE(write_key(*volume, 3, "tie") == Status::kOk);
    const uint32_t slots[] = {9, 4, 1, 4};
    const uint64_t stamps[] = {1, 2, 3, 4};
    REQUIRE(volume->write_recency(slots, stamps, 4) == Status::kOk);
    volume = files.open();
    const Recovery found = recover(*volume);
    CHECK(found.slots() == std::set<uint32_t>{3, 4});
    CHECK(found.damaged == 0);
    CHECK(files.generation(1) == 3);
    CHECK(files.generation(9) == 3);
    CHECK(files.generation(2) == 3);
    CHECK(read_key(*volume, 4, "same") == Status::kOk);
  }
}

TEST_CASE("stamps stand at their slots, and nothing beside them changes") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), uint64_t{4} << 20);
    REQUIRE(files.header().slots > 1500);  // on disk: what lies far apart is written apart
    auto volume = files.open();
    const auto at = [&](uint32_t slot) { return files.header().recency_offset + 16 * slot; };
    files.set_word(at(6), 77);
    files.set_word(at(700), 78);
    const uint32_t slots[] = {5, 1400, 3, 4, 1401, 3};
    const uint64_t stamps[] = {10, 11, 12, 13, 14, 15};
    REQUIRE(volume->write_recency(slots, stamps, 6) == Status::kOk);
    CHECK(files.word(at(5)) == 10);
    CHECK(files.word(at(1400)) == 11);
    CHECK(files.word(at(3)) == 15);  // given twice: the last
    CHECK(files.word(at(4)) == 13);
    CHECK(files.word(at(1401)) == 14);
    CHECK(files.word(at(6)) == 77);
    CHECK(files.word(at(700)) == 78);
    for (const uint32_t slot : {0u, 2u, 7u, 1399u, 1402u}) CHECK(files.word(at(slot)) == 0);
    CHECK(volume->write_recency(nullptr, nullptr, 0) == Status::kOk);
  }
}

TEST_CASE("recovery says why slots were freed") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    for (const uint32_t slot : {1u, 2u, 3u, 4u})
      REQUIRE(write_key(*volume, slot, slot < 3 ? "same" : "other") == Status::kOk);
    REQUIRE(volume->retire(4) == Status::kOk);
    files.set_word(files.header().records_offset + 192 * 3 + 40, 5);  // its key
    std::vector<RecoveredPage> pages;
    RecoveryCounts counts;
    REQUIRE(volume->recover(&pages, &counts) == Status::kOk);
    CHECK(pages.size() == 1);
    CHECK(counts.duplicate == 1);
    CHECK(counts.damaged == 1);
    CHECK(counts.freed() == 2);
    REQUIRE(volume->recover(&pages, &counts) == Status::kOk);
    CHECK(pages.size() == 1);
    CHECK(counts.freed() == 0);
  }
}

TEST_CASE("a changed byte of page, checksums or record is never delivered") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100, 50}), kVolumeBytes);
    auto volume = files.open();
    struct Place {
      int fd;
      uint64_t offset;
    };
    uint32_t slot = 0;
    uint32_t delivered = 0;
    std::vector<Place> places;
    for (uint64_t i = 0; i < 150; i += 7) places.push_back({files.pages(), files.page_at(slot) + i});
    for (uint64_t i = 0; i < 8; ++i) places.push_back({files.metadata(), files.checksums_at(slot) + i});
    for (uint64_t i = 0; i < 192; ++i) places.push_back({files.metadata(), files.record_at(slot) + i});
    for (const Place& place : places) {
      REQUIRE(write_key(*volume, slot, "k") == Status::kOk);
      const uint64_t generation = files.generation(slot);
      VolumeFiles::flip(place.fd, place.offset);
      delivered += read_key(*volume, slot, "k") == Status::kOk;
      delivered += read_foreign(files, slot, generation, "k") == Status::kOk;
      VolumeFiles::flip(place.fd, place.offset);
      CHECK(read_key(*volume, slot, "k") == Status::kOk);
    }
    CHECK(delivered == 0);
  }
}

TEST_CASE("a write that fails at any step leaves nothing to find, and the slot can be written again") {
  const char* const points[] = {"volume.begin",           "volume.odd",          "volume.after_bytes",
                                "volume.after_checksums", "volume.after_record", "volume.after_publish",
                                "volume.after_ring"};
  for (const VolumeMedium medium : kMedia) {
    for (const char* point : points) {
      VolumeFiles files(medium, shape_of({100, 50}), kVolumeBytes);
      ClearFaults clear;
      auto volume = files.open();
      REQUIRE(write_key(*volume, 1, "old") == Status::kOk);
      fault::arm(point, fault::Action::kErrno, 1, EIO);
      CAPTURE(point);
      CHECK(write_key(*volume, 1, "new") == Status::kIOError);
      CHECK(fault::reached(point) == 1);
      fault::clear();
      const bool before = std::string(point) == "volume.begin";
      CHECK(read_key(*volume, 1, "old") == (before ? Status::kOk : Status::kStale));
      CHECK(read_key(*volume, 1, "new") == Status::kStale);
      CHECK(files.generation(1) % 2 == (before ? 0 : 1));
      const uint64_t generation = files.generation(1);
      CHECK(write_key(*volume, 1, "new") == Status::kOk);
      CHECK(files.generation(1) > generation);
      CHECK(read_key(*volume, 1, "new") == Status::kOk);
    }
  }
}

TEST_CASE("a system call that fails or comes back short costs the page and nothing else") {
  for (const char* call : {"file.pwrite", "file.pread"}) {
    for (uint64_t nth = 1;; ++nth) {
      VolumeFiles files(VolumeMedium::kDisk, shape_of({100, 50}), kVolumeBytes);
      ClearFaults clear;
      auto volume = files.open();
      REQUIRE(write_key(*volume, 1, "old") == Status::kOk);
      fault::arm(call, fault::Action::kErrno, nth, EIO);
      const Status status = write_key(*volume, 1, "new");
      const bool fired = fault::reached(call) >= nth;
      fault::clear();
      CAPTURE(nth);
      CHECK(status == (fired ? Status::kIOError : Status::kOk));
      const Status old_status = read_key(*volume, 1, "old");
      CHECK(read_key(*volume, 1, "new") == (fired ? Status::kStale : Status::kOk));
      if (old_status == Status::kOk) CHECK(files.generation(1) == 2);
      CHECK(recover(*volume).damaged == 0);
      if (!fired) break;
      REQUIRE(nth < 50);
    }
    for (uint64_t nth = 1;; ++nth) {
      VolumeFiles files(VolumeMedium::kDisk, shape_of({100, 50}), kVolumeBytes);
      ClearFaults clear;
      auto volume = files.open();
      fault::arm(call, fault::Action::kShort, nth, 3);
      CHECK(write_key(*volume, 1, "k") == Status::kOk);  // the rest is asked for again
      const bool fired = fault::reached(call) >= nth;
      fault::clear();
      CHECK(read_key(*volume, 1, "k") == Status::kOk);
      if (!fired) break;
      REQUIRE(nth < 50);
    }
  }
}

TEST_CASE("the slot of a page that failed its checksum is rewritten and used again") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100, 51}), kVolumeBytes);
    auto volume = files.open();
    Scratch scratch;
    REQUIRE(write_key(*volume, 1, "k") == Status::kOk);
    REQUIRE(write_key(*volume, 2, "next") == Status::kOk);
    VolumeFiles::flip(files.pages(), files.page_at(1) + 120);
    CHECK(read_key(*volume, 1, "k") == Status::kChecksum);
    CHECK(volume->rewrite_and_check(1, scratch) == Status::kOk);
    CHECK(files.generation(1) == 3);
    CHECK(read_key(*volume, 1, "k") == Status::kStale);
    CHECK(read_key(*volume, 2, "next") == Status::kOk);
    CHECK(write_key(*volume, 1, "k") == Status::kOk);
    CHECK(read_key(*volume, 1, "k") == Status::kOk);
  }
}

TEST_CASE("a volume truncated under its writer gives BUS_FAULT and never a page") {
  for (const bool whole : {true, false}) {
    VolumeFiles files(VolumeMedium::kShared, shape_of({9000, 50}), kVolumeBytes);
    auto volume = files.open();
    REQUIRE(write_key(*volume, 1, "k") == Status::kOk);
    REQUIRE(write_key(*volume, 10, "far") == Status::kOk);
    Scratch scratch;
    PageSource source;
    PageTarget target;
    REQUIRE(volume->prepare_read(10, label_of("far"), scratch, &source) == Status::kOk);
    REQUIRE(volume->begin_write(11, scratch, &target) == Status::kOk);
    // All of it, or only the pages.
    const uint64_t rest = whole ? 0 : files.header().pages_offset;
    REQUIRE(::ftruncate(files.metadata(), static_cast<off_t>(rest)) == 0);
    const uint64_t caught = guard::caught();

    std::vector<std::byte> out(9050);
    uint32_t crc = 0;
    CHECK(guard::copy(out.data(), source.bytes, 9000, &crc) == Status::kBusFault);
    CHECK(guard::copy(target.bytes, out.data(), 9000, &crc) == Status::kBusFault);
    CHECK(read_key(*volume, 10, "far") == Status::kBusFault);
    CHECK(write_key(*volume, 12, "new") == Status::kBusFault);
    std::atomic<bool> stop{false};
    CHECK(volume->prefault(&stop) == Status::kBusFault);
    if (whole) {
      const uint32_t slot = 3;
      std::vector<RecoveredPage> pages;
      RecoveryCounts counts;
      CHECK(volume->retire(1) == Status::kBusFault);
      CHECK(volume->rewrite_and_check(1, scratch) == Status::kBusFault);
      CHECK(volume->recover(&pages, &counts) == Status::kBusFault);
      CHECK(pages.empty());
      const uint64_t stamp = 1;
      CHECK(volume->write_recency(&slot, &stamp, 1) == Status::kBusFault);
    } else {
      CHECK(files.generation(11) % 2 == 1);
      CHECK(files.generation(12) % 2 == 1);
      CHECK(volume->retire(1) == Status::kOk);
    }
    CHECK(guard::caught() > caught);
  }
}

TEST_CASE("a neighbour's mapping that is truncated gives BUS_FAULT or an I/O error") {
  VolumeFiles files(VolumeMedium::kShared, shape_of({9000, 50}), kVolumeBytes);
  auto volume = files.open();
  REQUIRE(write_key(*volume, 5, "k") == Status::kOk);
  void* address = ::mmap(nullptr, files.header().metadata_bytes, PROT_READ, MAP_SHARED, files.metadata(), 0);
  REQUIRE(address != MAP_FAILED);
  REQUIRE(guard::add_range(address, files.header().metadata_bytes));
  std::vector<std::byte> out(9050);
  const auto read = [&] {
    return read_foreign_page(files.shape(), files.header(), files.metadata(), files.metadata(),
                             static_cast<const std::byte*>(address), 5, 2, label_of("k"), out.data());
  };
  CHECK(read() == Status::kOk);
  CHECK(out == stamped(files.shape(), "k"));
  REQUIRE(::ftruncate(files.metadata(), static_cast<off_t>(files.header().pages_offset)) == 0);
  CHECK(read() == Status::kBusFault);
  REQUIRE(::ftruncate(files.metadata(), 0) == 0);
  CHECK(read() == Status::kIOError);
  guard::remove_range(address);
  ::munmap(address, files.header().metadata_bytes);
}

TEST_CASE("a disk volume whose page file is cut gives I/O errors") {
  VolumeFiles files(VolumeMedium::kDisk, shape_of({9000, 50}), kVolumeBytes);
  auto volume = files.open();
  REQUIRE(write_key(*volume, 5, "k") == Status::kOk);
  REQUIRE(::ftruncate(files.pages(), 9000) == 0);
  CHECK(read_key(*volume, 5, "k") == Status::kIOError);
  CHECK(read_foreign(files, 5, 2, "k") == Status::kIOError);
}

TEST_CASE("files that hold no such volume are refused with the reason") {
  const PageShape shape = shape_of({100, 50});
  VolumeFiles files(VolumeMedium::kShared, shape, kVolumeBytes);
  VolumeFiles disk(VolumeMedium::kDisk, shape, kVolumeBytes);
  const auto open = [](const PageShape& wanted, const VolumeHeader& header, int metadata, int pages) {
    Volume(wanted, header, Descriptor(::dup(metadata)), pages < 0 ? Descriptor() : Descriptor(::dup(pages)), false);
  };
  CHECK_NOTHROW(open(shape, files.header(), files.metadata(), -1));
  CHECK_THROWS_WITH(open(shape, files.header(), files.metadata(), disk.pages()), "a shared volume has no pages file");
  CHECK_THROWS_WITH(open(shape, disk.header(), disk.metadata(), -1), "a disk volume needs its pages file");
  CHECK_THROWS_WITH(open(shape_of({100, 51}), files.header(), files.metadata(), -1),
                    "volume of pages of 150 bytes in 2 layers does not fit pages of 151 bytes in 2");
  CHECK_THROWS_WITH(open(PageShape({100, 50}, {}), files.header(), files.metadata(), -1),
                    "volume of another fingerprint");
  VolumeHeader other = files.header();
  other.epoch = 1;
  CHECK_THROWS_WITH(open(shape, other, files.metadata(), -1), "the header of the volume is not the one given");
  VolumeFiles::flip(files.metadata(), 20);
  CHECK_THROWS_WITH(open(shape, files.header(), files.metadata(), -1), "volume header damaged: header checksum");
  REQUIRE(::ftruncate(disk.pages(), 512) == 0);
  CHECK_THROWS_AS(open(shape, disk.header(), disk.metadata(), disk.pages()), std::runtime_error);
}

TEST_CASE("the boot id is rewritten under a right checksum") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({100}), kVolumeBytes);
    auto volume = files.open();
    std::array<uint8_t, 16> boot_id;
    boot_id.fill(9);
    REQUIRE(volume->write_boot_id(boot_id) == Status::kOk);
    CHECK(volume->header().boot_id == boot_id);
    CHECK(files.open()->header().boot_id == boot_id);
  }
}

TEST_CASE("prefault stops when told and changes no byte") {
  VolumeFiles files(VolumeMedium::kShared, shape_of({9000}), 16 << 20);
  auto volume = files.open();
  REQUIRE(write_key(*volume, 7, "k") == Status::kOk);
  std::atomic<bool> stop{true};
  CHECK(volume->prefault(&stop) == Status::kCancelled);
  stop = false;
  CHECK(volume->prefault(&stop) == Status::kOk);
  CHECK(read_key(*volume, 7, "k") == Status::kOk);
  struct ::stat status;
  REQUIRE(::fstat(files.metadata(), &status) == 0);
  CHECK(status.st_blocks * 512 >= static_cast<int64_t>(files.header().metadata_bytes));
}

TEST_CASE("a volume that leaves its mapping goes on by system calls") {
  VolumeFiles files(VolumeMedium::kShared, shape_of({9000, 50}), kVolumeBytes);
  auto volume = files.open();
  REQUIRE(write_key(*volume, 1, "mapped") == Status::kOk);
  Scratch scratch;
  PageTarget target;
  REQUIRE(volume->begin_write(3, scratch, &target) == Status::kOk);
  volume->leave_mapping();
  CHECK(read_key(*volume, 1, "mapped") == Status::kOk);
  CHECK(write_key(*volume, 2, "called") == Status::kOk);
  CHECK(read_key(*volume, 2, "called") == Status::kOk);
  CHECK(read_foreign(files, 2, 2, "called") == Status::kOk);
  // A page begun in the mapping is finished there.
  const auto page = stamped(files.shape(), "between");
  std::array<uint32_t, 2> checksums{};
  const uint32_t seed = files.shape().page_seed(label_of("between"));
  for (uint32_t layer = 0; layer < 2; ++layer) {
    checksums[layer] = PageShape::layer_seed(seed, layer);
    const uint64_t at = files.shape().layer_offset(layer);
    REQUIRE(guard::copy(target.bytes + at, page.data() + at, files.shape().layer_bytes(layer), &checksums[layer]) ==
            Status::kOk);
  }
  CHECK(volume->finish_write(3, label_of("between"), checksums.data(), target) == Status::kOk);
  CHECK(read_key(*volume, 3, "between") == Status::kOk);
}

TEST_CASE("workers on different slots do not disturb each other, a neighbour or prefault") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({700, 300}), kVolumeBytes);
    auto volume = files.open();
    std::atomic<uint32_t> wrong{0};
    uint32_t delivered = 0;
    std::atomic<bool> stop{false};
    const auto look = [&](uint32_t slot) {
      SlotRecord record;
      std::array<std::byte, kRecordBytes> bytes;
      REQUIRE(::pread(files.metadata(), bytes.data(), kRecordBytes, static_cast<off_t>(files.record_at(slot))) ==
              kRecordBytes);
      if (!SlotRecord::decode(bytes.data(), &record)) return;
      std::vector<std::byte> out(1000);
      const Status status = read_foreign_page(files.shape(), files.header(), files.metadata(), files.pages(), nullptr,
                                              slot, record.generation, record.label, out.data());
      const std::string key(reinterpret_cast<const char*>(record.label.key.bytes.data()), record.label.key.length);
      if (status == Status::kOk) wrong += out != stamped(files.shape(), key);
      if (status != Status::kOk) wrong += status != Status::kStale;
      delivered += status == Status::kOk;
    };
    {
      std::vector<std::jthread> threads;
      for (uint32_t worker = 0; worker < 2; ++worker) {
        threads.emplace_back([&, worker] {
          Scratch scratch;
          std::vector<std::byte> out(1000);
          for (uint32_t i = 0; i < 300; ++i) {
            const uint32_t slot = 2 * (i % 5) + worker;
            const std::string key = "k" + std::to_string(i);
            const auto page = stamped(files.shape(), key);
            wrong += write_page(*volume, files.shape(), slot, label_of(key), page.data(), scratch) != Status::kOk;
            wrong += read_page(*volume, files.shape(), slot, label_of(key), out.data(), scratch) != Status::kOk;
            wrong += out != page;
            if (i % 7 == 0) wrong += volume->retire(slot) != Status::kOk;
          }
        });
      }
      threads.emplace_back([&] { volume->prefault(&stop); });
      for (uint32_t i = 0; i < 3000; ++i) look(i % 10);
    }
    // How much came while they wrote is the scheduler's matter; now that they have ended, every slot has a page.
    delivered = 0;
    for (uint32_t slot = 0; slot < 10; ++slot) look(slot);
    CHECK(wrong == 0);
    CHECK(delivered == 10);
  }
}

TEST_CASE("a set finds the volume of a slot and refuses the number of none") {
  VolumeFiles first(VolumeMedium::kShared, shape_of({100}), kVolumeBytes);
  VolumeFiles second(VolumeMedium::kShared, shape_of({100}), kVolumeBytes);
  VolumeFiles disk(VolumeMedium::kDisk, shape_of({100}), kVolumeBytes);
  VolumeSet set(false);
  Scratch scratch;
  CHECK_FALSE(set.does_io());
  CHECK(set.add(first.open()) == 0);
  CHECK(set.add(second.open()) == 1);
  CHECK_THROWS_AS(set.add(nullptr), std::invalid_argument);
  CHECK_THROWS_AS(set.add(disk.open()), std::invalid_argument);
  const uint32_t slot = 1u << kSlotBits | 5;
  const auto page = stamped(first.shape(), "k");
  REQUIRE(write_page(set, first.shape(), slot, label_of("k"), page.data(), scratch) == Status::kOk);
  CHECK(first.generation(5) == 0);
  CHECK(second.generation(5) == 2);
  std::vector<std::byte> out(100);
  CHECK(read_page(set, first.shape(), slot, label_of("k"), out.data(), scratch) == Status::kOk);
  CHECK(read_page(set, first.shape(), 5, label_of("k"), out.data(), scratch) == Status::kStale);
  CHECK(set.rewrite_and_check(5, scratch) == Status::kOk);

  PageSource source;
  PageTarget target;
  const uint32_t checksum = 0;
  for (const uint32_t none : {2u << kSlotBits | 5, kNoSlot}) {
    CHECK(set.prepare_read(none, label_of("k"), scratch, &source) == Status::kInvalid);
    CHECK(set.begin_write(none, scratch, &target) == Status::kInvalid);
    CHECK(set.finish_write(none, label_of("k"), &checksum, target) == Status::kInvalid);
    CHECK(set.retire(none) == Status::kInvalid);
    CHECK(set.rewrite_and_check(none, scratch) == Status::kInvalid);
  }
  CHECK(set.retire(first.header().slots) == Status::kInvalid);

  const std::shared_ptr<Volume> removed = set.remove(0);
  CHECK(removed != nullptr);
  CHECK(set.get(0) == nullptr);
  CHECK(set.remove(0) == nullptr);
  CHECK(set.remove(99) == nullptr);
  CHECK(set.retire(5) == Status::kInvalid);
  CHECK(set.add(removed) == 0);
}
