// What hands out ids, slots and turns, against a plain container of the standard library: through growth, deletion and
// emptiness, with hashes that collide and runs that wrap around.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "page_table.h"
#include "queue.h"
#include "slots.h"

using namespace stepwell;

namespace {

// Whether the table has exactly these: each id under its hash, and nothing under a hash for an id that is not there.
void check_ids(const IdTable& table, const std::map<uint32_t, uint32_t>& have, uint32_t most_ids) {
  REQUIRE(table.size() == have.size());
  for (uint32_t id = 0; id < most_ids; ++id) {
    const auto found = have.find(id);
    const uint32_t hash = found == have.end() ? id * 2654435761u : found->second;
    const uint32_t got = table.find(hash, [&](uint32_t other) { return other == id; });
    REQUIRE(got == (found == have.end() ? IdTable::kNone : id));
  }
}

// Hashes as they hurt: all in one cluster, clusters around the end of the table whatever its size, a few values for
// many ids, or spread.
uint32_t drawn_hash(std::mt19937& random, int kind) {
  switch (kind) {
    case 0: return 0xffffffffu - random() % 8;   // from the last places around to the first
    case 1: return random() % 16 * 0x01000001u;  // few values
    case 2: return (random() % 4 == 0 ? 0u : 0xfffffff0u) + random() % 24;
    default: return random();
  }
}

}  // namespace

TEST_CASE("the id table keeps what a map keeps, from nothing to thousands and back, and its memory is bounded") {
  for (int kind = 0; kind < 4; ++kind) {
    CAPTURE(kind);
    std::mt19937 random(static_cast<uint32_t>(kind) + 3);
    IdTable table;
    std::map<uint32_t, uint32_t> have;  // id -> hash
    // With all in one cluster a look-up walks it: as many as show a fault, no more.
    const uint32_t most = kind == 3 ? 20000 : 700;
    uint64_t bytes = 0;
    for (int round = 0; round < 4; ++round) {
      // Grow, churn about full, shrink to nothing.
      for (const uint32_t aim : {most, most, 0u}) {
        for (uint32_t step = 0; step < 2 * most || (aim == 0 && !have.empty()); ++step) {
          const uint32_t id = random() % most;
          const auto found = have.find(id);
          const bool grows = aim == 0 ? random() % 8 == 0 && step < 2 * most : random() % 4 != 0;
          if (found == have.end() && grows) {
            const uint32_t hash = drawn_hash(random, kind);
            table.insert(hash, id);
            have.emplace(id, hash);
          } else if (aim == 0 && found == have.end() && !have.empty()) {
            const auto any =
                std::next(have.begin(), static_cast<ptrdiff_t>(random() % std::min<size_t>(have.size(), 9)));
            table.erase(any->second, any->first);
            have.erase(any);
          } else if (found != have.end() && !grows) {
            table.erase(found->second, id);
            have.erase(found);
          } else if (found != have.end()) {
            REQUIRE(table.find(found->second, [&](uint32_t other) { return other == id; }) == id);
          }
          if (kind != 3 && step % 100 == 0) check_ids(table, have, most);
        }
        check_ids(table, have, most);
      }
      REQUIRE(table.size() == 0);
      if (round == 0) bytes = table.bytes();
      CHECK(table.bytes() == bytes);  // deletion leaves no marks that would make it grow
    }
    CHECK(bytes <= 8 * uint64_t{4} * std::max<uint32_t>(most, 64));
  }
}

TEST_CASE("in the id table an id takes another's place under the same hash") {
  std::mt19937 random(5);
  IdTable table;
  std::map<uint32_t, uint32_t> have;
  for (uint32_t id = 0; id < 200; ++id) {
    const uint32_t hash = drawn_hash(random, static_cast<int>(id % 3));
    table.insert(hash, id);
    have.emplace(id, hash);
  }
  for (uint32_t id = 0; id < 200; id += 3) {
    table.replace(have.at(id), id, id + 200);
    have.emplace(id + 200, have.at(id));
    have.erase(id);
  }
  check_ids(table, have, 400);
}

namespace {

using Name = std::tuple<std::vector<uint8_t>, uint8_t, uint64_t>;  // key, kind, epoch

Key key_of(const std::vector<uint8_t>& bytes) {
  Key key;
  key.length = static_cast<uint8_t>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), key.bytes.begin());
  return key;
}

// Keys of any length that mostly begin with the same eight bytes: those alone are hashed.
Name drawn_name(std::mt19937& random) {
  constexpr std::array<size_t, 8> kLengths = {1, 7, 8, 9, 31, 32, 33, 64};
  std::vector<uint8_t> bytes(kLengths[random() % kLengths.size()], 0x5a);
  bytes.back() = static_cast<uint8_t>(random() % 40);
  if (random() % 8 == 0) bytes[bytes.size() / 2] = static_cast<uint8_t>(random() % 4);
  return {bytes, static_cast<uint8_t>(1 + random() % 2), random() % 3 == 0 ? 1u : 0u};
}

}  // namespace

