// The index under threads, and what cannot be reached from Python: histories, hostile labels, slot runs.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "index.h"
#include "radix.h"
#include "sha256.h"
#include "slots.h"

using namespace stepwell;

namespace {

Key key_of(const uint8_t* digest) {
  Key key;
  std::memcpy(key.bytes.data(), digest, kDigestBytes);
  key.length = kDigestBytes;
  return key;
}

std::vector<Key> chain_keys(const std::vector<int32_t>& tokens, size_t page_tokens) {
  const size_t pages = tokens.size() / page_tokens;
  std::vector<uint8_t> digests(pages * kDigestBytes);
  hash_chain(nullptr, tokens.data(), pages, page_tokens, digests.data());
  std::vector<Key> keys;
  for (size_t i = 0; i < pages; ++i) keys.push_back(key_of(digests.data() + i * kDigestBytes));
  return keys;
}

Key named_key(const char* name) {
  Key key;
  key.length = 16;
  std::memcpy(key.bytes.data(), name, std::min<size_t>(std::strlen(name), 16));
  return key;
}

constexpr std::array<Tier, 3> kUsed = {Tier::kHost, Tier::kShared, Tier::kDisk};
constexpr TierMask kAll = mask(Tier::kHost) | mask(Tier::kShared) | mask(Tier::kDisk);

// Who held what, in the order of one clock: taken when a call has returned, given when the call that gives it is about
// to be made. Of a thing that one holder has at a time, takes and gives alternate.
struct Event {
  uint64_t time;
  bool is_take;
  uint32_t page;
  uint8_t tier;
  uint32_t slot;
  uint32_t number;
};

struct History {
  std::vector<Event> slots;
  std::vector<Event> claims;
  uint64_t stale = 0, granted = 0, matched = 0;
};

struct Claim {
  PageId page;
  Tier tier;
  uint32_t slot;
  uint32_t number;
  bool is_leaving;
};

std::atomic<uint64_t> the_clock{0};

void run_claimant(Index* index, const std::vector<std::vector<int32_t>>* chains,
                  const std::vector<std::vector<Key>>* keys, unsigned seed, int steps, History* history) {
  std::mt19937 rng(seed);
  std::vector<Claim> claims;
  std::vector<PageId> pins;
  std::vector<uint64_t> leases, holds;
  const auto choose = [&](size_t n) { return static_cast<size_t>(rng() % n); };
  const auto take = [&](const Claim& claim, bool with_slot) {
    const Event event{the_clock.fetch_add(1),           true,       claim.page,
                      static_cast<uint8_t>(claim.tier), claim.slot, claim.number};
    history->claims.push_back(event);
    if (with_slot) history->slots.push_back(event);
    ++history->granted;
    claims.push_back(claim);
  };
  const auto give = [&](std::vector<Event>* events, const Claim& claim) {
    events->push_back(
        {the_clock.fetch_add(1), false, claim.page, static_cast<uint8_t>(claim.tier), claim.slot, claim.number});
  };
  const auto settle = [&](Claim claim) {
    if (!claim.is_leaving) {
      give(&history->claims, claim);
      if (choose(4) > 0) {
        REQUIRE(index->commit(claim.page, claim.tier, claim.number) == Status::kOk);
        return;
      }
      give(&history->slots, claim);
      REQUIRE(index->abort(claim.page, claim.tier, claim.number) == Status::kOk);
      return;
    }
    const bool keeps = choose(3) == 0;
    give(&history->claims, claim);
    const Status status =
        keeps ? index->keep(claim.page, claim.tier, claim.number) : index->finish(claim.page, claim.tier, claim.number);
    if (status == Status::kStale) {  // a match wanted it meanwhile
      ++history->stale;
      return;
    }
    REQUIRE(status == Status::kOk);
    if (keeps) return;
    give(&history->slots, claim);
    index->free_slots(claim.tier, &claim.slot, 1);
  };
  for (int step = 0; step < steps; ++step) {
    // Few pins are held at a time, or nothing could leave.
    while (leases.size() > choose(3)) {
      REQUIRE(index->release(leases.back()));
      leases.pop_back();
    }
    while (holds.size() > choose(2)) {
      REQUIRE(index->unhold(holds.back()));
      holds.pop_back();
    }
    while (pins.size() > choose(4)) {
      index->unpin_pages(&pins.back(), 1);
      pins.pop_back();
    }
    const size_t c = choose(chains->size());
    const std::vector<int32_t>& tokens = (*chains)[c];
    const uint32_t total = static_cast<uint32_t>(tokens.size());
    switch (choose(10)) {
      case 0:
      case 1: {
        const MatchResult match = index->match_and_pin(0, tokens.data(), tokens.size(), kAll);
        history->matched += match.pages;
        if (match.lease != 0) leases.push_back(match.lease);
        break;
      }
      case 2: {
        const MatchResult match = index->match_keys_and_pin((*keys)[c].data(), total, 1, mask(kUsed[choose(3)]));
        if (match.lease != 0) leases.push_back(match.lease);
        break;
      }
      case 3: {
        ClaimBatch batch;
        const TierMask tiers = static_cast<TierMask>(kAll & (rng() | 2));
        index->claim_absent(0, tokens.data(), (*keys)[c].data(), static_cast<uint32_t>(choose(total)), total, tiers,
                            &batch);
        for (size_t i = 0; i < batch.pages.size(); ++i) {
          bool is_new = false;
          for (const Tier tier : kUsed) {
            const size_t column = i * kTiers + static_cast<size_t>(tier);
            if (batch.outcomes[column] != ClaimOutcome::kNew) continue;
            is_new = true;
            take({batch.pages[i], tier, batch.slots[column], batch.numbers[column], false}, true);
          }
          if (is_new) pins.push_back(batch.pages[i]);
        }
        break;
      }
      case 4: {
        std::vector<Victim> victims;
        const Tier tier = kUsed[choose(3)];
        index->claim_victims(tier, 1 + static_cast<uint32_t>(choose(3)), kNoSlot, &victims);
        for (const Victim& victim : victims) take({victim.page, tier, victim.slot, victim.number, true}, false);
        break;
      }
      case 5: {
        // A slot that is taken has had its end as a page's when it comes back; whose it was, only the index knows.
        std::vector<uint32_t> slots;
        const Tier tier = kUsed[choose(3)];
        index->take_victims(tier, 1, kNoSlot, &slots);
        for (const uint32_t slot : slots) {
          give(&history->slots, {0, tier, slot, 0, true});
          index->free_slots(tier, &slot, 1);
        }
        break;
      }
      case 6: {
        const HoldResult held = index->hold(0, tokens.data(), 1 + choose(tokens.size()), 6);
        if (held.hold != 0) holds.push_back(held.hold);
        TreeEdges edges;
        index->tree(4, &edges);
        for (size_t row = 0; row < edges.parents.size(); ++row) REQUIRE(edges.parents[row] < static_cast<int>(row));
        break;
      }
      case 7: {
        const MatchResult match = index->match_and_pin(0, tokens.data(), tokens.size(), kAll);
        if (match.lease == 0) break;
        leases.push_back(match.lease);
        ClaimBatch batch;
        index->claim_copies(match.lease, Tier::kShared, Tier::kDisk, 2, &batch);
        for (size_t i = 0; i < batch.pages.size(); ++i) {
          const size_t column = i * kTiers + static_cast<size_t>(Tier::kDisk);
          take({batch.pages[i], Tier::kDisk, batch.slots[column], batch.numbers[column], false}, true);
          pins.push_back(batch.pages[i]);
        }
        break;
      }
      default:
        for (int n = 0; n < 2 && !claims.empty(); ++n) {
          const size_t which = choose(claims.size());
          const Claim claim = claims[which];
          claims.erase(claims.begin() + static_cast<std::ptrdiff_t>(which));
          settle(claim);
        }
    }
  }
  for (const Claim& claim : claims) settle(claim);
  for (const uint64_t lease : leases) REQUIRE(index->release(lease));
  for (const uint64_t hold : holds) REQUIRE(index->unhold(hold));
  index->unpin_pages(pins.data(), pins.size());
}

}  // namespace

