// A radix tree over tokens: which pages lie behind which tokens, and how many leases pin each edge in each tier.
//
//     root (namespace, epoch) -- edge = 1..n pages -- edge ...      a node is its edge; children are told apart by
//                                                                   their first page's tokens
//
// Invariants: edges end at page boundaries; a page lies on at most one edge and names it; the children of a node differ
// in their first page; pins of an edge count the leases that cover all of it. A split keeps the old node as the lower
// part, so that the end node of a lease stays right.
// Source: RadixAttention (arXiv 2312.07104). Tokens are kept with the pages (page_table.h), so a split moves no tokens.
// Threads: none of its own; the index calls it under its mutex.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "page_table.h"

namespace stepwell {

struct Node {
  std::vector<PageId> pages;
  NodeId parent = kNoNode;  // kNoNode: a root, or a free node
  uint32_t start = 0;       // depth of the first page
  uint32_t children = 0;    // child nodes
  uint32_t hash = 0;        // of the tokens of the first page
  std::array<uint32_t, kTiers> pins{};
  uint32_t pinned_at = UINT32_MAX;  // its place in pinned(), while a pin is not 0

  uint32_t end() const noexcept { return start + static_cast<uint32_t>(pages.size()); }
  bool is_pinned() const noexcept { return (pins[0] | pins[1] | pins[2] | pins[3]) != 0; }
};

// Where a walk ended: `depth` pages have these tokens; the last `in_node` of them lie on `node`.
struct TreePlace {
  NodeId node = kNoNode;
  uint32_t in_node = 0;
  uint32_t depth = 0;
};

class Radix {
 public:
  explicit Radix(PageTable* pages) : pages_(pages) {}

  NodeId make_root();
  void drop_root(NodeId root);  // REQUIRES no children
  // As far as the tree goes with tokens[0 .. pages * page_tokens). Compares every token.
  TreePlace walk(NodeId root, const int32_t* tokens, uint32_t pages) const;
  // The page that lies behind `place` with these tokens, or UINT32_MAX.
  PageId next(const TreePlace& place, const int32_t* tokens) const;
  // Cuts an edge: returns a new node with its first `pages` pages; `node` keeps the rest. REQUIRES 0 < pages < size.
  NodeId split(NodeId node, uint32_t pages);
  // Puts `page` behind `place` and moves the place behind it. `tokens` are the page's own.
  void attach(TreePlace* place, PageId page, const int32_t* tokens);
  // Takes the page off the end of its edge. REQUIRES nothing lies behind it. Returns the root if that became childless,
  // else kNoNode.
  NodeId detach(PageId page);

  void pin(NodeId node, int tier);
  void unpin(NodeId node, int tier);
  const std::vector<NodeId>& pinned() const noexcept { return pinned_; }

  const Node& node(NodeId id) const noexcept { return nodes_[id]; }
  NodeId id_limit() const noexcept { return static_cast<NodeId>(nodes_.size()); }  // ids are below it
  uint64_t edges() const noexcept { return edges_; }
  uint64_t bytes() const noexcept;
  // For check(): how many entries the table of children has.
  uint64_t children() const noexcept { return children_.size(); }

 private:
  NodeId make_node();
  void free_node(NodeId id);
  uint32_t child_hash(NodeId parent, uint32_t first_page_hash) const noexcept {
    return static_cast<uint32_t>(mix64((static_cast<uint64_t>(parent) << 32) | first_page_hash));
  }
  uint32_t page_hash(const int32_t* tokens) const noexcept;
  NodeId find_child(NodeId parent, const int32_t* tokens) const;
  uint32_t match_edge(const Node& node, const int32_t* tokens, uint32_t pages) const;

  PageTable* pages_;
  std::deque<Node> nodes_;  // never moves
  std::vector<NodeId> free_nodes_;
  IdTable children_;  // (parent node, first page) -> node
  std::vector<NodeId> pinned_;
  uint64_t edges_ = 0;
};

// Length of the run of consecutive ids that starts at ids[0], at most `most`, inside one block of records.
inline uint32_t id_run(const PageId* ids, uint32_t most) noexcept {
  const PageId first = ids[0];
  uint32_t limit = kPageBlock - PageTable::index(first);
  if (limit > most) limit = most;
  uint32_t n = 1;
  while (n + 16 <= limit) {
    uint32_t differs = 0;
    for (uint32_t k = 0; k < 16; ++k) differs |= ids[n + k] ^ (first + n + k);
    if (differs != 0) break;
    n += 16;
  }
  while (n < limit && ids[n] == first + n) ++n;
  return n;
}

}  // namespace stepwell
