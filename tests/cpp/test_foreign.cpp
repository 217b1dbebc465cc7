#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
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

constexpr uint32_t kRing = 64;
constexpr TierMask kAnyTier = static_cast<TierMask>(~TierMask{0});

// A volume with its writer, and a reader of another process.
struct Pair {
  explicit Pair(VolumeMedium medium = VolumeMedium::kShared, uint32_t most_pages = 1000)
      : files(medium, shape_of({512, 192, 320}), 400 * 1024, kRing),
        writer(files.open()),
        reader(files.shape(), most_pages) {
    number = attach();
    CHECK(reader.poll().empty());
  }
  uint32_t attach() {
    const bool shared = files.pages() == files.metadata();
    return reader.attach(files.header(), Descriptor(::dup(files.metadata())),
                         shared ? Descriptor() : Descriptor(::dup(files.pages())));
  }
  void write(uint32_t slot, const std::string& key, uint64_t epoch = 0) {
    REQUIRE(write_page(*writer, files.shape(), slot, label_of(key, epoch), stamped(files.shape(), key).data(),
                       scratch) == Status::kOk);
  }
  ForeignPlace find(const std::string& key, uint64_t epoch = 0, TierMask usable = kAnyTier) const {
    ForeignPlace place;
    const Label label = label_of(key, epoch);
    reader.find(&label.key, 1, 1, epoch, usable, &place);
    return place;
  }
  Status read(const ForeignPlace& place, const std::string& key, TierMask usable = kAnyTier) {
    ForeignDetail detail;
    target.assign(files.shape().page_bytes(), std::byte{0xee});
    const Status status = reader.read(place, label_of(key), usable, target.data(), &detail);
    if (status == Status::kOk) CHECK(target == stamped(files.shape(), key));
    return status;
  }

  VolumeFiles files;
  std::unique_ptr<Volume> writer;
  Foreign reader;
  uint32_t number = 0;
  Scratch scratch;
  std::vector<std::byte> target;
};

}  // namespace

TEST_CASE("what a neighbour writes and frees is known after the next poll, and reads as it was written") {
  for (const VolumeMedium medium : {VolumeMedium::kShared, VolumeMedium::kDisk}) {
    Pair pair(medium);
    pair.write(3, "a");
    pair.write(5, "b");
    CHECK(!pair.find("a").is_known());
    CHECK(pair.reader.poll().empty());
    CHECK(pair.reader.pages() == 2);
    CHECK(pair.find("a").slot == 3);
    CHECK(pair.read(pair.find("a"), "a") == Status::kOk);
    CHECK(pair.read(pair.find("b"), "b") == Status::kOk);
    REQUIRE(pair.writer->retire(3) == Status::kOk);
    pair.write(5, "c");
    CHECK(pair.reader.poll().empty());
    CHECK(!pair.find("a").is_known());
    CHECK(!pair.find("b").is_known());
    CHECK(pair.find("c").generation == 4);
    CHECK(pair.reader.pages() == 1);
    CHECK(pair.reader.counts().delivered == 2);
  }
}

TEST_CASE("what lay there before, and what came while the ring went round, is read from the records") {
  Pair pair;
  for (uint32_t i = 0; i < 90; ++i) pair.write(i, "x" + std::to_string(i));  // more than the ring has entries
  CHECK(pair.reader.poll().empty());
  CHECK(pair.reader.pages() == 90);
  for (uint32_t i = 0; i < 90; ++i) REQUIRE(pair.writer->retire(i) == Status::kOk);
  CHECK(pair.reader.poll().empty());
  CHECK(pair.reader.pages() == 0);
}

TEST_CASE("a page that was freed, rewritten or damaged is none, and is forgotten") {
  Pair pair;
  pair.write(0, "a");
  pair.write(1, "b");
  pair.write(2, "c");
  pair.reader.poll();
  const ForeignPlace a = pair.find("a"), b = pair.find("b"), c = pair.find("c");
  REQUIRE(pair.writer->retire(0) == Status::kOk);
  pair.write(1, "z");
  VolumeFiles::flip(pair.files.pages(), pair.files.page_at(2) + 77);
  CHECK(pair.read(a, "a") == Status::kGone);
  CHECK(pair.read(b, "b") == Status::kGone);
  CHECK(pair.read(c, "c") == Status::kChecksum);
  CHECK(pair.reader.pages() == 0);
  const ForeignCounts counts = pair.reader.counts();
  CHECK(counts.stale == 2);
  CHECK(counts.refused == 1);
  // Not offered again, though all records are read anew; but once the slot has another page.
  pair.files.set_word(pair.files.header().ring_offset, 1000);
  pair.reader.poll();
  CHECK(!pair.find("c").is_known());
  CHECK(pair.find("z").is_known());
  pair.write(2, "c");
  pair.files.set_word(pair.files.header().ring_offset, 5000);
  pair.reader.poll();
  CHECK(pair.read(pair.find("c"), "c") == Status::kOk);
}

