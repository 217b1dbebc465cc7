// Pages whose slots on disk follow each other, moved together: how many calls that takes, and what each page comes to
// where one of them fails, is wrong, or is cancelled.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_medium.h"
#include "fault.h"
#include "mover.h"
#include "victims.h"
#include "volume_files.h"

namespace stepwell {
namespace {

using testing::FakeMedium;
using testing::shape_of;
using testing::VolumeFiles;

constexpr int kShared = static_cast<int>(Tier::kShared);
constexpr int kDisk = static_cast<int>(Tier::kDisk);
constexpr uint32_t kPages = 16;
constexpr uint32_t kUnitBytes = 64 * 1024;
constexpr double kLong_s = 60;

std::byte content(uint32_t id, uint64_t at) { return static_cast<std::byte>((id * 131 + at * 7 + at / 251) & 0xff); }

Key key_of(uint32_t id) {
  Key key;
  key.length = 8;
  std::memcpy(key.bytes.data(), &id, sizeof id);
  return key;
}

// A stepped mover over a volume on disk and a pool of kPages slots; slot i of the volume gets page i.
struct World {
  explicit World(Durability durability = Durability::kProcess) : volume(files.open(durability)) {
    index.add_slots(Tier::kShared, 0, 128);
    index.add_slots(Tier::kDisk, 0, files.header().slots);
    const MoverOptions options{.copy_threads = 0, .io_threads = 0, .queue_units = 64, .unit_bytes = kUnitBytes};
    mover = std::make_unique<Mover>(options, shape, &index,
                                    std::array<Medium*, kTiers>{nullptr, nullptr, &shared, volume.get()});
  }
  ~World() {
    fault::clear();
    mover.reset();
    CHECK(index.check() == "");
  }

  std::shared_ptr<const PoolLayout> layout() {
    std::vector<StreamView> views;
    for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
      StreamView view;
      view.base = pool.data() + shape.layer_offset(layer);
      view.slot_stride = static_cast<int64_t>(shape.page_bytes());
      view.piece_bytes = shape.layer_bytes(layer);
      views.push_back(view);
    }
    return std::make_shared<const PoolLayout>(shape, 1, views, kPages, true);
  }
  bool holds(uint32_t slot, uint32_t id) const {
    for (uint64_t at = 0; at < shape.page_bytes(); ++at) {
      if (pool[slot * shape.page_bytes() + at] != content(id, at)) return false;
    }
    return true;
  }

  TransferSpec save_spec(TierMask sinks, uint32_t count = kPages) {
    std::vector<Key> keys;
    for (uint32_t i = 0; i < count; ++i) keys.push_back(key_of(i));
    ClaimBatch claims;
    index.claim_absent_keys(keys.data(), count, 1, ParentState::kUnknown, Key{}, sinks, &claims);
    TransferSpec spec;
    spec.pool = layout();
    spec.work_class = WorkClass::kSave;
    spec.unpin_pages = true;
    saved = claims.pages;
    for (uint32_t i = 0; i < count; ++i) {
      for (uint64_t at = 0; at < shape.page_bytes(); ++at) pool[i * shape.page_bytes() + at] = content(i, at);
      PageCopy copy;
      copy.page = claims.pages[i];
      copy.roles[kPoolColumn] = Role::kSource;
      copy.slots[kPoolColumn] = i;
      index.labels(&copy.page, 1, &copy.label);
      for (size_t column = 1; column < kTiers; ++column) {
        if ((sinks & mask(static_cast<Tier>(column))) == 0) continue;
        REQUIRE(claims.outcomes[i * kTiers + column] == ClaimOutcome::kNew);
        REQUIRE(claims.slots[i * kTiers + column] == i);
        copy.roles[column] = Role::kSink;
        copy.slots[column] = claims.slots[i * kTiers + column];
        copy.numbers[column] = claims.numbers[i * kTiers + column];
      }
      spec.pages.push_back(copy);
    }
    return spec;
  }

