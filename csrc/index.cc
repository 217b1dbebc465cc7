// The index: tree, table, ranks, slots, claims and leases together, under one mutex. See index.h.
#include "index.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "courtesies.h"
#include "page_table.h"
#include "radix.h"
#include "rank.h"
#include "sha256.h"
#include "slots.h"

namespace stepwell {

namespace {

constexpr uint8_t kKv = 1;  // the kind whose keys are prefix hashes
constexpr uint8_t kNoTier = 0xff;
// Hashed past the tree's end before the first look; doubles from then on, because what was found once is likely to go
// on, and a miss should cost little.
constexpr uint32_t kFirstHashPages = 32;
constexpr uint32_t kMostHashPages = 1024;
constexpr uint32_t kAhead = 16;  // keys fetched ahead of the one looked up
// Touches kept back; with 32,768 pages at about 10 ns each, applying a full log holds the mutex for less than a
// millisecond.
constexpr size_t kLogEntries = 256;
constexpr uint64_t kLogPages = 32768;

constexpr size_t at(int tier) { return static_cast<size_t>(tier); }
constexpr size_t at(Tier tier) { return static_cast<size_t>(tier); }
constexpr bool has(TierMask tiers, int tier) { return ((tiers >> tier) & 1) != 0; }

// What a page's packed residency means to a match that may use some tiers.
struct Standing {
  uint8_t tier = kNoTier;  // the fastest usable one: RESIDENT in it, or (leaving) only LEAVING anywhere usable
  bool leaving = false;
  bool arriving = false;
  bool quarantined = false;
};

Standing standing(uint32_t packed, TierMask usable) {
  Standing out;
  uint8_t leaving_tier = kNoTier;
  for (int tier = 0; tier < kTiers; ++tier) {
    if (!has(usable, tier)) continue;
    switch (static_cast<Residency>((packed >> (8 * tier)) & 0xff)) {
      case Residency::kResident: out.tier = static_cast<uint8_t>(tier); return out;
      case Residency::kLeaving:
        if (leaving_tier == kNoTier) leaving_tier = static_cast<uint8_t>(tier);
        break;
      case Residency::kArriving: out.arriving = true; break;
      case Residency::kQuarantined: out.quarantined = true; break;
      case Residency::kAbsent: break;
    }
  }
  out.tier = leaving_tier;
  out.leaving = leaving_tier != kNoTier;
  return out;
}

// Pins of one tier along the tree: from depth first_page to the end of edge `end`.
struct LeaseSpan {
  NodeId end;
  uint32_t first_page;
  uint32_t pages;
  uint8_t tier;
};

struct LoosePin {
  PageId page;
  uint8_t tier;
};

struct Lease {
  uint32_t generation = 0;
  uint32_t owners = 0;           // 0: free
  std::vector<LeaseSpan> spans;  // of a match by tokens
  std::vector<LoosePin> loose;   // of a match by keys; behind the spans, what a match was continued with
  uint32_t span_pages() const { return spans.empty() ? 0 : spans.back().first_page + spans.back().pages; }
  uint32_t pages() const { return span_pages() + static_cast<uint32_t>(loose.size()); }
};

// Covers the chain of pages that ends with `end`.
struct Hold {
  uint32_t generation = 0;
  uint32_t owners = 0;  // 0: free
  PageId end = kNoPage;
};

struct Namespace {
  bool has_seed = false;
  std::array<uint8_t, kDigestBytes> seed{};
  NodeId root = kNoNode;  // of the current epoch
};

// What is known of a token path, without having changed anything.
struct Survey {
  TreePlace place;                // where the tree ends
  std::vector<Span> spans;        // of the usable run
  std::vector<LoosePin> leaving;  // pages of the run that must be kept to be usable
  std::vector<PageId> by_key;     // pages of the run past the tree's end; of the pending ones too if asked for
  uint32_t usable = 0;
  uint32_t pending = 0;
  Miss miss = Miss::kNone;
  bool wants_hashes = false;  // it ended only for lack of hashes, from page hash_from on
  uint32_t hash_from = 0;
};

}  // namespace

class Index::Impl {
 public:
  explicit Impl(uint32_t page_tokens) : pages(page_tokens), tree(&pages) {
    for (const Tier tier : {Tier::kShared, Tier::kDisk}) {
      ranks[at(tier)].watch();
      staying[at(tier)].watch();
    }
  }

  mutable std::mutex mutex;
  PageTable pages;
  Radix tree;
  std::array<Rank, kTiers> ranks;
  std::array<SlotRanges, kTiers> slots;
  std::array<uint32_t, kTiers> next_owed{};                           // where take_owed() goes on
  std::array<std::array<uint64_t, kResidencies>, kTiers> in_state{};  // pages; kAbsent is not counted
  std::array<uint64_t, kTiers> page_pinned{};                         // RESIDENT pages with a page pin
  // ranked last of the pages of other epochs, which all leave first
  std::array<PageId, kTiers> last_old{kNoPage, kNoPage, kNoPage, kNoPage};
  std::array<std::vector<PageId>, kTiers> quarantined;
  std::vector<Namespace> namespaces;
  std::map<std::pair<bool, std::array<uint8_t, kDigestBytes>>, uint32_t> namespace_ids;
  std::map<std::pair<uint32_t, uint64_t>, NodeId> roots;  // (namespace, epoch)
  uint64_t epoch = 0;
  std::vector<Lease> leases;
  std::vector<uint32_t> free_leases;
  uint64_t live_leases = 0;
  TierMask keeping = mask(Tier::kShared) | mask(Tier::kDisk);
  std::array<Rank, kTiers> staying;  // RESIDENT pages that are not to leave; its order is that of their uses
  std::vector<Hold> holds;
  std::vector<uint32_t> free_holds;
  std::unordered_map<PageId, uint32_t> hold_of_end;
  uint64_t held_pages = 0;
  Courtesies courtesies;
  std::array<uint64_t, kTiers> courtesies_in{};  // pages that are RESIDENT there
  std::array<uint64_t, kTiers> courtesies_allowed{UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
  std::vector<PageId> touches;  // ends of paths, in call order
  uint64_t touched_pages = 0;
  uint64_t clock_stands_at = 0;  // 0: it runs
  std::atomic<bool> poisoned{false};
  const pid_t pid = ::getpid();
  mutable std::vector<NodeId> path;  // scratch of path_to()

  // Runs f under the mutex; an assertion that fails in it poisons the index.
  template <typename F>
  auto locked(F&& f) {
    const std::lock_guard lock(mutex);
    try {
      return f();
    } catch (const AssertionFailure&) {
      poisoned.store(true);
      throw;
    }
  }

  // ---- residency -------------------------------------------------------------------------------------------------
  bool page_has_pin(PageId page) const { return pages.lease_pins(page) + pages.claim_pins(page) > 0; }
  bool is_pinned(PageId page, int tier) const {
    if (page_has_pin(page)) return true;
    const NodeId node = pages.node(page);
    return node != kNoNode && tree.node(node).pins[at(tier)] > 0;
  }

  // Moves a residency, its counters and its place in the rank; entering the rank is enter_rank()'s. Where another copy
  // of a held page comes to be its last one, or no longer is, that one leaves or enters its rank.
  void move(PageId page, int tier, Move move) {
    const Residency from = pages.residency(page, tier);
    const Residency to = after(move, from);
    STEPWELL_ASSERT(to != kIllegal);
    if (from != Residency::kAbsent) --in_state[at(tier)][static_cast<size_t>(from)];
    if (to != Residency::kAbsent) ++in_state[at(tier)][static_cast<size_t>(to)];
    if (from == Residency::kResident) {
      leave_order(page, tier);
      if (page_has_pin(page)) {
        --page_pinned[at(tier)];
        if (courtesies.has(page)) --courtesies_in[at(tier)];
      }
    } else if (to == Residency::kResident && page_has_pin(page)) {
      ++page_pinned[at(tier)];
      if (courtesies.has(page)) ++courtesies_in[at(tier)];
    }
    uint32_t& packed = pages.residency(page);
    packed = (packed & ~(0xffu << (8 * tier))) | (static_cast<uint32_t>(to) << (8 * tier));
    if (pages.holds(page) > 0) [[unlikely]]
      settle(page, tier);
  }

  void add_page_pins(PageId page, int64_t change, bool by_claim) {
    const bool before = page_has_pin(page);
    uint32_t& pins = by_claim ? pages.claim_pins(page) : pages.lease_pins(page);
    pins = static_cast<uint32_t>(pins + change);
    const bool after = page_has_pin(page);
    if (before == after) return;
    for (int tier = 0; tier < kTiers; ++tier) {
      if (pages.residency(page, tier) == Residency::kResident) page_pinned[at(tier)] += after ? 1 : uint64_t(-1);
    }
  }

  void make_resident(PageId page, int tier, Move by) {
    apply_touches();
    move(page, tier, by);
    enter_rank(page, tier);
    if (pages.holds(page) > 0) settle(page, kTiers);
  }

  // The page has no more to do with its slot.
  uint32_t take_slot(PageId page, int tier, SlotUse use) {
    const uint32_t slot = pages.slot(page, tier);
    pages.slot(page, tier) = kNoSlot;
    slots[at(tier)].set_use(slot, use);
    return slot;
  }

  // Whether a claim under this number still holds.
  bool is_claimed(PageId page, int tier, uint32_t number, Residency as) const {
    return pages.exists(page) && pages.number(page, tier) == number && pages.residency(page, tier) == as;
  }

  uint32_t next_number(PageId page, int tier) { return ++pages.number(page, tier); }

  // ARRIVING -> ABSENT.
  Status abort(PageId page, int tier, uint32_t number, SlotUse use) {
    return locked([&] {
      if (!is_claimed(page, tier, number, Residency::kArriving)) return Status::kStale;
      move(page, tier, Move::kAbort);
      take_slot(page, tier, use);
      drop_if_dead(page);
      return Status::kOk;
    });
  }

  // LEAVING -> ABSENT; the slot stays out of use until free_slots().
  void leave(PageId page, int tier) {
    move(page, tier, Move::kFinish);
    take_slot(page, tier, SlotUse::kReturning);
    drop_if_dead(page);
  }

  // First and last slot of the range that starts at `first`.
  std::pair<uint32_t, uint32_t> range_of(int tier, uint32_t first) const {
    if (!slots[at(tier)].has_range(first))
      throw std::invalid_argument("no slot range starts at " + std::to_string(first));
    return {first, slots[at(tier)].last_of(first)};
  }

  // Unpinned RESIDENT pages of lowest rank become LEAVING under a new claim number: up to n, within one slot range or
  // (kNoSlot) anywhere.
  void choose_victims(int tier, uint32_t n, uint32_t only_range, std::vector<Victim>* out, bool even_held = false) {
    out->clear();
    apply_touches();
    uint32_t first_slot = 0, last_slot = UINT32_MAX;
    if (only_range != kNoSlot) {
      std::tie(first_slot, last_slot) = range_of(tier, only_range);
    }
    out->reserve(std::min<uint64_t>(n, ranks[at(tier)].size()));
    const auto choose_from = [&](const Rank& rank) {
      for (uint32_t page = rank.first(), next; page != Rank::kNone && out->size() < n; page = next) {
        next = rank.after(page);
        const uint32_t slot = pages.slot(page, tier);
        if (slot < first_slot || slot > last_slot || is_pinned(page, tier)) continue;
        move(page, tier, Move::kClaimVictim);
        out->push_back({page, slot, next_number(page, tier)});
      }
    };
    choose_from(ranks[at(tier)]);
    if (even_held) choose_from(staying[at(tier)]);
  }

  // ---- rank ------------------------------------------------------------------------------------------------------
  // The wall clock, ns. Read once for all that is touched together, or for a page that enters: about 25 ns.
  uint64_t now() const noexcept {
    if (clock_stands_at != 0) return clock_stands_at;
    timespec time{};
    ::clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
  }

  PageId nearest_ranked_ancestor(PageId page, int tier) const {
    for (PageId p = pages.parent(page); p != kNoPage; p = pages.parent(p)) {
      if (may_leave(p, tier)) return p;
    }
    return kNoPage;
  }

  // At the leaving end: of all, or of those of the current epoch, which leave after all others.
  void enter_lowest(PageId page, int tier) {
    Rank& rank = ranks[at(tier)];
    PageId& old = last_old[at(tier)];
    if (pages.epoch(page) != epoch) {
      rank.enter_lowest(page, now());
      if (old == kNoPage) old = page;
    } else if (old == kNoPage) {
      rank.enter_lowest(page, now());
    } else {
      rank.enter_above(page, old);
    }
  }

  // As just used, but never above an ancestor (I4: directly below one is above all its other descendants). A page that
  // no match can reach, its parent gone or its epoch past, goes to the leaving end; with children, only as far as keeps
  // it above them.
  void enter_rank(PageId page, int tier) {
    Rank& rank = ranks[at(tier)];
    const bool is_old = pages.epoch(page) != epoch;
    const bool is_cut_off = pages.parent_state(page) == ParentState::kKnown && pages.residency(pages.parent(page)) == 0;
    if ((is_old || is_cut_off) && pages.children(page) == 0) return enter_lowest(page, tier);
    const PageId ancestor = nearest_ranked_ancestor(page, tier);
    if (ancestor != kNoPage) return rank.enter_below(page, ancestor);
    if (!is_old) return rank.enter_highest(page, now());
    PageId& old = last_old[at(tier)];
    if (old == kNoPage) {
      rank.enter_lowest(page, now());
    } else {
      rank.enter_above(page, old);
    }
    old = page;
  }

  // A page of another epoch stays among those that leave first.
  void touch_old(PageId page, int tier) {
    PageId& old = last_old[at(tier)];
    if (page == old) return;
    ranks[at(tier)].leave(page);
    ranks[at(tier)].enter_above(page, old);
    old = page;
  }

  void log_touch(PageId end, uint64_t path_pages) {
    if (!touches.empty() && touches.back() == end) return;
    if (touches.size() >= kLogEntries || touched_pages >= kLogPages) apply_touches();
    touches.push_back(end);
    touched_pages += path_pages;
  }

  // From tail to head, so that an ancestor ends above its descendants.
  void apply_touches() {
    if (touches.empty()) return;
    const uint64_t time = now();
    for (const PageId end : touches) {
      std::array<uint64_t, kTiers> steps;
      steps.fill(Rank::kPathStep);
      for (PageId page = end; page != kNoPage; page = pages.parent(page)) {
        const uint32_t packed = pages.residency(page);
        for (int tier = 0; tier < kTiers; ++tier) {
          if (((packed >> (8 * tier)) & 0xff) != static_cast<uint32_t>(Residency::kResident)) continue;
          if (pages.epoch(page) == epoch) [[likely]] {
            (has(pages.staying(page), tier) ? staying : ranks)[at(tier)].touch(page, time, steps[at(tier)]);
            steps[at(tier)] = Rank::kStep;
          } else {
            touch_old(page, tier);
          }
        }
      }
    }
    touches.clear();
    touched_pages = 0;
  }

  // ---- holds -----------------------------------------------------------------------------------------------------
  // Whether a copy is the last that a hold keeps.
  bool must_stay(PageId page, int tier) const {
    if (pages.holds(page) == 0 || !has(keeping, tier)) return false;
    for (int other = 0; other < kTiers; ++other) {
      if (has(keeping, other) && (pages.residency(page, other) == Residency::kResident) != (other == tier))
        return false;
    }
    return true;
  }

  bool is_kept(PageId page) const {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (has(keeping, tier) && pages.residency(page, tier) == Residency::kResident) return true;
    }
    return false;
  }

