// All of the core under one roof, from many threads, for a while: index, mover, host slab, shared and disk volumes.
//
//     stepwell_stress [--seconds S] [--threads N] [--seed N]
//
// Threads save, load (page by page, layer by layer, by tokens and by keys), match, evict, demote, forget, hold, change the
// epoch, damage pages, mend them, cancel, close gates; now and then one takes a volume out of service and adopts it again,
// and everything is closed while they are at it, and opened again. For sanitizers: run with -DSTEPWELL_SANITIZE=thread, and
// with address,undefined. Whatever is delivered as right has its own bytes, whatever was claimed is given back.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "fault.h"
#include "mover.h"
#include "sha256.h"
#include "slab.h"
#include "volume_files.h"

#define STRESS_CHECK(condition)                                                    \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace {

using namespace stepwell;
using stepwell::testing::shape_of;
using stepwell::testing::VolumeFiles;

constexpr uint32_t kPageTokens = 4, kChains = 24, kMostPages = 8, kPoolSlots = 2 * kMostPages;
constexpr uint32_t kHostSlots = 12, kVolumes = 3;
constexpr size_t kPool = kPoolColumn;
constexpr auto kHost = static_cast<size_t>(Tier::kHost), kShared = static_cast<size_t>(Tier::kShared),
               kDisk = static_cast<size_t>(Tier::kDisk);
constexpr TierMask kUsable = mask(Tier::kHost) | mask(Tier::kShared) | mask(Tier::kDisk);
constexpr double kWait_s = 60;  // longer than that is a hang

struct Chain {
  std::vector<int32_t> tokens;
  std::vector<Key> keys;
};

// Prefixes of one or two pages are shared by several chains; then they part.
Chain chain_of(uint32_t number) {
  Chain chain;
  for (uint32_t page = 0; page < kMostPages; ++page) {
    const uint32_t branch = page < 1 ? 0 : page < 2 ? number % 4 : number;
    for (uint32_t i = 0; i < kPageTokens; ++i)
      chain.tokens.push_back(static_cast<int32_t>(1000 * branch + 10 * page + i));
  }
  std::vector<uint8_t> hashes(kMostPages * kDigestBytes);
  hash_chain(nullptr, chain.tokens.data(), kMostPages, kPageTokens, hashes.data());
  for (uint32_t page = 0; page < kMostPages; ++page) {
    Key key;
    key.length = kDigestBytes;
    std::memcpy(key.bytes.data(), hashes.data() + page * kDigestBytes, kDigestBytes);
    chain.keys.push_back(key);
  }
  return chain;
}

// The bytes of a page follow from its key.
void fill(std::byte* page, uint64_t bytes, const Key& key) {
  uint64_t word;
  std::memcpy(&word, key.bytes.data(), sizeof(word));
  for (uint64_t at = 0; at < bytes; ++at) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    page[at] = static_cast<std::byte>(word >> 56);
  }
}

struct Counts {
  std::atomic<uint64_t> saves{0}, loads{0}, right{0}, damaged{0}, cancelled{0}, evicted{0}, adopted{0}, reopened{0};
};

// One volume with the files it lies in, which outlive it.
struct Member {
  Tier tier;
  uint32_t number = 0;
  std::unique_ptr<VolumeFiles> files;
  std::shared_ptr<Volume> volume;
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {
    for (uint32_t i = 0; i < kChains; ++i) chains.push_back(chain_of(i));
    for (const Tier tier : {Tier::kShared, Tier::kDisk}) {
      const auto medium = tier == Tier::kShared ? VolumeMedium::kShared : VolumeMedium::kDisk;
      for (uint32_t i = 0; i < kVolumes; ++i) {
        Member member{tier, 0, std::make_unique<VolumeFiles>(medium, shape, 48 << 10), nullptr};
        members_.push_back(std::move(member));
      }
    }
    open();
  }
  ~World() { close(); }

