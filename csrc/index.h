// Tokens and keys -> pages; and per page and tier: residency, slot, claims, pins, rank. Everything under one mutex.
//
// Structure. A radix tree over tokens with page-aligned edges per (namespace, epoch); a page table keyed by (key, kind,
// epoch); page records as structure of arrays, ids of one insertion contiguous. Each page names its parent page, and
// counts its children: a page record lives while it is claimed or resident anywhere, pinned, or has children (a
// tombstone: the chain below it stays findable).
//
// Invariants, after every call (check() verifies them):
//   I1  per tier: free + arriving + resident + leaving + quarantined = capacity (leaving includes slots on their way
//       back, see finish(), and those that are owed, see owe_slots()).
//   I2  a slot belongs to at most one page, or to a private holder, or is free.
//   I3  moves obey residency.h; a page pinned in a tier is RESIDENT there, but for one that a match was continued with
//       (extend_match) while it was ARRIVING: that one may fail to come, and is then ABSENT and pinned.
//   I4  rank is monotone along a chain: of two resident pages of one tier that may leave, the ancestor leaves later.
//   I5  a match never reports past the first page that is RESIDENT in no usable tier.
//   I6  every pin has a lease, a claim or a courtesy that will return it.
//   I7  a page that a hold covers keeps its last RESIDENT copy in the keeping tiers, until the hold ends or the copy is
//       damaged: there it is out of the rank (`staying`), so that choosing victims costs nothing for it.
//   I8  a page has one courtesy at most, however often it was asked for, and that is one pin; it is of this epoch.
//
// Threads: any. The mutex is never held over a copy, I/O, hashing, or a call out of this file.
// Sources: RadixAttention (arXiv 2312.07104) for the tree; pins on edges and deferred touches are ours.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "geometry.h"
#include "residency.h"
#include "status.h"

namespace stepwell {

using PageId = uint32_t;
constexpr PageId kNoPage = UINT32_MAX;
using TierMask = uint8_t;  // 1 << tier
constexpr TierMask mask(Tier tier) { return static_cast<TierMask>(1u << static_cast<unsigned>(tier)); }

// Why a match ended where it did (of the first page past its end).
enum class Miss : uint8_t { kNone = 0, kAbsent = 1, kPending = 2, kQuarantined = 3, kPoisoned = 4 };

enum class ClaimOutcome : uint8_t {
  kNone = 0,     // tier not asked for
  kNew = 1,      // claimed: ARRIVING, slot and number are set
  kPending = 2,  // another claim is bringing it
  kPresent = 3,  // RESIDENT (or was LEAVING and is kept)
  kFull = 4,     // no free slot in the tier
  kRefused = 5,  // quarantined in that tier
};

struct Span {
  uint32_t first_page;
  uint32_t pages;
  Tier tier;  // the fastest usable tier in which each of them is RESIDENT, and in which they are pinned
};

struct MatchResult {
  uint64_t lease = 0;  // 0 when pages == 0 (nothing pinned)
  uint32_t pages = 0;
  // pages directly behind `pages` that are ARRIVING in a usable tier (or resident behind such a page)
  uint32_t pending = 0;
  Miss miss = Miss::kNone;
  std::vector<Span> spans;
  uint64_t epoch = 0;  // the one that was current when the pages were found
};

struct TierCounts {
  uint64_t capacity = 0, free = 0, arriving = 0, resident = 0, leaving = 0, quarantined = 0;
  uint64_t pinned = 0;  // RESIDENT and not evictable because of a pin
  uint64_t held = 0;    // RESIDENT and not evictable because of a hold (pinned or not)
  uint64_t owed = 0;    // of leaving: slots whose record could not be retired
};

struct HoldResult {
  uint64_t hold = 0;     // 0: nothing is held
  uint32_t pages = 0;    // leading pages that are RESIDENT in a keeping tier
  uint32_t pending = 0;  // pages directly behind them that the hold covers: kept once they arrive in a keeping tier
  uint64_t added = 0;    // pages that no hold covered before
  uint64_t held = 0;     // pages that some hold covers, before this call where it was refused
  bool refused = false;  // held + added would be more than was allowed
};

// Column [i * kTiers + tier] of a claim over n pages.
struct ClaimBatch {
  std::vector<PageId> pages;           // [n]; kNoPage where nothing is claimed and nothing present
  std::vector<ClaimOutcome> outcomes;  // [n * kTiers]
  // [n * kTiers]; slot of a kNew claim; of a kPresent one where this claim pinned the page; else kNoSlot
  std::vector<uint32_t> slots;
  std::vector<uint32_t> numbers;  // [n * kTiers]; claim number of kNew
  // first page that got no slot in any tier asked for; pages from there on were not looked at
  uint32_t full_at = UINT32_MAX;
  uint32_t lacking = 0;  // of claim_copies(): pages that found no slot
};

// Edges of the tree, parents before children.
struct TreeEdges {
  std::vector<int32_t> parents;  // [n]; row of the parent edge, -1 for one behind a root
  std::vector<uint32_t> name_spaces;
  std::vector<uint64_t> epochs;
  std::vector<uint32_t> first_pages;  // depth of the first page
  std::vector<uint32_t> pages;
  std::vector<uint64_t> pages_below;  // with its own: in all edges below it, also those left out
  std::vector<uint32_t> residents;    // [n * kTiers]; pages RESIDENT in each tier
  uint64_t edges = 0;                 // of the whole tree
  uint64_t tree_pages = 0;
};

struct Victim {
  PageId page;
  uint32_t slot;
  uint32_t number;
};

// Pages that courtesies keep at a time, and what of a tier's slots they may keep.
constexpr uint64_t kMostCourtesies = uint64_t{1} << 18;
constexpr double kMostOfTier = 0.75;

class Index {
 public:
  explicit Index(uint32_t page_tokens);
  ~Index();
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  uint32_t page_tokens() const noexcept;