TEST_CASE("the page table finds a page by key, kind and epoch, whatever else is hashed to the same place") {
  std::mt19937 random(11);
  constexpr uint32_t kPageTokens = 3;
  PageTable table(kPageTokens);
  std::map<Name, PageId> have;
  std::map<PageId, std::array<int32_t, kPageTokens>> tokens;
  uint64_t bytes = 0;
  for (int round = 0; round < 3; ++round) {
    for (int step = 0; step < 12000; ++step) {
      const bool is_emptying = step > 9000;
      const Name name = drawn_name(random);
      const auto& [key, kind, epoch] = name;
      const auto found = have.find(name);
      REQUIRE(table.find(key_of(key), kind, epoch) == (found == have.end() ? UINT32_MAX : found->second));
      if (found == have.end() && !is_emptying) {
        if (random() % 4 == 0) table.seek(1 + random() % 100);
        const PageId page = table.create(key_of(key), kind, epoch);
        REQUIRE(tokens.find(page) == tokens.end());
        REQUIRE(table.exists(page));
        REQUIRE(table.residency(page) == 0);
        REQUIRE((table.depth(page) == kUnknownDepth && table.node(page) == kNoNode && table.children(page) == 0));
        std::array<int32_t, kPageTokens> own;
        for (int32_t& token : own) token = static_cast<int32_t>(random() >> 1);
        table.set_tokens(page, own.data());
        table.residency(page) = table.depth(page) = 7;  // what the next page of this id must not see
        table.node(page) = 9;
        table.children(page) = 1;
        have.emplace(name, page);
        tokens.emplace(page, own);
      } else if (found != have.end() && (is_emptying || random() % 3 == 0)) {
        table.destroy(found->second);
        REQUIRE(!table.exists(found->second));
        tokens.erase(found->second);
        have.erase(found);
      }
      REQUIRE(table.size() == have.size());
    }
    for (const auto& [name, page] : have) {
      const auto& [key, kind, epoch] = name;
      REQUIRE(table.key(page) == key_of(key));
      REQUIRE((table.kind(page) == kind && table.epoch(page) == epoch));
      REQUIRE(std::memcmp(table.tokens(page), tokens.at(page).data(), sizeof tokens.at(page)) == 0);
    }
    for (const auto& [name, page] : have) table.destroy(page);
    have.clear();
    tokens.clear();
    REQUIRE(table.size() == 0);
    if (round == 0) bytes = table.bytes();
    CHECK(table.bytes() == bytes);
  }
}

TEST_CASE("pages of one key but of two kinds or epochs are told apart where both are hashed to one place") {
  // Found by search: the first eight bytes of a key whose 32-bit hashes are equal for kinds 1 and 2, and for epochs 0
  // and 1. Where the hash changes, this test passes without meaning anything.
  const auto key_of_head = [](uint64_t head) {
    Key key;
    key.length = sizeof head;
    std::memcpy(key.bytes.data(), &head, sizeof head);
    return key;
  };
  const Key kinds = key_of_head(0x5a5a5a5af706dfe4u), epochs = key_of_head(0x5a5a5a5a3265edfeu);
  PageTable table(1);
  const PageId first = table.create(kinds, 1, 0), old = table.create(epochs, 1, 0);
  CHECK(table.find(kinds, 2, 0) == UINT32_MAX);
  CHECK(table.find(epochs, 1, 1) == UINT32_MAX);
  const PageId second = table.create(kinds, 2, 0), now = table.create(epochs, 1, 1);
  CHECK((table.find(kinds, 1, 0) == first && table.find(kinds, 2, 0) == second));
  CHECK((table.find(epochs, 1, 0) == old && table.find(epochs, 1, 1) == now));
  table.destroy(first);
  table.destroy(old);
  CHECK((table.find(kinds, 1, 0) == UINT32_MAX && table.find(kinds, 2, 0) == second));
  CHECK((table.find(epochs, 1, 0) == UINT32_MAX && table.find(epochs, 1, 1) == now));
}