TEST_CASE("eight threads on eight pages: each claim has one holder, each slot one owner, and the counts end whole") {
  // 1 2 3 4 5 6 7 8: eight pages
  const std::vector<std::vector<int32_t>> chains = {{1, 2, 3, 4}, {1, 2, 5}, {6, 7, 8}};
  std::vector<std::vector<Key>> keys;
  for (const auto& chain : chains) keys.push_back(chain_keys(chain, 1));
  for (unsigned round = 0; round < 4; ++round) {
    Index index(1);
    index.open_namespace(nullptr);
    for (const Tier tier : kUsed) index.add_slots(tier, 10, 6);
    std::vector<History> histories(8);
    {
      std::latch start(8);
      std::vector<std::jthread> threads;  // joined before the latch ends
      for (unsigned t = 0; t < 8; ++t) {
        threads.emplace_back([&, t] {
          start.arrive_and_wait();
          run_claimant(&index, &chains, &keys, round * 8 + t, 600, &histories[t]);
        });
      }
    }
    CHECK(index.check() == "");
    CHECK(index.leases() == 0);
    std::map<std::pair<uint8_t, uint32_t>, std::vector<Event>> by_slot;
    std::map<std::tuple<uint8_t, uint32_t, uint32_t>, std::vector<Event>> by_claim;
    uint64_t granted = 0, matched = 0;
    for (const History& history : histories) {
      for (const Event& event : history.slots) by_slot[{event.tier, event.slot}].push_back(event);
      for (const Event& event : history.claims) by_claim[{event.tier, event.page, event.number}].push_back(event);
      granted += history.granted;
      matched += history.matched;
    }
    CHECK(granted > 100);  // how many is the scheduler's matter; none would prove nothing
    CHECK(matched > 100);
    for (auto& [slot, events] : by_slot) {
      std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
      for (size_t i = 0; i < events.size(); ++i) REQUIRE(events[i].is_take == (i % 2 == 0));
    }
    for (const auto& [claim, events] : by_claim) REQUIRE(events.size() == 2);  // one grant, one end
    for (const Tier tier : kUsed) {
      TierCounts counts = index.counts(tier);
      CHECK(counts.arriving + counts.leaving + counts.pinned + counts.quarantined == 0);
      CHECK(counts.free + counts.resident == 6);
      std::vector<Victim> victims;
      index.claim_victims(tier, 100, kNoSlot, &victims);
      for (const Victim& victim : victims) {
        REQUIRE(index.finish(victim.page, tier, victim.number) == Status::kOk);
        index.free_slots(tier, &victim.slot, 1);
      }
      CHECK(index.counts(tier).free == 6);
    }
    CHECK(index.pages() == 0);
    CHECK(index.nodes() == 0);
  }
}