  // ---- slots -------------------------------------------------------------------------------------------------
  // Adds [first, first+count) as free slots. REQUIRES no overlap.
  // closed: they can be recovered into, and are claimed only after open_slots(): for a volume whose records are still
  // being read.
  void add_slots(Tier tier, uint32_t first, uint32_t count, bool closed = false);
  void open_slots(Tier tier, uint32_t first);
  // No new claims from this range from now on. Its free slots leave `free` and capacity at drop_slots().
  void close_slots(Tier tier, uint32_t first);
  // Removes the range if all its slots are free; else returns how many are not.
  uint32_t drop_slots(Tier tier, uint32_t first);

  // ---- namespaces, epochs ------------------------------------------------------------------------------------
  uint32_t open_namespace(const uint8_t* seed);  // 32 bytes or nullptr; the same id for the same seed
  // Pages of other epochs are misses from now on and leave first; running claims of them can still commit and are
  // misses too.
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const;

  // ---- match -------------------------------------------------------------------------------------------------
  // The longest prefix of whole pages, each RESIDENT in a tier of `usable`, pinned. Walks the tree; past its end hashes
  // the tokens (outside the mutex, in batches, stopping at the first unknown key) and probes the page table; pages
  // found by key are grafted into the tree with these tokens. LEAVING pages that are resident nowhere else are kept
  // (Move::kKeep). REQUIRES tokens >= 0. A touch of the path is logged and applied later, in call order.
  MatchResult match_and_pin(uint32_t name_space, const int32_t* tokens, uint64_t count, TierMask usable);
  // The same without pinning, touching or keeping: how many pages would match. Cost: no writes.
  uint32_t match_length(uint32_t name_space, const int32_t* tokens, uint64_t count, TierMask usable, uint32_t* pending);
  // Leading run of keys, pinned one by one.
  MatchResult match_keys_and_pin(const Key* keys, uint32_t count, uint8_t kind, TierMask usable);
  // Counts pages that are RESIDENT somewhere as used, each with its ancestors: what neighbours read. In the order given,
  // pages of one chain together; of more than a bound of steps the rest is left out. Returns how many were found.
  uint32_t touch(const Label* labels, size_t count);
  // Pages, tiers and slots of a lease, in order, from `first_page` on. Returns how many were written. REQUIRES the
  // lease is live.
  uint32_t lease_pages(uint64_t lease, uint32_t first_page, uint32_t count, PageId* pages, uint8_t* tiers,
                       uint32_t* slots) const;
  uint32_t lease_length(uint64_t lease) const;  // pages. REQUIRES the lease is live
  void retain(uint64_t lease);                  // one more owner
  bool release(uint64_t lease);  // false: unknown or already released by all (a double release: the caller raises)
  // Drops the pins past `pages`; the lease then covers the first `pages` only.
  void shorten(uint64_t lease, uint32_t pages);
  // The same for a match; without a page left its lease is released.
  MatchResult shorten_match(const MatchResult& found, uint32_t pages);