  const PageShape shape = shape_of({512, 192, 320});
  std::vector<Chain> chains;
  Counts counts;

  Index& index() { return *index_; }
  Mover& mover() { return *mover_; }
  Medium* medium(size_t tier) { return media_[tier]; }
  uint32_t name_space() const { return name_space_; }

  // Work is done between enter() and leave(). Who enters waits while everything is closed and opened again.
  bool enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !reopening_ || over_; });
    if (over_) return false;
    ++inside_;
    return true;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    --inside_;
    changed_.notify_all();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

  // Refuses work while threads are in the midst of it; then all goes, and comes back as a next process finds it.
  void reopen() {
    {
      std::unique_lock lock(mutex_);
      reopening_ = true;
    }
    mover_->drain(0.05, true);
    std::unique_lock lock(mutex_);
    STRESS_CHECK(changed_.wait_for(lock, std::chrono::duration<double>(kWait_s), [&] { return inside_ == 0; }));
    close();
    open();
    ++counts.reopened;
    reopening_ = false;
    changed_.notify_all();
  }

  // What the keeper does with a volume that it gives back, and then gets again.
  void cycle_volume(std::mt19937& random) {
    const std::unique_lock keeper(keeper_, std::try_to_lock);
    if (!keeper.owns_lock()) return;
    Member& member = members_[random() % members_.size()];
    const uint32_t first = member.number << kSlotBits;
    if (member.volume != nullptr) {
      index_->close_slots(member.tier, first);
      std::vector<uint32_t> slots;
      index_->take_victims(member.tier, member.volume->header().slots, first, &slots);
      index_->free_slots(member.tier, slots.data(), slots.size());
      if (index_->drop_slots(member.tier, first) > 0) {
        index_->open_slots(member.tier, first);  // pinned, or under way: another time
        return;
      }
      set_of(member.tier).remove(member.number);
      member.volume.reset();
    }
    adopt(member);
  }

  void stamp() {
    const std::unique_lock keeper(keeper_, std::try_to_lock);
    if (!keeper.owns_lock()) return;
    for (const Tier tier : {Tier::kShared, Tier::kDisk}) {
      std::vector<uint32_t> slots;
      std::vector<uint64_t> stamps;
      index_->take_stamps(tier, 1u << 10, &slots, &stamps);
      for (const Member& member : members_) {
        if (member.tier != tier || member.volume == nullptr) continue;
        std::vector<uint32_t> mine;
        std::vector<uint64_t> when;
        for (size_t i = 0; i < slots.size(); ++i) {
          if (slots[i] >> kSlotBits != member.number) continue;
          mine.push_back(slots[i] & kSlotMask);
          when.push_back(stamps[i]);
        }
        STRESS_CHECK(member.volume->write_recency(mine.data(), when.data(), mine.size()) == Status::kOk);
      }
    }
    std::atomic<bool> stop{false};
    members_[0].volume->prefault(&stop);
  }

  // Changes a byte of a page that is pinned, so that no other page is there meanwhile.
  void damage(Tier tier, uint32_t slot, std::mt19937& random) {
    const std::lock_guard keeper(keeper_);
    for (const Member& member : members_) {
      if (member.tier != tier || member.volume == nullptr || member.number != slot >> kSlotBits) continue;
      VolumeFiles::flip(member.files->pages(), member.files->page_at(slot & kSlotMask) + random() % shape.page_bytes());
    }
  }

  // Nothing is under way or pinned.
  void check_settled() {
    STRESS_CHECK(mover_->drain(kWait_s, false));
    STRESS_CHECK(!mover_->poisoned());
    const std::string wrong = index_->check();
    if (!wrong.empty()) std::fprintf(stderr, "%s\n", wrong.c_str());
    STRESS_CHECK(wrong.empty());
    STRESS_CHECK(index_->leases() == 0);
    for (const Tier tier : {Tier::kHost, Tier::kShared, Tier::kDisk}) {
      const TierCounts found = index_->counts(tier);
      STRESS_CHECK(found.arriving == 0 && found.leaving == 0 && found.pinned == 0);
    }
  }

 private:
  VolumeSet& set_of(Tier tier) { return tier == Tier::kShared ? *shared_ : *disk_; }

  void adopt(Member& member) {
    member.volume = member.files->open();
    member.number = set_of(member.tier).add(member.volume);
    const uint32_t first = member.number << kSlotBits, slots = member.volume->header().slots;
    index_->add_slots(member.tier, first, slots, true);
    std::vector<RecoveredPage> pages;
    RecoveryCounts found;
    STRESS_CHECK(member.volume->recover(&pages, &found) == Status::kOk);
    std::vector<uint32_t> places;
    std::vector<Label> labels;
    std::vector<uint64_t> stamps;
    for (const RecoveredPage& page : pages) {
      places.push_back(first | page.slot);
      labels.push_back(page.label);
      stamps.push_back(page.stamp);
    }
    std::vector<uint8_t> accepted(pages.size());
    index_->recover(member.tier, places.data(), labels.data(), stamps.data(), pages.size(), accepted.data());
    for (size_t i = 0; i < pages.size(); ++i) {
      if (accepted[i] == 0) member.volume->retire(pages[i].slot);
    }
    index_->open_slots(member.tier, first);
    counts.adopted += pages.size();
  }

  void open() {
    index_ = std::make_unique<Index>(kPageTokens);
    index_->set_keeping(mask(Tier::kShared) | mask(Tier::kDisk));
    name_space_ = index_->open_namespace(nullptr);
    slab_ = std::make_unique<Slab>(shape, kHostSlots);
    shared_ = std::make_unique<VolumeSet>(false);
    disk_ = std::make_unique<VolumeSet>(true);
    media_ = {nullptr, slab_.get(), shared_.get(), disk_.get()};
    index_->add_slots(Tier::kHost, 0, kHostSlots);
    for (Member& member : members_) adopt(member);
    const uint32_t copies = 1 + random_() % 2;
    mover_ = std::make_unique<Mover>(
        MoverOptions{.copy_threads = copies, .io_threads = 2, .queue_units = 64, .unit_bytes = 4096}, shape,
        index_.get(), media_);
  }

  void close() {
    check_settled();
    mover_.reset();
    for (Member& member : members_) {
      if (member.volume == nullptr) continue;
      set_of(member.tier).remove(member.number);
      member.volume.reset();
    }
    index_.reset();
    disk_.reset();
    shared_.reset();
    slab_.reset();
  }

  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reopening_ = false, over_ = false;  // GUARDED_BY(mutex_)
  uint32_t inside_ = 0;                    // GUARDED_BY(mutex_)
  std::mutex keeper_;                      // members_ while work is done
  std::vector<Member> members_;
  std::unique_ptr<Index> index_;
  std::unique_ptr<Slab> slab_;
  std::unique_ptr<VolumeSet> shared_, disk_;
  std::array<Medium*, kTiers> media_{};
  std::unique_ptr<Mover> mover_;
  uint32_t name_space_ = 0;
};

