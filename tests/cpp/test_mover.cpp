#include <doctest/doctest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "fake_medium.h"
#include "fault.h"
#include "mover.h"
#include "victims.h"

namespace stepwell {
namespace {

using testing::FakeMedium;

constexpr int kPool = kPoolColumn;
constexpr int kHost = static_cast<int>(Tier::kHost);
constexpr int kShared = static_cast<int>(Tier::kShared);
constexpr int kDisk = static_cast<int>(Tier::kDisk);
constexpr uint32_t kSlots = 64;
constexpr uint32_t kPoolSlots = 64;
const std::vector<uint64_t> kLayerBytes{512, 192, 320};

TierMask tiers(std::initializer_list<int> columns) {
  TierMask result = 0;
  for (const int column : columns) result |= mask(static_cast<Tier>(column));
  return result;
}

// What a page of number `id` holds, everywhere.
std::byte content(uint32_t id, uint64_t at) { return static_cast<std::byte>((id * 131 + at * 7 + at / 251) & 0xff); }

Key key_of(uint32_t id) {
  Key key;
  key.length = 8;
  std::memcpy(key.bytes.data(), &id, sizeof id);
  return key;
}

// A page that was saved: its id in the index and its slot in each tier.
struct Saved {
  uint32_t id = 0;
  PageId page = kNoPage;
  std::array<uint32_t, kTiers> slots{kNoSlot, kNoSlot, kNoSlot, kNoSlot};
};

// A mover over three fake tiers and a lent pool. Stepped unless threads are asked for.
struct World {
  explicit World(MoverOptions given = stepped()) : options(given) {
    index.add_slots(Tier::kHost, 0, kSlots);
    index.add_slots(Tier::kShared, 0, kSlots);
    index.add_slots(Tier::kDisk, 0, kSlots);
    start();
  }
  ~World() {
    mover.reset();
    for (auto* medium : {&host, &shared, &disk}) CHECK(medium->violations() == "");
    if (!index.poisoned()) CHECK(index.check() == "");
    fault::clear();
  }

  static MoverOptions stepped() { return {.copy_threads = 0, .io_threads = 0, .queue_units = 64, .unit_bytes = 4096}; }
  static MoverOptions threaded(uint32_t unit_bytes = 4096) {
    return {.copy_threads = 1, .io_threads = 2, .queue_units = 64, .unit_bytes = unit_bytes};
  }
  void start() {
    mover =
        std::make_unique<Mover>(options, shape, &index, std::array<Medium*, kTiers>{nullptr, &host, &shared, &disk});
  }

  std::shared_ptr<const PoolLayout> layout(bool writable = true) {
    std::vector<StreamView> views;
    for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
      StreamView view;
      view.base = pool.data() + shape.layer_offset(layer);
      view.slot_stride = static_cast<int64_t>(shape.page_bytes());
      view.piece_bytes = shape.layer_bytes(layer);
      view.outer_stride = view.inner_stride = static_cast<int64_t>(view.piece_bytes);
      views.push_back(view);
    }
    return std::make_shared<const PoolLayout>(shape, 1, views, kPoolSlots, writable);
  }
  std::byte* pool_slot(uint32_t slot) { return pool.data() + slot * shape.page_bytes(); }
  void fill(uint32_t slot, uint32_t id) {
    for (uint64_t at = 0; at < shape.page_bytes(); ++at) pool_slot(slot)[at] = content(id, at);
  }
  bool holds(uint32_t slot, uint32_t id, uint64_t first = 0, uint64_t end = UINT64_MAX) {
    for (uint64_t at = first; at < std::min(end, shape.page_bytes()); ++at) {
      if (pool_slot(slot)[at] != content(id, at)) return false;
    }
    return true;
  }
  void paint(std::byte with) { std::fill(pool.begin(), pool.end(), with); }
  bool is_painted(std::byte with) const {
    return std::all_of(pool.begin(), pool.end(), [&](std::byte b) { return b == with; });
  }

  // Claims pages first .. first+count-1 in `sinks` and fills pool slots from pool_first on with them: a save ready to
  // be submitted.
  TransferSpec save_spec(uint32_t first, uint32_t count, TierMask sinks, std::vector<Saved>* saved,
                         uint32_t pool_first = 0) {
    std::vector<Key> keys;
    for (uint32_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
    ClaimBatch claims;
    index.claim_absent_keys(keys.data(), count, 1, ParentState::kUnknown, Key{}, sinks, &claims);
    TransferSpec spec;
    spec.pool = layout(false);
    spec.work_class = WorkClass::kSave;
    spec.unpin_pages = true;
    for (uint32_t i = 0; i < count; ++i) {
      fill(pool_first + i, first + i);
      PageCopy copy;
      Saved page{first + i, claims.pages[i], {}};
      copy.page = claims.pages[i];
      copy.roles[kPool] = Role::kSource;
      copy.slots[kPool] = pool_first + i;
      index.labels(&copy.page, 1, &copy.label);
      page.slots.fill(kNoSlot);
      for (int column = 1; column < kTiers; ++column) {
        const auto c = static_cast<size_t>(column);
        if (claims.outcomes[i * kTiers + c] != ClaimOutcome::kNew) continue;
        copy.roles[c] = Role::kSink;
        page.slots[c] = copy.slots[c] = claims.slots[i * kTiers + c];
        copy.numbers[c] = claims.numbers[i * kTiers + c];
        ++claimed;
      }
      spec.pages.push_back(copy);
      if (saved != nullptr) saved->push_back(page);
    }
    return spec;
  }

  // Pins the pages and copies them from `source` to pool slots 0, 1, ...; those of `sinks` in which they are absent are
  // claimed too.
  TransferSpec load_spec(std::vector<Saved>& pages, int source, TierMask sinks = 0) {
    std::vector<Key> keys;
    for (const Saved& page : pages) keys.push_back(key_of(page.id));
    TransferSpec spec;
    spec.pool = layout();
    const MatchResult match =
        index.match_keys_and_pin(keys.data(), static_cast<uint32_t>(keys.size()), 1, mask(static_cast<Tier>(source)));
    REQUIRE(match.pages == pages.size());
    spec.lease = match.lease;
    ClaimBatch claims;
    if (sinks != 0) {
      index.claim_absent_keys(keys.data(), static_cast<uint32_t>(keys.size()), 1, ParentState::kUnknown, Key{}, sinks,
                              &claims);
      spec.unpin_pages = true;
    }
    for (uint32_t i = 0; i < pages.size(); ++i) {
      PageCopy copy;
      copy.page = pages[i].page;
      index.labels(&copy.page, 1, &copy.label);
      copy.roles[kPool] = Role::kSink;
      copy.slots[kPool] = i;
      copy.roles[static_cast<size_t>(source)] = Role::kSource;
      copy.slots[static_cast<size_t>(source)] = pages[i].slots[static_cast<size_t>(source)];
      for (size_t c = 1; sinks != 0 && c < kTiers; ++c) {
        if (claims.outcomes[i * kTiers + c] != ClaimOutcome::kNew) continue;
        copy.roles[c] = Role::kSink;
        pages[i].slots[c] = copy.slots[c] = claims.slots[i * kTiers + c];
        copy.numbers[c] = claims.numbers[i * kTiers + c];
        ++claimed;
      }
      spec.pages.push_back(copy);
    }
    return spec;
  }

  std::shared_ptr<Transfer> submit(TransferSpec spec, std::shared_ptr<Inbox> inbox = nullptr) {
    std::shared_ptr<Transfer> transfer;
    REQUIRE(mover->submit(std::move(spec), std::move(inbox), &transfer) == Status::kOk);
    return transfer;
  }
  int run() {
    int steps = 0;
    while (mover->step(0) || mover->step(1)) ++steps;
    return steps;
  }
  std::shared_ptr<Transfer> finish(const std::shared_ptr<Transfer>& transfer) {
    if (options.copy_threads == 0) {
      run();
    } else {
      REQUIRE(transfer->wait(60));
    }
    REQUIRE(transfer->done());
    return transfer;
  }
  std::vector<Saved> save(uint32_t first, uint32_t count, TierMask sinks) {
    std::vector<Saved> saved;
    const auto transfer = finish(submit(save_spec(first, count, sinks, &saved)));
    REQUIRE(all(transfer, Status::kOk));
    return saved;
  }
  static bool all(const std::shared_ptr<Transfer>& transfer, Status status) {
    const auto statuses = transfer->page_status();
    return std::all_of(statuses.begin(), statuses.end(), [&](Status s) { return s == status; });
  }
  Residency residency(uint32_t id, int tier) const { return index.state(key_of(id), 1)[static_cast<size_t>(tier)]; }

  // Nothing is under way and everything that was granted has come back once.
  void check_settled() {
    for (const Tier tier : {Tier::kHost, Tier::kShared, Tier::kDisk}) {
      const TierCounts counts = index.counts(tier);
      CHECK(counts.arriving == 0);
      CHECK(counts.leaving == 0);
      CHECK(counts.pinned == 0);
    }
    CHECK(index.leases() == 0);
    if (mover == nullptr) return;
    const MoverStats stats = mover->stats();
    CHECK(stats.commits + stats.aborts == claimed);
    CHECK(stats.queued_copy + stats.queued_io == 0);
    const MoverFlow flow = mover->flow();
    for (size_t c = 1; c < kTiers; ++c) {
      uint64_t read = 0, written = 0;
      for (size_t work_class = 0; work_class < kWorkClasses; ++work_class) {
        read += flow.reads[work_class][c].bytes;
        written += flow.writes[work_class][c].bytes;
        CHECK(flow.queued[work_class][c] == 0);
      }
      CHECK(read == stats.bytes_read[c]);
      CHECK(written >= stats.bytes_written[c]);  // some is written and not committed
      CHECK(flow.running[c].ns == 0);
    }
  }

  MoverOptions options;
  PageShape shape{kLayerBytes, {}};
  FakeMedium host{shape, kSlots, false}, shared{shape, kSlots, false}, disk{shape, kSlots, true};
  std::vector<std::byte> pool = std::vector<std::byte>(kPoolSlots * shape.page_bytes());
  Index index{16};
  std::unique_ptr<Mover> mover;
  uint64_t claimed = 0;
};

}  // namespace

// ---- the whole way ---------------------------------------------------------------------------------------------

TEST_CASE("what was saved to any tier is loaded as it was, page by page and layer by layer") {
  for (const MoverOptions& options : {World::stepped(), World::threaded(), World::threaded(1)}) {
    for (const int tier : {kHost, kShared, kDisk}) {
      for (const bool layer_order : {false, true}) {
        World world(options);
        auto saved = world.save(100, 20, tiers({tier}));
        world.paint(std::byte{0xee});
        TransferSpec spec = world.load_spec(saved, tier);
        spec.layer_order = layer_order;
        const auto transfer = world.finish(world.submit(std::move(spec)));
        CHECK(World::all(transfer, Status::kOk));
        CHECK(transfer->layers_done() == world.shape.layers());
        CHECK(transfer->bytes_moved() == 20 * world.shape.page_bytes());
        CHECK(transfer->landed() == std::vector<uint8_t>(20, 1 << kPool));
        for (uint32_t i = 0; i < 20; ++i) CHECK(world.holds(i, 100 + i));
        world.check_settled();
      }
    }
  }
}

TEST_CASE("a save goes to every tier asked for and reads the pool once for the memory tiers") {
  World world;
  const auto saved = world.save(1, 5, tiers({kHost, kShared, kDisk}));
  const MoverStats stats = world.mover->stats();
  CHECK(stats.bytes_read[kPool] == 5 * world.shape.page_bytes());
  for (const int tier : {kHost, kShared, kDisk})
    CHECK(stats.bytes_written[static_cast<size_t>(tier)] == 5 * world.shape.page_bytes());
  for (const Saved& page : saved) {
    for (auto [medium, tier] : {std::pair{&world.host, kHost}, {&world.shared, kShared}, {&world.disk, kDisk}}) {
      const std::byte* bytes = medium->bytes(page.slots[static_cast<size_t>(tier)]);
      bool same = true;
      for (uint64_t at = 0; at < world.shape.page_bytes(); ++at) same &= bytes[at] == content(page.id, at);
      CHECK(same);
      CHECK(world.residency(page.id, tier) == Residency::kResident);
    }
  }
  world.check_settled();
}

TEST_CASE("the source of a save is released when its first stage is over, and disk follows from shared") {
  World world;
  const auto transfer = world.submit(world.save_spec(1, 3, tiers({kShared, kDisk}), nullptr));
  CHECK(!transfer->source_released());
  CHECK(!world.mover->step(1));
  while (world.mover->step(0)) {
  }
  CHECK(transfer->source_released());
  CHECK(!transfer->done());
  CHECK(transfer->landed() == std::vector<uint8_t>(3, 1 << kShared));
  CHECK(World::all(transfer, Status::kPending));
  world.paint(std::byte{0});  // the pool is the caller's again
  world.finish(transfer);
  CHECK(World::all(transfer, Status::kOk));
  CHECK(transfer->landed() == std::vector<uint8_t>(3, 1 << kShared | 1 << kDisk));
  CHECK(world.mover->stats().bytes_read[kPool] == 3 * world.shape.page_bytes());
  world.check_settled();
}

TEST_CASE("a disk failure after the shared commit shows shared landed and the failure as status") {
  World world;
  std::vector<Saved> saved;
  const auto transfer = world.submit(world.save_spec(1, 3, tiers({kShared, kDisk}), &saved));
  world.disk.finish_fails.arm(2, Status::kIOError);
  world.finish(transfer);
  CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, Status::kIOError, Status::kOk});
  CHECK(transfer->landed()[1] == 1 << kShared);
  CHECK(world.residency(2, kShared) == Residency::kResident);
  CHECK(world.residency(2, kDisk) == Residency::kAbsent);
  CHECK(world.mover->stats().io_errors == 1);
  world.check_settled();
}