  // Into the pool slot of each page, which is painted over before.
  TransferSpec load_spec(const std::vector<uint32_t>& ids, Tier source = Tier::kDisk) {
    std::fill(pool.begin(), pool.end(), std::byte{0xee});
    std::vector<Key> keys;
    for (const uint32_t id : ids) keys.push_back(key_of(id));
    const auto count = static_cast<uint32_t>(ids.size());
    const MatchResult match = index.match_keys_and_pin(keys.data(), count, 1, mask(source));
    REQUIRE(match.pages == count);
    TransferSpec spec;
    spec.pool = layout();
    spec.lease = match.lease;
    for (uint32_t i = 0; i < count; ++i) {
      PageCopy copy;
      copy.page = saved[ids[i]];
      index.labels(&copy.page, 1, &copy.label);
      copy.roles[static_cast<size_t>(source)] = Role::kSource;
      copy.slots[static_cast<size_t>(source)] = ids[i];
      copy.roles[kPoolColumn] = Role::kSink;
      copy.slots[kPoolColumn] = ids[i];
      spec.pages.push_back(copy);
    }
    return spec;
  }

  std::shared_ptr<Transfer> run(TransferSpec spec) {
    std::shared_ptr<Transfer> transfer;
    REQUIRE(mover->submit(std::move(spec), nullptr, &transfer) == Status::kOk);
    step(*transfer);
    return transfer;
  }
  void step(const Transfer& transfer) {
    while (mover->step(0) || mover->step(1)) continue;
    REQUIRE(transfer.done());
  }
  std::vector<uint32_t> all() const {
    std::vector<uint32_t> ids(kPages);
    for (uint32_t i = 0; i < kPages; ++i) ids[i] = i;
    return ids;
  }
  // The one page of the volume that is not as it should be: kPages where all are right.
  void check_load(uint32_t bad, Status status) {
    const auto loaded = run(load_spec(all()))->page_status();
    for (uint32_t i = 0; i < kPages; ++i) {
      CAPTURE(i);
      CHECK(loaded[i] == (i == bad ? status : Status::kOk));
      CHECK(holds(i, i) == (i != bad));
    }
  }

  // What the disk's calls came to; `error`: the last one's errno.
  void check_errors(uint64_t reads, uint64_t writes, int error) {
    const MoverStats stats = mover->stats();
    CHECK(stats.io_errors == reads + writes);
    CHECK(stats.read_errors[kDisk] == reads);
    CHECK(stats.write_errors[kDisk] == writes);
    if (reads > 0) CHECK(stats.read_errno[kDisk] == error);
    if (writes > 0) CHECK(stats.write_errno[kDisk] == error);
  }

  PageShape shape = shape_of({512, 192, 320});
  Index index{16};
  VolumeFiles files{VolumeMedium::kDisk, shape, 512 * 1024};
  std::unique_ptr<Volume> volume;
  std::vector<PageId> saved;
  FakeMedium shared{shape, 128, false};
  std::vector<std::byte> pool = std::vector<std::byte>(kPages * shape.page_bytes());
  std::unique_ptr<Mover> mover;
};

uint64_t calls(const char* point) { return fault::reached(point); }

}  // namespace

TEST_CASE("pages whose slots follow each other are written, read and freed by one call for each part of them") {
  for (const Durability durability : {Durability::kProcess, Durability::kPower}) {
    World world(durability);
    fault::arm("file.pread", fault::Action::kCount, 1, 0);
    fault::arm("file.pwrite", fault::Action::kCount, 1, 0);
    const auto saved = world.run(world.save_spec(mask(Tier::kDisk)));
    for (const Status status : saved->page_status()) CHECK(status == Status::kOk);
    CHECK(calls("file.pwrite") == 7);  // odd, bytes, checksums, records, even; ring entries, counter
    const uint64_t reads = calls("file.pread");
    std::vector<uint32_t> ids = world.all();
    std::reverse(ids.begin(), ids.end());  // as the transfer has them, not as they lie
    const auto loaded = world.run(world.load_spec(ids));
    CHECK(calls("file.pread") - reads == 3);  // records, checksums, bytes
    for (const Status status : loaded->page_status()) CHECK(status == Status::kOk);
    for (uint32_t i = 0; i < kPages; ++i) CHECK(world.holds(i, i));
    const uint64_t writes = calls("file.pwrite");
    std::array<Status, 3> statuses;
    world.volume->retire_run(5, 3, statuses.data());
    CHECK(calls("file.pwrite") - writes == 3);
    CHECK(world.files.word(world.files.header().ring_offset) == kPages + 3);
  }
}

