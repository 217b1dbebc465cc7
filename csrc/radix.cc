// The tree of edges: see radix.h.
#include "radix.h"

#include <algorithm>
#include <cstring>

#include "status.h"

namespace stepwell {

namespace {
constexpr uint32_t kComparePages = 64;  // tokens compared by one memcmp; a mismatch is then searched in it
}

NodeId Radix::make_node() {
  if (!free_nodes_.empty()) {
    const NodeId id = free_nodes_.back();
    free_nodes_.pop_back();
    return id;
  }
  nodes_.emplace_back();
  return static_cast<NodeId>(nodes_.size() - 1);
}

void Radix::free_node(NodeId id) {
  STEPWELL_ASSERT(!nodes_[id].is_pinned() && nodes_[id].children == 0);
  nodes_[id] = Node{};
  free_nodes_.push_back(id);
}

NodeId Radix::make_root() { return make_node(); }

void Radix::drop_root(NodeId root) { free_node(root); }

uint32_t Radix::page_hash(const int32_t* tokens) const noexcept {
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t i = 0;
  for (const uint32_t n = pages_->page_tokens(); i < n; ++i) {
    state = (state ^ static_cast<uint32_t>(tokens[i])) * 0xff51afd7ed558ccdu;
    state ^= state >> 32;
  }
  return static_cast<uint32_t>(mix64(state));
}

NodeId Radix::find_child(NodeId parent, const int32_t* tokens) const {
  if (nodes_[parent].children == 0) return kNoNode;
  const uint32_t first_page = page_hash(tokens);
  const size_t bytes = static_cast<size_t>(pages_->page_tokens()) * sizeof(int32_t);
  return children_.find(child_hash(parent, first_page), [&](NodeId id) {
    const Node& child = nodes_[id];
    return child.parent == parent && child.hash == first_page &&
           std::memcmp(pages_->tokens(child.pages[0]), tokens, bytes) == 0;
  });
}

uint32_t Radix::match_edge(const Node& node, const int32_t* tokens, uint32_t pages) const {
  const size_t page_tokens = pages_->page_tokens();
  const uint32_t most = std::min(pages, static_cast<uint32_t>(node.pages.size()));
  uint32_t done = 0;
  while (done < most) {
    const PageId first = node.pages[done];
    const uint32_t run = id_run(node.pages.data() + done, std::min(most - done, kComparePages));
    const int32_t* have = pages_->tokens(first);
    const int32_t* want = tokens + done * page_tokens;
    if (std::memcmp(have, want, run * page_tokens * sizeof(int32_t)) != 0) {
      uint32_t same = 0;
      while (std::memcmp(have + same * page_tokens, want + same * page_tokens, page_tokens * sizeof(int32_t)) == 0)
        ++same;
      return done + same;
    }
    done += run;
  }
  return done;
}

TreePlace Radix::walk(NodeId root, const int32_t* tokens, uint32_t pages) const {
  const size_t page_tokens = pages_->page_tokens();
  TreePlace place{root, 0, 0};
  while (place.depth < pages) {
    const int32_t* rest = tokens + place.depth * page_tokens;
    const NodeId child = find_child(place.node, rest);
    if (child == kNoNode) break;
    const uint32_t matched = match_edge(nodes_[child], rest, pages - place.depth);
    place = {child, matched, place.depth + matched};
    if (matched < nodes_[child].pages.size()) break;
  }
  return place;
}

PageId Radix::next(const TreePlace& place, const int32_t* tokens) const {
  const Node& node = nodes_[place.node];
  if (place.in_node < node.pages.size()) {
    const PageId page = node.pages[place.in_node];
    const size_t bytes = static_cast<size_t>(pages_->page_tokens()) * sizeof(int32_t);
    return std::memcmp(pages_->tokens(page), tokens, bytes) == 0 ? page : UINT32_MAX;
  }
  const NodeId child = find_child(place.node, tokens);
  return child == kNoNode ? UINT32_MAX : nodes_[child].pages[0];
}

NodeId Radix::split(NodeId id, uint32_t pages) {
  STEPWELL_ASSERT(pages > 0 && pages < nodes_[id].pages.size());
  const NodeId upper_id = make_node();
  Node& lower = nodes_[id];
  Node& upper = nodes_[upper_id];
  upper.pages.assign(lower.pages.begin(), lower.pages.begin() + pages);
  lower.pages.erase(lower.pages.begin(), lower.pages.begin() + pages);
  if (lower.pages.capacity() > 2 * lower.pages.size()) lower.pages.shrink_to_fit();
  for (const PageId page : upper.pages) pages_->node(page) = upper_id;
  upper.parent = lower.parent;
  upper.start = lower.start;
  upper.hash = lower.hash;
  upper.children = 1;
  upper.pins = lower.pins;
  if (upper.is_pinned()) {
    upper.pinned_at = static_cast<uint32_t>(pinned_.size());
    pinned_.push_back(upper_id);
  }
  children_.replace(child_hash(upper.parent, upper.hash), id, upper_id);
  lower.parent = upper_id;
  lower.start += pages;
  lower.hash = page_hash(pages_->tokens(lower.pages[0]));
  children_.insert(child_hash(upper_id, lower.hash), id);
  ++edges_;
  return upper_id;
}

void Radix::attach(TreePlace* place, PageId page, const int32_t* tokens) {
  pages_->set_tokens(page, tokens);
  if (place->in_node < nodes_[place->node].pages.size()) place->node = split(place->node, place->in_node);
  Node& end = nodes_[place->node];
  // An edge grows in place only where no lease could come to cover pages that it does not name, and nothing branches
  // off.
  if (end.parent == kNoNode || end.children > 0 || end.is_pinned()) {
    const NodeId child_id = make_node();
    Node& child = nodes_[child_id];
    child.parent = place->node;
    child.start = place->depth;
    child.hash = page_hash(tokens);
    children_.insert(child_hash(place->node, child.hash), child_id);
    ++end.children;
    ++edges_;
    place->node = child_id;
    place->in_node = 0;
  }
  nodes_[place->node].pages.push_back(page);
  pages_->node(page) = place->node;
  ++place->in_node;
  ++place->depth;
}

NodeId Radix::detach(PageId page) {
  const NodeId id = pages_->node(page);
  Node& node = nodes_[id];
  STEPWELL_ASSERT(node.children == 0 && node.pages.back() == page && !node.is_pinned());
  node.pages.pop_back();
  pages_->node(page) = kNoNode;
  if (!node.pages.empty()) return kNoNode;
  const NodeId parent_id = node.parent;
  children_.erase(child_hash(parent_id, node.hash), id);
  free_node(id);
  --edges_;
  Node& parent = nodes_[parent_id];
  --parent.children;
  return parent.parent == kNoNode && parent.children == 0 ? parent_id : kNoNode;
}

void Radix::pin(NodeId id, int tier) {
  Node& node = nodes_[id];
  if (!node.is_pinned()) {
    node.pinned_at = static_cast<uint32_t>(pinned_.size());
    pinned_.push_back(id);
  }
  ++node.pins[static_cast<size_t>(tier)];
}

void Radix::unpin(NodeId id, int tier) {
  Node& node = nodes_[id];
  STEPWELL_ASSERT(node.pins[static_cast<size_t>(tier)] > 0);
  --node.pins[static_cast<size_t>(tier)];
  if (node.is_pinned()) return;
  const NodeId last = pinned_.back();
  pinned_[node.pinned_at] = last;
  nodes_[last].pinned_at = node.pinned_at;
  pinned_.pop_back();
  node.pinned_at = UINT32_MAX;
}

uint64_t Radix::bytes() const noexcept {
  uint64_t total = nodes_.size() * sizeof(Node) + children_.bytes();
  for (const Node& node : nodes_) total += node.pages.capacity() * sizeof(PageId);
  return total;
}

}  // namespace stepwell