TEST_CASE("a free map is a set that grows, and after seek the next takes are the run that there is") {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    FreeMap map;
    std::set<uint32_t> is_free;
    uint32_t cursor = 0;  // behind the last that was taken
    for (int step = 0; step < 1500; ++step) {
      const uint32_t choice = random() % 12;
      if (choice == 0 && map.size() < 700) {
        const uint32_t count = random() % 3 == 0 ? 1 + random() % 5 : 1 + random() % 150;
        for (uint32_t i = 0; i < count; ++i) is_free.insert(map.size() + i);
        map.grow(count);
      } else if (choice <= 3) {
        // Some runs begin and end inside a word, some cover several. They are looked for from the word of the last take
        // on, and not across the end: one that began before that word counts as two.
        const uint32_t want = random() % 2 == 0 ? 2 + random() % 9 : 2 + random() % 200;
        uint32_t longest = 0, run = 0, before = FreeMap::kNone;
        for (const uint32_t index : is_free) {
          run = before != FreeMap::kNone && index == before + 1 && index != cursor / 64 * 64 ? run + 1 : 1;
          longest = std::max(longest, run);
          before = index;
        }
        uint32_t words = FreeMap::kSeekWords;
        const uint32_t found = map.seek(want, &words);
        REQUIRE(std::min(found, want) == std::min(longest, want));
        for (uint32_t i = 0, first = 0; i < std::min(want, longest); ++i) {
          const uint32_t index = map.take();
          REQUIRE(is_free.erase(index) == 1);
          if (i == 0) first = index;
          REQUIRE(index == first + i);
          cursor = index + 1;
        }
      } else if (choice <= 7) {
        const uint32_t index = map.take();
        REQUIRE((index == FreeMap::kNone) == is_free.empty());
        if (index == FreeMap::kNone) continue;
        REQUIRE(is_free.erase(index) == 1);
        cursor = index + 1;
      } else if (choice == 8 && !is_free.empty()) {
        const auto any = std::next(is_free.begin(), static_cast<ptrdiff_t>(random() % is_free.size()));
        map.take_at(*any);
        is_free.erase(any);
      } else if (map.size() > 0) {
        for (uint32_t i = random() % 20; i > 0; --i) {
          const uint32_t index = random() % map.size();
          if (is_free.insert(index).second) map.give(index);
        }
      }
      REQUIRE(map.free() == is_free.size());
    }
    for (uint32_t index = 0; index < map.size(); ++index) REQUIRE(map.is_free(index) == (is_free.count(index) == 1));
  }
}

TEST_CASE(
    "a search of a free map ends at the words that it may look at, and passes over what is taken 64 words at a time") {
  FreeMap map;
  map.grow(64 * 4096);
  for (uint32_t index = 0; index < map.size(); ++index) {
    if (index % 2 == 1 && (index < 64 * 4000 || index >= 64 * 4001)) map.take_at(index);
  }
  uint32_t words = 100;
  CHECK(map.seek(64, &words) == 1);  // crumbs alone within 100 words
  CHECK(words == 0);
  for (uint32_t index = 0; index < 64 * 4000; index += 2) map.take_at(index);
  words = 100;
  CHECK(map.seek(64, &words) == 64);
  CHECK(words > 90);
  CHECK(map.take() == 64 * 4000);
}

TEST_CASE("a batch that no run can hold is handed out in few runs, the long ones of all open ranges first") {
  SlotRanges ranges;
  ranges.add(0, 4096);
  ranges.add(10000, 4096);
  while (ranges.take(SlotUse::kPage) != kNoSlot) continue;
  for (uint32_t slot = 0; slot < 4096; slot += 3) ranges.set_use(slot, SlotUse::kFree);  // crumbs
  for (uint32_t first = 512; first < 4096; first += 512) {                               // runs of 8 and more
    for (uint32_t i = 0; i < 8; ++i) {
      for (const uint32_t base : {0u, 10000u}) {
        const uint32_t slot = base + first + i;
        if (ranges.use(slot) != SlotUse::kFree) ranges.set_use(slot, SlotUse::kFree);
      }
    }
  }
  ranges.seek(14 * 8);
  uint32_t runs = 0, before = kNoSlot;
  for (uint32_t i = 0; i < 14 * 8; ++i) {
    const uint32_t slot = ranges.take(SlotUse::kPage);
    REQUIRE(slot != kNoSlot);
    if (before == kNoSlot || slot != before + 1) ++runs;
    before = slot;
  }
  CHECK(runs <= 14);
}