// What one thread does. Its pool is its own: saves read the first half of it, loads land in the second.
class Worker {
 public:
  Worker(World& world, uint64_t seed)
      : world_(world), random_(static_cast<uint32_t>(seed)), memory_(kPoolSlots * world.shape.page_bytes()) {
    std::vector<StreamView> views;
    for (uint32_t layer = 0; layer < world.shape.layers(); ++layer) {
      StreamView view;
      view.base = memory_.data() + world.shape.layer_offset(layer);
      view.slot_stride = static_cast<int64_t>(world.shape.page_bytes());
      view.outer_stride = view.inner_stride = static_cast<int64_t>(world.shape.layer_bytes(layer));
      view.piece_bytes = world.shape.layer_bytes(layer);
      views.push_back(view);
    }
    pool_ = std::make_shared<const PoolLayout>(world.shape, 1, views, kPoolSlots, true);
  }

  void run() {
    while (world_.enter()) {
      step();
      world_.leave();
    }
  }

 private:
  Index& index() { return world_.index(); }
  uint32_t below(uint32_t limit) { return random_() % limit; }
  std::byte* slot(uint32_t number) { return memory_.data() + number * world_.shape.page_bytes(); }
  Tier lasting() { return below(2) == 0 ? Tier::kShared : Tier::kDisk; }