TEST_CASE("pages of a medium that settles are committed after one call of it for all units of a stage") {
  World world;
  world.disk.is_settling = true;
  bool has_shared = false;
  SUBCASE("from the pool") {}
  SUBCASE("from shared memory") { has_shared = true; }
  const TierMask sinks = has_shared ? tiers({kShared, kDisk}) : tiers({kDisk});
  std::vector<Saved> saved;
  const auto transfer = world.submit(world.save_spec(1, 12, sinks, &saved));
  while (world.mover->step(0)) {
  }
  int units = 0;
  while (world.mover->step(1)) {
    ++units;
    if (transfer->done()) break;
    CHECK(world.residency(1, kDisk) == Residency::kArriving);
  }
  CHECK(units > 1);
  CHECK(world.disk.settled == 1);
  CHECK(transfer->done());
  CHECK(World::all(transfer, Status::kOk));
  for (uint32_t id = 1; id <= 12; ++id) CHECK(world.residency(id, kDisk) == Residency::kResident);
  world.check_settled();
}

TEST_CASE("a page that does not settle is aborted, freed and told, alone") {
  World world;
  world.disk.is_settling = true;
  std::vector<Saved> saved;
  const auto transfer = world.submit(world.save_spec(1, 3, tiers({kShared, kDisk}), &saved));
  world.disk.settle_fails.arm(2, Status::kIOError);
  world.finish(transfer);
  const auto statuses = transfer->page_status();
  CHECK(std::count(statuses.begin(), statuses.end(), Status::kIOError) == 1);
  CHECK(world.disk.holding() == 2);
  CHECK(world.disk.retires == 1);
  CHECK(world.shared.holding() == 3);
  CHECK(world.mover->stats().io_errors == 1);
  world.check_settled();
}

TEST_CASE("transfers that end while another is settled are settled together, and their pools are free before") {
  World world(World::threaded());
  world.disk.is_settling = true;
  world.disk.before_settle.hold();
  const auto first = world.submit(world.save_spec(1, 2, tiers({kDisk}), nullptr, 0));
  REQUIRE(world.disk.before_settle.wait_standing());
  std::vector<std::shared_ptr<Transfer>> rest;
  for (uint32_t i = 1; i < 6; ++i) {
    rest.push_back(world.submit(world.save_spec(1 + 2 * i, 2, tiers({kDisk}), nullptr, 2 * i)));
    while (!rest.back()->source_released()) std::this_thread::yield();
    CHECK(!rest.back()->done());
  }
  world.disk.before_settle.release();
  world.finish(first);
  for (const auto& transfer : rest) CHECK(World::all(world.finish(transfer), Status::kOk));
  CHECK(world.disk.settled == 2);
  world.check_settled();
}

TEST_CASE("what is cancelled before it is settled is aborted") {
  World world(World::threaded());
  world.disk.is_settling = true;
  world.disk.before_settle.hold();
  const auto first = world.submit(world.save_spec(1, 2, tiers({kDisk}), nullptr, 0));
  REQUIRE(world.disk.before_settle.wait_standing());
  const auto second = world.submit(world.save_spec(3, 2, tiers({kDisk}), nullptr, 2));
  while (!second->source_released()) std::this_thread::yield();
  second->cancel();
  world.disk.before_settle.release();
  CHECK(World::all(world.finish(first), Status::kOk));
  CHECK(World::all(world.finish(second), Status::kCancelled));
  CHECK(world.disk.holding() == 2);
  world.check_settled();
}

TEST_CASE("an exception after the commit of what was settled decides every page and poisons nothing") {
  World world;
  world.disk.is_settling = true;
  const auto transfer = world.submit(world.save_spec(1, 3, tiers({kDisk}), nullptr));
  fault::arm("mover.after_commit", fault::Action::kErrno, 1, EIO);
  world.finish(transfer);
  CHECK(World::all(transfer, Status::kOk));
  CHECK(!world.mover->poisoned());
  world.check_settled();
}

TEST_CASE("the second stage of a save verifies what it reads and quarantines it where it is wrong") {
  World world;
  std::vector<Saved> saved;
  const auto transfer = world.submit(world.save_spec(1, 2, tiers({kShared, kDisk}), &saved));
  while (world.mover->step(0)) {
  }
  world.shared.corrupt(saved[0].slots[kShared], 600);
  world.finish(transfer);
  CHECK(transfer->page_status() == std::vector<Status>{Status::kChecksum, Status::kOk});
  CHECK(world.residency(1, kShared) == Residency::kQuarantined);
  CHECK(world.residency(1, kDisk) == Residency::kAbsent);
  CHECK(world.mover->stats().checksum_failures == 1);
  world.check_settled();
}

TEST_CASE("a load from disk returns its pages to shared on the way, in both orders") {
  for (const bool layer_order : {false, true}) {
    World world;
    auto saved = world.save(1, 6, tiers({kDisk}));
    world.paint(std::byte{0xee});
    const int reads = world.disk.reads;
    TransferSpec spec = world.load_spec(saved, kDisk, tiers({kShared}));
    spec.layer_order = layer_order;
    const auto transfer = world.finish(world.submit(std::move(spec)));
    CHECK(World::all(transfer, Status::kOk));
    CHECK(world.disk.reads == reads + 6);  // slow media are read once
    for (uint32_t i = 0; i < 6; ++i) {
      CHECK(world.holds(i, 1 + i));
      CHECK(world.residency(1 + i, kShared) == Residency::kResident);
    }
    world.check_settled();
  }
}

TEST_CASE("the target of a load is not released while a stage that writes it is to come") {
  for (const bool layer_order : {false, true}) {
    World world;
    auto saved = world.save(1, 3, tiers({kDisk}));
    TransferSpec spec = world.load_spec(saved, kDisk, tiers({kShared}));
    spec.layer_order = layer_order;
    const auto transfer = world.submit(std::move(spec));
    do {
      if (transfer->source_released()) CHECK(World::all(transfer, Status::kOk));
    } while (world.mover->step(0) || world.mover->step(1));
    CHECK(transfer->source_released());
  }
}

TEST_CASE("a load whose shared sink fails still lands, in both orders") {
  for (const bool layer_order : {false, true}) {
    World world;
    auto saved = world.save(1, 3, tiers({kDisk}));
    world.paint(std::byte{0xee});
    TransferSpec spec = world.load_spec(saved, kDisk, tiers({kShared}));
    spec.layer_order = layer_order;
    world.shared.finish_fails.arm(2, Status::kBusFault);
    const auto transfer = world.finish(world.submit(std::move(spec)));
    CHECK(World::all(transfer, Status::kOk));
    for (uint32_t i = 0; i < 3; ++i) CHECK(world.holds(i, 1 + i));
    CHECK(world.residency(2, kShared) == Residency::kAbsent);
    CHECK(world.mover->stats().bus_faults == 1);
    world.check_settled();
  }
}

TEST_CASE("a layer-order load from a medium that reads into scratch lands every page") {
  World world;
  auto saved = world.save(1, 6, tiers({kShared}));
  world.paint(std::byte{0xee});
  world.shared.through_scratch = true;
  TransferSpec spec = world.load_spec(saved, kShared);
  spec.layer_order = true;
  const auto transfer = world.finish(world.submit(std::move(spec)));
  CHECK(World::all(transfer, Status::kOk));
  for (uint32_t i = 0; i < 6; ++i) CHECK(world.holds(i, 1 + i));
  world.check_settled();
}

TEST_CASE("layers_done counts only layers whose bytes are all in the pool") {
  World world(World::threaded());
  auto saved = world.save(1, 60, tiers({kShared}));
  world.paint(std::byte{0xee});
  TransferSpec spec = world.load_spec(saved, kShared);
  spec.layer_order = true;
  world.shared.yields = 1;
  const auto transfer = world.submit(std::move(spec));
  uint32_t seen = 0;
  while (seen < world.shape.layers()) {
    const uint32_t layers = transfer->layers_done();
    REQUIRE(layers >= seen);
    for (; seen < layers; ++seen) {
      const uint64_t first = world.shape.layer_offset(seen);
      for (uint32_t i = 0; i < 60; ++i) REQUIRE(world.holds(i, 1 + i, first, first + world.shape.layer_bytes(seen)));
    }
    std::this_thread::yield();
  }
  world.finish(transfer);
  CHECK(transfer->layers_done() == world.shape.layers());
  world.check_settled();
}

TEST_CASE("whoever sees a layer done may read it, with nothing else between") {
  World world(World::threaded());
  auto saved = world.save(1, 60, tiers({kShared}));
  uint32_t seen_early = 0;
  for (int round = 0; round < 100; ++round) {
    world.paint(std::byte{0xee});
    TransferSpec spec = world.load_spec(saved, kShared);
    spec.layer_order = true;
    const auto transfer = world.submit(std::move(spec));
    while (transfer->layers_done() == 0) {
    }
    for (uint32_t i = 0; i < 60; ++i) REQUIRE(world.holds(i, 1 + i, 0, world.shape.layer_bytes(0)));
    seen_early += transfer->layers_done() < world.shape.layers();
    world.finish(transfer);
  }
  MESSAGE(seen_early << " of 100 loads were seen with a layer to come");
  world.check_settled();
}

// ---- failures --------------------------------------------------------------------------------------------------

TEST_CASE("layers_done waits for a page that comes from its second source") {
  World world;
  auto saved = world.save(1, 2, tiers({kShared, kDisk}));
  world.shared.corrupt(saved[1].slots[kShared], kLayerBytes[0]);  // in the second layer
  TransferSpec spec = world.load_spec(saved, kShared);
  spec.layer_order = true;
  const auto transfer = world.submit(std::move(spec));
  REQUIRE(world.mover->step(0));
  CHECK(!transfer->done());
  CHECK(transfer->layers_done() == 1);
  world.finish(transfer);
  CHECK(World::all(transfer, Status::kOk));
  CHECK(transfer->layers_done() == kLayerBytes.size());
  CHECK(world.holds(1, 2));
}