  void leave_order(PageId page, int tier) {
    if (has(pages.staying(page), tier)) {
      staying[at(tier)].leave(page);
      pages.staying(page) = static_cast<uint8_t>(pages.staying(page) & ~(1u << tier));
      return;
    }
    if (page == last_old[at(tier)]) last_old[at(tier)] = ranks[at(tier)].before(page);
    ranks[at(tier)].leave(page);
  }

  // Puts each copy of the page, but that in `except`, where it belongs: into the rank or beside it. REQUIRES no touches
  // are due where a copy may enter the rank: it enters as just used.
  void settle(PageId page, int except) {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (tier == except) continue;
      const bool is_staying = has(pages.staying(page), tier);
      if (must_stay(page, tier) == is_staying) continue;
      leave_order(page, tier);
      if (is_staying) {
        enter_rank(page, tier);
      } else {
        staying[at(tier)].enter_highest(page, now());
        pages.staying(page) = static_cast<uint8_t>(pages.staying(page) | (1u << tier));
      }
    }
  }

  // A held page whose last kept copy has gone stays where it is just about to leave.
  void rescue(PageId page) {
    if (pages.holds(page) == 0 || is_kept(page)) return;
    for (int tier = 0; tier < kTiers; ++tier) {
      if (has(keeping, tier) && pages.residency(page, tier) == Residency::kLeaving)
        return make_resident(page, tier, Move::kKeep);
    }
  }

  Hold* find_hold(uint64_t id) {
    const uint32_t index = static_cast<uint32_t>(id);
    if (index >= holds.size()) return nullptr;
    Hold& hold = holds[index];
    return hold.owners > 0 && hold.generation == id >> 32 ? &hold : nullptr;
  }

  // The leading pages of the chain up to `end` that are kept; the depth of `end` is known.
  uint32_t kept_run(PageId end) const {
    uint32_t run = pages.depth(end) + 1;
    for (PageId page = end; page != kNoPage; page = pages.parent(page)) {
      if (!is_kept(page)) run = pages.depth(page);
    }
    return run;
  }

  // Covers the chain, deepest first: then each copy that is kept back enters the rank below those of its ancestors that
  // are still to come.
  uint64_t make_hold(PageId end) {
    const auto [known, is_new] = hold_of_end.try_emplace(end, 0);
    if (is_new) {
      apply_touches();
      for (PageId page = end; page != kNoPage; page = pages.parent(page)) {
        if (pages.holds(page)++ > 0) continue;
        ++held_pages;
        rescue(page);
        settle(page, kTiers);
      }
      if (free_holds.empty()) {
        free_holds.push_back(static_cast<uint32_t>(holds.size()));
        holds.emplace_back();
      }
      known->second = free_holds.back();
      free_holds.pop_back();
      ++holds[known->second].generation;
      holds[known->second].end = end;
    }
    ++holds[known->second].owners;
    return (static_cast<uint64_t>(holds[known->second].generation) << 32) | known->second;
  }

  void end_hold(Hold* hold) {
    apply_touches();
    const PageId end = hold->end;
    hold->owners = 0;
    hold_of_end.erase(end);
    free_holds.push_back(static_cast<uint32_t>(hold - holds.data()));
    // From head to tail: each page finds the one that it enters below beside itself.
    std::vector<PageId> chain;
    chain.reserve(pages.depth(end) + size_t{1});
    for (PageId page = end; page != kNoPage; page = pages.parent(page)) chain.push_back(page);
    for (auto page = chain.rbegin(); page != chain.rend(); ++page) {
      if (--pages.holds(*page) > 0) continue;
      --held_pages;
      settle(*page, kTiers);
    }
    drop_if_dead(end);
  }

  // ---- courtesies ------------------------------------------------------------------------------------------------
  void count_courtesy(PageId page, uint64_t change) {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (pages.residency(page, tier) == Residency::kResident) courtesies_in[at(tier)] += change;
    }
  }

  void end_courtesy(PageId page) {
    courtesies.remove(page);
    count_courtesy(page, uint64_t(-1));
    add_page_pins(page, -1, false);
    drop_if_dead(page);
  }

  uint32_t end_due_courtesies(double now) {
    std::vector<PageId> ended;
    courtesies.due(now, &ended);
    for (const PageId page : ended) end_courtesy(page);
    return static_cast<uint32_t>(ended.size());
  }

  // Ends up to `count`, the oldest first: in one tier, or (kTiers) anywhere. Returns how many.
  uint32_t end_oldest_courtesies(int tier, uint64_t count) {
    std::vector<PageId> ended;
    ended.reserve(count);
    courtesies.each([&](PageId page) {
      if (ended.size() < count && (tier == kTiers || pages.residency(page, tier) == Residency::kResident))
        ended.push_back(page);
      return ended.size() < count;
    });
    for (const PageId page : ended) end_courtesy(page);
    return static_cast<uint32_t>(ended.size());
  }

  uint64_t courtesies_most(int tier) const {
    const double of_tier = kMostOfTier * static_cast<double>(slots[at(tier)].capacity());
    return std::min(courtesies_allowed[at(tier)], static_cast<uint64_t>(of_tier));
  }

  // ---- records ---------------------------------------------------------------------------------------------------
  bool is_dead(PageId page) const {
    return pages.residency(page) == 0 && pages.children(page) == 0 && !page_has_pin(page) && pages.holds(page) == 0;
  }

  void drop_if_dead(PageId page) {
    while (page != kNoPage && is_dead(page)) {
      apply_touches();  // the log names pages: none may die in it
      if (pages.node(page) != kNoNode) {
        const NodeId childless = tree.detach(page);
        if (childless != kNoNode) drop_old_root(childless);
      }
      const PageId parent = pages.parent(page);
      pages.destroy(page);
      if (parent != kNoPage) --pages.children(parent);
      page = parent;
    }
  }

  void drop_old_root(NodeId root) {
    for (auto it = roots.begin(); it != roots.end(); ++it) {
      if (it->second != root) continue;
      if (it->first.second == epoch) return;
      tree.drop_root(root);
      roots.erase(it);
      return;
    }
  }

  NodeId root_of(uint32_t name_space) {
    Namespace& space = namespaces[name_space];
    if (space.root == kNoNode) {
      space.root = tree.make_root();
      roots[{name_space, epoch}] = space.root;
    }
    return space.root;
  }

  void link(PageId page, PageId parent) {
    pages.parent(page) = parent;
    pages.parent_state(page) = ParentState::kKnown;
    ++pages.children(parent);
  }

  // Links a page of unknown parent where that cannot be wrong: depths fit, and no cycle arises (labels of a volume are
  // not trusted).
  // Keeps: where a page's depth is known, so is its linked parent's, one less. True if `parent` is the page's parent
  // now.
  bool try_link(PageId page, PageId parent) {
    if (pages.parent_state(page) != ParentState::kUnknown) return pages.parent(page) == parent;
    if (page == parent || pages.node(page) != kNoNode) return false;
    const uint32_t depth = pages.depth(page), parent_depth = pages.depth(parent);
    if (depth != kUnknownDepth && parent_depth != kUnknownDepth) {
      if (depth != parent_depth + 1) return false;
    } else if (depth != kUnknownDepth) {
      if (depth == 0 || pages.parent_state(parent) != ParentState::kUnknown) return false;
      pages.depth(parent) = depth - 1;
    } else if (parent_depth != kUnknownDepth) {
      pages.depth(page) = parent_depth + 1;
    } else if (pages.children(page) > 0) {
      for (PageId p = parent; p != kNoPage; p = pages.parent(p)) {
        if (p == page) return false;
      }
    }
    link(page, parent);
    return true;
  }

  PageId page_before(const TreePlace& place) const {
    if (place.depth == 0) return kNoPage;
    return tree.node(place.node).pages[place.in_node - 1];
  }

  // Whether what is known of `page` forbids its place behind `place`: it lies elsewhere, or its label says otherwise.
  bool contradicts(PageId page, const TreePlace& place) const {
    if (pages.node(page) != kNoNode) return true;
    if (pages.depth(page) != kUnknownDepth && pages.depth(page) != place.depth) return true;
    switch (pages.parent_state(page)) {
      case ParentState::kRoot: return place.depth != 0;
      case ParentState::kKnown: return pages.parent(page) != page_before(place);
      case ParentState::kUnknown: return false;
    }
    return true;
  }

  // REQUIRES !contradicts(). The caller touches the path: a new link can put a page above its ancestors.
  void attach(TreePlace* place, PageId page, const int32_t* tokens) {
    const PageId parent = page_before(*place);
    if (parent == kNoPage) {
      pages.parent_state(page) = ParentState::kRoot;
    } else if (pages.parent_state(page) != ParentState::kKnown) {
      link(page, parent);
    }
    pages.depth(page) = place->depth;
    tree.attach(place, page, tokens);
  }

  // ---- paths -----------------------------------------------------------------------------------------------------
  // Nodes from below the root to `node`, in `path`.
  void path_to(NodeId node) const {
    path.clear();
    for (; tree.node(node).parent != kNoNode; node = tree.node(node).parent) path.push_back(node);
    std::reverse(path.begin(), path.end());
  }

  // f(first id, count, packed residency) for runs of equal residency and consecutive ids of the path to `place`; stops
  // where f says false.
  template <typename F>
  bool scan(const TreePlace& place, F&& f) const {
    path_to(place.node);
    for (const NodeId id : path) {
      const Node& node = tree.node(id);
      const uint32_t size = id == place.node ? place.in_node : static_cast<uint32_t>(node.pages.size());
      for (uint32_t i = 0; i < size;) {
        const PageId first = node.pages[i];
        const uint32_t consecutive = id_run(node.pages.data() + i, size - i);
        const uint32_t* packed = &pages.block(first).residency[PageTable::index(first)];
        uint32_t n = 1;
        while (n + 16 <= consecutive) {
          uint32_t differs = 0;
          for (uint32_t k = 0; k < 16; ++k) differs |= packed[n + k] ^ packed[0];
          if (differs != 0) break;
          n += 16;
        }
        while (n < consecutive && packed[n] == packed[0]) ++n;
        if (!f(first, n, packed[0])) return false;
        i += n;
      }
    }
    return true;
  }

  // The prefix hashes of pages [first, first + count) that a lookup has made so far.
  struct Hashes {
    uint32_t first = 0;
    uint32_t count = 0;
    uint32_t batch = kFirstHashPages;
    std::vector<uint8_t> bytes;
    std::array<uint8_t, kDigestBytes> prior{};
    bool has_prior = false;

    bool covers(uint32_t page) const { return page >= first && page - first < count; }
    const uint8_t* of(uint32_t page) const { return bytes.data() + static_cast<size_t>(page - first) * kDigestBytes; }
    // Outside the mutex. Makes the next batch, from page `from` on, on top of `prior`.
    void extend(uint32_t from, const int32_t* tokens, uint32_t total, size_t page_tokens) {
      if (count == 0 || from != first + count) {
        first = from;
        count = 0;
      }
      const uint32_t n = std::min(batch, total - from);
      bytes.resize(static_cast<size_t>(count + n) * kDigestBytes);
      hash_chain(has_prior ? prior.data() : nullptr, tokens + from * page_tokens, n, page_tokens,
                 bytes.data() + static_cast<size_t>(count) * kDigestBytes);
      count += n;
      batch = std::min(batch * 2, kMostHashPages);
    }
  };

  // Sets what page `before`'s successor is hashed on; false where its key is no prefix hash.
  bool set_prior(uint32_t name_space, PageId before, Hashes* hashes) const {
    if (before == kNoPage) {
      hashes->has_prior = namespaces[name_space].has_seed;
      hashes->prior = namespaces[name_space].seed;
      return true;
    }
    const Key key = pages.key(before);
    if (key.length != kDigestBytes || pages.kind(before) != kKv) return false;
    hashes->has_prior = true;
    std::memcpy(hashes->prior.data(), key.bytes.data(), kDigestBytes);
    return true;
  }

  // Calls f(page, place_or_depth) for pages past the tree's end, as far as hashes are known. Sets wants_hashes in
  // `survey` where only hashes were missing.
  template <typename F>
  void scan_by_key(uint32_t name_space, uint32_t total, Hashes* hashes, Survey* survey, F&& f) {
    PageId before = page_before(survey->place);
    TreePlace place = survey->place;
    for (uint32_t i = survey->place.depth; i < total; ++i) {
      if (!hashes->covers(i)) {
        if (!set_prior(name_space, before, hashes)) return;
        survey->wants_hashes = true;
        survey->hash_from = i;
        return;
      }
      const PageId page = pages.find(hashes->of(i), kDigestBytes, kKv, epoch);
      if (page == kNoPage || pages.node(page) != kNoNode) return;
      if (i == place.depth && contradicts(page, place)) return;
      if (i > place.depth && (pages.parent_state(page) == ParentState::kRoot ||
                              (pages.depth(page) != kUnknownDepth && pages.depth(page) != i) ||
                              (pages.parent_state(page) == ParentState::kKnown && pages.parent(page) != before))) {
        return;
      }
      if (!f(page)) return;
      before = page;
    }
  }

  // Appends the page of each key past the tree's end, kNoPage where there is none: unlike a match it goes on behind a
  // gap. False: more hashes are wanted, as scan_by_key() says it.
  bool find_behind(uint32_t name_space, uint32_t total, Hashes* hashes, Survey* survey, std::vector<PageId>* chain) {
    for (uint32_t i = survey->place.depth; i < total; ++i) {
      if (!hashes->covers(i)) {
        if (i > survey->place.depth) {
          hashes->has_prior = true;
          std::memcpy(hashes->prior.data(), hashes->of(i - 1), kDigestBytes);
        } else if (!set_prior(name_space, page_before(survey->place), hashes)) {
          return true;
        }
        survey->wants_hashes = true;
        survey->hash_from = i;
        return false;
      }
      chain->push_back(pages.find(hashes->of(i), kDigestBytes, kKv, epoch));
    }
    return true;
  }

  Survey survey(uint32_t name_space, const int32_t* tokens, uint32_t total, TierMask usable, Hashes* hashes,
                bool also_pending = false) {
    Survey out;
    const NodeId root = namespaces[name_space].root;
    if (root == kNoNode) {
      out.place = {kNoNode, 0, 0};
    } else {
      out.place = tree.walk(root, tokens, total);
    }
    bool in_run = true;
    uint32_t last_packed = 0;
    Standing last = standing(0, usable);
    const auto feed = [&](PageId first, uint32_t n, uint32_t packed) {
      if (packed != last_packed) {
        last_packed = packed;
        last = standing(packed, usable);
      }
      if (in_run && last.tier != kNoTier) {
        if (!out.spans.empty() && static_cast<uint8_t>(out.spans.back().tier) == last.tier) {
          out.spans.back().pages += n;
        } else {
          out.spans.push_back({out.usable, n, static_cast<Tier>(last.tier)});
        }
        if (last.leaving) {
          for (uint32_t k = 0; k < n; ++k) out.leaving.push_back({first + k, last.tier});
        }
        out.usable += n;
        return true;
      }
      if (in_run) {
        in_run = false;
        out.miss = last.arriving ? Miss::kPending : last.quarantined ? Miss::kQuarantined : Miss::kAbsent;
      }
      if (out.miss != Miss::kPending || (last.tier == kNoTier && !last.arriving)) return false;
      out.pending += n;
      return true;
    };
    const bool reached_end = out.place.node == kNoNode || scan(out.place, feed);
    if (reached_end) {
      scan_by_key(name_space, total, hashes, &out, [&](PageId page) {
        const bool go_on = feed(page, 1, pages.residency(page));
        if (go_on && (in_run || also_pending)) out.by_key.push_back(page);
        return go_on;
      });
    }
    if (in_run && out.usable < total) out.miss = Miss::kAbsent;
    return out;
  }

  // Pages found by key enter the tree with the tokens that hashed to them.
  void graft(uint32_t name_space, const int32_t* tokens, Survey* found) {
    if (found->by_key.empty()) return;
    if (found->place.node == kNoNode) found->place = {root_of(name_space), 0, 0};
    for (const PageId page : found->by_key) {
      attach(&found->place, page, tokens + static_cast<size_t>(found->place.depth) * pages.page_tokens());
    }
    log_touch(found->by_key.back(), found->place.depth);
    found->by_key.clear();
  }

  // ---- leases ----------------------------------------------------------------------------------------------------
  uint64_t make_lease(Lease&& lease) {
    uint32_t index;
    if (!free_leases.empty()) {
      index = free_leases.back();
      free_leases.pop_back();
    } else {
      index = static_cast<uint32_t>(leases.size());
      leases.emplace_back();
    }
    lease.generation = leases[index].generation + 1;
    lease.owners = 1;
    leases[index] = std::move(lease);
    ++live_leases;
    return (static_cast<uint64_t>(leases[index].generation) << 32) | index;
  }

  Lease* find_lease(uint64_t id) {
    const uint32_t index = static_cast<uint32_t>(id);
    if (index >= leases.size()) return nullptr;
    Lease& lease = leases[index];
    return lease.owners > 0 && lease.generation == id >> 32 ? &lease : nullptr;
  }

  Lease& live_lease(uint64_t id) {
    Lease* lease = find_lease(id);
    if (lease == nullptr)
      throw std::invalid_argument("lease " + std::to_string(id) + " is not live: released, or never given");
    return *lease;
  }

  // Pins [first_page, first_page + pages) in `tier`; `below` is a node on the path at or below its end. Edges are split
  // at both ends.
  LeaseSpan pin_span(NodeId below, const Span& span) {
    const uint32_t end = span.first_page + span.pages;
    const int tier = static_cast<int>(span.tier);
    while (tree.node(below).start >= end) below = tree.node(below).parent;
    if (tree.node(below).end() > end) below = tree.split(below, end - tree.node(below).start);
    const LeaseSpan out{below, span.first_page, span.pages, static_cast<uint8_t>(tier)};
    for (NodeId node = below;; node = tree.node(node).parent) {
      if (tree.node(node).start < span.first_page) tree.split(node, span.first_page - tree.node(node).start);
      tree.pin(node, tier);
      if (tree.node(node).start == span.first_page) return out;
    }
  }

  void unpin_span(const LeaseSpan& span) {
    for (NodeId node = span.end;;) {
      const uint32_t start = tree.node(node).start;
      const NodeId parent = tree.node(node).parent;
      tree.unpin(node, span.tier);
      if (start <= span.first_page) return;
      node = parent;
    }
  }

  // Ids of the pages that a span covers from `skip` on, at most `most`, appended.
  void span_pages(const LeaseSpan& span, uint32_t skip, uint32_t most, std::vector<PageId>* out) const {
    path.clear();
    const uint32_t first = span.first_page + skip;
    for (NodeId node = span.end;; node = tree.node(node).parent) {
      path.push_back(node);
      if (tree.node(node).start <= first) break;
    }
    uint32_t depth = first;
    for (auto it = path.rbegin(); it != path.rend() && most > 0; ++it) {
      const Node& node = tree.node(*it);
      const uint32_t n = std::min(node.end() - depth, most);
      const auto begin = node.pages.begin() + (depth - node.start);
      out->insert(out->end(), begin, begin + n);
      depth += n;
      most -= n;
    }
  }

  // Ids of all pages of a lease, in order.
  std::vector<PageId> lease_ids(const Lease& lease) const {
    std::vector<PageId> ids;
    for (const LeaseSpan& span : lease.spans) span_pages(span, 0, span.pages, &ids);
    for (const LoosePin& pin : lease.loose) ids.push_back(pin.page);
    return ids;
  }

  // ---- claims ----------------------------------------------------------------------------------------------------
  ClaimOutcome claim(PageId page, int tier) {
    switch (pages.residency(page, tier)) {
      case Residency::kAbsent: {
        const uint32_t slot = slots[at(tier)].take(SlotUse::kPage);
        if (slot == kNoSlot) return ClaimOutcome::kFull;
        move(page, tier, Move::kClaim);
        pages.slot(page, tier) = slot;
        next_number(page, tier);
        return ClaimOutcome::kNew;
      }
      case Residency::kArriving: return ClaimOutcome::kPending;
      case Residency::kResident: return ClaimOutcome::kPresent;
      case Residency::kLeaving: make_resident(page, tier, Move::kKeep); return ClaimOutcome::kPresent;
      case Residency::kQuarantined: return ClaimOutcome::kRefused;
    }
    return ClaimOutcome::kRefused;
  }

  bool any_claimable(TierMask tiers) const {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (has(tiers, tier) && slots[at(tier)].claimable() > 0) return true;
    }
    return false;
  }

  void seek_slots(TierMask tiers, uint32_t want) {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (has(tiers, tier)) slots[at(tier)].seek(want);
    }
  }

  // Claims row i of `out` for `page`. True if it is new, pending or present in a tier asked for.
  bool claim_row(PageId page, TierMask tiers, size_t i, ClaimBatch* out) {
    bool is_new = false, is_there = false;
    for (int tier = 0; tier < kTiers; ++tier) {
      if (!has(tiers, tier)) continue;
      const ClaimOutcome outcome = claim(page, tier);
      const size_t column = i * kTiers + at(tier);
      out->outcomes[column] = outcome;
      if (outcome == ClaimOutcome::kNew) {
        is_new = true;
        out->slots[column] = pages.slot(page, tier);
        out->numbers[column] = pages.number(page, tier);
      }
      is_there |= outcome == ClaimOutcome::kPending || outcome == ClaimOutcome::kPresent;
    }
    if (is_new) {
      add_page_pins(page, 1, true);
      for (int tier = 0; tier < kTiers; ++tier) {
        const size_t column = i * kTiers + at(tier);
        if (out->outcomes[column] == ClaimOutcome::kPresent) out->slots[column] = pages.slot(page, tier);
      }
    }
    if (is_new || is_there) out->pages[i] = page;
    return is_new || is_there;
  }

  static void reset(ClaimBatch* out, size_t n) {
    out->pages.assign(n, kNoPage);
    out->outcomes.assign(n * kTiers, ClaimOutcome::kNone);
    out->slots.assign(n * kTiers, kNoSlot);
    out->numbers.assign(n * kTiers, 0);
    out->full_at = UINT32_MAX;
    out->lacking = 0;
  }

  static void fill_row(ClaimBatch* out, size_t i, TierMask tiers, ClaimOutcome outcome) {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (has(tiers, tier)) out->outcomes[i * kTiers + at(tier)] = outcome;
    }
  }

  void check_name_space(uint32_t name_space) const {
    const std::lock_guard lock(mutex);
    if (name_space >= namespaces.size()) throw std::invalid_argument("no namespace " + std::to_string(name_space));
  }

  void claim_path(const int32_t* tokens, const Key* keys, uint32_t first_page, uint32_t total, TierMask tiers,
                  NodeId root, ClaimBatch* out, const uint8_t* row_tiers);

  // What extend_match() takes a match further by.
  struct Extension {
    const Key* keys;
    uint32_t count;
    const uint8_t* offered;
    TierMask usable;
    int staging;
    ClaimBatch* out;
  };
  bool extend_row(PageId page, uint32_t i, const Extension& by, Lease* lease, MatchResult* result);
  bool can_extend(const MatchResult& found, const Extension& by) const {
    return !poisoned.load(std::memory_order_relaxed) && found.epoch == epoch && by.count > 0;
  }
  template <typename F>
  MatchResult extend(const MatchResult& found, const Extension& by, F&& along);
  void extend_path(uint32_t name_space, const int32_t* tokens, uint32_t first, const Extension& by, Lease* lease,
                   MatchResult* result);
  void extend_keys(uint8_t kind, uint32_t first, const Extension& by, Lease* lease, MatchResult* result);
  void recover(Tier tier, const uint32_t* want, const Label* labels, const uint64_t* stamps, size_t count,
               uint8_t* accepted);
  void rank_recovered(int tier, const std::vector<std::pair<PageId, uint64_t>>& recovered,
                      const std::unordered_set<PageId>& had_children);
  bool may_leave(PageId page, int tier) const;
  void find_last_old(int tier);
  void lift_ancestors(int tier);
  std::string check();
  std::string check_records() const;
  std::string check_tree() const;
  std::string check_tiers() const;
  std::string check_pins() const;
  std::string check_holds() const;
  std::string check_courtesies() const;
};