  void step() {
    const Chain& chain = world_.chains[below(kChains)];
    const uint32_t pages = 1 + below(kMostPages);
    switch (const uint32_t roll = below(100); roll) {
      case 0: index().set_epoch(below(8) == 0); break;
      case 1: world_.cycle_volume(random_); break;
      case 2: world_.stamp(); break;
      case 3: damage(); break;
      case 4: forget(chain); break;
      case 5: hold(chain, pages); break;
      default:
        if (roll < 12)
          look(chain, pages);
        else if (roll < 20)
          mend();
        else if (roll < 36)
          evict();
        else if (roll < 44)
          demote();
        else if (roll < 68)
          save(chain, pages);
        else
          load(chain, pages);
    }
  }

  // Starts a transfer, and lets it run, stops it, or leaves it alone. Null: refused, all is still ours.
  std::shared_ptr<Transfer> start(TransferSpec spec) {
    spec.tag = ++tag_;
    std::shared_ptr<Transfer> transfer;
    Status status;
    for (int i = 0; i < 8; ++i) {
      status = world_.mover().submit(spec, below(4) == 0 ? inbox_ : nullptr, &transfer);
      if (status != Status::kQueueFull) break;
      std::vector<Completion> told;
      inbox_->poll(16, &told);
      std::this_thread::yield();
    }
    STRESS_CHECK(status == Status::kOk || status == Status::kQueueFull || status == Status::kClosed);
    return status == Status::kOk ? transfer : nullptr;
  }

  // True: ended, and what it says may be read.
  bool follow(Transfer& transfer) {
    switch (below(8)) {
      case 0:
        transfer.cancel();
        ++world_.counts.cancelled;
        break;
      case 1:
        transfer.close_gate();
        ++world_.counts.cancelled;
        std::fill(memory_.begin(), memory_.end(), std::byte{0});  // nothing lands in it from here on
        break;
      default: break;
    }
    STRESS_CHECK(transfer.wait(kWait_s));
    return true;
  }

  void give_back(const TransferSpec& spec) {
    std::vector<PageId> pinned;
    for (const PageCopy& page : spec.pages) {
      bool sinks = false;
      for (size_t tier = 1; tier < kTiers; ++tier) {
        if (page.roles[tier] != Role::kSink) continue;
        index().abort(page.page, static_cast<Tier>(tier), page.numbers[tier]);
        sinks = true;
      }
      if (sinks) pinned.push_back(page.page);
    }
    index().unpin_pages(pinned.data(), pinned.size());
    if (spec.lease != 0) STRESS_CHECK(index().release(spec.lease));
  }

  void take_claims(PageCopy& copy, const ClaimBatch& claims, size_t row) {
    for (size_t tier = 1; tier < kTiers; ++tier) {
      if (claims.outcomes[row * kTiers + tier] != ClaimOutcome::kNew) continue;
      copy.roles[tier] = Role::kSink;
      copy.slots[tier] = claims.slots[row * kTiers + tier];
      copy.numbers[tier] = claims.numbers[row * kTiers + tier];
    }
  }

  static bool has_sink(const PageCopy& copy) {
    for (size_t tier = 1; tier < kTiers; ++tier) {
      if (copy.roles[tier] == Role::kSink) return true;
    }
    return false;
  }

