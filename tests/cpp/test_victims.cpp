// The slots of pages that leave a tier are freed once, each after its record; one whose record stays is owed.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "victims.h"

using namespace stepwell;

namespace {

constexpr uint32_t kPages = 3;
constexpr uint32_t kPageTokens = 4;

// Notes what is retired, and whether the slot could already be claimed by then.
class Records final : public Medium {
 public:
  explicit Records(const Index& index) : index_(index) {}
  bool does_io() const noexcept override { return false; }
  Status prepare_read(uint32_t, const Label&, Scratch&, PageSource*) noexcept override { return Status::kInvalid; }
  Status begin_write(uint32_t, Scratch&, PageTarget*) noexcept override { return Status::kInvalid; }
  Status finish_write(uint32_t, const Label&, const uint32_t*, const PageTarget&) noexcept override {
    return Status::kInvalid;
  }
  Status retire(uint32_t slot) noexcept override {
    retired.push_back(slot);
    free_then = index_.counts(Tier::kShared).free;
    return std::count(stuck.begin(), stuck.end(), slot) > 0 ? Status::kIOError : Status::kOk;
  }
  Status rewrite_and_check(uint32_t, Scratch&) noexcept override { return Status::kInvalid; }

  std::vector<uint32_t> retired;
  std::vector<uint32_t> stuck;  // slots whose record cannot be retired
  uint64_t free_then = 0;

 private:
  const Index& index_;
};

struct World {
  Index index{kPageTokens};
  Records records{index};
  uint32_t name_space = index.open_namespace(nullptr);
  std::array<int32_t, kPages * kPageTokens> tokens{};
  std::array<Key, kPages> keys;

  World() {
    index.add_slots(Tier::kShared, 0, kPages);
    for (uint32_t i = 0; i < kPages; ++i) {
      keys[i].length = 1;
      keys[i].bytes[0] = static_cast<uint8_t>(i + 1);
    }
    ClaimBatch batch;
    index.claim_absent(name_space, tokens.data(), keys.data(), 0, kPages, mask(Tier::kShared), &batch);
    for (uint32_t i = 0; i < kPages; ++i)
      REQUIRE(index.commit(batch.pages[i], Tier::kShared, batch.numbers[i * kTiers + 2]) == Status::kOk);
    index.unpin_pages(batch.pages.data(), kPages);
  }
  Victims victims() { return Victims(&index, &records, Tier::kShared); }
  void check(uint64_t free, uint64_t leaving, uint64_t resident) const {
    const TierCounts counts = index.counts(Tier::kShared);
    CHECK(counts.free == free);
    CHECK(counts.leaving == leaving);
    CHECK(counts.resident == resident);
    CHECK(counts.capacity == free + leaving + resident);
    CHECK(index.check() == "");
  }
  uint64_t owed() const { return index.counts(Tier::kShared).owed; }
  std::vector<uint32_t> take_owed(uint32_t n, uint32_t only_range = kNoSlot) {
    std::vector<uint32_t> slots;
    index.take_owed(Tier::kShared, n, only_range, &slots);
    return slots;
  }
};

}  // namespace

TEST_CASE("victims are free once their records are retired") {
  World world;
  Victims victims = world.victims();
  victims.take(2);
  world.check(0, 2, 1);
  CHECK(victims.free() == 2);
  CHECK(world.records.retired.size() == 2);
  CHECK(world.records.free_then == 0);
  world.check(2, 0, 1);
  CHECK(victims.free() == 0);
  CHECK(victims.size() == 2);
  CHECK(world.records.retired.size() == 2);
}

TEST_CASE("victims that nobody freed are free when they are dropped") {
  World world;
  {
    Victims victims = world.victims();
    victims.take(2);
    const Victims moved = std::move(victims);
  }
  CHECK(world.records.retired.size() == 2);
  world.check(2, 0, 1);
}

TEST_CASE("a chain leaves from the page on that is not to be kept") {
  World world;
  Victims victims = world.victims();
  Victims* const all[] = {&victims};
  Victims::take_chain(all, world.name_space, world.tokens.data(), world.tokens.size(), 1);
  CHECK(victims.size() == 2);
  world.check(0, 2, 1);
  CHECK(victims.free() == 2);
  world.check(2, 0, 1);
}

TEST_CASE("a chain leaves all tiers at once") {
  World world;
  world.index.add_slots(Tier::kHost, 0, kPages);
  ClaimBatch batch;
  world.index.claim_absent(world.name_space, world.tokens.data(), world.keys.data(), 0, kPages, mask(Tier::kHost),
                           &batch);
  for (uint32_t i = 0; i < kPages; ++i)
    REQUIRE(world.index.commit(batch.pages[i], Tier::kHost, batch.numbers[i * kTiers + 1]) == Status::kOk);
  world.index.unpin_pages(batch.pages.data(), kPages);
  Victims shared = world.victims();
  Victims host(&world.index, nullptr, Tier::kHost);
  Victims* const all[] = {&host, &shared};
  Victims::take_chain(all, world.name_space, world.tokens.data(), world.tokens.size(), 1);
  CHECK(host.size() == 2);
  CHECK(shared.size() == 2);
  CHECK(world.index.counts(Tier::kHost).leaving == 2);
  world.check(0, 2, 1);
  CHECK(host.free() == 2);
  CHECK(shared.free() == 2);
  world.check(2, 0, 1);
}