namespace {

void check_keys(const Key* keys, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (keys[i].length == 0 || keys[i].length > kMaxKeyBytes) {
      throw std::invalid_argument("key " + std::to_string(i) + " has " + std::to_string(keys[i].length) +
                                  " bytes; 1 to 64 are possible");
    }
  }
}

}  // namespace

Index::Index(uint32_t page_tokens) {
  if (page_tokens == 0) throw std::invalid_argument("page_tokens is 0");
  impl_ = std::make_unique<Impl>(page_tokens);
}
Index::~Index() = default;
uint32_t Index::page_tokens() const noexcept { return impl_->pages.page_tokens(); }

// ---- slots ---------------------------------------------------------------------------------------------------------

void Index::add_slots(Tier tier, uint32_t first, uint32_t count, bool closed) {
  impl_->locked([&] {
    impl_->slots[at(tier)].add(first, count);
    if (closed) impl_->slots[at(tier)].close(first);
    uint64_t total = 0;
    for (const SlotRanges& ranges : impl_->slots) total += ranges.capacity();
    impl_->pages.reserve(total);
  });
}

void Index::open_slots(Tier tier, uint32_t first) {
  impl_->locked([&] { impl_->slots[at(tier)].open(first); });
}
void Index::close_slots(Tier tier, uint32_t first) {
  impl_->locked([&] { impl_->slots[at(tier)].close(first); });
}

uint32_t Index::drop_slots(Tier tier, uint32_t first) {
  return impl_->locked([&] { return impl_->slots[at(tier)].drop(first); });
}

// ---- namespaces, epochs --------------------------------------------------------------------------------------------

uint32_t Index::open_namespace(const uint8_t* seed) {
  return impl_->locked([&] {
    Namespace space;
    space.has_seed = seed != nullptr;
    if (seed != nullptr) std::memcpy(space.seed.data(), seed, kDigestBytes);
    const auto [known, is_new] =
        impl_->namespace_ids.try_emplace({space.has_seed, space.seed}, static_cast<uint32_t>(impl_->namespaces.size()));
    if (is_new) impl_->namespaces.push_back(space);
    return known->second;
  });
}

void Index::set_epoch(uint64_t epoch) {
  impl_->locked([&] {
    if (epoch == impl_->epoch) return;
    impl_->apply_touches();
    for (Hold& hold : impl_->holds) {
      if (hold.owners > 0) impl_->end_hold(&hold);
    }
    impl_->end_oldest_courtesies(kTiers, impl_->courtesies.size());
    impl_->epoch = epoch;
    for (int tier = 0; tier < kTiers; ++tier) {
      Rank& rank = impl_->ranks[at(tier)];
      std::vector<PageId> old;
      for (uint32_t page = rank.first(); page != Rank::kNone; page = rank.after(page)) {
        if (impl_->pages.epoch(page) != epoch) old.push_back(page);
      }
      for (auto page = old.rbegin(); page != old.rend(); ++page) {
        rank.leave(*page);
        rank.enter_lowest(*page, impl_->now());
      }
      impl_->last_old[at(tier)] = old.empty() ? kNoPage : old.back();
    }
    for (auto it = impl_->roots.begin(); it != impl_->roots.end();) {
      if (it->first.second != epoch && impl_->tree.node(it->second).children == 0) {
        impl_->tree.drop_root(it->second);
        it = impl_->roots.erase(it);
      } else {
        ++it;
      }
    }
    for (uint32_t i = 0; i < impl_->namespaces.size(); ++i) {
      const auto root = impl_->roots.find({i, epoch});
      impl_->namespaces[i].root = root == impl_->roots.end() ? kNoNode : root->second;
    }
  });
}

uint64_t Index::epoch() const {
  return impl_->locked([&] { return impl_->epoch; });
}

// ---- match ---------------------------------------------------------------------------------------------------------

MatchResult Index::match_and_pin(uint32_t name_space, const int32_t* tokens, uint64_t count, TierMask usable) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  const uint32_t page_tokens = in.pages.page_tokens();
  const uint32_t total = static_cast<uint32_t>(std::min<uint64_t>(count / page_tokens, kUnknownDepth - 1));
  Impl::Hashes hashes;
  MatchResult result;
  for (bool is_done = false; !is_done;) {
    uint32_t hash_from = 0;
    in.locked([&] {
      if (in.poisoned.load(std::memory_order_relaxed)) {
        result.miss = Miss::kPoisoned;
        is_done = true;
        return;
      }
      Survey found = in.survey(name_space, tokens, total, usable, &hashes);
      in.graft(name_space, tokens, &found);
      hash_from = found.hash_from;
      if (found.wants_hashes) return;
      is_done = true;
      result.epoch = in.epoch;
      result.pages = found.usable;
      result.pending = found.pending;
      result.miss = found.miss;
      result.spans = std::move(found.spans);
      if (result.pages == 0) return;
      // Deepest first: then each page enters the rank below those of its ancestors that are still to come.
      for (auto page = found.leaving.rbegin(); page != found.leaving.rend(); ++page) {
        in.make_resident(page->page, page->tier, Move::kKeep);
      }
      Lease lease;
      lease.spans.resize(result.spans.size());
      NodeId below = found.place.node;
      PageId end = kNoPage;
      for (size_t i = result.spans.size(); i-- > 0;) {
        lease.spans[i] = in.pin_span(below, result.spans[i]);
        below = lease.spans[i].end;
        if (end == kNoPage) end = in.tree.node(below).pages.back();
      }
      result.lease = in.make_lease(std::move(lease));
      in.log_touch(end, result.pages);
    });
    if (!is_done) hashes.extend(hash_from, tokens, total, page_tokens);
  }
  return result;
}