  // ---- a match continued with what somebody else has -----------------------------------------------------------
  // Takes a match further than it came by itself, along keys[i] of the pages behind it, as far as each is RESIDENT in a
  // tier of `usable`, or ARRIVING in `staging`, or offered[i] and then claimed there (kNew; page-pinned once, as by
  // claim_absent(), until unpin_pages()). All of them are pinned by the lease, page by page: one that is ARRIVING may
  // still fail, and is then ABSENT and pinned. Row i of *out is about keys[i]: kPresent, kPending or kNew in the tier
  // it is pinned in, with slot and number; rows past the end are kNone. Unchanged where the epoch is another one now.
  // `found` is consumed: its lease goes on in what is returned.
  MatchResult extend_match(const MatchResult& found, uint32_t name_space, const int32_t* tokens, const Key* keys,
                           uint32_t count, const uint8_t* offered, TierMask usable, Tier staging, ClaimBatch* out);
  // The same for a match by keys; pages that are claimed have no known parent.
  MatchResult extend_match_keys(const MatchResult& found, const Key* keys, uint32_t count, uint8_t kind,
                                const uint8_t* offered, TierMask usable, Tier staging, ClaimBatch* out);
  // Pages of a lease with the state of each in the tier it is pinned in, as of one moment.
  void lease_states(uint64_t lease, std::vector<PageId>* pages, std::vector<uint8_t>* tiers,
                    std::vector<uint32_t>* slots, std::vector<uint32_t>* numbers,
                    std::vector<uint8_t>* residencies) const;
  // Key of a page of a lease. REQUIRES the lease is live and has it.
  Key lease_key(uint64_t lease, uint32_t page) const;

  // ---- holds (pins by time) ----------------------------------------------------------------------------------
  // Tiers whose copies a hold keeps. REQUIRES no hold lives.
  void set_keeping(TierMask tiers);
  // Covers the leading pages of some tokens that are RESIDENT, LEAVING or ARRIVING in any tier, as one use of them.
  // Where no other keeping tier has a covered page, its copy does not leave (I7): it is no victim and claim_chain()
  // passes it by. Refused whole where it would add pages and more than most_pages would be held (a use still). The same pages again: the same hold,
  // with one more owner. Cost: one pass over the pages under the mutex, about 30 ns each.
  HoldResult hold(uint32_t name_space, const int32_t* tokens, uint64_t count, uint64_t most_pages);
  // Drops one owner; the last one ends the hold, and its pages count as just used. False: unknown or ended (set_epoch
  // ends all).
  bool unhold(uint64_t hold);
  // What a hold covers now: pages and pending as in HoldResult, 0 and 0 where it has ended.
  void hold_extent(uint64_t hold, uint32_t* pages, uint32_t* pending) const;
  uint64_t holds() const;       // that live
  uint64_t held_pages() const;  // that some hold covers