TEST_CASE("records beside those that are freed or written together stay as they are, to the last byte") {
  World world;
  world.run(world.save_spec(mask(Tier::kDisk)));
  const auto record = [&](uint32_t slot) {
    std::vector<char> bytes(kRecordBytes);
    const auto at = static_cast<off_t>(world.files.record_at(slot));
    REQUIRE(::pread(world.files.metadata(), bytes.data(), bytes.size(), at) == kRecordBytes);
    return bytes;
  };
  const auto before = record(4), after = record(8);
  std::array<Status, 3> statuses;
  world.volume->retire_run(5, 3, statuses.data());
  for (const Status status : statuses) CHECK(status == Status::kOk);
  for (const uint32_t slot : {5u, 6u, 7u}) CHECK(world.files.generation(slot) % 2 == 1);
  PageRun run;
  Scratch scratch;
  run.reset(5, 3, world.shape.layers());
  REQUIRE(world.volume->begin_run(&run, scratch));
  std::vector<Label> labels;
  for (uint32_t i = 0; i < 3; ++i) labels.push_back(testing::label_of("new" + std::to_string(i)));
  for (uint32_t i = 0; i < 3; ++i) run.labels[i] = &labels[i];
  REQUIRE(world.volume->finish_run(&run, 0, 3));
  for (const uint32_t slot : {5u, 6u, 7u}) CHECK(world.files.generation(slot) == 4);
  CHECK(record(4) == before);
  CHECK(record(8) == after);
}

TEST_CASE("a run whose bytes cannot be read in one call is read page by page, and one bad page costs one page") {
  for (const uint64_t call : {1u, 2u, 3u}) {  // checksums, records, bytes
    for (const bool is_short : {false, true}) {
      World world;
      world.run(world.save_spec(mask(Tier::kDisk)));
      fault::arm("file.pread", is_short ? fault::Action::kShort : fault::Action::kErrno, call, is_short ? 100 : EIO);
      world.check_load(kPages, Status::kOk);
      CHECK(calls("file.pread") > 3);
      // A short call is gone on with, as one for a page is; a failed one is seen, although no page is lost.
      world.check_errors(is_short ? 0 : 1, 0, is_short ? 0 : EIO);
    }
  }
  World world;
  world.run(world.save_spec(mask(Tier::kDisk)));
  // What lies behind the end of the file can no longer be read.
  REQUIRE(::ftruncate(world.files.pages(), static_cast<off_t>(world.files.page_at(kPages - 1))) == 0);
  world.check_load(kPages - 1, Status::kIOError);
  world.check_errors(2, 0, EIO);  // the call for all, and the page's own
}

TEST_CASE("each page of a run is verified by itself: its bytes, its checksums, its record") {
  for (const int what : {0, 1, 2}) {
    World world;
    world.run(world.save_spec(mask(Tier::kDisk)));
    constexpr uint32_t kBad = 7;
    if (what == 0) VolumeFiles::flip(world.files.pages(), world.files.page_at(kBad) + 700);
    if (what == 1) VolumeFiles::flip(world.files.metadata(), world.files.checksums_at(kBad) + 1);
    if (what == 2) VolumeFiles::flip(world.files.metadata(), world.files.record_at(kBad) + 40);
    world.check_load(kBad, Status::kChecksum);
  }
}

TEST_CASE("a run that cannot be written in one call is written page by page") {
  for (const Durability durability : {Durability::kProcess, Durability::kPower}) {
    for (uint64_t call = 1; call <= 7; ++call) {  // odd, bytes, checksums, records, even; ring entries, counter
      CAPTURE(call);
      World world(durability);
      fault::arm("file.pwrite", fault::Action::kErrno, call, ENXIO);
      const auto saved = world.run(world.save_spec(mask(Tier::kDisk)));
      CHECK(calls("file.pwrite") > 7);
      for (const Status status : saved->page_status()) CHECK(status == Status::kOk);
      world.check_load(kPages, Status::kOk);
      world.check_errors(0, 1, ENXIO);  // seen, although no page is lost
      CHECK(world.files.word(world.files.header().ring_offset) == kPages);
    }
  }
}