  void save(const Chain& chain, uint32_t pages) {
    const std::array<TierMask, 4> choices{mask(Tier::kShared) | mask(Tier::kDisk), mask(Tier::kShared),
                                          mask(Tier::kDisk), mask(Tier::kHost)};
    const TierMask sinks = choices[below(4)];
    ClaimBatch claims;
    const bool by_tokens = below(3) != 0;
    if (by_tokens)
      index().claim_absent(world_.name_space(), chain.tokens.data(), chain.keys.data(), 0, pages, sinks, &claims);
    else
      index().claim_absent_keys(chain.keys.data(), pages, 1, ParentState::kRoot, Key{}, sinks, &claims);
    TransferSpec spec;
    spec.pool = pool_;
    spec.work_class = WorkClass::kSave;
    spec.unpin_pages = true;
    for (uint32_t i = 0; i < pages && i < claims.pages.size(); ++i) {
      PageCopy copy;
      copy.page = claims.pages[i];
      copy.roles[kPool] = Role::kSource;
      copy.slots[kPool] = i;
      take_claims(copy, claims, i);
      if (!has_sink(copy)) continue;
      fill(slot(i), world_.shape.page_bytes(), chain.keys[i]);
      index().labels(&copy.page, 1, &copy.label);
      spec.pages.push_back(copy);
    }
    const std::shared_ptr<Transfer> transfer = start(spec);
    if (transfer == nullptr) return give_back(spec);
    ++world_.counts.saves;
    follow(*transfer);
  }

  void load(const Chain& chain, uint32_t pages) {
    const bool by_tokens = below(3) != 0;
    const MatchResult match = by_tokens ? index().match_and_pin(world_.name_space(), chain.tokens.data(),
                                                                uint64_t{pages} * kPageTokens, kUsable)
                                        : index().match_keys_and_pin(chain.keys.data(), pages, 1, kUsable);
    if (match.pages == 0) return;
    std::array<PageId, kMostPages> ids{};
    std::array<uint8_t, kMostPages> tiers{};
    std::array<uint32_t, kMostPages> slots{};
    STRESS_CHECK(index().lease_pages(match.lease, 0, match.pages, ids.data(), tiers.data(), slots.data()) ==
                 match.pages);
    TransferSpec spec;
    spec.pool = pool_;
    spec.lease = match.lease;
    spec.layer_order = below(2) == 0;
    ClaimBatch claims;
    const bool climbs = below(3) == 0;  // a place nearer to the device on the way
    if (climbs) {
      index().claim_leased(match.lease, below(2) == 0 ? Tier::kHost : Tier::kShared, nullptr, &claims);
      spec.unpin_pages = true;
    }
    for (uint32_t i = 0; i < match.pages; ++i) {
      PageCopy copy;
      copy.page = ids[i];
      index().labels(&copy.page, 1, &copy.label);
      if (climbs) take_claims(copy, claims, i);
      copy.roles[tiers[i]] = Role::kSource;
      copy.slots[tiers[i]] = slots[i];
      copy.roles[kPool] = Role::kSink;
      copy.slots[kPool] = kMostPages + i;
      spec.pages.push_back(copy);
      std::fill_n(slot(kMostPages + i), world_.shape.page_bytes(), std::byte{0xee});
    }
    const std::shared_ptr<Transfer> transfer = start(spec);
    if (transfer == nullptr) return give_back(spec);
    ++world_.counts.loads;
    const bool gate = below(10) == 0;
    if (gate) {
      transfer->close_gate();
      const std::vector<Status> decided = transfer->page_status();
      check(decided, chain);
      std::fill(memory_.begin(), memory_.end(), std::byte{0x11});
      STRESS_CHECK(transfer->wait(kWait_s));
      for (const std::byte byte : memory_) STRESS_CHECK(byte == std::byte{0x11});
      return;
    }
    if (below(10) == 0) transfer->cancel();
    STRESS_CHECK(transfer->wait(kWait_s));
    check(transfer->page_status(), chain);
  }