TEST_CASE("a source with a wrong checksum fails alone, is quarantined, and commits nowhere") {
  for (const bool layer_order : {false, true}) {
    for (const int tier : {kShared, kDisk}) {
      World world;
      auto saved = world.save(1, 4, tiers({tier}));
      FakeMedium& medium = tier == kShared ? world.shared : world.disk;
      medium.corrupt(saved[2].slots[static_cast<size_t>(tier)], world.shape.layer_offset(1) + 3);
      TransferSpec spec = world.load_spec(saved, tier, tiers({kHost}));
      spec.layer_order = layer_order;
      const auto transfer = world.finish(world.submit(std::move(spec)));
      CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, Status::kOk, Status::kChecksum, Status::kOk});
      CHECK(world.residency(3, tier) == Residency::kQuarantined);
      CHECK(world.residency(3, kHost) == Residency::kAbsent);
      CHECK(world.residency(4, kHost) == Residency::kResident);
      CHECK(world.mover->stats().checksum_failures == 1);
      CHECK(transfer->layers_done() == world.shape.layers());
      world.check_settled();
    }
  }
}

TEST_CASE("a pinned source whose record names another page is damage") {
  World world;
  auto saved = world.save(1, 3, tiers({kDisk}));
  world.disk.retire(saved[1].slots[kDisk]);
  const auto transfer = world.finish(world.submit(world.load_spec(saved, kDisk)));
  CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, Status::kChecksum, Status::kOk});
  CHECK(world.residency(2, kDisk) == Residency::kQuarantined);
  world.check_settled();
}

TEST_CASE("a source that cannot be read fails its page and is not offered again") {
  for (const Status status : {Status::kIOError, Status::kBusFault}) {
    World world;
    auto saved = world.save(1, 3, tiers({kDisk}));
    world.disk.read_fails.arm(2, status);
    const auto transfer = world.finish(world.submit(world.load_spec(saved, kDisk, tiers({kShared}))));
    CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, status, Status::kOk});
    CHECK(world.residency(2, kDisk) == Residency::kQuarantined);
    CHECK(world.residency(2, kShared) == Residency::kAbsent);
    world.check_settled();
  }
}

TEST_CASE("a sink that fails or is full aborts its claim only") {
  for (const Status status : {Status::kIOError, Status::kFull, Status::kBusFault}) {
    for (const bool at_begin : {true, false}) {
      World world;
      std::vector<Saved> saved;
      TransferSpec spec = world.save_spec(1, 3, tiers({kHost, kShared}), &saved);
      (at_begin ? world.shared.begin_fails : world.shared.finish_fails).arm(2, status);
      const auto transfer = world.finish(world.submit(std::move(spec)));
      CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, status, Status::kOk});
      CHECK(transfer->landed()[1] == 1 << kHost);
      CHECK(world.residency(2, kHost) == Residency::kResident);
      CHECK(world.residency(2, kShared) == Residency::kAbsent);
      CHECK(world.shared.holding() == 2);
      world.check_settled();
    }
  }
}

TEST_CASE("a second memory sink is filled from the pool where the first one failed") {
  World world;
  std::vector<Saved> saved;
  TransferSpec spec = world.save_spec(1, 1, tiers({kHost, kShared}), &saved);
  world.host.finish_fails.arm(1, Status::kIOError);
  const auto transfer = world.finish(world.submit(std::move(spec)));
  CHECK(transfer->landed()[0] == 1 << kShared);
  CHECK(transfer->page_status()[0] == Status::kIOError);
  world.check_settled();
}

TEST_CASE("an exception in a worker decides every page of its unit, returns every claim, and the worker goes on") {
  for (const char* point : {"mover.unit", "mover.before_copy", "mover.after_copy", "mover.after_commit"}) {
    for (uint64_t nth = 1; nth <= 6; ++nth) {
      World world;
      const auto inbox = std::make_shared<Inbox>(8);
      TransferSpec spec = world.save_spec(1, 3, tiers({kShared, kDisk}), nullptr);
      spec.keep_alive = 77;
      fault::arm(point, fault::Action::kErrno, nth, 5);
      const auto transfer = world.finish(world.submit(std::move(spec), inbox));
      const bool fired = fault::reached(point) >= nth;
      fault::clear();
      CHECK(!world.mover->poisoned());
      CHECK(!world.index.poisoned());
      CHECK(world.mover->stats().failed_units == (fired ? 1 : 0));
      for (const Status status : transfer->page_status()) CHECK((status == Status::kOk || status == Status::kFailed));
      if (fired && std::string(point) != "mover.after_commit") CHECK(!World::all(transfer, Status::kOk));
      std::vector<Completion> completions;
      CHECK(inbox->poll(8, &completions) == 1);
      CHECK(world.mover->retired().drain() == std::vector<uint64_t>{77});
      const MoverStats stats = world.mover->stats();
      CHECK(stats.commits + stats.aborts == world.claimed);
      CHECK(world.index.counts(Tier::kShared).arriving + world.index.counts(Tier::kDisk).arriving == 0);
      CHECK(world.shared.holding() == world.index.counts(Tier::kShared).resident);
      CHECK(world.disk.holding() == world.index.counts(Tier::kDisk).resident);
      CHECK(
          World::all(world.finish(world.submit(world.save_spec(9, 2, tiers({kShared, kDisk}), nullptr))), Status::kOk));
      world.check_settled();
    }
  }
}

TEST_CASE("a failed assertion in a worker decides every page, returns every claim and poisons") {
  World world;
  fault::arm("mover.assertion", fault::Action::kErrno, 1, 5);
  const auto transfer = world.finish(world.submit(world.save_spec(1, 3, tiers({kShared, kDisk}), nullptr)));
  fault::clear();
  CHECK(World::all(transfer, Status::kPoisoned));
  CHECK(world.mover->poisoned());
  CHECK(world.index.poisoned());
  CHECK(world.mover->poison_reason() != "");
  const MoverStats stats = world.mover->stats();
  CHECK(stats.commits + stats.aborts == world.claimed);
  std::shared_ptr<Transfer> refused;
  CHECK(world.mover->submit(TransferSpec{}, nullptr, &refused) == Status::kPoisoned);
}

// ---- a second source -------------------------------------------------------------------------------------------

TEST_CASE("a load whose source is damaged has the page from another tier, in any order of copying") {
  for (const bool layered : {false, true}) {
    for (const bool threaded : {false, true}) {
      World world(threaded ? World::threaded() : World::stepped());
      auto saved = world.save(1, 4, tiers({kShared, kDisk}));
      for (const size_t bad : {size_t{0}, size_t{2}}) world.shared.corrupt(saved[bad].slots[kShared], 600);
      TransferSpec spec = world.load_spec(saved, kShared);
      spec.layer_order = layered;
      const auto transfer = world.finish(world.submit(std::move(spec)));
      CHECK(World::all(transfer, Status::kOk));
      for (uint32_t i = 0; i < 4; ++i) CHECK(world.holds(i, 1 + i));
      CHECK(transfer->layers_done() == world.shape.layers());
      CHECK(world.residency(1, kShared) == Residency::kQuarantined);
      CHECK(world.residency(1, kDisk) == Residency::kResident);
      const MoverStats stats = world.mover->stats();
      CHECK(stats.retried_pages == 2);
      CHECK(stats.rescued_pages == 2);
      CHECK(stats.checksum_failures == 2);
      world.check_settled();
    }
  }
}

TEST_CASE("a page that is damaged in two tiers is asked for in one of the others, once") {
  World world;
  auto saved = world.save(1, 2, tiers({kHost, kShared, kDisk}));
  world.host.corrupt(saved[0].slots[kHost], 10);
  world.shared.corrupt(saved[0].slots[kShared], 10);
  const auto transfer = world.finish(world.submit(world.load_spec(saved, kHost)));
  CHECK(transfer->page_status() == std::vector<Status>{Status::kChecksum, Status::kOk});
  CHECK(world.residency(1, kDisk) == Residency::kResident);  // not asked
  CHECK(world.mover->stats().retried_pages == 1);
  CHECK(world.mover->stats().rescued_pages == 0);
  world.check_settled();
}

TEST_CASE("a tier that may not be read is no second source, and a demotion has none") {
  World world;
  auto saved = world.save(1, 2, tiers({kShared, kDisk}));
  world.mover->set_readable(tiers({kHost, kShared}));
  world.shared.corrupt(saved[0].slots[kShared], 10);
  CHECK(world.finish(world.submit(world.load_spec(saved, kShared)))->page_status()[0] == Status::kChecksum);
  world.mover->set_readable(tiers({kHost, kShared, kDisk}));
  world.shared.corrupt(saved[1].slots[kShared], 10);
  std::vector<Saved> second{saved[1]};
  TransferSpec spec = world.load_spec(second, kShared);
  spec.work_class = WorkClass::kDemote;
  CHECK(world.finish(world.submit(std::move(spec)))->page_status()[0] == Status::kChecksum);
  CHECK(world.mover->stats().retried_pages == 0);
  world.check_settled();
}

TEST_CASE("a promotion whose source is damaged fills its tier from another one") {
  World world;
  auto saved = world.save(1, 2, tiers({kShared, kDisk}));
  world.shared.corrupt(saved[1].slots[kShared], 500);
  TransferSpec spec = world.load_spec(saved, kShared, tiers({kHost}));
  const auto transfer = world.finish(world.submit(std::move(spec)));
  CHECK(World::all(transfer, Status::kOk));
  CHECK(world.residency(2, kHost) == Residency::kResident);
  CHECK(world.holds(1, 2));
  world.check_settled();
}

TEST_CASE("where the queue has no room for a second try the page is as its first source left it") {
  World world({.copy_threads = 0, .io_threads = 0, .queue_units = 1, .unit_bytes = 1 << 20});
  auto saved = world.save(1, 1, tiers({kShared}));
  std::vector<Saved> both = saved;
  const auto demoted = world.finish(world.submit([&] {
    TransferSpec spec = world.load_spec(both, kShared, tiers({kDisk}));
    return spec;
  }()));
  CHECK(World::all(demoted, Status::kOk));
  world.shared.corrupt(saved[0].slots[kShared], 10);
  const auto transfer = world.submit(world.load_spec(saved, kShared));
  auto other = world.save_spec(7, 1, tiers({kDisk}), nullptr, 5);
  const auto blocking = world.submit(std::move(other));  // takes the io queue's only place
  CHECK(world.mover->step(0));
  CHECK(transfer->done());
  CHECK(transfer->page_status()[0] == Status::kChecksum);
  world.finish(blocking);
  world.check_settled();
}

// ---- calls that do not return ----------------------------------------------------------------------------------

TEST_CASE("a drain lets go of a call that does not return, and what it does later reaches nobody") {
  World world(World::threaded());
  auto saved = world.save(1, 2, tiers({kDisk}));
  world.paint(std::byte{0xab});
  const auto inbox = std::make_shared<Inbox>(2);
  world.disk.before_read.hold();
  const auto transfer = world.submit(world.load_spec(saved, kDisk), inbox);
  REQUIRE(world.disk.before_read.wait_standing());
  const auto calls = world.mover->calls();
  CHECK(std::any_of(calls.begin(), calls.end(), [](const WorkerCall& call) { return call.column == kDisk; }));
  CHECK(!world.mover->drain(0, true));
  CHECK(world.mover->stuck());
  CHECK(!world.mover->join());
  CHECK(transfer->decided());
  CHECK(transfer->source_released());
  for (const Status status : transfer->page_status()) CHECK(status != Status::kOk);
  std::vector<Completion> completions;
  CHECK(inbox->poll(2, &completions) == 1);
  world.disk.before_read.release();
  REQUIRE(transfer->wait(60));
  while (!world.mover->join()) std::this_thread::yield();
  CHECK(!world.mover->stuck());
  CHECK(world.is_painted(std::byte{0xab}));
  CHECK(inbox->poll(2, &completions) == 0);
  world.check_settled();
}

TEST_CASE("a claim that has moved on before its commit is a failed sink, not a bug") {
  World world;
  std::vector<Saved> saved;
  TransferSpec spec = world.save_spec(1, 2, tiers({kShared}), &saved);
  spec.pages[0].numbers[kShared] += 1000;
  const auto transfer = world.finish(world.submit(std::move(spec)));
  CHECK(transfer->page_status() == std::vector<Status>{Status::kStale, Status::kOk});
  CHECK(!world.mover->poisoned());
  // The claim that nobody named is still there.
  CHECK(world.residency(1, kShared) == Residency::kArriving);
}