TEST_CASE("labels that contradict each other cost links, never the invariants") {
  const std::array<const char*, 6> names = {"a", "b", "c", "d", "e", "f"};
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 rng(seed);
    Index index(1);
    index.add_slots(Tier::kShared, 0, 16);
    index.add_slots(Tier::kDisk, 0, 16);
    for (const Tier tier : {Tier::kShared, Tier::kDisk, Tier::kShared}) {
      std::vector<uint32_t> slots;
      std::vector<Label> labels;
      std::vector<uint64_t> stamps;
      for (int i = 0; i < 6; ++i) {
        Label label;
        label.key = named_key(names[rng() % 6]);
        label.parent = named_key(names[rng() % 6]);
        if (rng() % 8 == 0) label.parent.length = static_cast<uint8_t>(rng() % 256);
        if (rng() % 8 == 0) label.key.length = static_cast<uint8_t>(rng() % 256);
        label.parent_state = static_cast<ParentState>(rng() % 3);
        label.depth = rng() % 2 != 0 ? kUnknownDepth : rng() % 3;
        label.epoch = rng() % 4 == 0;
        labels.push_back(label);
        slots.push_back(rng() % 20);
        stamps.push_back(rng() % 4);
      }
      std::vector<uint8_t> accepted(labels.size());
      index.recover(tier, slots.data(), labels.data(), stamps.data(), labels.size(), accepted.data());
      REQUIRE(index.check() == "");
    }
    std::vector<Label> touched(rng() % 12);
    for (Label& label : touched) {
      label.key = named_key(names[rng() % 6]);
      if (rng() % 8 == 0) label.key.length = static_cast<uint8_t>(rng() % 65);
      label.epoch = rng() % 4 == 0;
    }
    CHECK(index.touch(touched.data(), touched.size()) <= touched.size());
    REQUIRE(index.check() == "");
    std::vector<Key> keys;
    for (const char* name : names) keys.push_back(named_key(name));
    std::shuffle(keys.begin(), keys.end(), rng);
    ClaimBatch batch;
    index.claim_absent_keys(keys.data(), 6, 1, ParentState::kUnknown, Key{}, mask(Tier::kShared), &batch);
    REQUIRE(index.check() == "");
    const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6};
    index.claim_absent(index.open_namespace(nullptr), tokens.data(), keys.data(), 0, 6, mask(Tier::kDisk), &batch);
    REQUIRE(index.check() == "");
  }
}