uint32_t Index::match_length(uint32_t name_space, const int32_t* tokens, uint64_t count, TierMask usable,
                             uint32_t* pending) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  const uint32_t page_tokens = in.pages.page_tokens();
  const uint32_t total = static_cast<uint32_t>(std::min<uint64_t>(count / page_tokens, kUnknownDepth - 1));
  if (pending != nullptr) *pending = 0;
  Impl::Hashes hashes;
  for (;;) {
    if (poisoned()) return 0;
    const Survey found = in.locked([&] { return in.survey(name_space, tokens, total, usable, &hashes); });
    if (!found.wants_hashes) {
      if (pending != nullptr) *pending = found.pending;
      return found.usable;
    }
    hashes.extend(found.hash_from, tokens, total, page_tokens);
  }
}

MatchResult Index::match_keys_and_pin(const Key* keys, uint32_t count, uint8_t kind, TierMask usable) {
  Impl& in = *impl_;
  check_keys(keys, count);
  return in.locked([&] {
    MatchResult result;
    result.epoch = in.epoch;
    if (in.poisoned.load(std::memory_order_relaxed)) {
      result.miss = Miss::kPoisoned;
      return result;
    }
    Lease lease;
    uint32_t i = 0;
    lease.loose.reserve(count);
    for (; i < count; ++i) {
      if (i + kAhead < count) in.pages.prefetch(keys[i + kAhead], kind, in.epoch);
      const PageId page = in.pages.find(keys[i], kind, in.epoch);
      const Standing stands = standing(page == kNoPage ? 0 : in.pages.residency(page), usable);
      if (stands.tier == kNoTier) {
        result.miss = stands.arriving ? Miss::kPending : stands.quarantined ? Miss::kQuarantined : Miss::kAbsent;
        break;
      }
      if (stands.leaving) in.make_resident(page, stands.tier, Move::kKeep);
      in.add_page_pins(page, 1, false);
      lease.loose.push_back({page, stands.tier});
      if (!result.spans.empty() && static_cast<uint8_t>(result.spans.back().tier) == stands.tier) {
        ++result.spans.back().pages;
      } else {
        result.spans.push_back({i, 1, static_cast<Tier>(stands.tier)});
      }
    }
    result.pages = i;
    for (uint32_t k = i; result.miss == Miss::kPending && k < count; ++k) {
      const PageId page = in.pages.find(keys[k], kind, in.epoch);
      const Standing stands = standing(page == kNoPage ? 0 : in.pages.residency(page), usable);
      if (stands.tier == kNoTier && !stands.arriving) break;
      ++result.pending;
    }
    if (i == 0) return result;
    // One touch for each stretch of keys that follow one another in their chain.
    uint32_t run = 1;
    for (uint32_t k = 0; k < i; ++k, ++run) {
      const PageId page = lease.loose[k].page;
      if (k + 1 < i && in.pages.parent(lease.loose[k + 1].page) == page) continue;
      const uint32_t depth = in.pages.depth(page);
      in.log_touch(page, depth == kUnknownDepth ? run : depth + 1);
      run = 0;
    }
    result.lease = in.make_lease(std::move(lease));
    return result;
  });
}

uint32_t Index::touch(const Label* labels, size_t count) {
  Impl& in = *impl_;
  return in.locked([&] {
    uint32_t found = 0;
    if (in.poisoned.load(std::memory_order_relaxed)) return found;
    PageId last = kNoPage;  // touched once its chain goes no further
    uint64_t steps = 0, run = 0;
    const auto touch_last = [&] {
      if (last == kNoPage) return;
      const uint32_t depth = in.pages.depth(last);
      const uint64_t path = depth == kUnknownDepth ? run : depth + uint64_t{1};
      in.log_touch(last, path);
      steps += path;
    };
    for (size_t i = 0; i < count && steps < kLogPages; ++i) {
      const PageId page = in.pages.find(labels[i].key, labels[i].kind, in.epoch);
      if (page == kNoPage || labels[i].epoch != in.epoch) continue;
      const Standing stands = standing(in.pages.residency(page), (1u << kTiers) - 1);
      if (stands.tier == kNoTier || stands.leaving) continue;
      ++found;
      ++run;
      if (last != kNoPage && in.pages.parent(page) != last) {
        touch_last();
        run = 1;
      }
      last = page;
    }
    touch_last();
    return found;
  });
}

uint32_t Index::lease_pages(uint64_t lease_id, uint32_t first_page, uint32_t count, PageId* pages, uint8_t* tiers,
                            uint32_t* slots) const {
  Impl& in = *impl_;
  return in.locked([&] {
    const Lease& lease = in.live_lease(lease_id);
    uint32_t written = 0;
    const auto put = [&](PageId page, uint8_t tier) {
      pages[written] = page;
      tiers[written] = tier;
      slots[written] = in.pages.slot(page, tier);
      ++written;
    };
    std::vector<PageId> ids;
    for (const LeaseSpan& span : lease.spans) {
      if (written == count) break;
      if (span.first_page + span.pages <= first_page) continue;
      const uint32_t skip = first_page > span.first_page ? first_page - span.first_page : 0;
      ids.clear();
      in.span_pages(span, skip, std::min(span.pages - skip, count - written), &ids);
      for (const PageId page : ids) put(page, span.tier);
    }
    const uint32_t in_spans = lease.span_pages();
    for (uint32_t i = std::max(first_page, in_spans) - in_spans; i < lease.loose.size() && written < count; ++i)
      put(lease.loose[i].page, lease.loose[i].tier);
    return written;
  });
}

uint32_t Index::lease_length(uint64_t lease) const {
  return impl_->locked([&] { return impl_->live_lease(lease).pages(); });
}

void Index::retain(uint64_t lease) {
  impl_->locked([&] { ++impl_->live_lease(lease).owners; });
}

bool Index::release(uint64_t lease_id) {
  Impl& in = *impl_;
  // A forked child drops what it inherited: the mutex may be held there for good, and the pins are the parent's.
  if (in.pid != ::getpid()) return false;
  return in.locked([&] {
    Lease* lease = in.find_lease(lease_id);
    if (lease == nullptr) return false;
    if (--lease->owners > 0) return true;
    for (const LeaseSpan& span : lease->spans) in.unpin_span(span);
    for (const LoosePin& pin : lease->loose) in.add_page_pins(pin.page, -1, false);
    for (const LoosePin& pin : lease->loose) {
      if (in.pages.exists(pin.page)) in.drop_if_dead(pin.page);
    }
    lease->spans.clear();
    lease->loose.clear();
    in.free_leases.push_back(static_cast<uint32_t>(lease_id));
    --in.live_leases;
    return true;
  });
}

void Index::shorten(uint64_t lease_id, uint32_t pages) {
  Impl& in = *impl_;
  in.locked([&] {
    Lease& lease = in.live_lease(lease_id);
    const uint32_t in_spans = lease.span_pages();
    while (!lease.loose.empty() && in_spans + lease.loose.size() > pages) {
      const PageId page = lease.loose.back().page;
      lease.loose.pop_back();
      in.add_page_pins(page, -1, false);
      in.drop_if_dead(page);
    }
    while (!lease.spans.empty() && lease.spans.back().first_page >= pages) {
      in.unpin_span(lease.spans.back());
      lease.spans.pop_back();
    }
    if (lease.spans.empty()) return;
    LeaseSpan& span = lease.spans.back();
    const uint32_t end = span.first_page + span.pages;
    if (end <= pages) return;
    NodeId node = span.end;
    for (;;) {
      if (in.tree.node(node).start < pages) in.tree.split(node, pages - in.tree.node(node).start);
      const NodeId parent = in.tree.node(node).parent;
      const bool is_last = in.tree.node(node).start == pages;
      in.tree.unpin(node, span.tier);
      node = parent;
      if (is_last) break;
    }
    span.end = node;
    span.pages = pages - span.first_page;
  });
}

MatchResult Index::shorten_match(const MatchResult& found, uint32_t pages) {
  MatchResult result = found;
  if (pages >= found.pages) return result;
  if (pages == 0) {
    release(found.lease);
    result.lease = 0;
  } else {
    shorten(found.lease, pages);
  }
  while (!result.spans.empty() && result.spans.back().first_page >= pages) result.spans.pop_back();
  if (!result.spans.empty()) result.spans.back().pages = pages - result.spans.back().first_page;
  result.pages = pages;
  result.pending = 0;
  result.miss = Miss::kAbsent;
  return result;
}

// ---- a match continued ---------------------------------------------------------------------------------------------

// Pins row i's page where it is, or claims it. False: the match ends before it.
bool Index::Impl::extend_row(PageId page, uint32_t i, const Extension& by, Lease* lease, MatchResult* result) {
  const Standing stands = standing(pages.residency(page), by.usable);
  int tier = by.staging;
  ClaimOutcome outcome = ClaimOutcome::kPresent;
  if (stands.tier != kNoTier) {
    tier = stands.tier;
    if (stands.leaving) make_resident(page, tier, Move::kKeep);
  } else if (pages.residency(page, tier) == Residency::kArriving) {
    outcome = ClaimOutcome::kPending;
  } else if (stands.arriving || stands.quarantined || by.offered[i] == 0) {
    result->miss = stands.arriving ? Miss::kPending : stands.quarantined ? Miss::kQuarantined : Miss::kAbsent;
    result->pending = stands.arriving ? 1 : 0;  // at least
    return false;
  } else {
    outcome = claim(page, tier);
    if (outcome != ClaimOutcome::kNew) return false;  // no slot
    add_page_pins(page, 1, true);
  }
  add_page_pins(page, 1, false);
  lease->loose.push_back({page, static_cast<uint8_t>(tier)});
  const size_t column = size_t{i} * kTiers + at(tier);
  by.out->pages[i] = page;
  by.out->outcomes[column] = outcome;
  by.out->slots[column] = pages.slot(page, tier);
  by.out->numbers[column] = pages.number(page, tier);
  if (!result->spans.empty() && static_cast<int>(result->spans.back().tier) == tier) {
    ++result->spans.back().pages;
  } else {
    result->spans.push_back({result->pages, 1, static_cast<Tier>(tier)});
  }
  ++result->pages;
  return true;
}

template <typename F>
MatchResult Index::Impl::extend(const MatchResult& found, const Extension& by, F&& along) {
  MatchResult result = found;
  reset(by.out, by.count);
  if (!can_extend(found, by)) return result;
  result.miss = Miss::kAbsent;
  result.pending = 0;
  Lease fresh;
  Lease* lease = &fresh;
  if (found.lease != 0) lease = &live_lease(found.lease);
  seek_slots(mask(static_cast<Tier>(by.staging)), by.count);
  along(lease, &result);
  if (result.pages == found.pages) return found;  // it was right about what follows, but for what is offered
  if (result.pages == found.pages + by.count) result.miss = Miss::kNone;
  if (lease == &fresh) result.lease = make_lease(std::move(fresh));
  return result;
}

void Index::Impl::extend_path(uint32_t name_space, const int32_t* tokens, uint32_t first, const Extension& by,
                              Lease* lease, MatchResult* result) {
  const size_t page_tokens = pages.page_tokens();
  const uint32_t total = first + by.count;
  TreePlace place = tree.walk(root_of(name_space), tokens, total);
  const uint32_t walked = place.depth;
  if (walked < first) return;  // the pages before are another chain's: no lease of these tokens
  std::vector<PageId> known;
  if (walked > first) span_pages({place.node, 0, walked, 0}, first, walked - first, &known);
  PageId last = kNoPage;
  for (uint32_t i = 0; i < by.count; ++i) {
    PageId page;
    bool fits = true;
    if (first + i < walked) {
      page = known[i];
      fits = pages.has_key(page, by.keys[i].bytes.data(), by.keys[i].length);
    } else {
      page = pages.find(by.keys[i], kKv, epoch);
      if (page == kNoPage) {
        if (by.offered[i] == 0 || slots[at(by.staging)].claimable() == 0) break;
        page = pages.create(by.keys[i], kKv, epoch);
      } else {
        fits = !contradicts(page, place);
      }
      if (fits) attach(&place, page, tokens + (first + i) * page_tokens);
    }
    if (!fits) break;
    last = page;
    if (!extend_row(page, i, by, lease, result)) break;
  }
  if (last == kNoPage) return;
  log_touch(last, pages.depth(last) + 1);
  drop_if_dead(last);
}

void Index::Impl::extend_keys(uint8_t kind, uint32_t, const Extension& by, Lease* lease, MatchResult* result) {
  for (uint32_t i = 0; i < by.count; ++i) {
    PageId page = pages.find(by.keys[i], kind, epoch);
    if (page == kNoPage) {
      if (by.offered[i] == 0 || slots[at(by.staging)].claimable() == 0) return;
      page = pages.create(by.keys[i], kind, epoch);
    }
    if (extend_row(page, i, by, lease, result)) {
      log_touch(page, 1);
      continue;
    }
    drop_if_dead(page);
    return;
  }
}

MatchResult Index::extend_match(const MatchResult& found, uint32_t name_space, const int32_t* tokens, const Key* keys,
                                uint32_t count, const uint8_t* offered, TierMask usable, Tier staging,
                                ClaimBatch* out) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  check_keys(keys, count);
  const Impl::Extension by{keys, count, offered, usable, static_cast<int>(staging), out};
  return in.locked([&] {
    return in.extend(found, by, [&](Lease* lease, MatchResult* result) {
      in.extend_path(name_space, tokens, found.pages, by, lease, result);
    });
  });
}

MatchResult Index::extend_match_keys(const MatchResult& found, const Key* keys, uint32_t count, uint8_t kind,
                                     const uint8_t* offered, TierMask usable, Tier staging, ClaimBatch* out) {
  Impl& in = *impl_;
  check_keys(keys, count);
  const Impl::Extension by{keys, count, offered, usable, static_cast<int>(staging), out};
  return in.locked([&] {
    return in.extend(found, by,
                     [&](Lease* lease, MatchResult* result) { in.extend_keys(kind, found.pages, by, lease, result); });
  });
}