TEST_CASE("another place of the page is tried where the first one fails") {
  Pair pair;
  pair.write(0, "a");
  pair.write(9, "a");
  pair.reader.poll();
  CHECK(pair.reader.pages() == 2);
  const ForeignPlace first = pair.find("a");
  VolumeFiles::flip(pair.files.pages(), pair.files.page_at(first.slot) + 5);
  CHECK(pair.read(first, "a") == Status::kOk);
  CHECK(pair.reader.pages() == 1);
  VolumeFiles::flip(pair.files.pages(), pair.files.page_at(first.slot == 0 ? 9 : 0) + 5);
  CHECK(pair.read(pair.find("a"), "a") == Status::kChecksum);
  CHECK(!pair.find("a").is_known());
}

TEST_CASE("a hostile ring costs reads and nothing else") {
  Pair pair;
  pair.write(0, "a");
  pair.reader.poll();
  const uint64_t ring = pair.files.header().ring_offset;
  // The counter moves each time: entries are read where it has gone on, by no more than there are.
  for (const uint64_t slot : {uint64_t{0}, uint64_t{7}, uint64_t{pair.files.header().slots}, ~uint64_t{0}}) {
    for (const uint64_t counter : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{kRing}, uint64_t{kRing} + 2,
                                   uint64_t{1} << 63, ~uint64_t{0}, uint64_t{3}}) {
      for (uint32_t i = 0; i < kRing; ++i) pair.files.set_word(ring + kRingHeadBytes + i * kRingEntryBytes, slot);
      pair.files.set_word(ring, counter);
      CHECK(pair.reader.poll().empty());
      CHECK(pair.find("a").slot == 0);
      CHECK(pair.reader.pages() == 1);
    }
  }
}

TEST_CASE("a volume that cannot be read is named each time until it is detached") {
  Pair pair;
  pair.write(0, "a");
  pair.reader.poll();
  const ForeignPlace place = pair.find("a");
  REQUIRE(::ftruncate(pair.files.metadata(), 4096) == 0);
  CHECK(pair.reader.poll() == std::vector<uint32_t>{pair.number});
  CHECK(pair.reader.poll() == std::vector<uint32_t>{pair.number});
  pair.reader.detach(pair.number);
  CHECK(pair.reader.poll().empty());
  CHECK(pair.reader.pages() == 0);
  CHECK(pair.read(place, "a") == Status::kGone);
  pair.reader.detach(pair.number);
}

TEST_CASE("the table is bounded: the oldest places go first") {
  Pair pair(VolumeMedium::kShared, 10);
  for (uint32_t i = 0; i < 25; ++i) pair.write(i, "x" + std::to_string(i));
  pair.reader.poll();
  CHECK(pair.reader.pages() == 10);
  CHECK(pair.reader.counts().left_out == 15);
  for (uint32_t i = 15; i < 25; ++i) CHECK(pair.find("x" + std::to_string(i)).slot == i);
  for (uint32_t i = 0; i < 25; ++i) REQUIRE(pair.writer->retire(i) == Status::kOk);
  pair.reader.poll();
  CHECK(pair.reader.pages() == 0);
}

TEST_CASE("pages of other epochs, and of volumes of another shape, are none") {
  Pair pair;
  pair.write(0, "a", 5);
  pair.reader.poll();
  CHECK(!pair.find("a", 4).is_known());
  CHECK(pair.find("a", 5).is_known());
  VolumeFiles other(VolumeMedium::kShared, shape_of({512, 512}), 256 * 1024);
  CHECK_THROWS_AS(pair.reader.attach(other.header(), Descriptor(::dup(other.metadata())), Descriptor()),
                  std::invalid_argument);
}

TEST_CASE("what was read is told to the owner, a bounded number of times") {
  Pair pair;
  pair.write(4, "a");
  pair.reader.poll();
  for (uint32_t i = 0; i < Foreign::kMostTouches + 5; ++i) REQUIRE(pair.read(pair.find("a"), "a") == Status::kOk);
  const std::vector<ForeignTouch> touches = pair.reader.take_touches();
  CHECK(touches.size() == Foreign::kMostTouches);
  CHECK(touches[0].slot == 4);
  CHECK(touches[0].volume_id == pair.files.header().volume_id);
  CHECK(pair.reader.take_touches().empty());
}

TEST_CASE("every read of a poll may fail, and the next one finds everything") {
  for (int nth = 1;; ++nth) {
    Pair pair;
    for (uint32_t i = 0; i < 3; ++i) pair.write(i, "x" + std::to_string(i));
    fault::arm("file.pread", fault::Action::kErrno, nth, EIO);
    const bool failed = !pair.reader.poll().empty();
    fault::clear();
    CHECK(pair.reader.poll().empty());
    CHECK(pair.reader.pages() == 3);
    if (!failed) break;
    REQUIRE(nth < 50);
  }
}

}  // namespace stepwell