// ---- leaving ---------------------------------------------------------------------------------------------------

namespace {

// A demotion of up to n pages from `from`, claimed as victims, to `to`.
TransferSpec demote_spec(World& world, const std::vector<Saved>& saved, int from, int to) {
  std::vector<Victim> victims;
  world.index.claim_victims(static_cast<Tier>(from), static_cast<uint32_t>(saved.size()), kNoSlot, &victims);
  REQUIRE(victims.size() == saved.size());
  TransferSpec spec;
  spec.source_leaving = true;
  spec.unpin_pages = true;
  spec.work_class = WorkClass::kDemote;
  for (const Saved& page : saved) {
    const auto victim =
        std::find_if(victims.begin(), victims.end(), [&](const Victim& v) { return v.page == page.page; });
    REQUIRE(victim != victims.end());
    const Key key = key_of(page.id);
    ClaimBatch claims;
    world.index.claim_absent_keys(&key, 1, 1, ParentState::kUnknown, Key{}, mask(static_cast<Tier>(to)), &claims);
    REQUIRE(claims.outcomes[static_cast<size_t>(to)] == ClaimOutcome::kNew);
    ++world.claimed;
    PageCopy copy;
    copy.page = page.page;
    world.index.labels(&copy.page, 1, &copy.label);
    copy.roles[static_cast<size_t>(from)] = Role::kSource;
    copy.slots[static_cast<size_t>(from)] = victim->slot;
    copy.numbers[static_cast<size_t>(from)] = victim->number;
    copy.roles[static_cast<size_t>(to)] = Role::kSink;
    copy.slots[static_cast<size_t>(to)] = claims.slots[static_cast<size_t>(to)];
    copy.numbers[static_cast<size_t>(to)] = claims.numbers[static_cast<size_t>(to)];
    spec.pages.push_back(copy);
  }
  return spec;
}

}  // namespace

TEST_CASE("a demoted page leaves its source record freed and its slot free, a failed one is kept") {
  World world;
  const auto saved = world.save(1, 3, tiers({kShared}));
  TransferSpec spec = demote_spec(world, saved, kShared, kDisk);
  world.disk.finish_fails.arm(2, Status::kIOError);
  const auto transfer = world.finish(world.submit(std::move(spec)));
  CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, Status::kIOError, Status::kOk});
  CHECK(world.residency(1, kShared) == Residency::kAbsent);
  CHECK(world.residency(2, kShared) == Residency::kResident);
  CHECK(world.residency(1, kDisk) == Residency::kResident);
  CHECK(world.shared.holding() == 1);
  CHECK(world.index.counts(Tier::kShared).free == kSlots - 1);
  world.check_settled();
}

TEST_CASE("a page that leaves for two tiers is kept where one of them has no copy") {
  for (const bool fails : {false, true}) {
    World world;
    const auto saved = world.save(1, 1, tiers({kShared}));
    TransferSpec spec = demote_spec(world, saved, kShared, kDisk);
    ClaimBatch claims;
    const Key key = key_of(1);
    world.index.claim_absent_keys(&key, 1, 1, ParentState::kUnknown, Key{}, tiers({kHost}), &claims);
    ++world.claimed;
    world.index.unpin_pages(&spec.pages[0].page, 1);  // one pin a page, however many claims
    spec.pages[0].roles[kHost] = Role::kSink;
    spec.pages[0].slots[kHost] = claims.slots[kHost];
    spec.pages[0].numbers[kHost] = claims.numbers[kHost];
    if (fails) world.disk.finish_fails.arm(1, Status::kIOError);
    world.finish(world.submit(std::move(spec)));
    CHECK(world.residency(1, kHost) == Residency::kResident);
    CHECK(world.residency(1, kShared) == (fails ? Residency::kResident : Residency::kAbsent));
    world.check_settled();
  }
}

TEST_CASE("the slot of a page that leaves is nobody's before its record is freed") {
  World world;
  const auto saved = world.save(1, 1, tiers({kShared}));
  const uint64_t claimable = world.index.claimable(Tier::kShared);
  world.shared.at_retire = [&] { CHECK(world.index.claimable(Tier::kShared) == claimable); };
  world.finish(world.submit(demote_spec(world, saved, kShared, kDisk)));
  CHECK(world.shared.retires == 1);
  CHECK(world.index.claimable(Tier::kShared) == claimable + 1);
  world.check_settled();
}

TEST_CASE("the slot of a page that leaves is owed where its record cannot be freed") {
  World world;
  const auto saved = world.save(1, 2, tiers({kShared}));
  const uint64_t free = world.index.counts(Tier::kShared).free;
  world.shared.retire_fails.arm(1, Status::kIOError);
  const auto transfer = world.finish(world.submit(demote_spec(world, saved, kShared, kDisk)));
  CHECK(World::all(transfer, Status::kOk));
  const TierCounts counts = world.index.counts(Tier::kShared);
  CHECK(counts.free == free + 1);
  CHECK(counts.leaving == 1);
  CHECK(counts.owed == 1);
  CHECK(world.shared.holding() == 1);
  CHECK(world.mover->stats().io_errors == 1);
  CHECK(world.index.check() == "");
  Victims victims(&world.index, &world.shared, Tier::kShared);
  victims.take_owed(8, kNoSlot);
  CHECK(victims.free() == 1);
  CHECK(world.shared.holding() == 0);
  world.check_settled();
}

TEST_CASE("the slot of a page that was written and given up is owed where its record cannot be freed") {
  World world;
  const uint64_t free = world.index.counts(Tier::kShared).free;
  TransferSpec spec = world.save_spec(1, 1, tiers({kShared}), nullptr);
  fault::arm("mover.after_copy", fault::Action::kErrno, 1, 5);
  world.shared.retire_fails.arm(1, Status::kIOError);
  const auto transfer = world.finish(world.submit(std::move(spec)));
  fault::clear();
  CHECK(World::all(transfer, Status::kFailed));
  const TierCounts counts = world.index.counts(Tier::kShared);
  CHECK(counts.arriving == 0);
  CHECK(counts.free == free - 1);
  CHECK(counts.owed == 1);
  CHECK(world.shared.holding() == 1);
  CHECK(world.residency(1, kShared) == Residency::kAbsent);
  CHECK(world.index.check() == "");
  Victims victims(&world.index, &world.shared, Tier::kShared);
  victims.take_owed(8, kNoSlot);
  CHECK(victims.free() == 1);
  world.check_settled();
}

TEST_CASE("a cancelled demotion keeps its sources") {
  World world;
  const auto saved = world.save(1, 3, tiers({kShared}));
  const auto transfer = world.submit(demote_spec(world, saved, kShared, kDisk));
  transfer->cancel();
  world.finish(transfer);
  CHECK(World::all(transfer, Status::kCancelled));
  CHECK(world.index.counts(Tier::kShared).resident == 3);
  CHECK(world.shared.retires == 0);
  world.check_settled();
}

TEST_CASE("a damaged page that leaves is quarantined, not freed") {
  World world;
  const auto saved = world.save(1, 2, tiers({kShared}));
  world.shared.corrupt(saved[0].slots[kShared], 0);
  const auto transfer = world.finish(world.submit(demote_spec(world, saved, kShared, kDisk)));
  CHECK(transfer->page_status() == std::vector<Status>{Status::kChecksum, Status::kOk});
  CHECK(world.residency(1, kShared) == Residency::kQuarantined);
  world.check_settled();
}

TEST_CASE("a page that leaves the device frees its slot after the first stage, whatever disk does later") {
  World world;
  world.index.add_slots(Tier::kDevice, 0, 4);
  uint32_t slot = kNoSlot;
  REQUIRE(world.index.take_private(Tier::kDevice, 1, &slot));
  const std::vector<int32_t> tokens(16, 7);
  const Key key = key_of(900);
  PageId page = kNoPage;
  REQUIRE(world.index.publish_private(world.index.open_namespace(nullptr), tokens.data(), &key, 0, Tier::kDevice, slot,
                                      &page) == ClaimOutcome::kNew);
  world.index.unpin_pages(&page, 1);
  std::vector<Victim> victims;
  world.index.claim_victims(Tier::kDevice, 1, kNoSlot, &victims);
  REQUIRE(victims.size() == 1);
  TransferSpec spec = world.save_spec(900, 1, tiers({kShared, kDisk}), nullptr);
  REQUIRE(spec.pages[0].page == page);
  spec.source_leaving = true;
  spec.pages[0].numbers[kPool] = victims[0].number;
  spec.pages[0].slots[kPool] = slot;
  world.fill(slot, 900);
  world.disk.finish_fails.arm(1, Status::kIOError);
  const auto transfer = world.submit(std::move(spec));
  REQUIRE(world.mover->step(0));
  CHECK(world.index.counts(Tier::kDevice).free == 4);
  CHECK(!transfer->done());
  world.finish(transfer);
  CHECK(transfer->page_status()[0] == Status::kIOError);
  CHECK(world.residency(900, kShared) == Residency::kResident);
  world.check_settled();
}

// ---- cancel, gate, handles -------------------------------------------------------------------------------------

TEST_CASE("a transfer cancelled before it runs copies nothing and returns everything") {
  World world;
  const auto inbox = std::make_shared<Inbox>(4);
  TransferSpec spec = world.save_spec(1, 4, tiers({kHost, kShared, kDisk}), nullptr);
  spec.tag = 9;
  const auto transfer = world.submit(std::move(spec), inbox);
  transfer->cancel();
  world.finish(transfer);
  CHECK(World::all(transfer, Status::kCancelled));
  CHECK(transfer->bytes_moved() == 0);
  CHECK(world.index.counts(Tier::kShared).free == kSlots);
  std::vector<Completion> completions;
  CHECK(inbox->poll(4, &completions) == 1);
  CHECK(completions[0].tag == 9);
  CHECK(completions[0].pages == 4);
  CHECK(completions[0].ok_pages == 0);
  CHECK(completions[0].status == Status::kCancelled);
  world.check_settled();
}

TEST_CASE("cancelling a running transfer lets the page under way finish and stops the rest") {
  World world(World::threaded(1 << 20));
  auto saved = world.save(1, 4, tiers({kDisk}));
  world.disk.before_read.hold();
  const auto transfer = world.submit(world.load_spec(saved, kDisk));
  REQUIRE(world.disk.before_read.wait_standing());
  transfer->cancel();
  CHECK(!transfer->done());
  world.disk.before_read.release();
  world.finish(transfer);
  CHECK(transfer->page_status() ==
        std::vector<Status>{Status::kOk, Status::kCancelled, Status::kCancelled, Status::kCancelled});
  world.check_settled();
}

TEST_CASE("a buffer repainted after close_gate stays painted although a stalled read completes later") {
  World world(World::threaded(1 << 20));
  auto saved = world.save(1, 3, tiers({kDisk}));
  world.disk.before_read.hold();
  const auto transfer = world.submit(world.load_spec(saved, kDisk, tiers({kShared})));
  REQUIRE(world.disk.before_read.wait_standing());
  transfer->close_gate();
  CHECK(World::all(transfer, Status::kDeadline));  // at once, with the read still under way
  CHECK(transfer->source_released());
  CHECK(!transfer->done());
  world.paint(std::byte{0x5a});
  world.disk.before_read.release();
  world.finish(transfer);
  CHECK(world.is_painted(std::byte{0x5a}));
  CHECK(World::all(transfer, Status::kDeadline));  // later results do not change them
  // The rest of the transfer went on without the pool.
  CHECK(transfer->landed() == std::vector<uint8_t>(3, 1 << kShared));
  CHECK(world.index.counts(Tier::kShared).resident == 3);
  CHECK(transfer->layers_done() == 0);
  world.check_settled();
}

