// An index whose pages come from records that contradict each other: parents in rings, depths that lie, keys twice. What it
// is asked after that ends, and it agrees with itself.
#include <algorithm>
#include <string>
#include <vector>

#include "index.h"
#include "script.h"
#include "targets.h"

namespace stepwell::fuzz {

namespace {

constexpr uint32_t kMostKeys = 16, kSlots = 32, kMostCalls = 64;
constexpr std::array<Tier, 2> kLasting{Tier::kShared, Tier::kDisk};

Key key_of(uint32_t number) {
  Key key;
  key.length = 8;
  key.bytes[3] = static_cast<uint8_t>(number + 1);
  return key;
}

Label label_of(Script& script) {
  Label label;
  label.key = key_of(script.below(kMostKeys));
  label.parent_state = static_cast<ParentState>(script.take<uint8_t>() % 3);
  if (label.parent_state == ParentState::kKnown) label.parent = key_of(script.below(kMostKeys));
  label.depth = static_cast<uint32_t>(script.flag() ? script.value(0) : script.below(kMostKeys));
  label.kind = static_cast<uint8_t>(1 + script.take<uint8_t>() % 8 / 7);
  label.epoch = script.take<uint8_t>() % 8 / 7;
  return label;
}

struct Asked {
  Index index{1};
  std::vector<uint64_t> leases;

  void recover(Script& script) {
    const Tier tier = kLasting[script.flag()];
    std::vector<uint32_t> slots;
    std::vector<Label> labels;
    std::vector<uint64_t> stamps;
    for (uint32_t i = 1 + script.below(kSlots); i > 0; --i) {
      slots.push_back(script.below(kSlots));
      labels.push_back(label_of(script));
      stamps.push_back(script.flag() ? script.value(0) : script.below(8));
    }
    std::vector<uint8_t> accepted(slots.size());
    index.recover(tier, slots.data(), labels.data(), stamps.data(), slots.size(), accepted.data());
  }

  void call(Script& script) {
    const Tier tier = kLasting[script.flag()];
    std::array<Key, kMostKeys> keys;
    const uint32_t count = 1 + script.below(kMostKeys);
    for (uint32_t i = 0; i < count; ++i) keys[i] = key_of(script.below(kMostKeys));
    const TierMask both = mask(Tier::kShared) | mask(Tier::kDisk);
    switch (script.take<uint8_t>() % 8) {
      case 0: {
        const MatchResult match = index.match_keys_and_pin(keys.data(), count, 1, both);
        if (match.lease != 0) leases.push_back(match.lease);
        break;
      }
      case 1: {
        ClaimBatch claims;
        index.claim_absent_keys(keys.data(), count, 1, static_cast<ParentState>(script.take<uint8_t>() % 3),
                                key_of(script.below(kMostKeys)), mask(tier), &claims);
        for (uint32_t i = 0; i < count; ++i) {
          const size_t at = size_t{i} * kTiers + static_cast<size_t>(tier);
          if (claims.outcomes[at] != ClaimOutcome::kNew) continue;
          if (script.flag())
            index.commit(claims.pages[i], tier, claims.numbers[at]);
          else
            index.abort(claims.pages[i], tier, claims.numbers[at]);
          index.unpin_pages(&claims.pages[i], 1);
        }
        break;
      }
      case 2: {
        std::vector<uint32_t> slots;
        index.take_victims(tier, script.below(kSlots), kNoSlot, &slots);
        index.free_slots(tier, slots.data(), slots.size());
        break;
      }
      case 3: {
        std::vector<Victim> victims;
        index.claim_victims(tier, script.below(kSlots), kNoSlot, &victims);
        for (const Victim& victim : victims) {
          if (script.flag() && index.finish(victim.page, tier, victim.number) == Status::kOk)
            index.free_slots(tier, &victim.slot, 1);
          else
            index.keep(victim.page, tier, victim.number);
        }
        break;
      }
      case 4: {
        std::vector<uint32_t> order;
        index.rank_order(tier, &order);
        if (order.empty()) break;
        std::vector<PageId> pages;
        std::vector<uint32_t> slots;
        index.pin_resident(tier, kNoPage, 1 + script.below(4), &pages, &slots);
        if (!pages.empty() && script.flag()) index.quarantine(pages[0], tier, slots[0]);
        index.unpin_pages(pages.data(), pages.size());
        break;
      }
      case 5: {
        std::vector<Victim> damaged;
        index.claim_quarantined(tier, kSlots, &damaged);
        for (const Victim& victim : damaged) {
          if (index.mend(victim.page, tier, victim.number, true) == Status::kOk)
            index.free_slots(tier, &victim.slot, 1);
        }
        break;
      }
      case 6:
        if (leases.empty()) break;
        index.release(leases.back());
        leases.pop_back();
        break;
      default: {
        if (script.flag()) {
          index.set_epoch(script.take<uint8_t>() % 2);
          break;
        }
        std::array<uint8_t, kMostKeys> tiers{};
        index.probe(keys.data(), count, 1, both, tiers.data());
        TreeEdges edges;
        index.tree(16, &edges);
      }
    }
  }
};

}  // namespace

void fuzz_index(const uint8_t* data, size_t bytes) {
  Script script(data, bytes);
  Asked asked;
  for (const Tier tier : kLasting) asked.index.add_slots(tier, 0, kSlots);
  for (uint32_t call = 0; call < kMostCalls && !script.is_over(); ++call) {
    if (script.take<uint8_t>() % 4 == 0)
      asked.recover(script);
    else
      asked.call(script);
    const std::string wrong = asked.index.check();
    if (!wrong.empty()) std::fprintf(stderr, "%s\n", wrong.c_str());
    STEPWELL_FUZZ_CHECK(wrong.empty());
  }
  for (const uint64_t lease : asked.leases) asked.index.release(lease);
}

}  // namespace stepwell::fuzz