void Index::lease_states(uint64_t lease_id, std::vector<PageId>* pages, std::vector<uint8_t>* tiers,
                         std::vector<uint32_t>* slots, std::vector<uint32_t>* numbers,
                         std::vector<uint8_t>* residencies) const {
  Impl& in = *impl_;
  in.locked([&] {
    const Lease& lease = in.live_lease(lease_id);
    pages->clear();
    tiers->clear();
    for (const LeaseSpan& span : lease.spans) {
      in.span_pages(span, 0, span.pages, pages);
      tiers->resize(pages->size(), span.tier);
    }
    for (const LoosePin& pin : lease.loose) {
      pages->push_back(pin.page);
      tiers->push_back(pin.tier);
    }
    slots->resize(pages->size());
    numbers->resize(pages->size());
    residencies->resize(pages->size());
    for (size_t i = 0; i < pages->size(); ++i) {
      const PageId page = (*pages)[i];
      const int tier = (*tiers)[i];
      (*slots)[i] = in.pages.slot(page, tier);
      (*numbers)[i] = in.pages.number(page, tier);
      (*residencies)[i] = static_cast<uint8_t>(in.pages.residency(page, tier));
    }
  });
}

Key Index::lease_key(uint64_t lease_id, uint32_t page) const {
  Impl& in = *impl_;
  return in.locked([&] {
    const Lease& lease = in.live_lease(lease_id);
    if (page >= lease.pages()) throw std::invalid_argument("the lease has no page " + std::to_string(page));
    const uint32_t in_spans = lease.span_pages();
    if (page >= in_spans) return in.pages.key(lease.loose[page - in_spans].page);
    std::vector<PageId> ids;
    for (const LeaseSpan& span : lease.spans) {
      if (page < span.first_page + span.pages) {
        in.span_pages(span, page - span.first_page, 1, &ids);
        break;
      }
    }
    return in.pages.key(ids.at(0));
  });
}

// ---- holds ---------------------------------------------------------------------------------------------------------

void Index::set_keeping(TierMask tiers) {
  impl_->locked([&] {
    if (!impl_->hold_of_end.empty()) throw std::invalid_argument("tiers that keep cannot change while holds live");
    impl_->keeping = tiers;
  });
}

HoldResult Index::hold(uint32_t name_space, const int32_t* tokens, uint64_t count, uint64_t most_pages) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  const uint32_t page_tokens = in.pages.page_tokens();
  const uint32_t total = static_cast<uint32_t>(std::min<uint64_t>(count / page_tokens, kUnknownDepth - 1));
  constexpr TierMask kAnywhere = (1u << kTiers) - 1;
  Impl::Hashes hashes;
  HoldResult result;
  for (bool is_done = false; !is_done;) {
    uint32_t hash_from = 0;
    in.locked([&] {
      is_done = true;
      result.held = in.held_pages;
      if (in.poisoned.load(std::memory_order_relaxed)) return;
      Survey found = in.survey(name_space, tokens, total, kAnywhere, &hashes, true);
      in.graft(name_space, tokens, &found);
      hash_from = found.hash_from;
      is_done = !found.wants_hashes;
      const uint32_t covered = found.usable + found.pending;
      if (!is_done || covered == 0) return;
      NodeId node = found.place.node;
      while (in.tree.node(node).start >= covered) node = in.tree.node(node).parent;
      const PageId end = in.tree.node(node).pages[covered - 1 - in.tree.node(node).start];
      for (PageId page = end; page != kNoPage; page = in.pages.parent(page)) result.added += in.pages.holds(page) == 0;
      in.log_touch(end, covered);
      result.refused = result.added > 0 && result.held + result.added > most_pages;
      if (result.refused) return;
      result.hold = in.make_hold(end);
      result.held = in.held_pages;
      result.pages = in.kept_run(end);
      result.pending = covered - result.pages;
    });
    if (!is_done) hashes.extend(hash_from, tokens, total, page_tokens);
  }
  return result;
}

bool Index::unhold(uint64_t hold_id) {
  Impl& in = *impl_;
  return in.locked([&] {
    Hold* hold = in.find_hold(hold_id);
    if (hold == nullptr) return false;
    if (hold->owners > 1) {
      --hold->owners;
    } else {
      in.end_hold(hold);
    }
    return true;
  });
}

void Index::hold_extent(uint64_t hold_id, uint32_t* pages, uint32_t* pending) const {
  Impl& in = *impl_;
  in.locked([&] {
    const Hold* hold = in.find_hold(hold_id);
    *pages = hold == nullptr ? 0 : in.kept_run(hold->end);
    *pending = hold == nullptr ? 0 : in.pages.depth(hold->end) + 1 - *pages;
  });
}

uint64_t Index::holds() const {
  return impl_->locked([&] { return impl_->hold_of_end.size(); });
}
uint64_t Index::held_pages() const {
  return impl_->locked([&] { return impl_->held_pages; });
}

// ---- courtesies ----------------------------------------------------------------------------------------------------

void Index::keep_until(uint64_t lease_id, double now, double until) {
  Impl& in = *impl_;
  in.locked([&] {
    const Lease& lease = in.live_lease(lease_id);
    in.end_due_courtesies(now);
    if (in.poisoned.load(std::memory_order_relaxed) || until <= now) return;
    std::vector<PageId> ids, fresh;
    ids.reserve(lease.pages());
    for (const LeaseSpan& span : lease.spans) in.span_pages(span, 0, span.pages, &ids);
    for (const LoosePin& pin : lease.loose) ids.push_back(pin.page);
    std::erase_if(ids, [&](PageId page) { return in.pages.epoch(page) != in.epoch; });
    in.courtesies.add(ids, until, &fresh);
    for (const PageId page : fresh) {
      in.add_page_pins(page, 1, false);
      in.count_courtesy(page, 1);
    }
    for (int tier = 0; tier < kTiers; ++tier) {
      const uint64_t most = in.courtesies_most(tier), here = in.courtesies_in[at(tier)];
      if (here > most) in.end_oldest_courtesies(tier, here - most);
    }
    if (in.courtesies.size() > kMostCourtesies)
      in.end_oldest_courtesies(kTiers, in.courtesies.size() - kMostCourtesies);
  });
}

void Index::allow_courtesies(Tier tier, uint64_t pages) {
  impl_->locked([&] { impl_->courtesies_allowed[at(tier)] = pages; });
}

uint32_t Index::spend(const Key* keys, uint32_t count, uint8_t kind, const uint8_t* rows) {
  Impl& in = *impl_;
  check_keys(keys, count);
  return in.locked([&] {
    uint32_t ended = 0;
    if (in.courtesies.size() == 0) return ended;
    for (uint32_t i = 0; i < count; ++i) {
      if (i + kAhead < count) in.pages.prefetch(keys[i + kAhead], kind, in.epoch);
      if (rows[i] == 0) continue;
      const PageId page = in.pages.find(keys[i], kind, in.epoch);
      if (page == kNoPage || !in.courtesies.has(page)) continue;
      in.end_courtesy(page);
      ++ended;
    }
    return ended;
  });
}

uint32_t Index::end_due_courtesies(double now) {
  return impl_->locked([&] { return impl_->end_due_courtesies(now); });
}

void Index::end_courtesies() {
  impl_->locked([&] { impl_->end_oldest_courtesies(kTiers, impl_->courtesies.size()); });
}

uint32_t Index::end_older_courtesies(Tier tier) {
  Impl& in = *impl_;
  return in.locked([&] {
    const uint64_t here = in.courtesies_in[at(tier)];
    return here == 0 ? 0u : in.end_oldest_courtesies(static_cast<int>(tier), here - here / 2);
  });
}

bool Index::has_courtesy(const PageId* pages, size_t count) const {
  return impl_->locked(
      [&] { return std::any_of(pages, pages + count, [&](PageId page) { return impl_->courtesies.has(page); }); });
}

uint64_t Index::courtesies() const {
  return impl_->locked([&] { return impl_->courtesies.size(); });
}

void Index::list_courtesies(std::vector<PageId>* pages, std::vector<double>* until) const {
  pages->clear();
  until->clear();
  impl_->locked([&] {
    impl_->courtesies.each([&](PageId page) {
      pages->push_back(page);
      until->push_back(impl_->courtesies.until(page));
      return true;
    });
  });
}

// ---- claims --------------------------------------------------------------------------------------------------------

void Index::Impl::claim_path(const int32_t* tokens, const Key* keys, uint32_t first_page, uint32_t total,
                             TierMask tiers, NodeId root, ClaimBatch* out, const uint8_t* row_tiers) {
  const size_t page_tokens = pages.page_tokens();
  const auto tiers_of = [&](uint32_t i) {
    return row_tiers == nullptr ? tiers : static_cast<TierMask>(tiers & row_tiers[i - first_page]);
  };
  TreePlace place = tree.walk(root, tokens, total);
  const uint32_t walked = place.depth;
  const uint32_t start = std::min(first_page, walked);
  const uint32_t known_from = start > 0 ? start - 1 : 0;
  std::vector<PageId> known;
  if (walked > 0) span_pages({place.node, 0, walked, 0}, known_from, walked - known_from, &known);
  seek_slots(tiers, total - first_page);
  bool has_sought = false;
  PageId last = start > 0 ? known[0] : kNoPage;
  for (uint32_t i = start; i < total; ++i) {
    if (i + kAhead < total) pages.prefetch(keys[i + kAhead], kKv, epoch);
    PageId page;
    bool fits = true;
    if (i < walked) {
      page = known[i - known_from];
      fits = pages.has_key(page, keys[i].bytes.data(), keys[i].length);
    } else {
      page = pages.find(keys[i], kKv, epoch);
      if (page == kNoPage) {
        if (i >= first_page && !any_claimable(tiers_of(i))) {
          fill_row(out, i - first_page, tiers_of(i), ClaimOutcome::kFull);
          out->full_at = i;
          break;
        }
        if (!has_sought) pages.seek(total - i);
        has_sought = true;
        page = pages.create(keys[i], kKv, epoch);
      } else {
        fits = !contradicts(page, place);
      }
      if (fits) attach(&place, page, tokens + i * page_tokens);
    }
    if (!fits) {  // these tokens and this key do not belong together
      if (i >= first_page) fill_row(out, i - first_page, tiers_of(i), ClaimOutcome::kRefused);
      out->full_at = std::max(i, first_page);
      break;
    }
    last = page;
    if (i >= first_page && !claim_row(page, tiers_of(i), i - first_page, out)) {
      out->full_at = i;
      break;
    }
  }
  if (last == kNoPage) return;
  log_touch(last, pages.depth(last) + 1);
  drop_if_dead(last);
}

void Index::claim_absent(uint32_t name_space, const int32_t* tokens, const Key* keys, uint32_t first_page,
                         uint32_t total, TierMask tiers, ClaimBatch* out, const uint8_t* row_tiers) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  if (first_page > total || total >= kUnknownDepth) {
    throw std::invalid_argument("pages " + std::to_string(first_page) + " to " + std::to_string(total) +
                                " are no range");
  }
  check_keys(keys, total);
  Impl::reset(out, total - first_page);
  if (first_page == total) return;
  in.locked([&] {
    if (in.poisoned.load(std::memory_order_relaxed)) {
      Impl::fill_row(out, 0, tiers, ClaimOutcome::kRefused);
      out->full_at = first_page;
      return;
    }
    in.claim_path(tokens, keys, first_page, total, tiers, in.root_of(name_space), out, row_tiers);
  });
}

void Index::claim_absent_keys(const Key* keys, uint32_t count, uint8_t kind, ParentState parent_state,
                              const Key& parent, TierMask tiers, ClaimBatch* out, const uint8_t* row_tiers) {
  Impl& in = *impl_;
  check_keys(keys, count);
  if (parent_state == ParentState::kKnown) check_keys(&parent, 1);
  Impl::reset(out, count);
  if (count == 0) return;
  in.locked([&] {
    if (in.poisoned.load(std::memory_order_relaxed)) {
      for (uint32_t i = 0; i < count; ++i) Impl::fill_row(out, i, tiers, ClaimOutcome::kRefused);
      out->full_at = 0;
      return;
    }
    in.seek_slots(tiers, count);
    in.pages.seek(count + 1);
    std::vector<PageId> made;
    const auto find_or_create = [&](const Key& key) {
      PageId page = in.pages.find(key, kind, in.epoch);
      if (page == kNoPage) {
        page = in.pages.create(key, kind, in.epoch);
        made.push_back(page);
      }
      return page;
    };
    PageId before = parent_state == ParentState::kKnown ? find_or_create(parent) : kNoPage;
    uint32_t run = 1;
    for (uint32_t i = 0; i < count; ++i, ++run) {
      if (i + kAhead < count) in.pages.prefetch(keys[i + kAhead], kind, in.epoch);
      const PageId page = find_or_create(keys[i]);
      const bool is_chained = before != kNoPage && in.try_link(page, before);
      if (i == 0 && parent_state == ParentState::kRoot && in.pages.parent_state(page) == ParentState::kUnknown &&
          (in.pages.depth(page) == kUnknownDepth || in.pages.depth(page) == 0)) {
        in.pages.parent_state(page) = ParentState::kRoot;
        in.pages.depth(page) = 0;
      }
      if (before != kNoPage && !is_chained) {
        in.log_touch(before, run);
        run = 0;
      }
      const TierMask meant = row_tiers == nullptr ? tiers : static_cast<TierMask>(tiers & row_tiers[i]);
      if (!in.claim_row(page, meant, i, out) && out->full_at == UINT32_MAX) out->full_at = i;
      before = page;
    }
    in.log_touch(before, run);
    for (auto page = made.rbegin(); page != made.rend(); ++page) {
      if (in.pages.exists(*page)) in.drop_if_dead(*page);
    }
  });
}

void Index::claim_leased(uint64_t lease_id, Tier tier, const uint8_t* rows, ClaimBatch* out) {
  Impl& in = *impl_;
  in.locked([&] {
    const std::vector<PageId> ids = in.lease_ids(in.live_lease(lease_id));
    Impl::reset(out, ids.size());
    in.seek_slots(mask(tier), static_cast<uint32_t>(ids.size()));
    for (uint32_t i = 0; i < ids.size(); ++i) {
      if (rows != nullptr && rows[i] == 0) continue;
      if (in.poisoned.load(std::memory_order_relaxed)) {
        Impl::fill_row(out, i, mask(tier), ClaimOutcome::kRefused);
        continue;
      }
      if (!in.claim_row(ids[i], mask(tier), i, out) && out->full_at == UINT32_MAX) out->full_at = i;
    }
  });
}

void Index::claim_copies(uint64_t lease_id, Tier source, Tier target, uint32_t most, ClaimBatch* out, TierMask unless) {
  Impl& in = *impl_;
  const int from = static_cast<int>(source), to = static_cast<int>(target);
  Impl::reset(out, 0);
  in.locked([&] {
    const Lease& lease = in.live_lease(lease_id);
    if (in.poisoned.load(std::memory_order_relaxed)) return;
    std::vector<PageId> ids;
    const auto look = [&](PageId page) {
      if (ids.size() >= most || in.pages.residency(page, from) != Residency::kResident ||
          in.pages.residency(page, to) != Residency::kAbsent)
        return;
      const Standing elsewhere = standing(in.pages.residency(page), unless);
      if (elsewhere.tier == kNoTier && !elsewhere.arriving) ids.push_back(page);
    };
    for (const LoosePin& pin : lease.loose) look(pin.page);
    std::vector<PageId> covered;
    for (const LeaseSpan& span : lease.spans) {
      covered.clear();
      in.span_pages(span, 0, span.pages, &covered);
      for (const PageId page : covered) look(page);
    }
    const size_t room = std::min<uint64_t>(ids.size(), in.slots[at(to)].claimable());
    Impl::reset(out, room);
    if (room < ids.size()) out->full_at = static_cast<uint32_t>(room);
    out->lacking = static_cast<uint32_t>(ids.size() - room);
    in.seek_slots(mask(target), static_cast<uint32_t>(room));
    for (size_t i = 0; i < room; ++i) {
      in.claim_row(ids[i], mask(target), i, out);
      out->outcomes[i * kTiers + at(from)] = ClaimOutcome::kPresent;
      out->slots[i * kTiers + at(from)] = in.pages.slot(ids[i], from);
    }
  });
}