  void check(const std::vector<Status>& status, const Chain& chain) {
    std::vector<std::byte> expected(world_.shape.page_bytes());
    for (uint32_t i = 0; i < status.size(); ++i) {
      world_.counts.damaged += status[i] == Status::kChecksum;
      if (status[i] != Status::kOk) continue;
      fill(expected.data(), expected.size(), chain.keys[i]);
      STRESS_CHECK(std::memcmp(expected.data(), slot(kMostPages + i), expected.size()) == 0);
      ++world_.counts.right;
    }
  }

  void look(const Chain& chain, uint32_t pages) {
    uint32_t pending = 0;
    index().match_length(world_.name_space(), chain.tokens.data(), uint64_t{pages} * kPageTokens, kUsable, &pending);
    std::array<uint8_t, kMostPages> tiers{};
    index().probe(chain.keys.data(), pages, 1, kUsable, tiers.data());
    index().state(chain.keys[pages - 1], 1);
    TreeEdges edges;
    index().tree(32, &edges);
    index().prepare(64);
    STRESS_CHECK(world_.mover().stats().io_errors == 0);
    std::vector<Completion> told;
    inbox_->poll(16, &told);
  }

  void evict() {
    const std::array<Tier, 3> choices{Tier::kHost, Tier::kShared, Tier::kDisk};
    const Tier tier = choices[below(3)];
    std::vector<uint32_t> slots;
    index().take_victims(tier, 1 + below(6), kNoSlot, &slots);
    for (const uint32_t slot : slots)
      STRESS_CHECK(world_.medium(static_cast<size_t>(tier))->retire(slot) == Status::kOk);
    index().free_slots(tier, slots.data(), slots.size());
    world_.counts.evicted += slots.size();
  }

  // A page that leaves shared memory goes to host memory or to disk first.
  void demote() {
    const Tier target = below(2) == 0 ? Tier::kHost : Tier::kDisk;
    std::vector<Victim> victims;
    index().claim_victims(Tier::kShared, 1 + below(3), kNoSlot, &victims);
    for (const Victim& victim : victims) {
      PageCopy copy;
      copy.page = victim.page;
      try {
        index().labels(&copy.page, 1, &copy.label);
      } catch (const std::invalid_argument&) {
        continue;  // a match wanted it again, another thread evicted it then: its record is gone
      }
      ClaimBatch claim;
      index().claim_absent_keys(&copy.label.key, 1, 1, ParentState::kUnknown, Key{}, mask(target), &claim);
      TransferSpec spec;
      // A page of another epoch has another record there.
      if (claim.pages[0] == copy.page) take_claims(copy, claim, 0);
      if (!has_sink(copy)) {
        if (claim.pages[0] != kNoPage && claim.pages[0] != copy.page) {
          const size_t at = static_cast<size_t>(target);
          if (claim.outcomes[at] == ClaimOutcome::kNew) {
            index().abort(claim.pages[0], target, claim.numbers[at]);
            index().unpin_pages(claim.pages.data(), 1);
          }
        }
        drop(Tier::kShared, victim);
        continue;
      }
      copy.roles[kShared] = Role::kSource;
      copy.slots[kShared] = victim.slot;
      copy.numbers[kShared] = victim.number;
      spec.pages.push_back(copy);
      spec.source_leaving = true;
      spec.unpin_pages = true;
      spec.work_class = WorkClass::kDemote;
      const std::shared_ptr<Transfer> transfer = start(spec);
      if (transfer == nullptr) {
        give_back(spec);
        index().keep(victim.page, Tier::kShared, victim.number);
        continue;
      }
      if (below(8) == 0) transfer->cancel();
      STRESS_CHECK(transfer->wait(kWait_s));
    }
  }