TEST_CASE("a recovered chain ranks by its last use, ancestors with their descendants") {
  Index index(1);
  index.add_slots(Tier::kDisk, 0, 8);
  std::vector<Label> labels(4);
  const std::array<const char*, 4> names = {"root", "child", "grandchild", "other"};
  for (uint32_t i = 0; i < 4; ++i) {
    labels[i].key = named_key(names[i]);
    labels[i].depth = i == 3 ? 0 : i;
    labels[i].parent_state = labels[i].depth == 0 ? ParentState::kRoot : ParentState::kKnown;
    if (labels[i].depth > 0) labels[i].parent = named_key(names[i - 1]);
  }
  // The grandchild was used last: its ancestors leave after it, whatever their own stamps. Given in any order.
  const std::array<uint32_t, 4> slots = {4, 5, 6, 7};
  const std::array<uint64_t, 4> stamps = {1, 2, 9, 5};
  std::array<Label, 4> given = {labels[2], labels[3], labels[0], labels[1]};
  const std::array<uint32_t, 4> given_slots = {6, 7, 4, 5};
  const std::array<uint64_t, 4> given_stamps = {9, 5, 1, 2};
  std::array<uint8_t, 4> accepted{};
  index.recover(Tier::kDisk, given_slots.data(), given.data(), given_stamps.data(), 4, accepted.data());
  CHECK(accepted == std::array<uint8_t, 4>{1, 1, 1, 1});
  std::vector<uint32_t> order;
  index.rank_order(Tier::kDisk, &order);
  CHECK(order == std::vector<uint32_t>{slots[3], slots[2], slots[1], slots[0]});
  // A second record of a key, and a slot in use, are not accepted.
  const std::array<uint32_t, 2> again = {0, 4};
  std::array<Label, 2> twice = {labels[0], labels[0]};
  twice[1].key = named_key("new");
  index.recover(Tier::kDisk, again.data(), twice.data(), stamps.data(), 2, accepted.data());
  CHECK(accepted[0] == 0);
  CHECK(accepted[1] == 0);
  CHECK(index.check() == "");
}

namespace {

// A chain of pages that are resident in `tier`, in slots 0, 1, ...
std::vector<PageId> make_resident_chain(Index* index, const std::vector<int32_t>& tokens, Tier tier) {
  const std::vector<Key> keys = chain_keys(tokens, 1);
  ClaimBatch batch;
  index->claim_absent(0, tokens.data(), keys.data(), 0, static_cast<uint32_t>(keys.size()), mask(tier), &batch);
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t column = i * kTiers + static_cast<size_t>(tier);
    REQUIRE(batch.outcomes[column] == ClaimOutcome::kNew);
    REQUIRE(index->commit(batch.pages[i], tier, batch.numbers[column]) == Status::kOk);
  }
  index->unpin_pages(batch.pages.data(), batch.pages.size());
  return batch.pages;
}

}  // namespace

TEST_CASE("a touched page leaves after the others, and its ancestors after it") {
  Index index(1);
  index.add_slots(Tier::kShared, 0, 8);
  std::vector<Label> labels(5);
  const std::array<const char*, 5> names = {"root", "child", "grandchild", "other", "last"};
  std::array<uint32_t, 5> slots{};
  std::array<uint64_t, 5> stamps{};
  for (uint32_t i = 0; i < 5; ++i) {
    labels[i].key = named_key(names[i]);
    labels[i].depth = i >= 3 ? 0 : i;
    labels[i].parent_state = labels[i].depth == 0 ? ParentState::kRoot : ParentState::kKnown;
    if (labels[i].depth > 0) labels[i].parent = named_key(names[i - 1]);
    slots[i] = i;
    stamps[i] = i < 3 ? 3 - i : i + 1;
  }
  std::array<uint8_t, 5> accepted{};
  index.recover(Tier::kShared, slots.data(), labels.data(), stamps.data(), 5, accepted.data());
  std::vector<uint32_t> order;
  index.rank_order(Tier::kShared, &order);
  REQUIRE(order == std::vector<uint32_t>{2, 1, 0, 3, 4});
  const std::array<Label, 2> used = {labels[0], labels[1]};  // along their chain
  CHECK(index.touch(used.data(), 2) == 2);
  index.rank_order(Tier::kShared, &order);
  CHECK(order == std::vector<uint32_t>{2, 3, 4, 1, 0});
  CHECK(index.touch(&labels[2], 1) == 1);
  CHECK(index.touch(&labels[3], 1) == 1);
  index.rank_order(Tier::kShared, &order);
  CHECK(order == std::vector<uint32_t>{4, 2, 1, 0, 3});
  Label absent = labels[4];
  absent.epoch = 1;
  CHECK(index.touch(&absent, 1) == 0);
  absent = labels[4];
  absent.key = named_key("absent");
  CHECK(index.touch(&absent, 1) == 0);
  CHECK(index.check() == "");
}