TEST_CASE("slots can be freed with their records") {
  World world;
  Victims victims = world.victims();
  victims.take(kPages);
  CHECK(victims.free_with_records() == kPages);
  CHECK(world.records.retired.empty());
  world.check(kPages, 0, 0);
}

TEST_CASE("a slot whose record cannot be retired is owed, and is nobody's until it can") {
  World world;
  world.records.stuck = {1};
  {
    Victims victims = world.victims();
    victims.take(kPages);
    CHECK(victims.free() == 2);
    CHECK(victims.size() == 3);
    CHECK(victims.owed() == 1);
    CHECK(victims.errors() == 1);
    CHECK(victims.free() == 0);
    CHECK(victims.owed() == 1);
  }
  world.check(2, 1, 0);
  CHECK(world.owed() == 1);
  CHECK(world.index.claimable(Tier::kShared) == 2);
  const uint32_t slot = 1;
  CHECK_THROWS(world.index.free_slots(Tier::kShared, &slot, 1));
  Victims again = world.victims();
  again.take_owed(8, kNoSlot);
  CHECK(again.free() == 0);
  CHECK(world.owed() == 1);
  world.records.stuck.clear();
  again.take_owed(8, kNoSlot);
  CHECK(again.free() == 1);
  world.check(kPages, 0, 0);
}

TEST_CASE("victims that nobody freed are owed when they are dropped and their records stay") {
  World world;
  world.records.stuck = {0, 1, 2};
  {
    Victims victims = world.victims();
    victims.take(2);
  }
  world.check(0, 2, 1);
  CHECK(world.owed() == 2);
}

TEST_CASE("victims that are to be owed are, and no record is touched") {
  World world;
  {
    Victims victims = world.victims();
    victims.take(kPages);
    victims.owe();
    CHECK(victims.size() == kPages);
    CHECK(victims.owed() == kPages);
    CHECK(victims.errors() == 0);
    victims.owe();
    CHECK(victims.owed() == kPages);
    CHECK(victims.free() == 0);
  }
  CHECK(world.records.retired.empty());
  world.check(0, kPages, 0);
  CHECK(world.owed() == kPages);
  CHECK(world.index.claimable(Tier::kShared) == 0);
  Victims again = world.victims();
  again.take_owed(kPages, kNoSlot);
  CHECK(again.free() == kPages);
  CHECK(world.records.retired.size() == kPages);
  world.check(kPages, 0, 0);
}

TEST_CASE("owed slots are taken in turn, and of one range where one is named") {
  World world;
  world.index.add_slots(Tier::kShared, 1 << 20, 70);
  world.records.stuck = {0, 1, 2};
  Victims victims = world.victims();
  victims.take(kPages);
  CHECK(victims.free() == 0);
  world.index.close_slots(Tier::kShared, 1 << 20);
  const std::vector<uint32_t> far = {(1 << 20) + 66, (1 << 20) + 67};
  world.index.owe_slots(Tier::kShared, far.data(), far.size());
  CHECK(world.owed() == 5);
  CHECK(world.index.drop_slots(Tier::kShared, 1 << 20) == 2);
  const auto retry = [&](const std::vector<uint32_t>& slots) {
    world.index.owe_slots(Tier::kShared, slots.data(), slots.size());
    return slots;
  };
  CHECK(retry(world.take_owed(2)) == std::vector<uint32_t>{0, 1});
  CHECK(retry(world.take_owed(2)) == std::vector<uint32_t>{2, far[0]});
  CHECK(retry(world.take_owed(2)) == std::vector<uint32_t>{far[1], 0});
  CHECK(retry(world.take_owed(8)) == std::vector<uint32_t>{1, 2, far[0], far[1], 0});
  CHECK(retry(world.take_owed(8, 0)) == std::vector<uint32_t>{1, 2, 0});
  CHECK_THROWS(world.take_owed(8, 7));
  CHECK(world.take_owed(8, 1 << 20) == far);
  world.index.free_slots(Tier::kShared, far.data(), far.size());
  CHECK(world.index.drop_slots(Tier::kShared, 1 << 20) == 0);
  world.check(0, 3, 0);
}

TEST_CASE("slots are owed all or none") {
  World world;
  Victims victims = world.victims();
  victims.take(2);
  const std::array<uint32_t, kPages> slots = {0, 1, 2};  // one of them is a page's still
  CHECK_THROWS(world.index.owe_slots(Tier::kShared, slots.data(), slots.size()));
  CHECK(world.owed() == 0);
  world.check(0, 2, 1);
}
