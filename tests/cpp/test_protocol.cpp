// The page protocol of FORMAT.md 3 and 4, replayed: the stores of the real writer are recorded at its fault points, and
// a reader is shown every combination of prefixes of them, step i the state after prefix p_i, p_1 <= p_2 <= ... What a
// reader may say: the wanted page, whole and right, or a miss. Mutants of writer, reader and adoption go through the
// same replay and must fail it: so it can fail.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <thread>

#include "crc32c.h"
#include "fault.h"
#include "volume_files.h"

using namespace stepwell;
using stepwell::testing::label_of;
using stepwell::testing::shape_of;
using stepwell::testing::stamped;
using stepwell::testing::VolumeFiles;

namespace {

constexpr uint32_t kSlot = 1;
constexpr size_t kChunks = 2;  // a page of two layers, each stored (and read) as one chunk
constexpr size_t kChunkBytes = 24;
constexpr VolumeMedium kMedia[] = {VolumeMedium::kShared, VolumeMedium::kDisk};

PageShape tiny_shape() { return shape_of({kChunkBytes, kChunkBytes}); }

// One slot of a volume at one moment.
struct Image {
  std::array<std::byte, kRecordBytes> record{};
  std::array<std::byte, 4 * kChunks> checksums{};
  std::array<std::array<std::byte, kChunkBytes>, kChunks> page{};
  bool operator==(const Image&) const = default;
  uint64_t generation() const {
    uint64_t value;
    std::memcpy(&value, record.data(), sizeof(value));
    return value;
  }
};
using History = std::vector<Image>;

Image look(const VolumeFiles& files) {
  Image image;
  const auto get = [](int fd, void* data, size_t bytes, uint64_t offset) {
    REQUIRE(::pread(fd, data, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes));
  };
  get(files.metadata(), image.record.data(), image.record.size(), files.record_at(kSlot));
  get(files.metadata(), image.checksums.data(), image.checksums.size(), files.checksums_at(kSlot));
  get(files.pages(), image.page.data(), sizeof(image.page), files.page_at(kSlot));
  return image;
}

void restore(const VolumeFiles& files, const Image& image) {
  const auto put = [](int fd, const void* data, size_t bytes, uint64_t offset) {
    REQUIRE(::pwrite(fd, data, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes));
  };
  put(files.metadata(), image.record.data(), image.record.size(), files.record_at(kSlot));
  put(files.metadata(), image.checksums.data(), image.checksums.size(), files.checksums_at(kSlot));
  put(files.pages(), image.page.data(), sizeof(image.page), files.page_at(kSlot));
}

// Runs `work` on a thread of its own and notes the slot at every fault point of volume.cc and of the test; states that
// repeat are noted once.
History record_history(const VolumeFiles& files, const std::function<void()>& work) {
  History history{look(files)};
  fault::arm("volume.*", fault::Action::kPause, 0, 0);
  fault::arm("test.*", fault::Action::kPause, 0, 0);
  std::jthread writer([&] {
    work();
    fault::reach("test.done");
  });
  for (bool done = false; !done;) {
    REQUIRE(fault::wait_paused("*", 60));
    done = fault::paused("test.done") > 0;
    const Image now = look(files);
    if (!(now == history.back())) history.push_back(now);
    fault::resume("*");
  }
  writer.join();
  fault::clear();
  return history;
}

// The steps of write_page() with a point between the chunks.
void write_in_chunks(Volume& volume, const std::string& key) {
  Scratch scratch;
  PageTarget target;
  const auto page = stamped(volume.shape(), key);
  std::array<uint32_t, kChunks> checksums{};
  const uint32_t seed = volume.shape().page_seed(label_of(key));
  REQUIRE(volume.begin_write(kSlot, scratch, &target) == Status::kOk);
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    checksums[chunk] = PageShape::layer_seed(seed, chunk);
    checksums[chunk] = crc32c_copy(checksums[chunk], target.bytes + kChunkBytes * chunk,
                                   page.data() + kChunkBytes * chunk, kChunkBytes);
    copy_fence();
    fault::reach("test.chunk");
  }
  REQUIRE(volume.finish_write(kSlot, label_of(key), checksums.data(), target) == Status::kOk);
}

// One thing that changed between two images.
enum class Store { kOdd, kEven, kChunk0, kChunk1, kChecksums, kRecord };

