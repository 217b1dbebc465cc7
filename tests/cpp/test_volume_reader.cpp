#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "crc32c.h"
#include "fault.h"
#include "volume_files.h"
#include "volume_reader.h"

using namespace stepwell;
using stepwell::testing::label_of;
using stepwell::testing::shape_of;
using stepwell::testing::stamped;
using stepwell::testing::VolumeFiles;

namespace {

constexpr VolumeMedium kMedia[] = {VolumeMedium::kShared, VolumeMedium::kDisk};
constexpr uint64_t kVolumeBytes = 1 << 18;

std::unique_ptr<VolumeReader> reader_of(const VolumeFiles& files) {
  const bool disk = files.header().medium == VolumeMedium::kDisk;
  return std::make_unique<VolumeReader>(files.header(), Descriptor(::dup(files.metadata())),
                                        disk ? Descriptor(::dup(files.pages())) : Descriptor());
}

Status write_key(Volume& volume, uint32_t slot, const std::string& key) {
  Scratch scratch;
  return write_page(volume, volume.shape(), slot, label_of(key), stamped(volume.shape(), key).data(), scratch);
}

struct Found {
  Status status = Status::kOk;
  std::vector<RecoveredPage> pages;
  std::vector<uint32_t> damaged;
  EmptySlots empty;
};

Found read_all(const VolumeReader& reader) {
  Found found;
  found.status = reader.read_records(0, reader.header().slots, &found.pages, &found.damaged, &found.empty);
  return found;
}

// Layer checksums of a page as they are recorded.
std::vector<uint32_t> checksums_of(const PageShape& shape, const std::vector<std::byte>& page, uint32_t seed) {
  std::vector<uint32_t> checksums;
  for (uint32_t layer = 0; layer < shape.layers(); ++layer)
    checksums.push_back(
        crc32c(PageShape::layer_seed(seed, layer), page.data() + shape.layer_offset(layer), shape.layer_bytes(layer)));
  return checksums;
}

}  // namespace

TEST_CASE("a reader counts every slot once") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({3000, 96, 1000}), kVolumeBytes);
    const auto volume = files.open();
    for (uint32_t slot = 0; slot < 6; ++slot)
      REQUIRE(write_key(*volume, slot, "key " + std::to_string(slot)) == Status::kOk);
    REQUIRE(volume->retire(1) == Status::kOk);                     // odd
    VolumeFiles::flip(files.metadata(), files.record_at(2) + 40);  // its key
    files.set_word(files.record_at(3), kGenerationLimit - 1);
    const auto reader = reader_of(files);
    const Found found = read_all(*reader);
    CHECK(found.status == Status::kOk);
    CHECK(found.pages.size() == 3);
    CHECK(found.damaged == std::vector<uint32_t>{2});
    CHECK(found.empty.odd == 1);
    CHECK(found.empty.worn == 1);
    CHECK(found.empty.never_written == files.header().slots - 6);
    Found out;
    CHECK(reader->read_records(files.header().slots, 1, &out.pages, &out.damaged, &out.empty) == Status::kInvalid);
    CHECK(reader->read_records(1, UINT32_MAX, &out.pages, &out.damaged, &out.empty) == Status::kInvalid);
    CHECK(reader->check_page(files.header().slots).verdict == PageVerdict::kUnreadable);
    CHECK(reader->check_page(1).verdict == PageVerdict::kChanged);
  }
}

TEST_CASE("a record that looks damaged and was rewritten since is read again") {
  struct ClearFaults {
    ~ClearFaults() { fault::clear(); }
  } clear;
  // What is paused is the second look at the record, then at its generation: reads 2 and 3 of one page, 3 and 4 of all
  // records (after the stamps).
  for (const uint64_t nth : {2, 3, 13, 14}) {
    const bool one = nth < 10;
    VolumeFiles files(VolumeMedium::kShared, shape_of({500, 300}), kVolumeBytes);
    const auto volume = files.open();
    REQUIRE(write_key(*volume, 0, "torn") == Status::kOk);
    VolumeFiles::flip(files.metadata(), files.record_at(0) + 40);
    const auto reader = reader_of(files);
    CHECK(reader->check_page(0).damage == PageDamage::kRecord);
    PageCheck check;
    Found found;
    fault::arm("file.pread", fault::Action::kPause, one ? nth : nth - 10, 0);
    std::thread looking([&] {
      if (one)
        check = reader->check_page(0);
      else
        found = read_all(*reader);
    });
    REQUIRE(fault::wait_paused("file.pread", 60));
    REQUIRE(write_key(*volume, 0, "whole") == Status::kOk);
    fault::clear();
    looking.join();
    if (one) {
      CHECK(check.verdict == PageVerdict::kRight);
    } else {
      CHECK(found.damaged.empty());
      CHECK(found.pages.size() == 1);
    }
  }
}