  void drop(Tier tier, const Victim& victim) {
    if (index().finish(victim.page, tier, victim.number) != Status::kOk) return;  // wanted again meanwhile
    STRESS_CHECK(world_.medium(static_cast<size_t>(tier))->retire(victim.slot) == Status::kOk);
    index().free_slots(tier, &victim.slot, 1);
    ++world_.counts.evicted;
  }

  void forget(const Chain& chain) {
    std::array<std::vector<Victim>, kTiers> victims;
    index().claim_chain(world_.name_space(), chain.tokens.data(), chain.tokens.size(), below(4), kUsable,
                        victims.data());
    for (size_t tier = 1; tier < kTiers; ++tier) {
      for (const Victim& victim : victims[tier]) drop(static_cast<Tier>(tier), victim);
    }
  }

  void hold(const Chain& chain, uint32_t pages) {
    const HoldResult held =
        index().hold(world_.name_space(), chain.tokens.data(), uint64_t{pages} * kPageTokens, 2 * kMostPages);
    if (held.hold == 0) return;
    load(chain, pages);
    evict();
    index().unhold(held.hold);
  }

  void damage() {
    const Tier tier = lasting();
    std::vector<PageId> pages;
    std::vector<uint32_t> slots;
    index().pin_resident(tier, kNoPage, 1 + below(8), &pages, &slots);
    if (!pages.empty()) world_.damage(tier, slots.back(), random_);
    index().unpin_pages(pages.data(), pages.size());
  }

  void mend() {
    const Tier tier = lasting();
    std::vector<Victim> damaged;
    index().claim_quarantined(tier, 4, &damaged);
    Medium* medium = world_.medium(static_cast<size_t>(tier));
    for (const Victim& victim : damaged) {
      const bool mended = medium->rewrite_and_check(victim.slot, scratch_) == Status::kOk;
      if (index().mend(victim.page, tier, victim.number, mended) == Status::kOk && mended)
        index().free_slots(tier, &victim.slot, 1);
    }
  }

  World& world_;
  std::mt19937 random_;
  std::vector<std::byte> memory_;
  std::shared_ptr<const PoolLayout> pool_;
  std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>(8);
  Scratch scratch_;
  uint64_t tag_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
  std::map<std::string, double> options{{"--seconds", 4}, {"--threads", 8}, {"--seed", 1}};
  for (int i = 1; i < count; i += 2) {
    if (options.count(arguments[i]) == 0 || i + 1 == count) {
      std::fprintf(stderr, "usage: stepwell_stress [--seconds S] [--threads N] [--seed N]\n");
      return 2;
    }
    options[arguments[i]] = std::atof(arguments[i + 1]);
  }
  const auto seed = static_cast<uint64_t>(options["--seed"]);
  World world(seed);
  {
    std::vector<std::jthread> threads;
    for (uint64_t i = 0; i < static_cast<uint64_t>(options["--threads"]); ++i)
      threads.emplace_back([&world, seed, i] { Worker(world, seed * 1000 + i).run(); });
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(options["--seconds"]);
    while (std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      world.reopen();
    }
    world.end();
  }
  world.check_settled();
  const Counts& done = world.counts;
  std::printf(
      "saves %llu, loads %llu, pages right %llu, damaged %llu, evicted %llu, stopped %llu, adopted %llu, reopened "
      "%llu\n",
      static_cast<unsigned long long>(done.saves), static_cast<unsigned long long>(done.loads),
      static_cast<unsigned long long>(done.right), static_cast<unsigned long long>(done.damaged),
      static_cast<unsigned long long>(done.evicted), static_cast<unsigned long long>(done.cancelled),
      static_cast<unsigned long long>(done.adopted), static_cast<unsigned long long>(done.reopened));
  STRESS_CHECK(done.saves > 0 && done.right > 0 && done.evicted > 0 && done.adopted > 0 && done.reopened > 0);
  return 0;
}