void Index::pin_copies(uint64_t lease_id, Tier tier, const uint32_t* numbers, ClaimBatch* out) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  in.locked([&] {
    const std::vector<PageId> ids = in.lease_ids(in.live_lease(lease_id));
    Impl::reset(out, ids.size());
    if (in.poisoned.load(std::memory_order_relaxed)) return;
    for (uint32_t i = 0; i < ids.size(); ++i) {
      const Residency is = in.pages.residency(ids[i], t);
      if (numbers[i] == 0 || (is != Residency::kArriving && is != Residency::kResident)) continue;
      if (in.pages.number(ids[i], t) != numbers[i]) continue;
      const size_t column = size_t{i} * kTiers + at(t);
      in.add_page_pins(ids[i], 1, true);
      out->pages[i] = ids[i];
      out->outcomes[column] = is == Residency::kResident ? ClaimOutcome::kPresent : ClaimOutcome::kPending;
      out->slots[column] = in.pages.slot(ids[i], t);
      out->numbers[column] = numbers[i];
    }
  });
}

Status Index::commit(PageId page, Tier tier, uint32_t number) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  return in.locked([&] {
    if (!in.is_claimed(page, t, number, Residency::kArriving)) return Status::kStale;
    in.make_resident(page, t, Move::kCommit);
    return Status::kOk;
  });
}

Status Index::abort(PageId page, Tier tier, uint32_t number) {
  return impl_->abort(page, static_cast<int>(tier), number, SlotUse::kFree);
}

Status Index::abort_owed(PageId page, Tier tier, uint32_t number) {
  return impl_->abort(page, static_cast<int>(tier), number, SlotUse::kOwed);
}

void Index::unpin_pages(const PageId* pages, size_t count) {
  Impl& in = *impl_;
  in.locked([&] {
    for (size_t i = 0; i < count; ++i) {
      if (in.pages.exists(pages[i]) && in.pages.claim_pins(pages[i]) > 0) {
        in.add_page_pins(pages[i], -1, true);
        continue;
      }
      for (size_t k = 0; k < i; ++k) in.add_page_pins(pages[k], 1, true);  // refused whole
      throw std::invalid_argument("page " + std::to_string(pages[i]) + " has no pin of a claim to return");
    }
    for (size_t i = 0; i < count; ++i) {
      if (in.pages.exists(pages[i])) in.drop_if_dead(pages[i]);
    }
  });
}

void Index::labels(const PageId* pages, size_t count, Label* out) const {
  const Impl& in = *impl_;
  impl_->locked([&] {
    for (size_t i = 0; i < count; ++i) {
      if (!in.pages.exists(pages[i])) throw std::invalid_argument("no page " + std::to_string(pages[i]));
    }
    for (size_t i = 0; i < count; ++i) {
      const PageId page = pages[i];
      Label label;
      label.key = in.pages.key(page);
      label.parent_state = in.pages.parent_state(page);
      if (label.parent_state == ParentState::kKnown) label.parent = in.pages.key(in.pages.parent(page));
      label.kind = in.pages.kind(page);
      label.depth = in.pages.depth(page);
      label.epoch = in.pages.epoch(page);
      out[i] = label;
    }
  });
}

// ---- eviction ------------------------------------------------------------------------------------------------------

void Index::pin_resident(Tier tier, PageId after, uint32_t n, std::vector<PageId>* pages,
                         std::vector<uint32_t>* slots) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  pages->clear();
  slots->clear();
  in.locked([&] {
    for (PageId page = after == kNoPage ? 0 : after + 1; page < in.pages.id_limit() && pages->size() < n; ++page) {
      if (!in.pages.exists(page) || in.pages.residency(page, t) != Residency::kResident) continue;
      pages->push_back(page);
      slots->push_back(in.pages.slot(page, t));
      in.add_page_pins(page, 1, true);
    }
  });
}

Tier Index::pin_in_any(PageId page, TierMask usable, uint32_t* slot) {
  Impl& in = *impl_;
  return in.locked([&] {
    if (in.poisoned.load(std::memory_order_relaxed) || !in.pages.exists(page)) return Tier::kDevice;
    for (int t = static_cast<int>(Tier::kDevice) + 1; t < kTiers; ++t) {
      if (!has(usable, t) || in.pages.residency(page, t) != Residency::kResident) continue;
      in.add_page_pins(page, 1, true);
      *slot = in.pages.slot(page, t);
      return static_cast<Tier>(t);
    }
    return Tier::kDevice;
  });
}

void Index::claim_victims(Tier tier, uint32_t n, uint32_t only_range, std::vector<Victim>* out) {
  impl_->locked([&] { impl_->choose_victims(static_cast<int>(tier), n, only_range, out); });
}

void Index::take_victims(Tier tier, uint32_t n, uint32_t only_range, std::vector<uint32_t>* slots, bool even_held) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  std::vector<Victim> victims;
  slots->clear();
  in.locked([&] {
    in.choose_victims(t, n, only_range, &victims, even_held);
    slots->reserve(victims.size());
    for (const Victim& victim : victims) {
      slots->push_back(victim.slot);
      in.leave(victim.page, t);
      if (even_held && in.pages.exists(victim.page)) in.rescue(victim.page);
    }
  });
}

Status Index::finish(PageId page, Tier tier, uint32_t number) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  return in.locked([&] {
    if (!in.is_claimed(page, t, number, Residency::kLeaving)) return Status::kStale;
    in.leave(page, t);
    return Status::kOk;
  });
}

Status Index::keep(PageId page, Tier tier, uint32_t number) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  return in.locked([&] {
    if (!in.is_claimed(page, t, number, Residency::kLeaving)) return Status::kStale;
    in.make_resident(page, t, Move::kKeep);
    return Status::kOk;
  });
}

namespace {

// Gives slots of use `from` back as free; refused whole where one is of another use or named twice.
void give_back(SlotRanges* ranges, SlotUse from, const uint32_t* slots, size_t count, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    if (ranges->use(slots[i]) == from) {
      ranges->set_use(slots[i], SlotUse::kFree);
      continue;
    }
    for (size_t k = 0; k < i; ++k) ranges->take_back(slots[k], from);
    throw std::invalid_argument("slot " + std::to_string(slots[i]) + " is not " + what);
  }
}

}  // namespace

void Index::free_slots(Tier tier, const uint32_t* slots, size_t count) {
  impl_->locked([&] { give_back(&impl_->slots[at(tier)], SlotUse::kReturning, slots, count, "on its way back"); });
}

void Index::owe_slots(Tier tier, const uint32_t* slots, size_t count) {
  impl_->locked([&] {
    SlotRanges& ranges = impl_->slots[at(tier)];
    for (size_t i = 0; i < count; ++i) {
      const SlotUse use = ranges.use(slots[i]);
      if (use != SlotUse::kReturning && use != SlotUse::kFree)
        throw std::invalid_argument("slot " + std::to_string(slots[i]) + " is neither on its way back nor free");
    }
    for (size_t i = 0; i < count; ++i) {
      if (!ranges.take_at(slots[i], SlotUse::kOwed)) ranges.set_use(slots[i], SlotUse::kOwed);
    }
  });
}

void Index::take_owed(Tier tier, uint32_t n, uint32_t only_range, std::vector<uint32_t>* out) {
  Impl& in = *impl_;
  out->clear();
  in.locked([&] {
    SlotRanges& ranges = in.slots[at(tier)];
    uint32_t& next = in.next_owed[at(tier)];
    uint32_t first = 0, last = kNoSlot - 1;
    if (only_range != kNoSlot) std::tie(first, last) = in.range_of(static_cast<int>(tier), only_range);
    const auto most = static_cast<size_t>(std::min<uint64_t>(n, ranges.used(SlotUse::kOwed)));
    out->reserve(most);
    const uint32_t start = next < first || next > last ? first : next;
    const auto take = [&](uint32_t from, uint32_t to) {
      while (out->size() < most && (from = ranges.find_use(SlotUse::kOwed, from, to)) != kNoSlot) {
        ranges.set_use(from, SlotUse::kReturning);
        out->push_back(from);
        next = ++from;
      }
    };
    take(start, last);
    if (start > first) take(first, start - 1);
  });
}

bool Index::quarantine(PageId page, Tier tier, uint32_t slot) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  return in.locked([&] {
    if (!in.pages.exists(page) || in.pages.slot(page, t) != slot) return false;
    if (in.pages.residency(page, t) == Residency::kLeaving) in.make_resident(page, t, Move::kKeep);
    if (in.pages.residency(page, t) != Residency::kResident) return false;
    in.apply_touches();
    in.move(page, t, Move::kQuarantine);
    in.pages.handed_out(page) = static_cast<uint8_t>(in.pages.handed_out(page) & ~mask(tier));
    in.quarantined[at(t)].push_back(page);
    in.rescue(page);
    return true;
  });
}

void Index::claim_quarantined(Tier tier, uint32_t n, std::vector<Victim>* out, bool even_retired) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  out->clear();
  in.locked([&] {
    for (const PageId page : in.quarantined[at(t)]) {
      if (out->size() >= n) break;
      if ((has(in.pages.handed_out(page), t) && !even_retired) || in.is_pinned(page, t)) continue;
      in.pages.handed_out(page) = static_cast<uint8_t>(in.pages.handed_out(page) | mask(tier));
      out->push_back({page, in.pages.slot(page, t), in.next_number(page, t)});
    }
  });
}

Status Index::mend(PageId page, Tier tier, uint32_t number, bool mended, bool retired) {
  Impl& in = *impl_;
  const int t = static_cast<int>(tier);
  return in.locked([&] {
    if (!in.pages.exists(page) || in.pages.number(page, t) != number ||
        in.pages.residency(page, t) != Residency::kQuarantined || !has(in.pages.handed_out(page), t)) {
      return Status::kStale;
    }
    in.next_number(page, t);
    if (!mended && retired) return Status::kOk;  // handed_out stays set: it is not handed out again
    in.pages.handed_out(page) = static_cast<uint8_t>(in.pages.handed_out(page) & ~mask(tier));
    std::vector<PageId>& quarantined = in.quarantined[at(t)];
    std::erase(quarantined, page);
    if (!mended) {
      quarantined.push_back(page);  // into the place that it has just left: no allocation
      return Status::kOk;
    }
    in.move(page, t, Move::kMend);
    in.take_slot(page, t, SlotUse::kReturning);
    in.drop_if_dead(page);
    return Status::kOk;
  });
}

void Index::claim_chain(uint32_t name_space, const int32_t* tokens, uint64_t count, uint32_t keep_pages, TierMask tiers,
                        std::vector<Victim> out[kTiers]) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  const uint32_t page_tokens = in.pages.page_tokens();
  const uint32_t total = static_cast<uint32_t>(std::min<uint64_t>(count / page_tokens, kUnknownDepth - 1));
  for (int tier = 0; tier < kTiers; ++tier) out[tier].clear();
  Impl::Hashes hashes;
  for (;;) {
    Survey found;
    in.locked([&] {
      in.apply_touches();
      const NodeId root = in.namespaces[name_space].root;
      found.place = root == kNoNode ? TreePlace{} : in.tree.walk(root, tokens, total);
      std::vector<PageId> chain;
      if (found.place.depth > 0)
        in.span_pages({found.place.node, 0, found.place.depth, 0}, 0, found.place.depth, &chain);
      if (!in.find_behind(name_space, total, &hashes, &found, &chain)) return;
      for (size_t i = chain.size(); i-- > keep_pages;) {
        if (chain[i] == kNoPage || in.pages.holds(chain[i]) > 0) continue;
        for (int tier = 0; tier < kTiers; ++tier) {
          if (!has(tiers, tier) || in.pages.residency(chain[i], tier) != Residency::kResident ||
              in.is_pinned(chain[i], tier))
            continue;
          in.move(chain[i], tier, Move::kClaimVictim);
          out[tier].push_back({chain[i], in.pages.slot(chain[i], tier), in.next_number(chain[i], tier)});
        }
      }
    });
    if (!found.wants_hashes) return;
    hashes.extend(found.hash_from, tokens, total, page_tokens);
  }
}

// ---- private slots -------------------------------------------------------------------------------------------------

bool Index::take_private(Tier tier, uint32_t n, uint32_t* slots) {
  Impl& in = *impl_;
  return in.locked([&] {
    SlotRanges& ranges = in.slots[at(tier)];
    if (in.poisoned.load(std::memory_order_relaxed) || ranges.claimable() < n) return false;
    ranges.seek(n);
    for (uint32_t i = 0; i < n; ++i) slots[i] = ranges.take(SlotUse::kPrivate);
    return true;
  });
}

void Index::free_private(Tier tier, const uint32_t* slots, size_t count) {
  impl_->locked([&] { give_back(&impl_->slots[at(tier)], SlotUse::kPrivate, slots, count, "a private slot"); });
}

ClaimOutcome Index::publish_private(uint32_t name_space, const int32_t* tokens, const Key* keys, uint32_t page_index,
                                    Tier tier, uint32_t slot, PageId* published_page) {
  Impl& in = *impl_;
  in.check_name_space(name_space);
  check_keys(keys, page_index + size_t{1});
  *published_page = kNoPage;
  const int t = static_cast<int>(tier);
  const size_t page_tokens = in.pages.page_tokens();
  return in.locked([&] {
    if (in.slots[at(t)].use(slot) != SlotUse::kPrivate)
      throw std::invalid_argument("slot " + std::to_string(slot) + " is not a private slot");
    if (in.poisoned.load(std::memory_order_relaxed)) return ClaimOutcome::kRefused;
    // Behind a page that is in its place already only this one's tokens are compared: pages are published one after
    // another.
    TreePlace place;
    const PageId before = page_index == 0 ? kNoPage : in.pages.find(keys[page_index - 1], kKv, in.epoch);
    if (before != kNoPage && in.pages.node(before) != kNoNode && in.pages.depth(before) == page_index - 1 &&
        std::memcmp(in.pages.tokens(before), tokens + (page_index - 1) * page_tokens, page_tokens * sizeof(int32_t)) ==
            0) {
      const NodeId node = in.pages.node(before);
      place = {node, page_index - in.tree.node(node).start, page_index};
    } else {
      place = in.tree.walk(in.root_of(name_space), tokens, page_index);
    }
    PageId last = in.page_before(place);
    for (uint32_t i = place.depth; i <= page_index; ++i) {
      PageId page = in.tree.next(place, tokens + i * page_tokens);
      bool fits = true;
      if (page != kNoPage) {
        fits = in.pages.has_key(page, keys[i].bytes.data(), keys[i].length);
      } else {
        page = in.pages.find(keys[i], kKv, in.epoch);
        if (page == kNoPage) {
          page = in.pages.create(keys[i], kKv, in.epoch);
        } else {
          fits = !in.contradicts(page, place);
        }
        if (fits) in.attach(&place, page, tokens + i * page_tokens);
      }
      if (!fits) {
        if (last != kNoPage) in.log_touch(last, i);
        in.drop_if_dead(last);
        return ClaimOutcome::kRefused;
      }
      last = page;
    }
    in.log_touch(last, page_index + uint64_t{1});
    *published_page = last;
    const Residency have = in.pages.residency(last, t);
    if (have != Residency::kAbsent) return in.claim(last, t);
    in.move(last, t, Move::kClaim);
    in.next_number(last, t);
    in.slots[at(t)].set_use(slot, SlotUse::kPage);
    in.pages.slot(last, t) = slot;
    in.make_resident(last, t, Move::kCommit);
    in.add_page_pins(last, 1, true);
    return ClaimOutcome::kNew;
  });
}

