// What a Taken has is returned once, unless it was handed on.
#include <doctest/doctest.h>

#include <array>

#include "taken.h"

using namespace stepwell;

namespace {

constexpr uint32_t kPages = 3;
constexpr TierMask kBoth = mask(Tier::kShared) | mask(Tier::kDisk);

struct World {
  Index index{4};
  std::array<Key, kPages> keys;

  World() {
    index.add_slots(Tier::kShared, 0, 8);
    index.add_slots(Tier::kDisk, 0, 8);
    for (uint32_t i = 0; i < kPages; ++i) {
      keys[i].length = 1;
      keys[i].bytes[0] = static_cast<uint8_t>(i + 1);
    }
  }
  ClaimBatch claim(TierMask tiers) {
    ClaimBatch batch;
    index.claim_absent_keys(keys.data(), kPages, 1, ParentState::kRoot, Key{}, tiers, &batch);
    return batch;
  }
  void commit(const ClaimBatch& batch, Tier tier) {
    for (uint32_t i = 0; i < kPages; ++i)
      REQUIRE(index.commit(batch.pages[i], tier, batch.numbers[i * kTiers + static_cast<size_t>(tier)]) == Status::kOk);
  }
  MatchResult match() { return index.match_keys_and_pin(keys.data(), kPages, 1, kBoth); }
  void check_whole(uint64_t arriving, uint64_t resident, uint64_t pinned) const {
    const TierCounts counts = index.counts(Tier::kShared);
    CHECK(counts.arriving == arriving);
    CHECK(counts.resident == resident);
    CHECK(counts.pinned == pinned);
    CHECK(index.check() == "");
  }
};

}  // namespace

TEST_CASE("claims that were not handed on are returned with their pins") {
  World world;
  {
    Taken taken(&world.index);
    taken.add(world.claim(kBoth));
    world.check_whole(kPages, 0, 0);
  }
  world.check_whole(0, 0, 0);
  CHECK(world.index.counts(Tier::kDisk).arriving == 0);
  CHECK(world.index.pages() == 0);
}

TEST_CASE("what was handed on is left alone") {
  World world;
  ClaimBatch batch;
  {
    Taken taken(&world.index);
    batch = world.claim(mask(Tier::kShared));
    taken.add(batch);
    taken.hand_on();
    taken.give_back();
  }
  world.check_whole(kPages, 0, 0);
  world.commit(batch, Tier::kShared);
  world.index.unpin_pages(batch.pages.data(), kPages);
  world.check_whole(0, kPages, 0);
}

TEST_CASE("a claim that was decided meanwhile stays so, and its pin is returned") {
  World world;
  Taken taken(&world.index);
  const ClaimBatch batch = world.claim(mask(Tier::kShared));
  taken.add(batch);
  world.commit(batch, Tier::kShared);
  world.check_whole(0, kPages, kPages);
  taken.give_back();
  world.check_whole(0, kPages, 0);
}

TEST_CASE("each owner of a lease is returned once") {
  World world;
  const ClaimBatch batch = world.claim(mask(Tier::kShared));
  world.commit(batch, Tier::kShared);
  world.index.unpin_pages(batch.pages.data(), kPages);
  const uint64_t lease = world.match().lease;
  {
    Taken taken(&world.index);
    taken.retain(lease);
    taken.add_lease(0);
    taken.retain(0);
  }
  CHECK(world.index.leases() == 1);
  Taken taken(&world.index);
  taken.add_lease(lease);
  taken.give_back();
  taken.give_back();
  CHECK(world.index.leases() == 0);
  CHECK_FALSE(world.index.release(lease));
  world.check_whole(0, kPages, 0);
}

TEST_CASE("pins of a pass over all pages are returned") {
  World world;
  const ClaimBatch batch = world.claim(mask(Tier::kShared));
  world.commit(batch, Tier::kShared);
  world.index.unpin_pages(batch.pages.data(), kPages);
  Taken taken(&world.index);
  std::vector<PageId> pages;
  std::vector<uint32_t> slots;
  world.index.pin_resident(Tier::kShared, kNoPage, kPages, &pages, &slots);
  taken.add_pins(pages);
  world.check_whole(0, kPages, kPages);
  taken.give_back();
  world.check_whole(0, kPages, 0);
}

TEST_CASE("one owner of a hold is dropped, and the others keep it") {
  World world;
  world.index.set_keeping(mask(Tier::kShared));
  const uint32_t name_space = world.index.open_namespace(nullptr);
  const std::array<int32_t, 4 * kPages> tokens{};
  ClaimBatch batch;
  world.index.claim_absent(name_space, tokens.data(), world.keys.data(), 0, kPages, mask(Tier::kShared), &batch);
  world.commit(batch, Tier::kShared);
  world.index.unpin_pages(batch.pages.data(), kPages);
  const auto hold = [&] { return world.index.hold(name_space, tokens.data(), tokens.size(), kPages).hold; };
  const uint64_t first = hold();
  {
    Taken taken(&world.index);
    taken.add_hold(hold());
    taken.add_hold(0);
  }
  CHECK(world.index.holds() == 1);
  CHECK(world.index.held_pages() == kPages);
  Taken taken(&world.index);
  taken.add_hold(first);
  taken.give_back();
  taken.give_back();
  CHECK(world.index.holds() == 0);
  world.check_whole(0, kPages, 0);
}