TEST_CASE("a page that is written while a reader looks is never damaged") {
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, shape_of({5000, 300, 1}), kVolumeBytes);
    const auto volume = files.open();
    std::atomic<bool> stop{false};
    REQUIRE(write_key(*volume, 0, "first") == Status::kOk);
    std::thread writer([&] {
      for (int i = 0; !stop.load(); ++i) (void)write_key(*volume, i % 3 == 0 ? 0 : 1, std::to_string(i % 7));
    });
    const auto reader = reader_of(files);
    int right = 0, others = 0;
    for (int i = 0; i < 3000; ++i) {
      const Found found = read_all(*reader);
      others += found.status != Status::kOk || !found.damaged.empty();
      for (uint32_t slot = 0; slot < 2; ++slot) {
        const PageVerdict verdict = reader->check_page(slot).verdict;
        right += verdict == PageVerdict::kRight;
        others += verdict != PageVerdict::kRight && verdict != PageVerdict::kChanged;
      }
    }
    stop.store(true);
    writer.join();
    CHECK(others == 0);
    CHECK(right > 0);
    CHECK(reader->check_page(0).verdict == PageVerdict::kRight);
  }
}

TEST_CASE("layers are found from their checksums") {
  for (const std::vector<uint64_t>& sizes :
       std::vector<std::vector<uint64_t>>{{1}, {1, 1, 1}, {70, 1, 4000, 2}, {5, 5, 5, 9}}) {
    const PageShape shape = shape_of(sizes);
    std::vector<std::byte> page = stamped(shape, "layers");
    const std::vector<uint32_t> checksums = checksums_of(shape, page, 17);
    uint64_t steps = 4 * shape.page_bytes();
    CHECK(find_layers(page.data(), page.size(), checksums, 17, &steps) == sizes);
    page.back() ^= std::byte{1};
    steps = 4 * shape.page_bytes();
    CHECK(find_layers(page.data(), page.size(), checksums, 17, &steps).empty());
    steps = 0;
    CHECK(find_layers(page.data(), page.size(), checksums, 17, &steps).empty());
  }
}

TEST_CASE("a checksum that is right too early is gone back on") {
  // The end of layer 0 that is recorded fits after 3 bytes too: forged, for by chance it takes 2^32 pages.
  const PageShape shape = shape_of({8, 4});
  std::vector<std::byte> page = stamped(shape, "forged");
  std::vector<uint32_t> checksums = checksums_of(shape, page, 1);
  const uint32_t early = crc32c(PageShape::layer_seed(1, 0), page.data(), 3);
  // Four bytes steer a CRC-32C to any value: find those that lead from byte 4 on back to `early`.
  const uint32_t base = crc32c(early, page.data() + 3, 1);
  std::array<uint32_t, 33> columns{};
  const std::array<std::byte, 4> zero{};
  columns[32] = crc32c(base, zero.data(), 4);
  for (int bit = 0; bit < 32; ++bit) {
    std::array<std::byte, 4> one{};
    one[bit / 8] = static_cast<std::byte>(1u << (bit % 8));
    columns[bit] = crc32c(base, one.data(), 4) ^ columns[32];
  }
  uint32_t wanted = early ^ columns[32], chosen = 0;
  std::array<uint32_t, 32> basis{}, origin{};
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t value = columns[bit], from = 1u << bit;
    for (int i = 31; i >= 0 && value != 0; --i) {
      if ((value >> i & 1) == 0) continue;
      if (basis[i] == 0) {
        basis[i] = value;
        origin[i] = from;
        value = 0;
      } else {
        value ^= basis[i];
        from ^= origin[i];
      }
    }
  }
  for (int i = 31; i >= 0; --i) {
    if ((wanted >> i & 1) == 0) continue;
    wanted ^= basis[i];
    chosen ^= origin[i];
  }
  REQUIRE(wanted == 0);
  std::memcpy(page.data() + 4, &chosen, 4);
  checksums = checksums_of(shape, page, 1);
  REQUIRE(checksums[0] == early);
  uint64_t steps = 100;
  CHECK(find_layers(page.data(), page.size(), checksums, 1, &steps) == std::vector<uint64_t>{8, 4});
  CHECK(steps < 100 - 12);  // it had gone astray
}

TEST_CASE("a search that is too long is given up") {
  const PageShape shape = shape_of(std::vector<uint64_t>(40, 100));
  std::vector<std::byte> page = stamped(shape, "long");
  std::vector<uint32_t> checksums = checksums_of(shape, page, 1);
  checksums.back() ^= 1;
  uint64_t steps = 1000;
  CHECK(find_layers(page.data(), page.size(), checksums, 1, &steps).empty());
  CHECK(steps == 0);
}
