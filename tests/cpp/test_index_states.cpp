// Every state that two and three pages of a chain can reach, with two claimants, against the move table.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "index.h"

using namespace stepwell;

namespace {

enum class Op : uint8_t { kClaim, kCommit, kAbort, kFinish, kKeep, kVictim, kMatch, kRelease, kQuarantine, kMend };

constexpr size_t kMostPages = 3;
size_t page_count = 2;  // of the chain under test

struct Step {
  Op op;
  uint8_t which;  // page, or claimant
  uint8_t tier;
};

struct Pin {
  uint8_t tier = 0, pages = 0;
  bool operator<(const Pin& other) const { return std::pair(tier, pages) < std::pair(other.tier, other.pages); }
};

// What can matter later. Claimants are alike: their pins are kept sorted.
struct State {
  std::array<std::array<Residency, kTiers>, kMostPages> residency{};
  std::array<Pin, 2> pins{};
  bool operator<(const State& other) const { return std::tie(residency, pins) < std::tie(other.residency, other.pins); }
  bool operator==(const State& other) const { return !(*this < other) && !(other < *this); }
  bool is_pinned(int page, int tier) const {
    return std::any_of(pins.begin(), pins.end(), [&](const Pin& pin) { return pin.pages > page && pin.tier == tier; });
  }
};

constexpr Move move_of(Op op) {
  switch (op) {
    case Op::kCommit: return Move::kCommit;
    case Op::kAbort: return Move::kAbort;
    case Op::kFinish: return Move::kFinish;
    default: return Move::kKeep;
  }
}

// What a step must lead to: the move table, and which of its moves each call makes.
State expected(State state, Step step) {
  const auto move = [&](int page, Move by) {
    Residency& residency = state.residency[static_cast<size_t>(page)][step.tier];
    const Residency to = after(by, residency);
    if (to == kIllegal) return false;
    residency = to;
    return true;
  };
  switch (step.op) {
    case Op::kClaim:
      if (!move(step.which, Move::kClaim)) move(step.which, Move::kKeep);
      break;
    case Op::kVictim:  // the deeper page leaves first
      for (int page = static_cast<int>(page_count) - 1; page >= 0; --page) {
        if (!state.is_pinned(page, step.tier) && move(page, Move::kClaimVictim)) break;
      }
      break;
    case Op::kMatch: {
      Pin& pin = state.pins[step.which];
      if (pin.pages > 0) break;
      pin.tier = step.tier;
      for (int page = 0; page < static_cast<int>(page_count); ++page) {
        if (state.residency[static_cast<size_t>(page)][step.tier] != Residency::kResident && !move(page, Move::kKeep))
          break;
        ++pin.pages;
      }
      if (pin.pages == 0) pin = Pin{};
      break;
    }
    case Op::kRelease: state.pins[step.which] = Pin{}; break;
    case Op::kQuarantine:
      move(step.which, Move::kKeep);
      move(step.which, Move::kQuarantine);
      break;
    case Op::kMend:
      if (!state.is_pinned(step.which, step.tier)) move(step.which, Move::kMend);
      break;
    default: move(step.which, move_of(step.op));
  }
  return state;
}

class Small {
 public:
  Small() : index_(1) {
    space_ = index_.open_namespace(nullptr);
    for (int tier = 0; tier < kTiers; ++tier)
      index_.add_slots(static_cast<Tier>(tier), 0, static_cast<uint32_t>(page_count));
    for (size_t i = 0; i < page_count; ++i) {
      keys_[i].length = 32;
      keys_[i].bytes[0] = static_cast<uint8_t>(i + 1);
    }
  }

  State state() const {
    State out;
    for (size_t page = 0; page < page_count; ++page) out.residency[page] = index_.state(keys_[page], 1);
    out.pins = pins_;
    return out;
  }