TEST_CASE("a page whose last byte fell before close_gate but was not said to have landed stays at deadline") {
  for (const bool layer_order : {false, true}) {
    World world(World::threaded());
    auto saved = world.save(1, 2, tiers({kShared}));
    fault::arm("mover.after_copy", fault::Action::kPause, 1, 0);
    TransferSpec spec = world.load_spec(saved, kShared);
    spec.layer_order = layer_order;
    const auto transfer = world.submit(std::move(spec));
    REQUIRE(fault::wait_paused("mover.after_copy", 60));
    transfer->close_gate();
    CHECK(World::all(transfer, Status::kDeadline));
    fault::clear();
    world.finish(transfer);
    CHECK(World::all(transfer, Status::kDeadline));
    CHECK(transfer->landed() == std::vector<uint8_t>{0, 0});
    world.check_settled();
  }
}

TEST_CASE("close_gate leaves landed pages as they are and tells the others at once") {
  World world({.copy_threads = 0, .io_threads = 0, .queue_units = 64, .unit_bytes = 1});
  auto saved = world.save(1, 3, tiers({kShared}));
  const auto transfer = world.submit(world.load_spec(saved, kShared));
  REQUIRE(world.mover->step(0));
  transfer->close_gate();
  const std::vector<Status> expected{Status::kOk, Status::kDeadline, Status::kDeadline};
  CHECK(transfer->page_status() == expected);
  world.paint(std::byte{0x5a});
  world.finish(transfer);
  CHECK(transfer->page_status() == expected);
  CHECK(world.is_painted(std::byte{0x5a}));
  world.check_settled();
}

TEST_CASE("a save whose gate is closed aborts what was not gathered and goes on with what was") {
  World world({.copy_threads = 0, .io_threads = 0, .queue_units = 64, .unit_bytes = 1});
  const auto transfer = world.submit(world.save_spec(1, 3, tiers({kShared, kDisk}), nullptr));
  REQUIRE(world.mover->step(0));
  transfer->close_gate();
  CHECK(transfer->page_status() == std::vector<Status>{Status::kPending, Status::kDeadline, Status::kDeadline});
  world.finish(transfer);
  CHECK(transfer->page_status() == std::vector<Status>{Status::kOk, Status::kDeadline, Status::kDeadline});
  CHECK(world.index.counts(Tier::kDisk).resident == 1);
  world.check_settled();
}

TEST_CASE("closing the gate of layer-order loads at any moment leaves no late byte") {
  World world(World::threaded());
  auto saved = world.save(1, 40, tiers({kShared}));
  for (int round = 0; round < 50; ++round) {
    TransferSpec spec = world.load_spec(saved, kShared);
    spec.layer_order = true;
    const auto transfer = world.submit(std::move(spec));
    for (int i = 0; i < round; ++i) std::this_thread::yield();
    transfer->close_gate();
    world.paint(std::byte{0x5a});
    const auto told = transfer->page_status();
    world.finish(transfer);
    CHECK(world.is_painted(std::byte{0x5a}));
    CHECK(transfer->page_status() == told);
    for (const Status status : told) CHECK((status == Status::kOk || status == Status::kDeadline));
  }
  world.check_settled();
}

TEST_CASE("a closed gate waits for those inside and lets nobody in") {
  Gate gate;
  REQUIRE(gate.enter());
  std::atomic<bool> closed{false};
  std::jthread closer([&] {
    gate.close();
    closed = true;
  });
  while (gate.enter()) gate.leave();  // until the closer has been there
  CHECK(!closed);
  gate.leave();
  closer.join();
  CHECK(closed);
  CHECK(!gate.enter());
  gate.close();  // again is nothing
}

TEST_CASE("a dropped handle detaches: everything that follows still happens") {
  World world;
  const auto inbox = std::make_shared<Inbox>(4);
  TransferSpec spec = world.save_spec(1, 4, tiers({kShared, kDisk}), nullptr);
  spec.keep_alive = 5;
  world.submit(std::move(spec), inbox).reset();
  world.run();
  CHECK(world.index.counts(Tier::kDisk).resident == 4);
  std::vector<Completion> completions;
  CHECK(inbox->poll(4, &completions) == 1);
  CHECK(completions[0].ok_pages == 4);
  CHECK(world.mover->retired().drain() == std::vector<uint64_t>{5});
  world.check_settled();
}

TEST_CASE("a mover destroyed with work queued decides it all") {
  for (const bool threads : {false, true}) {
    World world(threads ? World::threaded(1) : World::stepped());
    auto saved = world.save(50, 4, tiers({kDisk}));
    const auto inbox = std::make_shared<Inbox>(16);
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (uint32_t i = 0; i < 6; ++i)
      transfers.push_back(
          world.submit(world.save_spec(1 + 4 * i, 4, tiers({kShared, kDisk}), nullptr, 4 + 4 * i), inbox));
    transfers.push_back(world.submit(world.load_spec(saved, kDisk, tiers({kHost})), inbox));
    world.mover.reset();
    for (const auto& transfer : transfers) {
      CHECK(transfer->done());
      CHECK(transfer->wait(-1));
      for (const Status status : transfer->page_status())
        CHECK((status == Status::kOk || status == Status::kCancelled));
    }
    std::vector<Completion> completions;
    CHECK(inbox->poll(16, &completions) == transfers.size());
    world.check_settled();
  }
}

TEST_CASE("drain finishes what is queued and then refuses") {
  for (const bool threads : {false, true}) {
    World world(threads ? World::threaded() : World::stepped());
    const auto transfer = world.submit(world.save_spec(1, 8, tiers({kShared, kDisk}), nullptr));
    if (threads) CHECK(!world.mover->step(0));  // only a mover without threads is stepped
    CHECK(world.mover->drain(-1, false));
    CHECK(World::all(transfer, Status::kOk));
    const auto second = world.submit(world.save_spec(20, 8, tiers({kShared}), nullptr));
    CHECK(world.mover->drain(60, true));
    CHECK(World::all(second, Status::kOk));
    std::shared_ptr<Transfer> refused;
    CHECK(world.mover->submit(TransferSpec{}, nullptr, &refused) == Status::kClosed);
    world.check_settled();
  }
}

TEST_CASE("drain without time cancels what has not started") {
  World world;
  const auto transfer = world.submit(world.save_spec(1, 8, tiers({kShared, kDisk}), nullptr));
  CHECK(!world.mover->drain(0, false));
  CHECK(World::all(transfer, Status::kCancelled));
  CHECK(World::all(world.finish(world.submit(world.save_spec(20, 2, tiers({kShared}), nullptr))), Status::kOk));
  world.check_settled();
}

// ---- room ------------------------------------------------------------------------------------------------------

TEST_CASE("a full inbox refuses and consumes nothing, until it is polled") {
  World world;
  const auto inbox = std::make_shared<Inbox>(1);
  auto saved = world.save(1, 2, tiers({kShared}));
  const auto first = world.submit(world.load_spec(saved, kShared), inbox);
  TransferSpec spec = world.load_spec(saved, kShared, tiers({kHost}));
  spec.keep_alive = 3;
  std::shared_ptr<Transfer> second;
  CHECK(world.mover->submit(spec, inbox, &second) == Status::kQueueFull);
  CHECK(second == nullptr);
  world.finish(first);
  CHECK(world.mover->submit(spec, inbox, &second) == Status::kQueueFull);  // done, but not told yet
  CHECK(world.index.counts(Tier::kHost).arriving == 2);
  CHECK(world.mover->retired().drain().empty());
  std::vector<Completion> completions;
  CHECK(inbox->poll(1, &completions) == 1);
  CHECK(world.mover->submit(spec, inbox, &second) == Status::kOk);
  world.finish(second);
  CHECK(world.mover->retired().drain() == std::vector<uint64_t>{3});
  world.check_settled();
}

TEST_CASE("a full queue refuses and consumes nothing, and room for every stage is taken at once") {
  World world({.copy_threads = 0, .io_threads = 0, .queue_units = 2, .unit_bytes = 1 << 20});
  const auto inbox = std::make_shared<Inbox>(8);
  const auto first = world.submit(world.save_spec(1, 2, tiers({kShared, kDisk}), nullptr), inbox);
  const auto second = world.submit(world.save_spec(3, 2, tiers({kShared, kDisk}), nullptr), inbox);
  TransferSpec spec =
      world.save_spec(5, 2, tiers({kDisk}), nullptr);  // needs only the io queue, in which nothing stands yet
  std::shared_ptr<Transfer> third;
  CHECK(world.mover->submit(spec, inbox, &third) == Status::kQueueFull);
  CHECK(world.index.counts(Tier::kDisk).arriving == 6);
  while (world.mover->step(0)) {
  }
  CHECK(world.mover->submit(spec, inbox, &third) == Status::kQueueFull);
  REQUIRE(world.mover->step(1));
  CHECK(world.mover->submit(spec, inbox, &third) == Status::kOk);
  world.finish(third);
  for (uint32_t i = 1; i <= 6; ++i) CHECK(world.residency(i, kDisk) == Residency::kResident);
  std::vector<Completion> completions;
  CHECK(inbox->poll(8, &completions) == 3);
  world.check_settled();
}

TEST_CASE("a transfer of more units than a queue holds is cut into larger ones") {
  World world({.copy_threads = 0, .io_threads = 0, .queue_units = 4, .unit_bytes = 1});
  const auto saved = world.save(1, 60, tiers({kShared, kDisk}));
  CHECK(saved.size() == 60);
  world.check_settled();
}

TEST_CASE("loads go first and a demotion is not starved by them") {
  World world({.copy_threads = 0, .io_threads = 0, .queue_units = 64, .unit_bytes = 1 << 20});
  auto pages = world.save(1, 1, tiers({kShared}));
  const auto leaving = world.save(2, 1, tiers({kShared}));
  auto pinned = world.load_spec(pages, kShared);
  const auto first_load = world.submit(std::move(pinned));
  const auto demotion = world.submit(demote_spec(world, leaving, kShared, kHost));
  std::vector<std::shared_ptr<Transfer>> loads{first_load};
  for (int i = 0; i < 20; ++i) loads.push_back(world.submit(world.load_spec(pages, kShared)));
  for (int i = 0; i < 8; ++i) REQUIRE(world.mover->step(0));
  CHECK(demotion->done());
  CHECK(std::count_if(loads.begin(), loads.end(), [](const auto& load) { return load->done(); }) == 7);
  world.run();
  world.check_settled();
}

TEST_CASE("a load waits for one unit of a long save that runs, and for one more at most") {
  for (const int tier : {kShared, kDisk}) {
    for (int before = 0; before < 8; ++before) {
      World world;  // four pages a unit
      auto pages = world.save(1, 1, tiers({tier}));
      const auto save = world.submit(world.save_spec(2, 60, tiers({tier}), nullptr));
      const int queue = tier == kDisk ? 1 : 0;
      for (int i = 0; i < before; ++i) REQUIRE(world.mover->step(queue));
      const auto load = world.submit(world.load_spec(pages, tier));
      int waited = 0;
      for (; !load->done(); ++waited) REQUIRE(world.mover->step(queue));
      CHECK(waited <= 2);
      CHECK(!save->done());
      world.finish(save);
      world.check_settled();
    }
  }
}

TEST_CASE("what units move and how long they take is counted by class and lane") {
  World world;
  const uint64_t bytes = world.shape.page_bytes();
  constexpr auto kLoad = static_cast<size_t>(WorkClass::kLoad), kSave = static_cast<size_t>(WorkClass::kSave);
  const auto began = std::chrono::steady_clock::now();
  auto saved = world.save(1, 6, tiers({kShared, kDisk}));
  MoverFlow flow = world.mover->flow();
  CHECK(flow.reads[kSave][kPool].bytes == 6 * bytes);
  CHECK(flow.writes[kSave][kShared].bytes == 6 * bytes);
  CHECK(flow.reads[kSave][kShared].bytes == 6 * bytes);  // the disk copy is made from there
  CHECK(flow.writes[kSave][kDisk].bytes == 6 * bytes);
  CHECK(flow.writes[kSave][kDisk].ns == flow.reads[kSave][kShared].ns);  // the same units, each page with both
  CHECK(flow.waits[0][kSave].units == 2);
  CHECK(flow.waits[1][kSave].units == 2);
  CHECK(flow.reads[kLoad][kDisk].bytes + flow.reads[kLoad][kShared].bytes == 0);

  world.finish(world.submit(world.load_spec(saved, kDisk)));
  flow = world.mover->flow();
  CHECK(flow.reads[kLoad][kDisk].bytes == 6 * bytes);
  const auto elapsed = std::chrono::steady_clock::now() - began;
  CHECK(flow.reads[kLoad][kDisk].ns > 0);
  uint64_t ns = 0;
  for (const auto& of_class : flow.reads) {
    for (const Flow& of_lane : of_class) ns += of_lane.ns;
  }
  CHECK(ns <= static_cast<uint64_t>(std::chrono::nanoseconds(elapsed).count()));  // each of a unit's counts once
  CHECK(flow.writes[kLoad][kPool].bytes == 6 * bytes);
  CHECK(flow.waits[1][kLoad].units == 2);
  CHECK(flow.reads[kLoad][kShared].bytes == 0);
  world.check_settled();
}