  // ---- courtesies (leases of probes) --------------------------------------------------------------------------
  // Keeps the pages that a lease covers until `until` (seconds of the caller's clock), which it says is `now`: one pin
  // a page, however often it is asked for; asked for again it ends with the later of both, and counts as the youngest.
  // Courtesies whose end has come end first; those of more than kMostCourtesies pages, or than a tier allows, after:
  // the oldest, of one asking the last page first. Pages of another epoch are passed by. Cost: 9 ns a page asked for
  // again, 17 ns one that was not (measured). REQUIRES the lease is live.
  void keep_until(uint64_t lease, double now, double until);
  // How many pages RESIDENT in a tier courtesies may keep there, and never more than kMostOfTier of its slots.
  void allow_courtesies(Tier tier, uint64_t pages);
  // Ends the courtesies of keys[i] where rows[i] != 0: they were delivered. Returns how many there were.
  uint32_t spend(const Key* keys, uint32_t count, uint8_t kind, const uint8_t* rows);
  // Ends those whose end has come. Returns how many. REQUIRES now is finite.
  uint32_t end_due_courtesies(double now);
  // Ends the older half of those whose pages are RESIDENT in a tier. Returns how many.
  uint32_t end_older_courtesies(Tier tier);
  // Ends all.
  void end_courtesies();
  bool has_courtesy(const PageId* pages, size_t count) const;  // any of them
  uint64_t courtesies() const;
  // Pages with a courtesy, and when each ends: the oldest first. For tests and tools.
  void list_courtesies(std::vector<PageId>* pages, std::vector<double>* until) const;

  // ---- claims ------------------------------------------------------------------------------------------------
  // For pages [first_page, total) of the chain given by tokens (all from 0; count >= total * page_tokens) and
  // keys[total]: claims each that is ABSENT in a tier of `tiers`. Inserts the path. Stops at the first page that is
  // then neither present, pending nor new in any of `tiers` (full_at). Every page with a kNew outcome is page-pinned
  // once (all tiers) until unpin_pages(). Tokens and a key that do not belong together (the path has another key there,
  // or the key lies on another path): kRefused, and it stops. The path counts as used. Poisoned: all kRefused.
  // row_tiers: null, or for each page of the range the tiers of `tiers` that are meant for it, not 0.
  void claim_absent(uint32_t name_space, const int32_t* tokens, const Key* keys, uint32_t first_page, uint32_t total,
                    TierMask tiers, ClaimBatch* out, const uint8_t* row_tiers = nullptr);
  // The same for keys without tokens: consecutive keys are chained; parent of the first: state and key. Does not stop
  // at a full page.
  void claim_absent_keys(const Key* keys, uint32_t count, uint8_t kind, ParentState parent_state, const Key& parent,
                         TierMask tiers, ClaimBatch* out, const uint8_t* row_tiers = nullptr);
  // For pages that the caller has pinned by `lease` (all of it): claims those ABSENT in `tier`, e.g. to promote.
  // outcomes[n] of that tier only. Page-pins as claim_absent does: the copy has to stay when the lease has gone. rows:
  // null for all, else only pages i with rows[i] != 0; the others' outcome is kNone.
  void claim_leased(uint64_t lease, Tier tier, const uint8_t* rows, ClaimBatch* out);
  // For up to `most` pages that the caller has pinned by `lease` and that are RESIDENT in `source` and ABSENT in
  // `target`: claims them in `target`. One row a claimed page, its slot in `source` beside (kPresent). full_at: how many
  // were claimed when the target was full, and lacking: how many found no slot. unless: pages are passed by that one of
  // these tiers has or is getting. Cost where nothing lacks: about 3 ns a page.
  void claim_copies(uint64_t lease, Tier source, Tier target, uint32_t most, ClaimBatch* out, TierMask unless = 0);
  // Page-pins up to n RESIDENT pages of the tier whose id is above `after` (kNoPage: from the first), in the order of
  // ids. For passes over all pages.
  void pin_resident(Tier tier, PageId after, uint32_t n, std::vector<PageId>* pages, std::vector<uint32_t>* slots);
  // Page-pins a page that is RESIDENT in some tier of `usable` other than the device, nearest first; its slot there.
  // Tier::kDevice: there is none, and nothing is pinned.
  Tier pin_in_any(PageId page, TierMask usable, uint32_t* slot);
  // Page-pins, of the pages that the caller has pinned by `lease`, each that is ARRIVING in `tier` by claim numbers[i],
  // or RESIDENT there by it: what comes, or has come, stays until unpin_pages(). Row i says kPending or kPresent in that
  // tier, with slot and number; the others are kNone. numbers[i] 0: not that page.
  void pin_copies(uint64_t lease, Tier tier, const uint32_t* numbers, ClaimBatch* out);
  // kOk, or kStale where the page has moved on (nothing changed). Commit enters the page's rank as just used. A commit
  // of a page of an old epoch succeeds.
  Status commit(PageId page, Tier tier, uint32_t number);
  // ARRIVING -> ABSENT; the slot is free again (its record was never published, or is odd).
  Status abort(PageId page, Tier tier, uint32_t number);
  // The same where the record was published and could not be retired: the slot is owed.
  Status abort_owed(PageId page, Tier tier, uint32_t number);
  void unpin_pages(const PageId* pages, size_t count);
  void labels(const PageId* pages, size_t count, Label* out) const;

