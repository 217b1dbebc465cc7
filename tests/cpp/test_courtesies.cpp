// What probes keep, against a list in the order of askings: each page once, until the latest end.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "courtesies.h"

using namespace stepwell;

namespace {

// The oldest first.
struct Model {
  std::vector<uint32_t> order;
  std::map<uint32_t, double> until;

  void remove(uint32_t page) {
    order.erase(std::find(order.begin(), order.end(), page));
    until.erase(page);
  }
  std::vector<uint32_t> add(const std::vector<uint32_t>& pages, double end) {
    std::vector<uint32_t> fresh, once;
    for (const uint32_t page : pages) {
      if (std::find(once.begin(), once.end(), page) == once.end()) once.push_back(page);
    }
    for (const uint32_t page : once) {
      if (until.count(page) == 0) fresh.push_back(page);
    }
    for (auto page = once.rbegin(); page != once.rend(); ++page) {
      const auto before = until.find(*page);
      const double later = before == until.end() ? end : std::max(before->second, end);
      if (before != until.end()) remove(*page);
      order.push_back(*page);
      until[*page] = later;
    }
    return fresh;
  }
};

void check_same(const Courtesies& courtesies, const Model& model) {
  std::vector<uint32_t> order;
  courtesies.each([&](uint32_t page) {
    order.push_back(page);
    return true;
  });
  REQUIRE(order == model.order);
  REQUIRE(courtesies.size() == order.size());
  for (const uint32_t page : order) REQUIRE(courtesies.until(page) == model.until.at(page));
  REQUIRE(std::string(courtesies.check()) == "");
}

}  // namespace

TEST_CASE("a page is kept once, until the latest end asked for, and is as old as its last asking") {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    std::mt19937 rng(seed);
    Courtesies courtesies;
    Model model;
    double now = 0;
    std::vector<uint32_t> fresh;
    for (int step = 0; step < 400; ++step) {
      const uint32_t first = rng() % 40 * (seed % 2 == 0 ? 1 : 700);  // some in blocks of their own
      std::vector<uint32_t> pages;
      for (uint32_t i = 0; i < rng() % 12; ++i) pages.push_back(rng() % 4 == 0 ? first : first + i);
      switch (rng() % 4) {
        case 0:
          for (const uint32_t page : pages) {
            if (!courtesies.has(page)) continue;
            courtesies.remove(page);
            model.remove(page);
          }
          break;
        case 1: {
          now += rng() % 3;
          std::vector<uint32_t> due;
          courtesies.due(now, &due);
          std::vector<uint32_t> expected;
          for (const auto& [page, until] : model.until) {
            if (until <= now) expected.push_back(page);
          }
          for (const uint32_t page : due) {
            courtesies.remove(page);
            model.remove(page);
          }
          std::sort(due.begin(), due.end());
          REQUIRE(due == expected);
          break;
        }
        default: {
          const double until = now + rng() % 20;
          courtesies.add(pages, until, &fresh);
          REQUIRE(fresh == model.add(pages, until));
        }
      }
      check_same(courtesies, model);
    }
  }
}

TEST_CASE("pages that are asked for again and again take no more memory than once") {
  Courtesies courtesies;
  Model model;
  std::vector<uint32_t> pages(5000), fresh;
  for (uint32_t i = 0; i < pages.size(); ++i) pages[i] = i;
  courtesies.add({9000}, 1e9, &fresh);  // an old one that stays
  courtesies.add(pages, 1.0, &fresh);
  const uint64_t bytes = courtesies.bytes();
  for (int round = 0; round < 1000; ++round) {
    // Never all of it, so that no list becomes empty by itself.
    courtesies.add({pages.begin() + round % 2, pages.end() - 1 + round % 2}, 1.0 + round, &fresh);
    REQUIRE(fresh.empty());
  }
  CHECK(courtesies.size() == 5001);
  CHECK(courtesies.bytes() < bytes + 100'000);
  REQUIRE(std::string(courtesies.check()) == "");
}