std::vector<Store> changes(const Image& before, const Image& after) {
  std::vector<Store> stores;
  if (before.generation() != after.generation())
    stores.push_back(after.generation() % 2 == 1 ? Store::kOdd : Store::kEven);
  if (before.page[0] != after.page[0]) stores.push_back(Store::kChunk0);
  if (before.page[1] != after.page[1]) stores.push_back(Store::kChunk1);
  if (before.checksums != after.checksums) stores.push_back(Store::kChecksums);
  if (!std::equal(before.record.begin() + 8, before.record.end(), after.record.begin() + 8))
    stores.push_back(Store::kRecord);
  return stores;
}

std::vector<Store> order_of(const History& history) {
  std::vector<Store> order;
  for (size_t i = 1; i < history.size(); ++i) {
    for (const Store store : changes(history[i - 1], history[i])) order.push_back(store);
  }
  return order;
}

// The history of the same rewrite with its stores in another order.
History reordered(const History& recorded, const std::vector<Store>& order) {
  const Image& last = recorded.back();
  History history{recorded.front()};
  const uint64_t odd = last.generation() - 1;
  for (const Store store : order) {
    Image next = history.back();
    switch (store) {
      case Store::kOdd: std::memcpy(next.record.data(), &odd, 8); break;
      case Store::kEven: std::copy_n(last.record.begin(), 8, next.record.begin()); break;
      case Store::kChunk0: next.page[0] = last.page[0]; break;
      case Store::kChunk1: next.page[1] = last.page[1]; break;
      case Store::kChecksums: next.checksums = last.checksums; break;
      case Store::kRecord: std::copy(last.record.begin() + 8, last.record.end(), next.record.begin() + 8); break;
    }
    history.push_back(next);
  }
  return history;
}

// What each read of a reader sees: prefixes of the history. The record is read in two halves and the page in two
// chunks, because no copy is atomic; the chunks in either order.
struct Schedule {
  size_t record, record_end, second, chunk0, chunk1, last;
};

void for_each_schedule(size_t images, bool split_record, const std::function<void(const Schedule&)>& visit) {
  for (size_t record = 0; record < images; ++record)
    for (size_t record_end = record; record_end < (split_record ? images : record + 1); ++record_end)
      for (size_t second = record_end; second < images; ++second)
        for (size_t chunk0 = second; chunk0 < images; ++chunk0)
          for (size_t chunk1 = second; chunk1 < images; ++chunk1)
            for (size_t last = std::max(chunk0, chunk1); last < images; ++last)
              visit({record, record_end, second, chunk0, chunk1, last});
}

// The file as the n-th read (1 .. 4) of a schedule finds it.
Image seen(const History& history, const Schedule& schedule, int read) {
  Image image;
  switch (read) {
    case 1: {
      image = history[schedule.record];
      const Image& end = history[schedule.record_end];
      std::copy(end.record.begin() + kRecordBytes / 2, end.record.end(), image.record.begin() + kRecordBytes / 2);
      return image;
    }
    case 2: return history[schedule.second];
    case 3:
      image = history[std::max(schedule.chunk0, schedule.chunk1)];
      image.page[0] = history[schedule.chunk0].page[0];
      image.page[1] = history[schedule.chunk1].page[1];
      return image;
    default: return history[schedule.last];
  }
}

using Page = std::array<std::array<std::byte, kChunkBytes>, kChunks>;

struct Verdict {
  Status status = Status::kStale;
  bool generation_held = false;  // step 4 found G: the checksums alone decided
  Page page{};
};

// FORMAT.md 4 said once more, over images in place of files. `second_look`: the mutant that makes its checksum of a
// second read of the source.
Verdict model_read(const History& history, const Schedule& schedule, uint64_t generation, const Label& wanted,
                   bool second_look = false) {
  Verdict verdict;
  const auto judge = [&](const Image& now, Status otherwise) {
    verdict.generation_held = now.generation() == generation;
    verdict.status = verdict.generation_held ? otherwise : Status::kStale;
    return verdict;
  };
  const Image first = seen(history, schedule, 1);
  if (first.generation() != generation) return verdict;
  SlotRecord record;
  const Image& second = history[schedule.second];
  if (!SlotRecord::decode(first.record.data(), &record)) return judge(second, Status::kChecksum);
  if (!same_page(record.label, wanted)) return verdict;
  const Image third = seen(history, schedule, 3);
  if (crc32c(0, second.checksums.data(), second.checksums.size()) != record.page_checksum)
    return judge(third, Status::kChecksum);
  verdict.page = third.page;
  const Page& summed = second_look ? history[schedule.last].page : third.page;
  bool right = true;
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    static const PageShape shape = tiny_shape();
    uint32_t expected;
    std::memcpy(&expected, second.checksums.data() + 4 * chunk, 4);
    const uint32_t seed = PageShape::layer_seed(shape.page_seed(wanted), chunk);
    right = right && crc32c(seed, summed[chunk].data(), kChunkBytes) == expected;
  }
  return judge(history[schedule.last], right ? Status::kOk : Status::kChecksum);
}

