// The tree of tokens where hashes collide: what only happens among very many edges.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "radix.h"

using namespace stepwell;

namespace {

Key key_of(uint64_t number) {
  Key key;
  key.length = sizeof number;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

}  // namespace

// Children are found by 32 bits of a hash over parent and first page. Among 200,000 edges with the same next page some
// pairs have all of these in common (expected: 4.6 pairs): they must be told apart by their parents.
TEST_CASE("a child is found behind its own parent, also where another one's has the same hash and the same tokens") {
  constexpr int32_t kChains = 200000, kSame = -7;
  PageTable pages(1);
  Radix tree(&pages);
  const NodeId root = tree.make_root();
  std::vector<PageId> last;
  pages.reserve(2 * kChains);
  for (int32_t chain = 0; chain < kChains; ++chain) {
    TreePlace place{root, 0, 0};
    tree.attach(&place, pages.create(key_of(static_cast<uint64_t>(2 * chain)), 1, 0), &chain);
    tree.pin(place.node, 0);  // so that the next page is an edge of its own
    last.push_back(pages.create(key_of(static_cast<uint64_t>(2 * chain + 1)), 1, 0));
    tree.attach(&place, last.back(), &kSame);
  }
  REQUIRE(tree.edges() == 2 * kChains);
  const auto check = [&](int32_t chain, uint32_t depth) {
    const int32_t tokens[] = {chain, kSame};
    const TreePlace place = tree.walk(root, tokens, 2);
    REQUIRE(place.depth == depth);
    if (depth == 2) REQUIRE(tree.node(place.node).pages[0] == last[static_cast<size_t>(chain)]);
  };
  for (int32_t chain = 0; chain < kChains; ++chain) check(chain, 2);
  // Taking out every other one takes nothing else, however they were hashed.
  for (int32_t chain = 0; chain < kChains; chain += 2) tree.detach(last[static_cast<size_t>(chain)]);
  for (int32_t chain = 0; chain < kChains; ++chain) check(chain, chain % 2 == 0 ? 1 : 2);
  REQUIRE(tree.children() == tree.edges());
}