TEST_CASE("the time of a unit is counted once, not once a page") {
  World world({.copy_threads = 1, .io_threads = 1, .queue_units = 64, .unit_bytes = 4096});
  auto saved = world.save(1, 4, tiers({kDisk}));
  const auto began = std::chrono::steady_clock::now();
  world.disk.before_read.hold();
  const auto load = world.submit(world.load_spec(saved, kDisk));
  REQUIRE(world.disk.before_read.wait_standing());
  // Long beside all else that the load does: what was counted once a page would be more than has passed.
  while (std::chrono::steady_clock::now() - began < std::chrono::milliseconds(50)) std::this_thread::yield();
  world.disk.before_read.release();
  world.finish(load);
  const auto elapsed = std::chrono::nanoseconds(std::chrono::steady_clock::now() - began);
  const uint64_t ns = world.mover->flow().reads[static_cast<size_t>(WorkClass::kLoad)][kDisk].ns;
  CHECK(ns > 0);
  CHECK(ns <= static_cast<uint64_t>(elapsed.count()));
  world.check_settled();
}

TEST_CASE("a page that could not be read costs its time and brings no bytes") {
  World world;
  auto saved = world.save(1, 1, tiers({kDisk}));
  world.disk.read_fails.arm(1, Status::kIOError);
  world.finish(world.submit(world.load_spec(saved, kDisk)));
  const Flow read = world.mover->flow().reads[static_cast<size_t>(WorkClass::kLoad)][kDisk];
  CHECK(read.bytes == 0);
  CHECK(read.ns > 0);
  world.check_settled();
}

TEST_CASE("what waits and what runs is seen while it does") {
  World world({.copy_threads = 1, .io_threads = 1, .queue_units = 64, .unit_bytes = 4096});
  const uint64_t bytes = world.shape.page_bytes();
  auto saved = world.save(1, 6, tiers({kDisk}));
  world.disk.before_read.hold();
  const auto load = world.submit(world.load_spec(saved, kDisk));
  REQUIRE(world.disk.before_read.wait_standing());
  const MoverFlow held = world.mover->flow();
  CHECK(held.queued[static_cast<size_t>(WorkClass::kLoad)][kDisk] == 6 * bytes);  // one unit runs, one waits
  CHECK(held.running[kDisk].bytes == 4 * bytes);
  CHECK(held.running[kDisk].ns > 0);
  CHECK(held.running[kShared].ns == 0);
  CHECK(world.mover->flow().running[kDisk].ns >= held.running[kDisk].ns);
  world.disk.before_read.release();
  world.finish(load);
  world.check_settled();
}

TEST_CASE("a check reads a page where it is and fills nothing") {
  World world;
  auto saved = world.save(1, 3, tiers({kShared}));
  TransferSpec spec = world.load_spec(saved, kShared);
  for (PageCopy& page : spec.pages) page.roles[kPool] = Role::kUnused;
  const auto check = world.submit(std::move(spec));
  world.finish(check);
  CHECK(check->page_status() == std::vector<Status>(3, Status::kOk));
  CHECK(check->landed() == std::vector<uint8_t>(3, 1u << kShared));
  CHECK(check->bytes_moved() == 0);
  world.check_settled();
}

TEST_CASE("what makes no sense is refused before anything starts") {
  World world;
  auto saved = world.save(1, 1, tiers({kShared}));
  const TransferSpec good = world.load_spec(saved, kShared);
  std::shared_ptr<Transfer> transfer;
  const auto refuses = [&](auto change) {
    TransferSpec spec = good;
    change(spec);
    return world.mover->submit(std::move(spec), nullptr, &transfer) == Status::kInvalid;
  };
  CHECK(refuses([](TransferSpec& spec) { spec.pages[0].page = kNoPage; }));
  CHECK(refuses([](TransferSpec& spec) { spec.pages[0].roles = {Role::kSource}; }));
  CHECK(refuses([](TransferSpec& spec) {
    spec.pages[0].roles[kPool] = Role::kUnused;  // a check: what leaves is not checked
    spec.source_leaving = true;
  }));
  CHECK(refuses([](TransferSpec& spec) { spec.pages[0].roles[kShared] = Role::kUnused; }));
  CHECK(refuses([](TransferSpec& spec) { spec.pages[0].roles[kHost] = Role::kSource; }));
  CHECK(refuses([](TransferSpec& spec) { spec.pages[0].roles[kHost] = static_cast<Role>(9); }));
  CHECK(refuses([](TransferSpec& spec) { spec.pages[0].slots[kPool] = kPoolSlots; }));
  CHECK(refuses([](TransferSpec& spec) { spec.pool = nullptr; }));
  CHECK(refuses([&](TransferSpec& spec) { spec.pool = world.layout(false); }));
  CHECK(refuses([](TransferSpec& spec) { spec.work_class = static_cast<WorkClass>(3); }));
  CHECK(world.mover->submit(good, nullptr, &transfer) == Status::kOk);
  world.finish(transfer);
  world.check_settled();
}

TEST_CASE("a mover without a tier refuses its column, and half a stepped mover is no mover") {
  World world;
  auto saved = world.save(1, 1, tiers({kShared}));
  TransferSpec spec = world.load_spec(saved, kShared);
  Mover bare(World::stepped(), world.shape, &world.index, {});
  std::shared_ptr<Transfer> transfer;
  CHECK(bare.submit(spec, nullptr, &transfer) == Status::kInvalid);
  CHECK_THROWS_AS(Mover({.copy_threads = 1, .io_threads = 0}, world.shape, &world.index, {}), std::invalid_argument);
  CHECK_THROWS_AS(Mover({.copy_threads = 0, .io_threads = 0, .queue_units = 0}, world.shape, &world.index, {}),
                  std::invalid_argument);
  world.index.release(spec.lease);
}

TEST_CASE("a transfer of no pages is done at once, with its completion") {
  World world;
  const auto inbox = std::make_shared<Inbox>(1);
  TransferSpec spec;
  spec.tag = 4;
  spec.keep_alive = 6;
  const auto transfer = world.submit(std::move(spec), inbox);
  CHECK(transfer->done());
  CHECK(transfer->source_released());
  std::vector<Completion> completions;
  CHECK(inbox->poll(1, &completions) == 1);
  CHECK(completions[0].tag == 4);
  CHECK(world.mover->retired().drain() == std::vector<uint64_t>{6});
}

// ---- inbox -----------------------------------------------------------------------------------------------------