Page page_of(const std::string& key) {
  Page page;
  std::memcpy(page.data(), stamped(tiny_shape(), key).data(), sizeof(page));
  return page;
}

struct Outcomes {
  uint64_t right = 0, misses = 0;
  uint64_t wrong = 0;         // OK, and a byte that is not the page's
  uint64_t false_alarms = 0;  // CHECKSUM, and nothing was damaged
  uint64_t unguarded = 0;  // the generation held over wrong bytes: only the checksum stood between them and the caller
  bool flawless() const { return wrong + false_alarms + unguarded == 0; }
};

Outcomes replay(const History& history, uint64_t generation, const std::string& key, bool second_look = false,
                bool split_record = false) {
  Outcomes outcomes;
  const Page right = page_of(key);
  const Label label = label_of(key);
  for_each_schedule(history.size(), split_record, [&](const Schedule& schedule) {
    if (history[schedule.record].generation() != generation) {
      ++outcomes.misses;
      return;
    }
    const Verdict verdict = model_read(history, schedule, generation, label, second_look);
    const bool bytes_right = verdict.page == right;
    if (verdict.status == Status::kOk) ++(bytes_right ? outcomes.right : outcomes.wrong);
    if (verdict.status == Status::kStale) ++outcomes.misses;
    if (verdict.status == Status::kChecksum) ++outcomes.false_alarms;
    if (verdict.generation_held && !bytes_right) ++outcomes.unguarded;
  });
  return outcomes;
}

// A page "old" at generation 2, then the stores of the real writer that make it "new" at generation 4.
History rewrite_history(VolumeMedium medium) {
  VolumeFiles files(medium, tiny_shape(), 1 << 16);
  auto volume = files.open();
  write_in_chunks(*volume, "old");
  return record_history(files, [&] { write_in_chunks(*volume, "new"); });
}

}  // namespace

TEST_CASE("the writer stores in the order of FORMAT.md 3") {
  using enum Store;
  CHECK(order_of(rewrite_history(VolumeMedium::kShared)) ==
        std::vector<Store>{kOdd, kChunk0, kChunk1, kChecksums, kRecord, kEven});
  // On disk the page is one pwrite: both chunks between the same two points.
  CHECK(order_of(rewrite_history(VolumeMedium::kDisk)) ==
        std::vector<Store>{kOdd, kChunk0, kChunk1, kChecksums, kRecord, kEven});
}

TEST_CASE("every reader of every prefix of a rewrite gets the right page or a miss") {
  for (const VolumeMedium medium : kMedia) {
    // A pwrite of the page can be seen half done: the replay takes its chunks apart.
    const History recorded = rewrite_history(medium);
    const History history = reordered(recorded, order_of(recorded));
    const Outcomes of_old = replay(history, 2, "old", false, true);
    const Outcomes of_new = replay(history, 4, "new", false, true);
    CHECK(of_old.flawless());
    CHECK(of_new.flawless());
    CHECK(of_old.right > 0);
    CHECK(of_new.right > 0);
    CHECK(of_old.misses > 0);
    CHECK(replay(history, 4, "old").right == 0);
    CHECK(replay(history, 2, "new").right == 0);
  }
}

TEST_CASE("the real reader says what the model says, at every step of every schedule") {
  const History history = [] {
    const History recorded = rewrite_history(VolumeMedium::kShared);
    return reordered(recorded, order_of(recorded));
  }();
  for (const VolumeMedium medium : kMedia) {
    VolumeFiles files(medium, tiny_shape(), 1 << 16);
    std::vector<Schedule> schedules;
    for_each_schedule(history.size(), true, [&](const Schedule& schedule) {
      if (history[schedule.record].generation() == 2) schedules.push_back(schedule);
    });
    // The world moves between two reads of the reader, which stands before each of them.
    fault::arm("file.pread", fault::Action::kPause, 0, 0);
    fault::arm("test.end", fault::Action::kPause, 0, 0);
    uint64_t different = 0, right = 0;
    std::jthread reader([&] {
      std::array<std::array<std::byte, kChunkBytes>, kChunks> out;
      for (const Schedule& schedule : schedules) {
        const Status status = read_foreign_page(files.shape(), files.header(), files.metadata(), files.pages(), nullptr,
                                                kSlot, 2, label_of("old"), out[0].data());
        const Verdict expected = model_read(history, schedule, 2, label_of("old"));
        different += status != expected.status;
        if (status == Status::kOk) {
          ++right;
          different += out != page_of("old");
        }
        fault::reach("test.end");
      }
    });
    for (const Schedule& schedule : schedules) {
      for (int read = 1;; ++read) {
        REQUIRE(fault::wait_paused("*", 60));
        if (fault::paused("test.end") > 0) break;
        restore(files, seen(history, schedule, read));
        fault::resume("file.pread");
      }
      fault::resume("test.end");
    }
    reader.join();
    fault::clear();
    CHECK(different == 0);
    CHECK(right > 0);
    CHECK(schedules.size() > 500);
  }
}

