// The rank: its list against a vector, and stamps that strictly grow along it wherever pages enter.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "rank.h"

using namespace stepwell;

namespace {

void check_order(const Rank& rank, const std::vector<uint32_t>& expected) {
  std::vector<uint32_t> order;
  uint64_t last = 0;
  for (uint32_t page = rank.first(); page != Rank::kNone; page = rank.after(page)) {
    if (!order.empty()) REQUIRE(rank.stamp(page) > last);
    last = rank.stamp(page);
    order.push_back(page);
  }
  REQUIRE(order == expected);
  REQUIRE(rank.size() == expected.size());
}

}  // namespace

TEST_CASE("stamps strictly grow along the order wherever pages enter, and what changed is given out") {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    std::mt19937 rng(seed);
    Rank rank;
    rank.watch();
    std::vector<uint32_t> order;
    std::map<uint32_t, uint64_t> written;
    // Some clocks hardly move, some go back, some begin at nothing: then there is no room below.
    uint64_t clock = seed % 3 == 0 ? 1 : 1'800'000'000'000'000'000u;
    for (int step = 0; step < 3000; ++step) {
      const uint32_t page = rng() % 300;
      const auto found = std::find(order.begin(), order.end(), page);
      if (rng() % 8 == 0) clock += rng() % 100 - (clock > 1000 ? 30 : 0);
      if (found == order.end()) {
        const size_t at = order.empty() ? 0 : seed % 2 == 0 ? order.size() / 2 : rng() % order.size();
        switch (order.empty() ? 0 : rng() % 4) {
          case 0:
            rank.enter_highest(page, clock);
            order.push_back(page);
            break;
          case 1:
            rank.enter_lowest(page, clock);
            order.insert(order.begin(), page);
            break;
          case 2:
            rank.enter_below(page, order[at]);
            order.insert(order.begin() + static_cast<ptrdiff_t>(at), page);
            break;
          default:
            rank.enter_above(page, order[at]);
            order.insert(order.begin() + static_cast<ptrdiff_t>(at) + 1, page);
        }
      } else if (rng() % 2 == 0) {
        rank.touch(page, clock, Rank::kStep);
        order.erase(found);
        order.push_back(page);
      } else {
        rank.leave(page);
        order.erase(found);
      }
      if (step % 50 == 0) check_order(rank, order);
      if (rng() % 100 == 0) {
        while (rank.has_changed())
          rank.take_changed(1 + rng() % 64, [&](uint32_t changed, uint64_t stamp) { written[changed] = stamp; });
        for (const uint32_t there : order) REQUIRE(written.at(there) == rank.stamp(there));
      }
    }
    check_order(rank, order);
  }
}

TEST_CASE("many pages that enter at one place are given room a few at a time") {
  Rank rank;
  rank.watch();
  for (uint32_t page = 0; page < 50000; ++page) rank.enter_highest(page, 1'000'000, Rank::kStep);
  uint64_t given = 0;
  while (rank.has_changed()) rank.take_changed(1 << 20, [](uint32_t, uint64_t) {});
  for (uint32_t page = 50000; page < 100000; ++page) rank.enter_below(page, 25000);
  while (rank.has_changed()) rank.take_changed(1 << 20, [&](uint32_t, uint64_t) { ++given; });
  CHECK(given >= 50000);
  CHECK(given <= 100000);
  uint32_t last = rank.first();
  for (uint32_t page = rank.after(last); page != Rank::kNone; page = rank.after(page)) {
    REQUIRE(rank.stamp(page) > rank.stamp(last));
    last = page;
  }
}

TEST_CASE("beyond the list of changes all that changed is given out, also what changes meanwhile") {
  Rank rank;
  rank.watch();
  constexpr uint32_t kPages = 200000;
  std::map<uint32_t, uint64_t> written;
  for (uint32_t page = 0; page < kPages; ++page) rank.enter_highest(page, page);
  uint32_t again = 0;
  for (int round = 0; rank.has_changed(); ++round) {
    REQUIRE(round < 10000);
    rank.take_changed(1000, [&](uint32_t page, uint64_t stamp) { written[page] = stamp; });
    if (again < 3000) rank.touch(again++, kPages, Rank::kStep);
  }
  REQUIRE(written.size() == kPages);
  for (uint32_t page = 0; page < kPages; ++page) REQUIRE(written[page] == rank.stamp(page));
}