  // ---- eviction ----------------------------------------------------------------------------------------------
  // Up to n unpinned RESIDENT pages of lowest rank become LEAVING. only_range: only slots of the range that starts
  // there (kNoSlot: any). even_held: after those, pages that a hold keeps there too: for a range that is lost anyway.
  void claim_victims(Tier tier, uint32_t n, uint32_t only_range, std::vector<Victim>* out);
  // The same with nothing to copy first: RESIDENT -> LEAVING -> ABSENT in one step, so that no match can want a victim
  // again in between. Their slots are as after finish().
  void take_victims(Tier tier, uint32_t n, uint32_t only_range, std::vector<uint32_t>* slots, bool even_held = false);
  // LEAVING -> ABSENT, page pins or not (they hold other tiers). The slot is then neither the page's nor free: retire
  // its record, then free_slots(). kStale: kept by a match meanwhile.
  Status finish(PageId page, Tier tier, uint32_t number);
  Status keep(PageId page, Tier tier, uint32_t number);  // LEAVING -> RESIDENT
  void free_slots(Tier tier, const uint32_t* slots, size_t count);
  // For slots on their way back, and free ones of a closed range, whose record could not be retired: it may name the
  // page before still, which a restart would find again. Nobody gets them until take_owed(). Refused whole where one is
  // neither.
  void owe_slots(Tier tier, const uint32_t* slots, size_t count);
  // Up to n owed slots are on their way back again: in turn, so that one that is owed for ever keeps no other waiting.
  // only_range: as in claim_victims(). Cost where there are any: a scan of the tier's slots.
  void take_owed(Tier tier, uint32_t n, uint32_t only_range, std::vector<uint32_t>* slots);
  // RESIDENT -> QUARANTINED (a LEAVING page is kept first). False where it is neither.
  bool quarantine(PageId page, Tier tier, uint32_t slot);
  // Quarantined pages with pins 0, those first that were tried longest ago, each handed out once until mend().
  // even_retired: also those that are handed out or retired: for a tier that is attached anew.
  void claim_quarantined(Tier tier, uint32_t n, std::vector<Victim>* out, bool even_retired = false);
  // QUARANTINED -> ABSENT if mended (then free_slots()); else it stays, behind all others, and may be claimed again
  // unless it is `retired`: beyond mending for as long as the slot is in use.
  Status mend(PageId page, Tier tier, uint32_t number, bool mended, bool retired = false);
  // Makes every unpinned RESIDENT page of the chain past `keep_pages` (all: 0) that no hold covers LEAVING in all tiers
  // given; deepest first, and behind a page that is not here too: a save of that one would bring them back. For forget().
  void claim_chain(uint32_t name_space, const int32_t* tokens, uint64_t count, uint32_t keep_pages, TierMask tiers,
                   std::vector<Victim> out[kTiers]);