// ---- recovery, export, statistics ----------------------------------------------------------------------------------

void Index::recover(Tier tier, const uint32_t* slots, const Label* labels, const uint64_t* stamps, size_t count,
                    uint8_t* accepted) {
  impl_->locked([&] { impl_->recover(tier, slots, labels, stamps, count, accepted); });
}

void Index::Impl::recover(Tier tier, const uint32_t* want, const Label* labels, const uint64_t* stamps, size_t count,
                          uint8_t* accepted) {
  const int t = static_cast<int>(tier);
  apply_touches();
  std::vector<std::pair<PageId, uint64_t>> recovered;  // with stamps
  std::unordered_set<PageId> had_children;             // before this call: something in the rank may descend from them
  std::vector<PageId> relinked;
  pages.seek(static_cast<uint32_t>(std::min<size_t>(count, UINT32_MAX / 2)));
  const auto find_or_create = [&](const Key& key, const Label& label, bool* is_new) {
    PageId page = pages.find(key, label.kind, label.epoch);
    *is_new = page == kNoPage;
    return *is_new ? pages.create(key, label.kind, label.epoch) : page;
  };
  for (size_t i = 0; i < count; ++i) {
    const Label& label = labels[i];
    accepted[i] = 0;
    if (label.key.length == 0 || label.key.length > kMaxKeyBytes) continue;
    const PageId known = pages.find(label.key, label.kind, label.epoch);
    if (known != kNoPage && pages.residency(known, t) != Residency::kAbsent) continue;
    if (!slots[at(t)].take_at(want[i], SlotUse::kPage)) continue;
    const PageId page = known != kNoPage ? known : pages.create(label.key, label.kind, label.epoch);
    move(page, t, Move::kClaim);
    next_number(page, t);
    move(page, t, Move::kCommit);
    pages.slot(page, t) = want[i];
    recovered.emplace_back(page, stamps[i]);
    accepted[i] = 1;
    if (known != kNoPage && pages.children(known) > 0) had_children.insert(page);
  }
  // Links only now, so that a parent of the same batch is found as itself, whatever the order.
  size_t next = 0;
  for (size_t i = 0; i < count; ++i) {
    if (accepted[i] == 0) continue;
    const Label& label = labels[i];
    const PageId page = recovered[next++].first;
    if (pages.parent_state(page) != ParentState::kUnknown) continue;
    const bool was_known = (pages.residency(page) & ~(0xffu << (8 * t))) != 0 || had_children.contains(page);
    if (label.parent_state == ParentState::kRoot) {
      if (pages.depth(page) != kUnknownDepth && pages.depth(page) != 0) continue;
      pages.parent_state(page) = ParentState::kRoot;
      pages.depth(page) = 0;
    } else if (label.parent_state == ParentState::kKnown && label.parent.length > 0 &&
               label.parent.length <= kMaxKeyBytes && label.depth != 0) {
      if (pages.depth(page) == kUnknownDepth && pages.children(page) == 0) pages.depth(page) = label.depth;
      bool is_new;
      const PageId parent = find_or_create(label.parent, label, &is_new);
      if (!try_link(page, parent)) {
        drop_if_dead(parent);
      } else if (was_known) {
        relinked.push_back(page);
      }
    }
  }
  rank_recovered(t, recovered, had_children);
  for (const auto& [page, stamp] : recovered) {
    if (pages.holds(page) > 0) settle(page, kTiers);
  }
  for (int other = 0; other < kTiers; ++other) {
    if (other != t && ranks[at(other)].size() > 0 && !relinked.empty()) lift_ancestors(other);
  }
}

bool Index::Impl::may_leave(PageId page, int tier) const {
  return pages.residency(page, tier) == Residency::kResident && !has(pages.staying(page), tier);
}

void Index::Impl::find_last_old(int tier) {
  last_old[at(tier)] = kNoPage;
  const Rank& rank = ranks[at(tier)];
  for (uint32_t page = rank.first(); page != Rank::kNone && pages.epoch(page) != epoch; page = rank.after(page))
    last_old[at(tier)] = page;
}

// Moves each page that leaves before one of its descendants directly above the one of them that leaves last: after new
// links. Cost: one walk over the rank.
void Index::Impl::lift_ancestors(int tier) {
  Rank& rank = ranks[at(tier)];
  std::vector<bool> seen(pages.id_limit());
  for (uint32_t page = rank.last(); page != Rank::kNone; page = rank.before(page)) {
    uint32_t above = page;
    for (PageId ancestor = page; ancestor != kNoPage && !seen[ancestor]; ancestor = pages.parent(ancestor)) {
      seen[ancestor] = true;
      if (ancestor == page || !may_leave(ancestor, tier)) continue;
      rank.leave(ancestor);
      rank.place_above(ancestor, above, rank.stamp(page));
      above = ancestor;
    }
  }
  rank.order_stamps();
  find_last_old(tier);
}

// Merges the batch into the rank by stamps, a page's use being one of its ancestors too: pages of other epochs among
// themselves, below all of this one. Of two with one stamp the recovered one leaves later. A stamp from the future
// counts as now: no page stays for ever because a clock was wrong.
// Cost: one walk over the rank, a sort of the batch, and each chain once; a second walk where a recovered page had
// children here.
void Index::Impl::rank_recovered(int tier, const std::vector<std::pair<PageId, uint64_t>>& recovered,
                                 const std::unordered_set<PageId>& had_children) {
  Rank& rank = ranks[at(tier)];
  const uint64_t latest = now();
  std::unordered_map<PageId, uint64_t> batch;
  batch.reserve(recovered.size());
  for (const auto& [page, stamp] : recovered) batch.emplace(page, stamp);
  if (!had_children.empty()) {
    std::vector<bool> seen(pages.id_limit());
    for (uint32_t used = rank.last(); used != Rank::kNone; used = rank.before(used)) {
      for (PageId page = used; page != kNoPage && !seen[page]; page = pages.parent(page)) {
        seen[page] = true;
        const auto found = batch.find(page);
        if (found != batch.end()) found->second = std::max(found->second, rank.stamp(used));
      }
    }
  }
  const auto is_old = [&](PageId page) { return pages.epoch(page) != epoch; };
  std::vector<std::pair<PageId, uint64_t>> order;
  order.reserve(recovered.size());
  for (const auto& [page, stamp] : recovered) order.emplace_back(page, batch[page]);
  std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    if (is_old(a.first) != is_old(b.first)) return is_old(b.first);
    if (a.second != b.second) return a.second > b.second;
    return pages.depth(a.first) < pages.depth(b.first);
  });

  // From the page used last down. `below` is the next page of the rank that leaves before what is placed now.
  uint32_t below = rank.last();
  std::vector<bool> placed(pages.id_limit());
  std::vector<PageId> chain;
  for (const auto& recovered_page : order) {
    // Not a structured binding: clang before 16 refuses those in a lambda.
    const PageId start = recovered_page.first;
    const uint64_t stamp = recovered_page.second;
    const auto leaves_later = [&](PageId page) {
      return is_old(page) != is_old(start) ? is_old(start) : rank.stamp(page) > stamp;
    };
    while (below != Rank::kNone && leaves_later(below)) below = rank.before(below);
    chain.clear();
    for (PageId page = start; page != kNoPage && !placed[page]; page = pages.parent(page)) {
      placed[page] = true;
      if (batch.contains(page)) {
        chain.push_back(page);
        continue;
      }
      if (!may_leave(page, tier)) continue;
      // What leaves later than `start` already has its ancestors above it.
      if (below == Rank::kNone || rank.stamp(page) > rank.stamp(below)) break;
      if (page == below) below = rank.before(page);
      rank.leave(page);
      chain.push_back(page);
    }
    for (auto page = chain.rbegin(); page != chain.rend(); ++page)
      rank.place_above(*page, below, std::min(stamp, latest));
  }
  find_last_old(tier);
  rank.lower_stamps(last_old[at(tier)]);
  rank.order_stamps();
}

void Index::take_stamps(Tier tier, size_t most, std::vector<uint32_t>* slots, std::vector<uint64_t>* stamps) {
  Impl& in = *impl_;
  slots->clear();
  stamps->clear();
  in.locked([&] {
    in.apply_touches();
    for (Rank* rank : {&in.ranks[at(tier)], &in.staying[at(tier)]}) {
      while (slots->size() < most && rank->has_changed()) {
        const size_t had = slots->size();
        rank->take_changed(most - had, [&](PageId page, uint64_t stamp) {
          slots->push_back(in.pages.slot(page, static_cast<int>(tier)));
          stamps->push_back(stamp);
        });
        if (slots->size() == had && rank->has_changed()) return;  // it scans: go on in another call
      }
    }
  });
}

bool Index::has_stamps(Tier tier) const {
  return impl_->locked([&] {
    return !impl_->touches.empty() || impl_->ranks[at(tier)].has_changed() || impl_->staying[at(tier)].has_changed();
  });
}

void Index::stand_clock_at(uint64_t ns) {
  impl_->locked([&] { impl_->clock_stands_at = ns; });
}

void Index::rank_order(Tier tier, std::vector<uint32_t>* slots) const {
  Impl& in = *impl_;
  slots->clear();
  in.locked([&] {
    in.apply_touches();
    slots->reserve(in.ranks[at(tier)].size() + in.staying[at(tier)].size());
    for (const Rank* rank : {&in.ranks[at(tier)], &in.staying[at(tier)]}) {
      for (uint32_t page = rank->first(); page != Rank::kNone; page = rank->after(page)) {
        slots->push_back(in.pages.slot(page, static_cast<int>(tier)));
      }
    }
  });
}

std::array<Residency, kTiers> Index::state(const Key& key, uint8_t kind) const {
  Impl& in = *impl_;
  std::array<Residency, kTiers> out{};
  if (key.length == 0 || key.length > kMaxKeyBytes) return out;
  in.locked([&] {
    if (in.poisoned.load(std::memory_order_relaxed)) return;
    const PageId page = in.pages.find(key, kind, in.epoch);
    if (page == kNoPage) return;
    for (int tier = 0; tier < kTiers; ++tier) out[at(tier)] = in.pages.residency(page, tier);
  });
  return out;
}

uint32_t Index::probe(const Key* keys, uint32_t count, uint8_t kind, TierMask usable, uint8_t* tiers) const {
  Impl& in = *impl_;
  check_keys(keys, count);
  return in.locked([&] {
    uint32_t run = 0;
    for (uint32_t i = 0; i < count; ++i) {
      if (i + kAhead < count) in.pages.prefetch(keys[i + kAhead], kind, in.epoch);
      tiers[i] = kNoTier;
      if (in.poisoned.load(std::memory_order_relaxed)) continue;
      const PageId page = in.pages.find(keys[i], kind, in.epoch);
      if (page == kNoPage) continue;
      const Standing stands = standing(in.pages.residency(page), usable);
      if (stands.tier == kNoTier || stands.leaving) continue;
      tiers[i] = stands.tier;
      if (run == i) ++run;
    }
    return run;
  });
}

TierCounts Index::counts(Tier tier) const {
  Impl& in = *impl_;
  return in.locked([&] {
    const size_t t = at(tier);
    const SlotRanges& ranges = in.slots[t];
    const auto pages = [&](Residency residency) { return in.in_state[t][static_cast<size_t>(residency)]; };
    TierCounts out;
    out.capacity = ranges.capacity();
    out.free = ranges.free();
    out.resident = pages(Residency::kResident);
    out.quarantined = pages(Residency::kQuarantined);
    out.arriving = pages(Residency::kArriving) + ranges.used(SlotUse::kPrivate);
    out.owed = ranges.used(SlotUse::kOwed);
    out.leaving = pages(Residency::kLeaving) + ranges.used(SlotUse::kReturning) + out.owed;
    out.held = in.staying[t].size();
    out.pinned = in.page_pinned[t];
    for (const NodeId id : in.tree.pinned()) {
      const Node& node = in.tree.node(id);
      if (node.pins[t] == 0) continue;
      for (const PageId page : node.pages) {
        out.pinned +=
            !in.page_has_pin(page) && in.pages.residency(page, static_cast<int>(tier)) == Residency::kResident;
      }
    }
    return out;
  });
}

uint64_t Index::claimable(Tier tier) const {
  return impl_->locked([&] { return impl_->slots[at(tier)].claimable(); });
}

void Index::prepare(uint32_t pages) {
  while (impl_->locked([&] { return impl_->pages.free_records() < pages; })) {
    std::unique_ptr<PageBlock> block = PageTable::make_block(page_tokens());
    impl_->locked([&] { impl_->pages.add_block(std::move(block)); });
  }
}