TEST_CASE("records that cannot be freed in one call are freed one by one, and readers are told of each") {
  constexpr uint32_t kCount = 8;
  for (uint64_t call = 1; call <= 3; ++call) {  // records, ring entries, counter
    for (const bool is_cut : {false, true}) {   // in the middle of the call
      CAPTURE(call);
      CAPTURE(is_cut);
      World world;
      world.run(world.save_spec(mask(Tier::kDisk)));
      if (is_cut) fault::arm("file.pwrite", fault::Action::kShort, call, call == 3 ? 4 : 3 * kRecordBytes);
      fault::arm("file.pwrite", fault::Action::kErrno, is_cut ? call + 1 : call, EIO);
      std::array<Status, kCount> statuses;
      world.volume->retire_run(2, kCount, statuses.data());
      for (const Status status : statuses) CHECK(status == Status::kOk);
      for (uint32_t slot = 0; slot < kPages; ++slot)
        CHECK(world.files.generation(slot) % 2 == (slot >= 2 && slot < 2 + kCount ? 1 : 0));
      const uint64_t ring = world.files.header().ring_offset;
      CHECK(world.files.word(ring) == kPages + kCount);
      for (uint32_t i = 0; i < kCount; ++i)
        CHECK(world.files.word(ring + kRingHeadBytes + kRingEntryBytes * (kPages + i)) == 2 + i);
    }
  }
}

TEST_CASE("a failed call to free records together is counted where each record's own then works") {
  World world;
  world.run(world.save_spec(mask(Tier::kDisk)));
  fault::arm("file.pwrite", fault::Action::kErrno, 1, ENXIO);
  Victims victims(&world.index, world.volume.get(), Tier::kDisk);
  victims.take(kPages);
  CHECK(victims.free() == kPages);
  CHECK(victims.owed() == 0);
  CHECK(victims.errors() == 1);
  CHECK(victims.error() == ENXIO);
}

TEST_CASE("a page that a failed call freed in part is freed durably before its slot is written again") {
  for (const bool is_retired : {false, true}) {
    CAPTURE(is_retired);
    World world(Durability::kPower);
    world.run(world.save_spec(mask(Tier::kDisk)));
    fault::arm("file.pwrite", fault::Action::kShort, 1, 3 * kRecordBytes);
    fault::arm("file.pwrite", fault::Action::kErrno, 2, EIO);
    PageRun run;
    Scratch scratch;
    std::array<Status, 8> statuses;
    if (is_retired) {
      world.volume->retire_run(0, 8, statuses.data());
    } else {
      run.reset(0, 8, world.shape.layers());
      CHECK(!world.volume->begin_run(&run, scratch));
      CHECK(world.files.generation(3) % 2 == 0);
    }
    CHECK(world.files.generation(2) % 2 == 1);
    const uint64_t syncs = world.volume->syncs();
    PageTarget target;
    REQUIRE(world.volume->begin_write(2, scratch, &target) == Status::kOk);
    CHECK(world.volume->syncs() == syncs + 1);
  }
}

TEST_CASE("a page that fails at a step of its run fails alone, and nobody finds it") {
  const char* const points[] = {"volume.begin",           "volume.odd",          "volume.after_bytes",
                                "volume.after_checksums", "volume.after_record", "volume.after_publish",
                                "volume.after_ring"};
  for (const char* const point : points) {
    CAPTURE(point);
    World world;
    constexpr uint32_t kBad = 3;
    fault::arm(point, fault::Action::kErrno, kBad + 1, EIO);
    const auto saved = world.run(world.save_spec(mask(Tier::kDisk)))->page_status();
    CHECK(calls(point) >= kPages - 1);
    fault::clear();
    for (uint32_t i = 0; i < kPages; ++i) {
      CAPTURE(i);
      CHECK(saved[i] == (i == kBad ? Status::kIOError : Status::kOk));
      CHECK(holds_page(world.files.generation(i)) == (i != kBad));
    }
    std::vector<uint32_t> ids = world.all();
    ids.erase(ids.begin() + kBad);
    for (const Status status : world.run(world.load_spec(ids))->page_status()) CHECK(status == Status::kOk);
    for (const uint32_t id : ids) CHECK(world.holds(id, id));
  }
}