TEST_CASE("recovered pages of another epoch leave first, in their own order, until the epoch is theirs") {
  Index index(1);
  index.add_slots(Tier::kDisk, 0, 8);
  const auto adopt = [&](std::vector<uint32_t> slots, std::array<const char*, 3> names, std::array<uint64_t, 3> epochs,
                         std::array<uint64_t, 3> stamps) {
    std::vector<Label> labels(3);
    for (size_t i = 0; i < 3; ++i) {
      labels[i].key = named_key(names[i]);
      labels[i].epoch = epochs[i];
    }
    std::array<uint8_t, 3> accepted{};
    index.recover(Tier::kDisk, slots.data(), labels.data(), stamps.data(), 3, accepted.data());
    CHECK(accepted == std::array<uint8_t, 3>{1, 1, 1});
    CHECK(index.check() == "");
  };
  adopt({0, 1, 2}, {"one", "one", "two"}, {0, 5, 5}, {100, 40, 500});
  adopt({4, 5, 6}, {"two", "three", "four"}, {0, 5, 5}, {60, 30, 45});
  std::vector<uint32_t> order;
  index.rank_order(Tier::kDisk, &order);
  CHECK(order == std::vector<uint32_t>{5, 1, 6, 2, 4, 0});
  // However late the others were used, these were used when their records say.
  std::vector<uint32_t> slots;
  std::vector<uint64_t> stamps;
  index.take_stamps(Tier::kDisk, 8, &slots, &stamps);
  std::map<uint32_t, uint64_t> stamp_of;
  for (size_t i = 0; i < slots.size(); ++i) stamp_of[slots[i]] = stamps[i];
  CHECK((stamp_of[4] == 60 && stamp_of[0] == 100));
  CHECK((stamp_of[5] < stamp_of[1] && stamp_of[1] < stamp_of[6] && stamp_of[6] < stamp_of[2] && stamp_of[2] < 60));
  const auto is_resident = [&](const char* name) {
    return index.state(named_key(name), 1)[static_cast<size_t>(Tier::kDisk)] == Residency::kResident;
  };
  CHECK((is_resident("one") && is_resident("two") && !is_resident("three")));
  index.set_epoch(5);
  CHECK((is_resident("one") && is_resident("two") && is_resident("three")));
  index.rank_order(Tier::kDisk, &order);
  CHECK(order == std::vector<uint32_t>{4, 0, 5, 1, 6, 2});
  index.take_victims(Tier::kDisk, 3, kNoSlot, &slots);
  CHECK(slots == std::vector<uint32_t>{4, 0, 5});
  CHECK(index.check() == "");
}