  void apply(Step step) {
    const Tier tier = static_cast<Tier>(step.tier);
    Claim& claim = claims_[step.which][step.tier];
    switch (step.op) {
      case Op::kClaim: {
        ClaimBatch batch;
        index_.claim_absent(space_, tokens_.data(), keys_.data(), step.which, step.which + 1u, mask(tier), &batch);
        if (batch.outcomes[step.tier] != ClaimOutcome::kNew) break;
        claim = {batch.pages[0], batch.numbers[step.tier]};
        index_.unpin_pages(batch.pages.data(), 1);
        break;
      }
      case Op::kCommit: settled_ = index_.commit(claim.page, tier, claim.number); break;
      case Op::kAbort: settled_ = index_.abort(claim.page, tier, claim.number); break;
      case Op::kKeep: settled_ = index_.keep(claim.page, tier, claim.number); break;
      case Op::kFinish:
        settled_ = index_.finish(claim.page, tier, claim.number);
        give_back(tier);
        break;
      case Op::kVictim: {
        std::vector<Victim> victims;
        index_.claim_victims(tier, 1, kNoSlot, &victims);
        for (const Victim& victim : victims) claims_[depth_of(victim.page)][step.tier] = {victim.page, victim.number};
        break;
      }
      case Op::kMatch: {
        if (leases_[step.which] != 0) break;
        const MatchResult match = index_.match_and_pin(space_, tokens_.data(), page_count, mask(tier));
        leases_[step.which] = match.lease;
        if (match.pages > 0) pins_[step.which] = {step.tier, static_cast<uint8_t>(match.pages)};
        break;
      }
      case Op::kRelease:
        if (leases_[step.which] != 0) REQUIRE(index_.release(leases_[step.which]));
        leases_[step.which] = 0;
        pins_[step.which] = Pin{};
        break;
      case Op::kQuarantine:
        for (uint32_t slot = 0; slot < page_count; ++slot) index_.quarantine(claim.page, tier, slot);
        break;
      case Op::kMend: {
        std::vector<Victim> damaged;
        index_.claim_quarantined(tier, 3, &damaged);  // hands out the other pages too, which wait
        for (const Victim& victim : damaged) damaged_[depth_of(victim.page)][step.tier] = {victim.page, victim.number};
        Claim& handed = damaged_[step.which][step.tier];
        if (handed.page != kNoPage && index_.mend(handed.page, tier, handed.number, true) == Status::kOk)
          give_back(tier);
        handed = Claim{};
        break;
      }
    }
  }

  Status settled() const { return settled_; }
  std::string check() const { return index_.check(); }

  // Back to nothing resident, nothing held.
  void empty() {
    for (uint8_t claimant = 0; claimant < 2; ++claimant) apply({Op::kRelease, claimant, 0});
    for (uint8_t tier = 0; tier < kTiers; ++tier) {
      for (uint8_t page = 0; page < page_count; ++page) {
        apply({Op::kAbort, page, tier});
        apply({Op::kKeep, page, tier});
      }
      for (size_t n = 0; n < page_count; ++n) apply({Op::kVictim, 0, tier});
      for (uint8_t page = 0; page < page_count; ++page) {
        apply({Op::kFinish, page, tier});
        apply({Op::kMend, page, tier});
      }
    }
    claims_ = {};
  }
  bool is_empty() const { return index_.pages() == 0; }

 private:
  struct Claim {
    PageId page = kNoPage;
    uint32_t number = 0;
  };

  size_t depth_of(PageId page) const {
    Label label;
    index_.labels(&page, 1, &label);
    return label.depth;
  }
  void give_back(Tier tier) {
    if (index_.counts(tier).leaving == 0) return;
    for (uint32_t slot = 0; slot < page_count; ++slot) {
      try {
        index_.free_slots(tier, &slot, 1);
      } catch (const std::invalid_argument&) {  // another slot is meant
      }
    }
  }

