// A neighbour that writes between two system calls of its reader: each call is a fault point, at which the reader stands
// while the neighbour works.
#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fault.h"
#include "foreign.h"
#include "volume_files.h"

namespace stepwell {
namespace {

using testing::label_of;
using testing::shape_of;
using testing::stamped;
using testing::VolumeFiles;

constexpr double kLong_s = 60;
constexpr TierMask kAnyTier = static_cast<TierMask>(~TierMask{0});

// A volume with its writer, and a reader of another process.
struct Pair {
  Pair(VolumeMedium medium, std::vector<uint64_t> layer_bytes, uint32_t ring_entries)
      : files(medium, shape_of(std::move(layer_bytes)), 400 * 1024, ring_entries),
        writer(files.open()),
        reader(files.shape(), 1000) {
    const bool shared = medium == VolumeMedium::kShared;
    reader.attach(files.header(), Descriptor(::dup(files.metadata())),
                  shared ? Descriptor() : Descriptor(::dup(files.pages())));
    CHECK(reader.poll().empty());
  }
  ~Pair() { fault::clear(); }
  void write(uint32_t slot, const std::string& key) {
    REQUIRE(write_page(*writer, files.shape(), slot, label_of(key), stamped(files.shape(), key).data(), scratch) ==
            Status::kOk);
  }
  ForeignPlace find(const std::string& key) const {
    ForeignPlace place;
    const Label label = label_of(key);
    reader.find(&label.key, 1, 1, 0, kAnyTier, &place);
    return place;
  }

  VolumeFiles files;
  std::unique_ptr<Volume> writer;
  Foreign reader;
  Scratch scratch;
};

}  // namespace

TEST_CASE("bytes that change between two reads of a neighbour's page are delivered as verified or not at all") {
  // The page is a slot long or not, and its target aligned for direct reads or not: with a copy in between and without.
  for (const uint64_t last : {320u, 100u}) {
    for (const size_t offset : {size_t{0}, size_t{8}}) {
      for (const bool begins_damaged : {false, true}) {
        Pair pair(VolumeMedium::kDisk, {512, 192, last}, 64);
        pair.write(3, "a");
        REQUIRE(pair.reader.poll().empty());
        const uint64_t byte = pair.files.page_at(3) + 700;
        if (begins_damaged) VolumeFiles::flip(pair.files.pages(), byte);
        const auto right = stamped(pair.files.shape(), "a");
        std::vector<std::byte> memory(8192);
        const size_t aligned = 4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096;
        std::byte* const target = memory.data() + aligned + offset;
        Status status = Status::kPending;
        std::atomic<bool> is_over{false};
        fault::arm("file.pread", fault::Action::kPause, 0, 0);
        std::thread reader([&] {
          status = pair.reader.read(pair.find("a"), label_of("a"), kAnyTier, target, nullptr);
          is_over = true;
        });
        int reads = 0;
        while (!is_over) {
          if (!fault::wait_paused("file.pread", 0.01)) continue;
          VolumeFiles::flip(pair.files.pages(), byte);
          ++reads;
          fault::resume("file.pread");
        }
        reader.join();
        fault::clear();
        CHECK(reads >= 4);
        if (status == Status::kOk) CHECK(std::memcmp(target, right.data(), right.size()) == 0);
      }
    }
  }
}

TEST_CASE("a ring that goes round while it is read costs a look at all records, and no page") {
  constexpr uint32_t kRing = 64;
  Pair pair(VolumeMedium::kShared, {512, 192, 320}, kRing);
  REQUIRE(pair.reader.poll().empty());
  pair.write(3, "a");
  fault::arm("file.pread", fault::Action::kPause, 2, 0);  // the counter is read, the entries are not
  std::thread reader([&] { CHECK(pair.reader.poll().empty()); });
  REQUIRE(fault::wait_paused("file.pread", kLong_s));
  for (uint32_t change = 0; change < kRing; ++change) pair.write(5, "b" + std::to_string(change));
  fault::clear();
  reader.join();
  CHECK(pair.reader.poll().empty());
  CHECK(pair.find("a").slot == 3);
  CHECK(pair.find("b" + std::to_string(kRing - 1)).slot == 5);
}

TEST_CASE("a record of another kind or size than its volume's is no page, in the ring and among all records") {
  for (const bool other_kind : {false, true}) {
    Pair pair(VolumeMedium::kShared, {512, 192, 320}, 64);
    pair.write(3, "a");
    SlotRecord record;
    record.generation = pair.files.generation(3);
    record.label = label_of("a");
    record.label.kind = other_kind ? 2 : 1;
    record.length = static_cast<uint32_t>(pair.files.header().page_bytes) - (other_kind ? 0 : 1);
    std::array<std::byte, kRecordBytes> bytes;
    record.encode(bytes.data());
    REQUIRE(::pwrite(pair.files.metadata(), bytes.data(), bytes.size(), static_cast<off_t>(pair.files.record_at(3))) ==
            kRecordBytes);
    CHECK(pair.reader.poll().empty());
    CHECK(pair.reader.pages() == 0);
    pair.files.set_word(pair.files.header().ring_offset, 1000);  // further than the ring is long
    CHECK(pair.reader.poll().empty());
    CHECK(pair.reader.pages() == 0);
  }
}

}  // namespace stepwell