TEST_CASE("slot ranges hand each slot out once, from open ranges alone, and count every use") {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    SlotRanges ranges;
    std::map<uint32_t, SlotUse> uses;
    std::map<uint32_t, std::pair<uint32_t, bool>> have;  // first -> count, is closed
    const auto is_open = [&](uint32_t slot) {
      const auto& [first, range] = *std::prev(have.upper_bound(slot));
      return slot < first + range.first && !range.second;
    };
    const auto some_use = [&] { return static_cast<SlotUse>(1 + random() % 3); };
    for (int step = 0; step < 1500; ++step) {
      const uint32_t choice = random() % 16;
      const uint32_t slot = random() % 8 == 0 ? random() % 1200 : [&] {
        return uses.empty() ? 0u : std::next(uses.begin(), static_cast<ptrdiff_t>(random() % uses.size()))->first;
      }();
      const bool is_known = uses.count(slot) == 1;
      REQUIRE(ranges.use(slot) == (is_known ? uses.at(slot) : SlotRanges::kNoUse));
      if (choice == 0) {
        const uint32_t first = random() % 1000, count = random() % 90;
        bool fits = count > 0;
        for (uint32_t i = 0; i < count; ++i) fits &= uses.count(first + i) == 0;
        if (fits) {
          ranges.add(first, count);
          have[first] = {count, false};
          for (uint32_t i = 0; i < count; ++i) uses[first + i] = SlotUse::kFree;
        } else {
          CHECK_THROWS_AS(ranges.add(first, count), std::invalid_argument);
        }
      } else if (choice <= 2 && !have.empty()) {
        const auto range = std::next(have.begin(), static_cast<ptrdiff_t>(random() % have.size()));
        const auto [count, is_closed] = range->second;
        REQUIRE(ranges.last_of(range->first) == range->first + count - 1);
        if (choice == 1) {
          is_closed ? ranges.open(range->first) : ranges.close(range->first);
          range->second.second = !is_closed;
        } else {
          uint32_t used = 0;
          for (uint32_t i = 0; i < count; ++i) used += uses.at(range->first + i) != SlotUse::kFree;
          REQUIRE(ranges.drop(range->first) == used);
          if (used == 0) {
            for (uint32_t i = 0; i < count; ++i) uses.erase(range->first + i);
            have.erase(range);
          }
        }
      } else if (choice <= 8) {
        if (random() % 4 == 0) ranges.seek(1 + random() % 40);
        const SlotUse use = some_use();
        const uint64_t claimable = ranges.claimable();
        const uint32_t taken = ranges.take(use);
        REQUIRE((taken == kNoSlot) == (claimable == 0));
        if (taken == kNoSlot) continue;
        REQUIRE(uses.at(taken) == SlotUse::kFree);
        REQUIRE(is_open(taken));
        uses[taken] = use;
      } else if (choice <= 10) {
        const SlotUse use = some_use();
        const bool is_free = is_known && uses.at(slot) == SlotUse::kFree;
        REQUIRE(ranges.take_at(slot, use) == is_free);
        if (is_free) uses[slot] = use;
      } else if (is_known && uses.at(slot) != SlotUse::kFree) {
        const SlotUse use = choice == 11 ? some_use() : SlotUse::kFree;
        const SlotUse before = uses.at(slot);
        ranges.set_use(slot, use);
        uses[slot] = use;
        if (choice == 12 && use == SlotUse::kFree) {
          ranges.take_back(slot, before);
          uses[slot] = before;
        }
      }
      std::array<uint64_t, 4> counted{};
      uint64_t claimable = 0;
      for (const auto& [each, use] : uses) {
        ++counted[static_cast<size_t>(use)];
        claimable += use == SlotUse::kFree && is_open(each);
      }
      for (size_t use = 0; use < counted.size(); ++use) {
        REQUIRE(ranges.used(static_cast<SlotUse>(use)) == counted[use]);
        REQUIRE(ranges.count(static_cast<SlotUse>(use)) == counted[use]);
      }
      REQUIRE(ranges.claimable() == claimable);
      REQUIRE(ranges.capacity() == uses.size());
    }
  }
}

TEST_CASE("a queue gives back each item once, each class in order, and never more room than it has") {
  std::mt19937 random(21);
  WeightedQueue<uint32_t> queue(40);
  std::array<std::deque<uint32_t>, kWorkClasses> lanes;
  size_t reserved = 0, queued = 0;
  uint32_t next = 0;
  for (int step = 0; step < 20000; ++step) {
    const bool is_filling = step / 500 % 2 == 0;
    if (random() % 3 < (is_filling ? 2u : 1u)) {
      const size_t count = random() % 6;
      const bool fits = reserved + count <= 40;
      REQUIRE(queue.try_reserve(count) == fits);
      if (!fits) continue;
      reserved += count;
      for (size_t i = 0; i < count; ++i, ++next, ++queued) {
        const size_t lane = random() % kWorkClasses;
        queue.push(static_cast<WorkClass>(lane), next);
        lanes[lane].push_back(next);
      }
    } else {
      const auto item = queue.pop();
      REQUIRE(item.has_value() == (queued > 0));
      if (!item) continue;
      const auto lane = std::find_if(lanes.begin(), lanes.end(),
                                     [&](const auto& each) { return !each.empty() && each.front() == *item; });
      REQUIRE(lane != lanes.end());
      lane->pop_front();
      --queued;
      queue.unreserve(1);
      --reserved;
    }
    REQUIRE(queue.size() == queued);
    REQUIRE(queue.reserved() == reserved);
  }
}
