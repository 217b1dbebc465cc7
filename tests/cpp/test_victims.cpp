// The slots of pages that leave a tier are freed once, each after its record.
#include <doctest/doctest.h>

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
    return Status::kOk;
  }
  Status rewrite_and_check(uint32_t, Scratch&) noexcept override { return Status::kInvalid; }

  std::vector<uint32_t> retired;
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
    CHECK(index.check() == "");
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
  victims.take_chain(world.name_space, world.tokens.data(), world.tokens.size(), 1);
  CHECK(victims.size() == 2);
  world.check(0, 2, 1);
  CHECK(victims.free() == 2);
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