  Index index_;
  uint32_t space_ = 0;
  std::array<int32_t, kMostPages> tokens_ = {1, 2, 3};
  std::array<Key, kMostPages> keys_{};
  std::array<std::array<Claim, kTiers>, kMostPages> claims_{};
  std::array<std::array<Claim, kTiers>, kMostPages> damaged_{};
  std::array<uint64_t, 2> leases_{};
  std::array<Pin, 2> pins_{};
  Status settled_ = Status::kOk;
};

// Breadth first from nothing: returns how many states there are; every step from each is made and compared.
size_t explore(const std::vector<uint8_t>& tiers, bool with_quarantine,
               std::set<std::pair<Residency, Residency>>* moves) {
  std::vector<Step> alphabet;
  for (const uint8_t tier : tiers) {
    for (uint8_t page = 0; page < page_count; ++page) {
      for (const Op op : {Op::kClaim, Op::kCommit, Op::kAbort, Op::kFinish, Op::kKeep})
        alphabet.push_back({op, page, tier});
      if (with_quarantine) {
        alphabet.push_back({Op::kQuarantine, page, tier});
        alphabet.push_back({Op::kMend, page, tier});
      }
    }
    for (uint8_t claimant = 0; claimant < 2; ++claimant) alphabet.push_back({Op::kMatch, claimant, tier});
    alphabet.push_back({Op::kVictim, 0, tier});
  }
  for (uint8_t claimant = 0; claimant < 2; ++claimant) alphabet.push_back({Op::kRelease, claimant, 0});

  Small small;
  std::map<State, std::vector<Step>> paths = {{State{}, {}}};
  std::deque<State> frontier = {State{}};
  const auto go_to = [&](const std::vector<Step>& path) {
    small.empty();
    REQUIRE(small.is_empty());
    for (const Step& step : path) small.apply(step);
  };
  while (!frontier.empty()) {
    const State from = frontier.front();
    frontier.pop_front();
    const std::vector<Step> path = paths[from];
    bool is_there = false;
    for (const Step& step : alphabet) {
      const bool is_match_of_held = step.op == Op::kMatch && from.pins[step.which].pages > 0;
      if (is_match_of_held) continue;
      if (!is_there) go_to(path);
      const State want = expected(from, step);
      small.apply(step);
      REQUIRE(small.state() == want);
      if (step.op >= Op::kCommit && step.op <= Op::kKeep) {
        const bool is_legal = after(move_of(step.op), from.residency[step.which][step.tier]) != kIllegal;
        REQUIRE(small.settled() == (is_legal ? Status::kOk : Status::kStale));
      }
      is_there = want == from;
      for (size_t page = 0; page < page_count; ++page) {
        for (size_t tier = 0; tier < kTiers; ++tier)
          moves->insert({from.residency[page][tier], want.residency[page][tier]});
      }
      State canonical = want;
      std::vector<Step> longer = path;
      longer.push_back(step);
      if (canonical.pins[1] < canonical.pins[0]) continue;  // the other claimant's turn reaches its mirror
      if (paths.emplace(canonical, longer).second) {
        REQUIRE(small.check() == "");
        frontier.push_back(canonical);
      }
    }
  }
  return paths.size();
}

}  // namespace

TEST_CASE("every state of two pages in three tiers with two claimants follows the move table") {
  std::set<std::pair<Residency, Residency>> moves;
  const size_t states = explore({1, 2, 3}, false, &moves);
  CHECK(states > 4096);  // each of the 4^6 residencies, and those with pins
  for (const auto& [from, to] : moves) {
    bool is_legal = from == to;
    for (int move = 0; move < kMoves; ++move) is_legal |= after(static_cast<Move>(move), from) == to;
    CHECK(is_legal);
  }
  MESSAGE("states: " << states);
}

TEST_CASE("every state of two pages in two tiers, damage included, follows the move table") {
  std::set<std::pair<Residency, Residency>> moves;
  const size_t states = explore({2, 3}, true, &moves);
  CHECK(states > 400);
  for (const Residency from :
       {Residency::kAbsent, Residency::kArriving, Residency::kResident, Residency::kLeaving, Residency::kQuarantined}) {
    for (int move = 0; move < kMoves; ++move) {
      const Residency to = after(static_cast<Move>(move), from);
      if (to != kIllegal && !(from == Residency::kLeaving && to == Residency::kQuarantined))
        CHECK(moves.contains({from, to}));
    }
  }
  MESSAGE("states: " << states);
}

TEST_CASE("every state of three pages in two tiers with two claimants follows the move table") {
  page_count = 3;
  std::set<std::pair<Residency, Residency>> moves;
  const size_t states = explore({2, 3}, false, &moves);
  page_count = 2;
  CHECK(states > 4096);  // each of the 4^6 residencies, and those with pins
  for (const auto& [from, to] : moves) {
    bool is_legal = from == to;
    for (int move = 0; move < kMoves; ++move) is_legal |= after(static_cast<Move>(move), from) == to;
    CHECK(is_legal);
  }
  MESSAGE("states: " << states);
}