TEST_CASE("a page whose source is wrong parts a run, and the pages on both sides of it are written") {
  World world;
  constexpr uint32_t kBad = 6;
  std::shared_ptr<Transfer> transfer;
  REQUIRE(world.mover->submit(world.save_spec(mask(Tier::kShared) | mask(Tier::kDisk)), nullptr, &transfer) ==
          Status::kOk);
  while (world.mover->step(0)) continue;  // pool -> shared
  world.shared.corrupt(kBad, 100);
  world.step(*transfer);
  const auto statuses = transfer->page_status();
  for (uint32_t i = 0; i < kPages; ++i) {
    CHECK(statuses[i] == (i == kBad ? Status::kChecksum : Status::kOk));
    CHECK(holds_page(world.files.generation(i)) == (i != kBad));
  }
}

TEST_CASE("cancelled inside a run, the pages that were begun are kept and the others are not written") {
  constexpr uint32_t kUnderWay = 5;
  for (const bool is_load : {false, true}) {
    CAPTURE(is_load);
    World world;
    if (is_load) world.run(world.save_spec(mask(Tier::kDisk)));
    TransferSpec spec = is_load ? world.load_spec(world.all()) : world.save_spec(mask(Tier::kDisk));
    std::shared_ptr<Transfer> transfer;
    REQUIRE(world.mover->submit(std::move(spec), nullptr, &transfer) == Status::kOk);
    fault::arm("mover.before_copy", fault::Action::kPause, kUnderWay + 1, 0);
    std::thread worker([&] { world.step(*transfer); });
    REQUIRE(fault::wait_paused("mover.before_copy", kLong_s));
    transfer->cancel();
    fault::clear();
    worker.join();
    const auto statuses = transfer->page_status();
    for (uint32_t i = 0; i < kPages; ++i) {
      CAPTURE(i);
      CHECK(statuses[i] == (i <= kUnderWay ? Status::kOk : Status::kCancelled));
      if (!is_load) CHECK(holds_page(world.files.generation(i)) == (i <= kUnderWay));
      if (is_load) CHECK(world.holds(i, i) == (i <= kUnderWay));
    }
  }
}

TEST_CASE("no byte of a run lands once the gate is closed") {
  World world;
  world.run(world.save_spec(mask(Tier::kDisk)));
  std::shared_ptr<Transfer> transfer;
  REQUIRE(world.mover->submit(world.load_spec(world.all()), nullptr, &transfer) == Status::kOk);
  fault::arm("file.pread", fault::Action::kPause, 3, 0);  // the bytes of the run
  std::thread worker([&] { world.step(*transfer); });
  REQUIRE(fault::wait_paused("file.pread", kLong_s));
  transfer->close_gate();
  fault::clear();
  worker.join();
  for (const Status status : transfer->page_status()) CHECK(status == Status::kDeadline);
  CHECK(std::all_of(world.pool.begin(), world.pool.end(), [](std::byte byte) { return byte == std::byte{0xee}; }));
}

TEST_CASE("entries that are counted together are all in the ring, also across its end") {
  World world;  // a ring of 64
  const Label label = testing::label_of("page");
  Scratch scratch;
  PageRun run;
  std::array<Status, kPages> statuses;
  for (uint32_t round = 0; round < 7; ++round) {
    const uint32_t first = round, count = kPages - 3;
    run.reset(first, count, world.shape.layers());
    std::fill(run.labels.begin(), run.labels.end(), &label);
    REQUIRE(world.volume->begin_run(&run, scratch));
    REQUIRE(world.volume->finish_run(&run, 0, count));
    world.volume->retire_run(first, count, statuses.data());
    const uint64_t ring = world.files.header().ring_offset;
    const uint64_t counter = world.files.word(ring);
    CHECK(counter == uint64_t{round + 1} * 2 * count);
    for (uint32_t i = 0; i < 2 * count; ++i) {
      const uint64_t k = counter - 2 * count + i;
      CHECK(world.files.word(ring + kRingHeadBytes + kRingEntryBytes * (k % 64)) == first + i % count);
    }
  }
}

}  // namespace stepwell