TEST_CASE("a writer killed after any store and a successor that adopts leave every reader right or missing") {
  for (const VolumeMedium medium : kMedia) {
    const History recorded = rewrite_history(medium);
    const History history = reordered(recorded, order_of(recorded));
    for (size_t killed = 0; killed < history.size(); ++killed) {
      CAPTURE(killed);
      VolumeFiles files(medium, tiny_shape(), 1 << 16);
      restore(files, history[killed]);
      auto volume = files.open();
      std::vector<RecoveredPage> pages;
      RecoveryCounts counts;
      History after = record_history(files, [&] {
        REQUIRE(volume->recover(&pages, &counts) == Status::kOk);
        write_in_chunks(*volume, "third");
      });
      CHECK(counts.freed() + counts.worn == 0);
      const bool published = killed + 1 == history.size();
      REQUIRE(pages.size() == (killed == 0 || published ? 1u : 0u));
      if (!pages.empty()) CHECK(pages[0].label.key == label_of(published ? "new" : "old").key);

      History whole(history.begin(), history.begin() + static_cast<ptrdiff_t>(killed) + 1);
      const History rest = reordered(after, order_of(after));
      whole.insert(whole.end(), rest.begin() + 1, rest.end());
      const uint64_t third = whole.back().generation();
      CHECK(third > 2);
      CHECK(replay(whole, 2, "old").flawless());
      CHECK(replay(whole, 4, third == 4 ? "third" : "new").flawless());
      CHECK(replay(whole, third, "third").flawless());
      CHECK(replay(whole, third, "third").right > 0);
    }
  }
}

TEST_CASE("mutant: a generation made even before the bytes fails the replay") {
  using enum Store;
  const History recorded = rewrite_history(VolumeMedium::kShared);
  const Outcomes early = replay(reordered(recorded, {kOdd, kChecksums, kRecord, kEven, kChunk0, kChunk1}), 4, "new");
  CHECK(early.unguarded > 0);
  CHECK(early.false_alarms > 0);
  // And so does an odd generation stored after the first byte.
  const Outcomes late = replay(reordered(recorded, {kChunk0, kOdd, kChunk1, kChecksums, kRecord, kEven}), 2, "old");
  CHECK(late.unguarded > 0);
  CHECK(late.false_alarms > 0);
  // And a record that is complete before the checksums it names.
  const Outcomes torn = replay(reordered(recorded, {kOdd, kChunk0, kChunk1, kRecord, kEven, kChecksums}), 4, "new");
  CHECK(torn.false_alarms > 0);
}

TEST_CASE("mutant: a checksum of a second read of the source delivers damaged bytes as right") {
  // A byte that is wrong for a while (a failing module, a stray store) and right again.
  const Image good = rewrite_history(VolumeMedium::kShared).front();
  Image damaged = good;
  damaged.page[1][5] ^= std::byte{1};
  const History history{good, damaged, good};
  CHECK(replay(history, 2, "old", true).wrong > 0);
  const Outcomes real = replay(history, 2, "old", false);
  CHECK(real.wrong == 0);
  CHECK(real.right > 0);
}

TEST_CASE("mutant: a generation that starts again at adoption fails the replay") {
  // "old" at generation 2, its writer killed before its next one; the mutant of recover() sets the slot back to 0;
  // "new" gets generation 2 again.
  VolumeFiles files(VolumeMedium::kShared, tiny_shape(), 1 << 16);
  auto volume = files.open();
  History history = record_history(files, [&] {
    write_in_chunks(*volume, "old");
    files.set_word(files.record_at(kSlot), 0);
    write_in_chunks(*volume, "new");
  });
  REQUIRE(history.back().generation() == 2);
  const Outcomes reset = replay(history, 2, "old");
  CHECK(reset.unguarded > 0);
  CHECK(reset.false_alarms > 0);
}