uint64_t Index::pages() const {
  return impl_->locked([&] { return impl_->pages.size(); });
}
uint64_t Index::nodes() const {
  return impl_->locked([&] { return impl_->tree.edges(); });
}
void Index::tree(uint32_t most, TreeEdges* out) const {
  Impl& in = *impl_;
  *out = TreeEdges{};
  in.locked([&] {
    const Radix& tree = in.tree;
    // Leaves first, each adds what is in and below it to its parent.
    std::vector<uint64_t> below(tree.id_limit());
    std::vector<uint32_t> waiting(tree.id_limit());
    std::vector<NodeId> edges, ready;
    edges.reserve(tree.edges());
    for (NodeId id = 0; id < tree.id_limit(); ++id) {
      const Node& node = tree.node(id);
      if (node.pages.empty()) continue;
      edges.push_back(id);
      below[id] += node.pages.size();
      out->tree_pages += node.pages.size();
      waiting[id] = node.children;
      if (node.children == 0) ready.push_back(id);
    }
    while (!ready.empty()) {
      const NodeId id = ready.back();
      const NodeId parent = tree.node(id).parent;
      ready.pop_back();
      below[parent] += below[id];
      if (waiting[parent] > 0 && --waiting[parent] == 0) ready.push_back(parent);
    }
    out->edges = edges.size();
    if (edges.size() > most) {
      // A parent has more below it than any of its children: what is chosen is a tree.
      std::nth_element(edges.begin(), edges.begin() + most, edges.end(),
                       [&](NodeId a, NodeId b) { return below[a] != below[b] ? below[a] > below[b] : a < b; });
      edges.resize(most);
    }
    const size_t n = edges.size();
    std::vector<std::pair<uint32_t, NodeId>> order;  // by depth: parents first
    order.reserve(n);
    for (const NodeId id : edges) order.emplace_back(tree.node(id).start, id);
    std::sort(order.begin(), order.end());
    std::unordered_map<NodeId, std::pair<uint32_t, uint64_t>> of_root;
    for (const auto& [name, root] : in.roots) of_root[root] = name;
    std::vector<int32_t> row_of(tree.id_limit(), -1);
    out->residents.assign(n * kTiers, 0);
    for (size_t row = 0; row < n; ++row) {
      const NodeId id = order[row].second;
      const Node& node = tree.node(id);
      const int32_t parent = row_of[node.parent];
      const size_t parent_row = static_cast<size_t>(parent);
      const std::pair<uint32_t, uint64_t> name =
          parent < 0 ? of_root.at(node.parent) : std::pair(out->name_spaces[parent_row], out->epochs[parent_row]);
      for (const PageId page : node.pages) {
        const uint32_t packed = in.pages.residency(page);
        for (int tier = 0; tier < kTiers; ++tier) {
          out->residents[row * kTiers + at(tier)] +=
              ((packed >> (8 * tier)) & 0xff) == static_cast<uint32_t>(Residency::kResident);
        }
      }
      row_of[id] = static_cast<int32_t>(row);
      out->parents.push_back(parent);
      out->name_spaces.push_back(name.first);
      out->epochs.push_back(name.second);
      out->first_pages.push_back(node.start);
      out->pages.push_back(static_cast<uint32_t>(node.pages.size()));
      out->pages_below.push_back(below[id]);
    }
  });
}

uint64_t Index::leases() const {
  return impl_->locked([&] { return impl_->live_leases; });
}
uint64_t Index::bytes() const {
  return impl_->locked([&] {
    uint64_t total = impl_->pages.bytes() + impl_->tree.bytes();
    for (const Rank& rank : impl_->ranks) total += rank.bytes();
    for (const Rank& rank : impl_->staying) total += rank.bytes();
    total += impl_->courtesies.bytes();
    for (const SlotRanges& ranges : impl_->slots) total += ranges.capacity() + ranges.capacity() / 8;
    return total;
  });
}
void Index::poison() noexcept { impl_->poisoned.store(true); }
bool Index::poisoned() const noexcept { return impl_->poisoned.load(); }

// ---- check ---------------------------------------------------------------------------------------------------------

std::string Index::check() const {
  return impl_->locked([&] { return impl_->check(); });
}

std::string Index::Impl::check() {
  apply_touches();
  for (const std::string& wrong :
       {check_records(), check_tree(), check_tiers(), check_pins(), check_holds(), check_courtesies()}) {
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string Index::Impl::check_records() const {
  std::unordered_map<PageId, uint32_t> children;
  uint64_t records = 0;
  for (PageId page = 0; page < pages.id_limit(); ++page) {
    if (!pages.exists(page)) continue;
    ++records;
    const std::string name = "page " + std::to_string(page);
    if (pages.find(pages.key(page), pages.kind(page), pages.epoch(page)) != page)
      return name + " is not found by its key";
    if (is_dead(page)) return name + " is dead and has a record";
    const PageId parent = pages.parent(page);
    if ((parent != kNoPage) != (pages.parent_state(page) == ParentState::kKnown))
      return name + ": parent and parent state differ";
    if (pages.parent_state(page) == ParentState::kRoot && pages.depth(page) != 0)
      return name + " is first of its chain, not at depth 0";
    if (parent == kNoPage) continue;
    if (!pages.exists(parent)) return name + ": its parent has no record";
    if (pages.epoch(parent) != pages.epoch(page) || pages.kind(parent) != pages.kind(page))
      return name + ": its parent is of another epoch or kind";
    if (pages.depth(page) != kUnknownDepth && pages.depth(parent) + 1 != pages.depth(page))
      return name + ": its depth is not its parent's + 1";
    ++children[parent];
  }
  if (records != pages.size())
    return "the page table has " + std::to_string(pages.size()) + " entries, not " + std::to_string(records);
  for (PageId page = 0; page < pages.id_limit(); ++page) {
    if (!pages.exists(page)) continue;
    const auto found = children.find(page);
    if (pages.children(page) != (found == children.end() ? 0 : found->second))
      return "page " + std::to_string(page) + ": wrong count of children";
  }
  return "";
}

std::string Index::Impl::check_tree() const {
  std::unordered_map<NodeId, uint32_t> child_nodes;
  std::unordered_set<NodeId> seen;
  for (PageId page = 0; page < pages.id_limit(); ++page) {
    if (!pages.exists(page) || pages.node(page) == kNoNode) continue;
    const NodeId id = pages.node(page);
    const std::string name = "edge " + std::to_string(id);
    const Node& node = tree.node(id);
    if (pages.depth(page) < node.start || pages.depth(page) >= node.end() ||
        node.pages[pages.depth(page) - node.start] != page) {
      return name + " does not have page " + std::to_string(page) + " at its depth";
    }
    if (!seen.insert(id).second) continue;
    if (node.parent == kNoNode) return name + " has pages and no parent";
    ++child_nodes[node.parent];
    const Node& parent = tree.node(node.parent);
    if (parent.end() != node.start) return name + " does not start where its parent ends";
    PageId before = parent.pages.empty() ? kNoPage : parent.pages.back();
    for (const PageId p : node.pages) {
      if (!pages.exists(p) || pages.node(p) != id) return name + " names a page that does not name it";
      if (pages.parent(p) != before) return name + ": a page's parent is not the page before it";
      before = p;
    }
    const TreePlace place{node.parent, static_cast<uint32_t>(parent.pages.size()), node.start};
    if (tree.next(place, pages.tokens(node.pages[0])) != node.pages[0]) return name + " is not found by its tokens";
  }
  if (seen.size() != tree.edges())
    return "the tree counts " + std::to_string(tree.edges()) + " edges, not " + std::to_string(seen.size());
  if (tree.children() != tree.edges())
    return "the table of children has " + std::to_string(tree.children()) + " entries";
  for (const auto& [id, count] : child_nodes) {
    if (tree.node(id).children != count) return "edge " + std::to_string(id) + ": wrong count of child edges";
  }
  return "";
}

std::string Index::Impl::check_tiers() const {
  for (int t = 0; t < kTiers; ++t) {
    const std::string name = "tier " + std::to_string(t);
    std::array<uint64_t, kResidencies> counted{};
    std::unordered_set<uint32_t> owned;
    uint64_t pinned = 0;
    for (PageId page = 0; page < pages.id_limit(); ++page) {
      if (!pages.exists(page)) continue;
      const Residency residency = pages.residency(page, t);
      if (residency == Residency::kAbsent) {
        if (pages.slot(page, t) != kNoSlot) return name + ": an absent page has a slot";
        continue;
      }
      ++counted[static_cast<size_t>(residency)];
      if (slots[at(t)].use(pages.slot(page, t)) != SlotUse::kPage)
        return name + ": a page's slot is not in use by a page";
      if (!owned.insert(pages.slot(page, t)).second)
        return name + ": two pages have slot " + std::to_string(pages.slot(page, t));
      pinned += residency == Residency::kResident && page_has_pin(page);
      if (residency == Residency::kQuarantined &&
          std::count(quarantined[at(t)].begin(), quarantined[at(t)].end(), page) != 1) {
        return name + ": a quarantined page is not listed once";
      }
    }
    if (counted != in_state[at(t)]) return name + ": pages by residency are miscounted";
    if (counted[static_cast<size_t>(Residency::kQuarantined)] != quarantined[at(t)].size())
      return name + ": quarantined pages are misplaced";
    if (pinned != page_pinned[at(t)]) return name + ": pinned pages are miscounted";
    const SlotRanges& ranges = slots[at(t)];
    uint64_t total = 0;
    for (const SlotUse use : {SlotUse::kFree, SlotUse::kPage, SlotUse::kPrivate, SlotUse::kReturning, SlotUse::kOwed}) {
      if (ranges.count(use) != ranges.used(use)) return name + ": slots are miscounted";
      total += ranges.used(use);
    }
    if (owned.size() != ranges.used(SlotUse::kPage)) return name + ": a slot is in use by no page";
    if (total != ranges.capacity()) return name + ": capacity is not whole";
    std::unordered_map<PageId, uint64_t> position;
    for (uint32_t page = ranks[at(t)].first(); page != Rank::kNone; page = ranks[at(t)].after(page)) {
      if (!pages.exists(page) || pages.residency(page, t) != Residency::kResident)
        return name + ": a ranked page is not resident";
      if (!position.insert({page, position.size()}).second) return name + ": the rank is a cycle";
    }
    if (position.size() + staying[at(t)].size() != counted[static_cast<size_t>(Residency::kResident)] ||
        position.size() != ranks[at(t)].size()) {
      return name + ": a resident page is not ranked";
    }
    for (const Rank* rank : {&ranks[at(t)], &staying[at(t)]}) {
      for (uint32_t page = rank->first(); page != Rank::kNone && page != rank->last(); page = rank->after(page)) {
        if (rank->stamp(page) >= rank->stamp(rank->after(page))) return name + ": stamps are not in the rank's order";
      }
    }
    bool in_old = true;
    PageId expected_last = kNoPage;
    for (uint32_t page = ranks[at(t)].first(); page != Rank::kNone; page = ranks[at(t)].after(page)) {
      if (pages.epoch(page) == epoch) {
        in_old = false;
      } else if (!in_old) {
        return name + ": page " + std::to_string(page) + " of another epoch does not leave first";
      } else {
        expected_last = page;
      }
    }
    if (expected_last != last_old[at(t)]) return name + ": the last page of other epochs is not known";
    for (const auto& [page, place] : position) {
      const PageId ancestor = nearest_ranked_ancestor(page, t);
      if (ancestor != kNoPage && position[ancestor] < place) {
        return name + ": page " + std::to_string(ancestor) + " leaves before its descendant " + std::to_string(page);
      }
    }
  }
  return "";
}

std::string Index::Impl::check_holds() const {
  std::unordered_map<PageId, uint32_t> covered;
  for (const Hold& hold : holds) {
    if (hold.owners == 0) continue;
    const auto known = hold_of_end.find(hold.end);
    if (known == hold_of_end.end() || &holds[known->second] != &hold) return "a hold is not found by its end";
    for (PageId page = hold.end; page != kNoPage; page = pages.parent(page)) ++covered[page];
  }
  if (covered.size() != held_pages) return "held pages are miscounted";
  std::array<uint64_t, kTiers> found{};
  for (PageId page = 0; page < pages.id_limit(); ++page) {
    if (!pages.exists(page)) continue;
    const auto expected = covered.find(page);
    if (pages.holds(page) != (expected == covered.end() ? 0 : expected->second))
      return "page " + std::to_string(page) + ": its holds are miscounted";
    for (int tier = 0; tier < kTiers; ++tier) {
      if (has(pages.staying(page), tier) != must_stay(page, tier))
        return "page " + std::to_string(page) + " wrongly stays or may leave tier " + std::to_string(tier);
      found[at(tier)] += has(pages.staying(page), tier);
    }
    if (pages.holds(page) > 0 && pages.epoch(page) != epoch)
      return "page " + std::to_string(page) + " of another epoch is held";
  }
  for (int tier = 0; tier < kTiers; ++tier) {
    uint64_t listed = 0;
    const Rank& list = staying[at(tier)];
    for (uint32_t page = list.first(); page != Rank::kNone; page = list.after(page)) {
      if (!has(pages.staying(page), tier)) return "page " + std::to_string(page) + " is listed as one that stays";
      if (++listed > list.size()) return "the list of pages that stay is a cycle";
    }
    if (listed != found[at(tier)] || listed != list.size()) return "pages that stay are miscounted";
  }
  return "";
}

std::string Index::Impl::check_courtesies() const {
  const std::string wrong = courtesies.check();
  if (!wrong.empty()) return wrong;
  std::array<uint64_t, kTiers> found{};
  std::string strange;
  courtesies.each([&](PageId page) {
    if (!pages.exists(page) || pages.epoch(page) != epoch) {
      strange = "page " + std::to_string(page) + " has a courtesy, and is not of this epoch";
      return false;
    }
    for (int tier = 0; tier < kTiers; ++tier) found[at(tier)] += pages.residency(page, tier) == Residency::kResident;
    return true;
  });
  if (strange.empty() && found != courtesies_in) strange = "pages with a courtesy are miscounted";
  return strange;
}

std::string Index::Impl::check_pins() const {
  std::unordered_map<PageId, uint32_t> loose;
  courtesies.each([&](PageId page) {
    ++loose[page];
    return true;
  });
  std::unordered_map<NodeId, std::array<uint32_t, kTiers>> pins;
  uint64_t live = 0;
  for (const Lease& lease : leases) {
    live += lease.owners > 0;
    if (lease.owners == 0) continue;
    for (const LoosePin& pin : lease.loose) ++loose[pin.page];
    for (const LeaseSpan& span : lease.spans) {
      NodeId node = span.end;
      if (tree.node(node).end() != span.first_page + span.pages) return "a lease does not end where its edge ends";
      for (;; node = tree.node(node).parent) {
        ++pins[node][span.tier];
        if (tree.node(node).start <= span.first_page) break;
      }
      if (tree.node(node).start != span.first_page) return "a lease does not start where its edge starts";
    }
  }
  if (live != live_leases) return "leases are miscounted";
  uint64_t pinned_nodes = 0;
  for (const auto& [id, expected] : pins) {
    ++pinned_nodes;
    const Node& node = tree.node(id);
    if (node.pins != expected) return "edge " + std::to_string(id) + ": its pins are not those of the leases";
    for (const PageId page : node.pages) {
      for (int t = 0; t < kTiers; ++t) {
        const Residency residency = pages.residency(page, t);
        if (expected[at(t)] > 0 && residency != Residency::kResident && residency != Residency::kQuarantined) {
          return "page " + std::to_string(page) + " is pinned in tier " + std::to_string(t) + " and not resident there";
        }
      }
    }
  }
  if (pinned_nodes != tree.pinned().size()) return "an edge has pins of no lease";
  for (PageId page = 0; page < pages.id_limit(); ++page) {
    if (!pages.exists(page)) continue;
    const auto found = loose.find(page);
    if (pages.lease_pins(page) != (found == loose.end() ? 0 : found->second))
      return "page " + std::to_string(page) + ": its pins are not those of the leases";
  }
  return "";
}

}  // namespace stepwell