TEST_CASE("an inbox's descriptor is readable exactly while completions wait") {
  Inbox inbox(3);
  const auto readable = [&] {
    pollfd entry{inbox.fileno(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  };
  std::vector<Completion> completions;
  CHECK(!readable());
  for (uint64_t tag = 1; tag <= 3; ++tag) {
    REQUIRE(inbox.try_reserve());
    inbox.push({tag, 1, 1, Status::kOk});
  }
  CHECK(!inbox.try_reserve());
  CHECK(readable());
  CHECK(inbox.poll(2, &completions) == 2);
  CHECK(readable());
  CHECK(inbox.poll(2, &completions) == 1);
  CHECK(!readable());
  CHECK(inbox.poll(2, &completions) == 0);
  CHECK(completions[2].tag == 3);
  REQUIRE(inbox.try_reserve());
  inbox.close();
  inbox.push({9, 1, 1, Status::kOk});
  CHECK(inbox.poll(2, &completions) == 0);
  CHECK(!readable());
  CHECK(!inbox.try_reserve());
}

TEST_CASE("what had nothing to move is posted where there is room, and takes it until it is polled") {
  Inbox inbox(2);
  std::vector<Completion> completions;
  REQUIRE(inbox.try_reserve());
  CHECK(inbox.try_post({7, 4, 0, Status::kQueueFull}));
  CHECK(!inbox.try_post({8, 0, 0, Status::kOk}));
  CHECK(!inbox.try_reserve());
  CHECK(inbox.poll(2, &completions) == 1);
  CHECK(completions[0].tag == 7);
  CHECK(completions[0].status == Status::kQueueFull);
  CHECK(inbox.counts().reserved == 1);
  inbox.close();
  CHECK(!inbox.try_post({9, 0, 0, Status::kOk}));
}

TEST_CASE("a transfer whose inbox was closed ends all the same, and a closed one is refused") {
  World world;
  const auto inbox = std::make_shared<Inbox>(2);
  const auto transfer = world.submit(world.save_spec(1, 2, tiers({kShared}), nullptr), inbox);
  inbox->close();
  world.finish(transfer);
  CHECK(World::all(transfer, Status::kOk));
  std::shared_ptr<Transfer> refused;
  CHECK(world.mover->submit(TransferSpec{}, inbox, &refused) == Status::kClosed);
}

// ---- wakers ----------------------------------------------------------------------------------------------------

bool readable(int fileno) {
  pollfd entry{fileno, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

using Tokens = std::vector<uint64_t>;

TEST_CASE("every waker that watches a transfer is told once, when it is done") {
  World world;
  const auto transfer = world.submit(world.save_spec(1, 2, tiers({kShared, kDisk}), nullptr));
  const auto one = std::make_shared<Waker>(), other = std::make_shared<Waker>();
  REQUIRE(transfer->watch(one, 1));
  REQUIRE(transfer->watch(one, 2));
  REQUIRE(transfer->watch(other, 1));
  REQUIRE(transfer->watch(one, 3));
  transfer->unwatch(one.get(), 3);
  transfer->unwatch(one.get(), 4);  // never was
  CHECK(!readable(one->fileno()));
  world.finish(transfer);
  CHECK(readable(one->fileno()));
  CHECK(one->drain() == Tokens{1, 2});
  CHECK(other->drain() == Tokens{1});
  CHECK(!readable(one->fileno()));
  CHECK(one->drain() == Tokens{});
  CHECK(!transfer->watch(one, 5));  // done already
  transfer->unwatch(one.get(), 1);  // told: no matter
  CHECK(one.use_count() == 1);
  CHECK(other.use_count() == 1);
}

TEST_CASE("closing the gate decides a transfer, and tells who watches and who waits, although it is not done") {
  World world;
  auto saved = world.save(1, 2, tiers({kShared}));
  const auto transfer = world.submit(world.load_spec(saved, kShared));
  const auto waker = std::make_shared<Waker>();
  REQUIRE(transfer->watch(waker, 7));
  CHECK(!transfer->decided());
  CHECK(!transfer->wait_decided(0));
  std::thread waiting([&] { CHECK(transfer->wait_decided(-1)); });
  transfer->close_gate();
  waiting.join();
  CHECK(transfer->decided());
  CHECK(!transfer->done());
  CHECK(waker->drain() == Tokens{7});
  CHECK(!transfer->watch(waker, 8));
  world.finish(transfer);
  CHECK(waker->drain() == Tokens{});
}

TEST_CASE("an inbox tells its watchers of a completion and of its end, and takes none while it has something") {
  Inbox inbox(2);
  const auto waker = std::make_shared<Waker>();
  REQUIRE(inbox.watch(waker, 1));
  REQUIRE(inbox.watch(waker, 2));
  inbox.unwatch(waker.get(), 2);
  REQUIRE(inbox.try_reserve());
  REQUIRE(inbox.try_reserve());
  inbox.push({1, 1, 1, Status::kOk});
  CHECK(waker->drain() == Tokens{1});
  CHECK(!inbox.watch(waker, 3));
  InboxCounts counts = inbox.counts();
  CHECK(counts.capacity == 2);
  CHECK(counts.reserved == 2);
  CHECK(counts.ready == 1);
  std::vector<Completion> completions;
  CHECK(inbox.poll(2, &completions) == 1);
  REQUIRE(inbox.watch(waker, 4));
  inbox.close();
  CHECK(waker->drain() == Tokens{4});
  CHECK(!inbox.watch(waker, 5));
  counts = inbox.counts();
  CHECK(counts.reserved == 1);  // of the transfer that is under way
}

TEST_CASE("a waker that was closed writes to no descriptor, whatever has its number now") {
  World world;
  const auto transfer = world.submit(world.save_spec(1, 2, tiers({kShared}), nullptr));
  const auto waker = std::make_shared<Waker>();
  REQUIRE(transfer->watch(waker, 1));
  const int number = waker->fileno();
  waker->close();
  waker->close();
  CHECK(waker->fileno() == -1);
  Waker next;  // the lowest number that is free
  REQUIRE(next.fileno() == number);
  world.finish(transfer);
  CHECK(!readable(next.fileno()));
  CHECK(waker->drain() == Tokens{1});
}

TEST_CASE("threads that watch, give up and close while transfers end lose no token and no descriptor") {
  constexpr int kThreads = 4;
  constexpr uint32_t kRounds = 200;
  World world(World::threaded(1024));
  auto saved = world.save(1, 4, tiers({kShared}));
  std::vector<std::thread> threads;
  std::atomic<uint64_t> told{0};
  for (int t = 0; t < kThreads; ++t) {
    TransferSpec spec = world.load_spec(saved, kShared);
    threads.emplace_back([&world, &told, t, spec]() mutable {
      for (uint32_t round = 0; round < kRounds; ++round) {
        TransferSpec again = spec;
        if (round + 1 < kRounds) world.index.retain(again.lease);
        // No two threads into the same slots: the copies do not meet.
        for (PageCopy& copy : again.pages) copy.slots[kPool] = copy.slots[kPool] % 4 + static_cast<uint32_t>(4 * t);
        std::shared_ptr<Transfer> transfer;
        while (world.mover->submit(again, nullptr, &transfer) == Status::kQueueFull) std::this_thread::yield();
        const auto waker = std::make_shared<Waker>();
        const bool watched = transfer->watch(waker, 1) && transfer->watch(waker, 2);
        if (round % 3 == 0) {
          transfer->unwatch(waker.get(), 1);
          transfer->unwatch(waker.get(), 2);
          waker->close();
        } else if (watched) {
          if (round % 3 == 1) transfer->close_gate();
          pollfd entry{waker->fileno(), POLLIN, 0};
          REQUIRE(::poll(&entry, 1, 60'000) == 1);
          told += waker->drain().size();
        }
        REQUIRE(transfer->wait(60));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(told > 0);
}

// ---- threads ---------------------------------------------------------------------------------------------------

TEST_CASE("a forked child refuses, and its mover goes without a join") {
  World world(World::threaded());
  const pid_t child = ::fork();
  if (child == 0) {
    std::shared_ptr<Transfer> transfer;
    const bool refused = world.mover->submit(TransferSpec{}, nullptr, &transfer) == Status::kClosed;
    const bool drained = world.mover->drain(-1, true);
    world.mover.reset();
    ::_exit(refused && drained ? 0 : 1);
  }
  REQUIRE(child > 0);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  world.save(1, 2, tiers({kShared}));
}

TEST_CASE("eight threads of small transfers: every claim is decided once, every completion told once") {
  constexpr int kThreads = 8;
  constexpr uint32_t kRounds = 125;
  World world({.copy_threads = 2, .io_threads = 2, .queue_units = 16, .unit_bytes = 1024});
  SUBCASE("published page by page") {}
  SUBCASE("settled on disk") { world.disk.is_settling = true; }
  world.host.yields = world.shared.yields = world.disk.yields = 1;
  std::atomic<uint64_t> claimed{0}, submitted{0}, refused{0};
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto inbox = std::make_shared<Inbox>(4);
      uint64_t mine = 0, told = 0;
      std::vector<Completion> completions;
      const auto id = static_cast<uint32_t>(t);
      const Key keys[2] = {key_of(2 * id), key_of(2 * id + 1)};
      std::vector<std::byte> memory(4 * world.shape.page_bytes());  // saves read slots 0 and 1, loads land in 2 and 3
      std::vector<StreamView> views;
      for (uint32_t layer = 0; layer < world.shape.layers(); ++layer) {
        StreamView view;
        view.base = memory.data() + world.shape.layer_offset(layer);
        view.slot_stride = static_cast<int64_t>(world.shape.page_bytes());
        view.piece_bytes = world.shape.layer_bytes(layer);
        views.push_back(view);
      }
      const auto pool = std::make_shared<const PoolLayout>(world.shape, 1, views, 4, true);
      for (uint32_t round = 0; round < kRounds; ++round) {
        // Save two pages to shared and disk (the second time on they are there), then evict and load again: all kinds
        // of work at once.
        ClaimBatch claims;
        world.index.claim_absent_keys(keys, 2, 1, ParentState::kUnknown, Key{}, tiers({kShared, kDisk}), &claims);
        TransferSpec spec;
        spec.pool = pool;
        spec.unpin_pages = true;
        spec.work_class = WorkClass::kSave;
        for (uint32_t i = 0; i < 2; ++i) {
          PageCopy copy;
          copy.page = claims.pages[i];
          copy.roles[kPool] = Role::kSource;
          copy.slots[kPool] = i;
          for (const size_t c : {static_cast<size_t>(kShared), static_cast<size_t>(kDisk)}) {
            if (claims.outcomes[i * kTiers + c] != ClaimOutcome::kNew) continue;
            copy.roles[c] = Role::kSink;
            copy.slots[c] = claims.slots[i * kTiers + c];
            copy.numbers[c] = claims.numbers[i * kTiers + c];
            ++claimed;
          }
          if (copy.roles[kShared] == Role::kUnused && copy.roles[kDisk] == Role::kUnused) continue;
          world.index.labels(&copy.page, 1, &copy.label);
          spec.pages.push_back(copy);
        }
        std::shared_ptr<Transfer> transfer;
        while (world.mover->submit(spec, inbox, &transfer) == Status::kQueueFull) {
          ++refused;
          told += inbox->poll(4, &completions);
          std::this_thread::yield();
        }
        ++mine;
        if (round % 5 == 0) transfer->cancel();
        if (round % 7 == 0) transfer->close_gate();
        if (round % 3 != 0) CHECK(transfer->wait(60));
        transfer.reset();
        // Load what is on disk by now, page by page or layer by layer, and repaint at once where the deadline has
        // passed.
        const MatchResult match = world.index.match_keys_and_pin(keys, 2, 1, tiers({kDisk}));
        if (match.pages > 0) {
          std::array<PageId, 2> ids{};
          std::array<uint8_t, 2> tier{};
          std::array<uint32_t, 2> slots{};
          world.index.lease_pages(match.lease, 0, match.pages, ids.data(), tier.data(), slots.data());
          TransferSpec load;
          load.pool = pool;
          load.lease = match.lease;
          load.layer_order = round % 2 == 0;
          for (uint32_t i = 0; i < match.pages; ++i) {
            PageCopy copy;
            copy.page = ids[i];
            world.index.labels(&copy.page, 1, &copy.label);
            copy.roles[kDisk] = Role::kSource;
            copy.slots[kDisk] = slots[i];
            copy.roles[kPool] = Role::kSink;
            copy.slots[kPool] = 2 + i;
            load.pages.push_back(copy);
          }
          while (world.mover->submit(load, inbox, &transfer) == Status::kQueueFull) {
            ++refused;
            told += inbox->poll(4, &completions);
            std::this_thread::yield();
          }
          ++mine;
          if (round % 4 == 0) {
            transfer->close_gate();
            std::fill(memory.begin() + static_cast<std::ptrdiff_t>(2 * world.shape.page_bytes()), memory.end(),
                      std::byte{0});
          } else {
            CHECK(transfer->wait(60));
            CHECK(World::all(transfer, Status::kOk));
          }
        }
        // Demote whatever may leave shared, dropping it: the next round saves anew.
        std::vector<Victim> victims;
        world.index.claim_victims(Tier::kShared, 1, kNoSlot, &victims);
        for (const Victim& victim : victims) {
          TransferSpec leaving;
          PageCopy copy;
          copy.page = victim.page;
          world.index.labels(&copy.page, 1, &copy.label);
          ClaimBatch claim;
          world.index.claim_absent_keys(&copy.label.key, 1, 1, ParentState::kUnknown, Key{}, tiers({kHost}), &claim);
          if (claim.outcomes[kHost] != ClaimOutcome::kNew) {
            if (world.index.finish(victim.page, Tier::kShared, victim.number) == Status::kOk) {
              world.shared.retire(victim.slot);
              world.index.free_slots(Tier::kShared, &victim.slot, 1);
            }
            continue;
          }
          ++claimed;
          copy.roles[kShared] = Role::kSource;
          copy.slots[kShared] = victim.slot;
          copy.numbers[kShared] = victim.number;
          copy.roles[kHost] = Role::kSink;
          copy.slots[kHost] = claim.slots[kHost];
          copy.numbers[kHost] = claim.numbers[kHost];
          leaving.pages.push_back(copy);
          leaving.source_leaving = true;
          leaving.unpin_pages = true;
          leaving.work_class = WorkClass::kDemote;
          while (world.mover->submit(leaving, inbox, &transfer) == Status::kQueueFull) {
            ++refused;
            told += inbox->poll(4, &completions);
            std::this_thread::yield();
          }
          ++mine;
          CHECK(transfer->wait(60));
        }
        // Host gives its pages up, so that demotions go on.
        victims.clear();
        world.index.claim_victims(Tier::kHost, 1, kNoSlot, &victims);
        for (const Victim& victim : victims) {
          if (world.index.finish(victim.page, Tier::kHost, victim.number) != Status::kOk) continue;
          world.host.retire(victim.slot);
          world.index.free_slots(Tier::kHost, &victim.slot, 1);
        }
      }
      while (told < mine) {
        told += inbox->poll(4, &completions);
        std::this_thread::yield();
      }
      CHECK(completions.size() == mine);
      submitted += mine;
    });
  }
  threads.clear();
  CHECK(world.mover->drain(60, false));
  world.claimed = claimed;
  CHECK(world.mover->stats().transfers == submitted);
  CHECK(world.mover->stats().checksum_failures == 0);
  CHECK(!world.mover->poisoned());
  world.check_settled();
}

// ---- one after another -----------------------------------------------------------------------------------------

namespace {

// A load of pages that `bringer` (a save into host memory, submitted or to be) is still to bring there.
TransferSpec follower_spec(World& world, const std::vector<Saved>& pages, std::shared_ptr<Transfer> bringer) {
  std::vector<Key> keys;
  for (const Saved& page : pages) keys.push_back(key_of(page.id));
  const auto count = static_cast<uint32_t>(keys.size());
  const std::vector<uint8_t> offered(count, 0);
  ClaimBatch joined;
  const MatchResult none = world.index.match_keys_and_pin(keys.data(), count, 1, tiers({kHost}));
  REQUIRE(none.pages == 0);
  const MatchResult match =
      world.index.extend_match_keys(none, keys.data(), count, 1, offered.data(), tiers({kHost}), Tier::kHost, &joined);
  REQUIRE(match.pages == count);
  TransferSpec spec;
  spec.pool = world.layout();
  spec.lease = match.lease;
  for (uint32_t i = 0; i < count; ++i) {
    PageCopy copy;
    copy.page = joined.pages[i];
    world.index.labels(&copy.page, 1, &copy.label);
    copy.roles[kPool] = Role::kSink;
    copy.slots[kPool] = 32 + i;
    copy.roles[kHost] = Role::kSource;
    copy.slots[kHost] = joined.slots[i * kTiers + kHost];
    copy.numbers[kHost] = joined.numbers[i * kTiers + kHost];
    copy.is_awaited = true;
    spec.pages.push_back(copy);
  }
  if (bringer != nullptr) spec.after.push_back(std::move(bringer));
  return spec;
}

}  // namespace

TEST_CASE("a transfer begins once those are done that it waits for") {
  for (const bool layer_order : {false, true}) {
    for (const MoverOptions& options : {World::stepped(), World::threaded()}) {
      World world(options);
      std::vector<Saved> saved;
      TransferSpec save = world.save_spec(1, 6, tiers({kHost}), &saved);
      world.host.before_finish.hold();
      if (options.copy_threads == 0) world.host.before_finish.release();
      const auto bringer = world.submit(std::move(save));
      TransferSpec load = follower_spec(world, saved, bringer);
      load.layer_order = layer_order;
      const auto follower = world.submit(std::move(load));
      CHECK(!follower->done());
      world.host.before_finish.release();
      world.finish(bringer);
      world.finish(follower);
      CHECK(World::all(follower, Status::kOk));
      for (uint32_t i = 0; i < 6; ++i) CHECK(world.holds(32 + i, 1 + i));
      world.check_settled();
    }
  }
}

TEST_CASE("what did not come fails with its reason, and nothing is quarantined for it") {
  for (const bool layer_order : {false, true}) {
    World world;
    std::vector<Saved> saved;
    TransferSpec save = world.save_spec(1, 5, tiers({kHost}), &saved);
    world.host.finish_fails.arm(3, Status::kIOError);
    const auto bringer = world.submit(std::move(save));
    TransferSpec load = follower_spec(world, saved, bringer);
    load.layer_order = layer_order;
    const auto follower = world.finish(world.submit(std::move(load)));
    CHECK(follower->page_status() ==
          std::vector<Status>{Status::kOk, Status::kOk, Status::kIOError, Status::kOk, Status::kOk});
    CHECK(world.index.counts(Tier::kHost).quarantined == 0);
    CHECK(world.mover->stats().checksum_failures == 0);
    world.check_settled();
  }
}

TEST_CASE("a page that none of them brings under its number has gone") {
  World world;
  std::vector<Saved> saved;
  const auto bringer = world.submit(world.save_spec(1, 3, tiers({kHost}), &saved));
  TransferSpec load = follower_spec(world, saved, bringer);
  ++load.pages[1].numbers[kHost];
  const auto follower = world.finish(world.submit(std::move(load)));
  CHECK(follower->page_status() == std::vector<Status>{Status::kOk, Status::kGone, Status::kOk});
  world.check_settled();
}

TEST_CASE("those that are done when it is submitted count as well, and none at all is every page gone") {
  for (const bool has_bringer : {true, false}) {
    World world;
    std::vector<Saved> saved;
    const auto bringer = world.submit(world.save_spec(1, 3, tiers({kHost}), &saved));
    TransferSpec load = follower_spec(world, saved, bringer);
    world.finish(bringer);
    if (!has_bringer) load.after.clear();
    const auto follower = world.submit(std::move(load));
    world.finish(follower);
    CHECK(World::all(follower, has_bringer ? Status::kOk : Status::kGone));
    world.check_settled();
  }
}

TEST_CASE("cancelled, gated or drained while it waits, a transfer returns everything") {
  for (const int how : {0, 1, 2, 3}) {
    World world;
    std::vector<Saved> saved;
    const auto bringer = world.submit(world.save_spec(1, 4, tiers({kHost}), &saved));
    const auto follower = world.submit(follower_spec(world, saved, bringer));
    world.paint(std::byte{0xee});
    if (how == 0) follower->cancel();
    if (how == 1) {
      follower->close_gate();
      CHECK(follower->decided());
      CHECK(World::all(follower, Status::kDeadline));
    }
    if (how == 2) bringer->cancel();
    if (how == 3) {
      CHECK(!world.mover->drain(0, false));
    } else {
      world.run();
    }
    CHECK(bringer->done());
    CHECK(follower->done());
    CHECK(World::all(follower, how == 1 ? Status::kDeadline : Status::kCancelled));
    CHECK(world.is_painted(std::byte{0xee}));
    world.check_settled();
  }
}

TEST_CASE("a poisoned mover ends what waits") {
  World world;
  std::vector<Saved> saved;
  const auto bringer = world.submit(world.save_spec(1, 4, tiers({kHost}), &saved));
  const auto follower = world.submit(follower_spec(world, saved, bringer));
  fault::arm("mover.assertion", fault::Action::kErrno, 1, EIO);
  world.run();
  CHECK(follower->done());
  CHECK(World::all(follower, Status::kPoisoned));
  CHECK(world.mover->poisoned());
}

TEST_CASE("an exception while a transfer is begun after others costs what it awaits") {
  World world;
  std::vector<Saved> saved;
  const auto bringer = world.submit(world.save_spec(1, 4, tiers({kHost}), &saved));
  const auto follower = world.submit(follower_spec(world, saved, bringer));
  fault::arm("mover.begin_after", fault::Action::kErrno, 1, ENOMEM);
  world.run();
  CHECK(World::all(bringer, Status::kOk));
  CHECK(follower->done());
  CHECK(World::all(follower, Status::kFailed));
  CHECK(!world.mover->poisoned());
  world.check_settled();
}

TEST_CASE("what is awaited must be a source in host memory") {
  World world;
  auto saved = world.save(1, 1, tiers({kShared}));
  TransferSpec spec = world.load_spec(saved, kShared);
  spec.pages[0].is_awaited = true;
  const uint64_t lease = spec.lease;
  std::shared_ptr<Transfer> transfer;
  CHECK(world.mover->submit(std::move(spec), nullptr, &transfer) == Status::kInvalid);
  world.index.release(lease);
}

// ---- what is brought nearer meanwhile --------------------------------------------------------------------------

namespace {

// A load from disk of pages that `bringer` brings to shared memory, by the claims of `bringing`.
TransferSpec joiner_spec(World& world, std::vector<Saved>& pages, const TransferSpec& bringing,
                         std::shared_ptr<Transfer> bringer) {
  TransferSpec spec = world.load_spec(pages, kDisk);
  std::vector<uint32_t> numbers;
  for (const PageCopy& copy : bringing.pages) numbers.push_back(copy.numbers[kShared]);
  ClaimBatch joined;
  world.index.pin_copies(spec.lease, Tier::kShared, numbers.data(), &joined);
  for (size_t i = 0; i < spec.pages.size(); ++i) {
    PageCopy& copy = spec.pages[i];
    REQUIRE(joined.pages[i] == copy.page);
    copy.slots[kPool] += 32;
    copy.slots[kShared] = joined.slots[i * kTiers + kShared];
    copy.numbers[kShared] = joined.numbers[i * kTiers + kShared];
    copy.nearer = Tier::kShared;
  }
  spec.after.push_back(std::move(bringer));
  return spec;
}

}  // namespace

TEST_CASE("a page that is brought nearer meanwhile is read there, and from its own source no more") {
  for (const bool layer_order : {false, true}) {
    for (const MoverOptions& options : {World::stepped(), World::threaded()}) {
      World world(options);
      auto saved = world.save(1, 6, tiers({kDisk}));
      TransferSpec bringing = world.load_spec(saved, kDisk, tiers({kShared}));
      world.shared.before_finish.hold();
      if (options.copy_threads == 0) world.shared.before_finish.release();
      const auto bringer = world.submit(bringing);
      TransferSpec load = joiner_spec(world, saved, bringing, bringer);
      load.layer_order = layer_order;
      const auto joiner = world.submit(std::move(load));
      CHECK(!joiner->done());
      world.shared.before_finish.release();
      world.finish(bringer);
      world.finish(joiner);
      CHECK(World::all(joiner, Status::kOk));
      CHECK(joiner->layers_done() == world.shape.layers());
      for (uint32_t i = 0; i < 6; ++i) CHECK(world.holds(32 + i, 1 + i));
      CHECK(world.mover->stats().bytes_read[kDisk] == 6 * world.shape.page_bytes());
      CHECK(world.mover->stats().bytes_read[kShared] == 6 * world.shape.page_bytes());
      world.check_settled();
    }
  }
}

TEST_CASE("what has come nearer does not wait for what else is to be read") {
  World world;
  auto saved = world.save(1, 4, tiers({kDisk}));
  auto others = world.save(10, 2, tiers({kDisk}));
  TransferSpec bringing = world.load_spec(saved, kDisk, tiers({kShared}));
  const auto bringer = world.submit(bringing);
  const auto joiner = world.submit(joiner_spec(world, saved, bringing, bringer));
  const auto other = world.submit(world.load_spec(others, kDisk));
  while (!bringer->done()) REQUIRE(world.mover->step(1));
  while (!joiner->done()) REQUIRE(world.mover->step(0));
  CHECK(!other->done());
  world.finish(other);
  CHECK(World::all(joiner, Status::kOk));
  world.check_settled();
}

TEST_CASE("what does not come nearer is read from its own source") {
  for (const int how : {0, 1, 2, 3, 4}) {
    World world;
    auto saved = world.save(1, 5, tiers({kDisk}));
    TransferSpec bringing = world.load_spec(saved, kDisk, tiers({kShared}));
    if (how == 0) world.shared.finish_fails.arm(3, Status::kIOError);
    const auto bringer = world.submit(bringing);
    TransferSpec load = joiner_spec(world, saved, bringing, bringer);
    if (how == 1) ++load.pages[2].numbers[kShared];  // an older claim's
    if (how == 2) load.after.clear();
    const auto joiner = world.submit(std::move(load));
    if (how == 3) bringer->cancel();
    if (how == 4) fault::arm("mover.begin_after", fault::Action::kErrno, 1, ENOMEM);
    world.finish(joiner);
    CHECK(World::all(joiner, Status::kOk));
    for (uint32_t i = 0; i < 5; ++i) CHECK(world.holds(32 + i, 1 + i));
    const uint64_t again[] = {1, 1, 5, 0, 5};  // pages that two read, or the joiner alone
    CHECK(world.mover->stats().bytes_read[kDisk] == (5 + again[how]) * world.shape.page_bytes());
    world.check_settled();
  }
}

TEST_CASE("cancelled, gated or drained, a transfer that waits for what comes nearer returns everything") {
  for (const int how : {0, 1, 2}) {
    World world;
    auto saved = world.save(1, 4, tiers({kDisk}));
    TransferSpec bringing = world.load_spec(saved, kDisk, tiers({kShared}));
    const auto bringer = world.submit(bringing);
    const auto joiner = world.submit(joiner_spec(world, saved, bringing, bringer));
    world.paint(std::byte{0xee});
    if (how == 0) joiner->cancel();
    if (how == 1) joiner->close_gate();
    if (how == 2) {
      CHECK(!world.mover->drain(0, false));
    } else {
      world.run();
    }
    CHECK(joiner->done());
    CHECK(World::all(joiner, how == 1 ? Status::kDeadline : Status::kCancelled));
    for (uint32_t i = 0; i < 4; ++i) CHECK(world.pool_slot(32 + i)[0] == std::byte{0xee});
    world.check_settled();
  }
}

TEST_CASE("what comes nearer comes to a tier that the page has no part in yet") {
  for (const int how : {0, 1, 2, 3}) {
    World world;
    auto saved = world.save(1, 1, tiers({kDisk, kShared}));
    TransferSpec spec = world.load_spec(saved, kDisk);
    const uint64_t lease = spec.lease;
    spec.pages[0].nearer = how == 0 ? Tier::kDisk : how == 1 ? static_cast<Tier>(9) : Tier::kShared;
    if (how == 2) spec.pages[0].is_awaited = true;
    if (how == 3) spec.source_leaving = true;
    std::shared_ptr<Transfer> transfer;
    CHECK(world.mover->submit(std::move(spec), nullptr, &transfer) == Status::kInvalid);
    world.index.release(lease);
  }
}

}  // namespace stepwell