TEST_CASE("a held page may leave shared memory once an adopted volume has it, and not before") {
  const std::vector<int32_t> tokens = {1, 2, 3};
  Index index(1);
  index.open_namespace(nullptr);
  index.add_slots(Tier::kShared, 0, 4);
  index.add_slots(Tier::kDisk, 0, 4);
  const std::vector<PageId> pages = make_resident_chain(&index, tokens, Tier::kShared);
  const HoldResult held = index.hold(0, tokens.data(), 3, 3);
  CHECK(held.pages == 3);
  std::vector<uint32_t> slots;
  index.take_victims(Tier::kShared, 3, kNoSlot, &slots);
  CHECK(slots.empty());
  std::vector<Label> labels(3);
  index.labels(pages.data(), 3, labels.data());
  const std::array<uint32_t, 2> disk_slots = {0, 1};
  const std::array<uint64_t, 2> stamps = {1, 2};
  std::array<uint8_t, 2> accepted{};
  index.recover(Tier::kDisk, disk_slots.data(), labels.data(), stamps.data(), 2, accepted.data());
  CHECK(accepted == std::array<uint8_t, 2>{1, 1});
  CHECK(index.check() == "");
  CHECK(index.counts(Tier::kShared).held == 1);  // the third page, which the volume does not have
  index.take_victims(Tier::kShared, 3, kNoSlot, &slots);
  CHECK(slots.size() == 2);
  CHECK(index.counts(Tier::kDisk).held == 2);
  CHECK(index.check() == "");
  CHECK(index.unhold(held.hold));
  CHECK_FALSE(index.unhold(held.hold));
  CHECK(index.check() == "");
}

TEST_CASE("a held copy on its way out comes back when the last other one is damaged or lost") {
  const std::vector<int32_t> tokens = {1};
  for (const bool is_lost : {false, true}) {
    Index index(1);
    index.open_namespace(nullptr);
    index.add_slots(Tier::kShared, 0, 1);
    index.add_slots(Tier::kDisk, 0, 1);
    const PageId page = make_resident_chain(&index, tokens, Tier::kShared)[0];
    CHECK(make_resident_chain(&index, tokens, Tier::kDisk)[0] == page);
    const HoldResult held = index.hold(0, tokens.data(), 1, 1);
    std::vector<Victim> victims;
    index.claim_victims(Tier::kShared, 1, kNoSlot, &victims);
    REQUIRE(victims.size() == 1);
    std::vector<uint32_t> slots;
    index.take_victims(Tier::kDisk, 1, kNoSlot, &slots);
    CHECK(slots.empty());
    if (is_lost) {
      index.take_victims(Tier::kDisk, 1, kNoSlot, &slots, true);
      CHECK(slots.size() == 1);
    } else {
      CHECK(index.quarantine(page, Tier::kDisk, 0));
    }
    CHECK(index.finish(page, Tier::kShared, victims[0].number) == Status::kStale);
    CHECK(index.counts(Tier::kShared).held == 1);
    CHECK(index.check() == "");
    CHECK(index.unhold(held.hold));
    CHECK(index.check() == "");
  }
}

TEST_CASE("ending a hold of a long chain costs one pass over it") {
  constexpr uint32_t kPages = 40000;
  std::vector<int32_t> tokens(kPages);
  for (uint32_t i = 0; i < kPages; ++i) tokens[i] = static_cast<int32_t>(i);
  Index index(1);
  index.open_namespace(nullptr);
  index.add_slots(Tier::kShared, 0, kPages);
  make_resident_chain(&index, tokens, Tier::kShared);
  const HoldResult held = index.hold(0, tokens.data(), kPages, kPages);
  CHECK(held.pages == kPages);
  CHECK(index.unhold(held.hold));  // a pass for each page would take minutes under a sanitizer
  std::vector<uint32_t> order;
  index.rank_order(Tier::kShared, &order);
  REQUIRE(order.size() == kPages);
  CHECK(order.front() == kPages - 1);  // deepest first
  CHECK(order.back() == 0);
}

TEST_CASE("slots of one batch lie together where a run is free") {
  SlotRanges ranges;
  ranges.add(100, 64);
  ranges.add(1000, 200);
  std::vector<uint32_t> taken;
  for (int i = 0; i < 264; ++i) taken.push_back(ranges.take(SlotUse::kPage));
  CHECK(ranges.take(SlotUse::kPage) == kNoSlot);
  for (uint32_t slot = 1000; slot < 1040; slot += 2) ranges.set_use(slot, SlotUse::kFree);  // crumbs
  for (uint32_t slot = 1100; slot < 1130; ++slot) ranges.set_use(slot, SlotUse::kFree);     // a run
  ranges.set_use(120, SlotUse::kFree);
  ranges.close(100);
  ranges.seek(30);
  for (uint32_t i = 0; i < 30; ++i) CHECK(ranges.take(SlotUse::kPage) == 1100 + i);
  CHECK(ranges.claimable() == 20);
  CHECK(ranges.free() == 21);
  CHECK_THROWS_AS(ranges.add(163, 1), std::invalid_argument);
}