  // ---- private slots (device pages that are being computed and have no key yet) ----------------------------------
  // Counted as arriving. Takes n or none.
  bool take_private(Tier tier, uint32_t n, uint32_t* slots);
  void free_private(Tier tier, const uint32_t* slots, size_t count);
  // Gives the private slot the place of page `page` of the chain: RESIDENT, page-pinned once for the caller. kNew:
  // published; kPending/kPresent as ClaimOutcome says: another has it, the slot stays private; *published_page = the
  // page either way. Slots that are not private: std::invalid_argument, here and in free_private(); free_slots()
  // likewise. Nothing is changed then.
  ClaimOutcome publish_private(uint32_t name_space, const int32_t* tokens, const Key* keys, uint32_t page, Tier tier,
                               uint32_t slot, PageId* published_page);

  // ---- recovery, export, statistics --------------------------------------------------------------------------
  // Pages of an adopted volume: RESIDENT, outside the tree until a query grafts them; ranked by their stamps (rank.h)
  // among all that is resident: one from the future as if used now. Labels are not trusted: what contradicts itself stays unlinked. accepted[i] = 0: the key is resident
  // already in this tier or the slot is not free (the caller retires the record).
  void recover(Tier tier, const uint32_t* slots, const Label* labels, const uint64_t* stamps, size_t count,
               uint8_t* accepted);
  // Slots of RESIDENT pages, first to leave first, those that a hold keeps at the end.
  void rank_order(Tier tier, std::vector<uint32_t>* slots) const;
  // Slots of shared or disk pages whose stamp has changed since it was last taken, and the stamps: at most `most`. Few or
  // none does not mean that it was all: has_stamps(). What a call takes is the caller's to write.
  void take_stamps(Tier tier, size_t most, std::vector<uint32_t>* slots, std::vector<uint64_t>* stamps);
  bool has_stamps(Tier tier) const;
  // From now on the wall clock stands at `ns`; 0: it runs. For tests.
  void stand_clock_at(uint64_t ns);
  std::array<Residency, kTiers> state(const Key& key, uint8_t kind) const;
  // Longest run of keys[i] RESIDENT in `usable` without a pin; tiers[i] = fastest tier or 0xff.
  uint32_t probe(const Key* keys, uint32_t count, uint8_t kind, TierMask usable, uint8_t* tiers) const;
  TierCounts counts(Tier tier) const;
  uint64_t claimable(Tier tier) const;  // free slots in ranges that are not closed

  // Makes room for `pages` more records ahead of need, so that no claim pays for the first touch of their memory
  // (measured: 4 us a 4 KiB page in a virtual machine). For the keeper: allocates and touches outside the mutex.
  void prepare(uint32_t pages);
  uint64_t pages() const;  // page records
  uint64_t nodes() const;  // tree edges
  // The `most` edges with the most pages in and below them, so that an edge's parents are among them. Cost: one pass
  // over all edges (about 30 ns each) and one over the pages of those chosen, under the mutex.
  void tree(uint32_t most, TreeEdges* out) const;
  uint64_t leases() const;
  uint64_t bytes() const;  // memory of records, tree, ranks and maps
  void poison() noexcept;  // from now on every lookup misses
  bool poisoned() const noexcept;
  // Verifies I1..I8 by a full scan; "" or what is wrong. For tests and `verify`.
  std::string check() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepwell
