// Page records as structure of arrays, and the way to them from a key: open addressing over (key, kind, epoch).
//
// Records live in blocks of 4,096 so that nothing moves when they grow. Ids of one insertion are contiguous where the
// free ids allow it; then tokens, residencies and slots of its pages are contiguous too, which is what makes a match
// fast.
// Threads: none of its own; the index calls it under its mutex.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "geometry.h"
#include "huge.h"
#include "residency.h"
#include "slots.h"

namespace stepwell {

using PageId = uint32_t;
using NodeId = uint32_t;
constexpr NodeId kNoNode = UINT32_MAX;

// From a 32-bit hash to candidate ids; the caller compares. Linear probing, backward-shift deletion, load at most 3/4.
class IdTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  IdTable() : entries_(64, Entry{0, kNone}) {}

  // The first candidate of `hash` that `equal(id)` accepts, or kNone.
  template <typename Equal>
  uint32_t find(uint32_t hash, Equal&& equal) const {
    for (size_t i = hash & mask(); entries_[i].id != kNone; i = (i + 1) & mask()) {
      if (entries_[i].hash == hash && equal(entries_[i].id)) return entries_[i].id;
    }
    return kNone;
  }
  void prefetch(uint32_t hash) const noexcept { __builtin_prefetch(&entries_[hash & mask()], 1); }
  void insert(uint32_t hash, uint32_t id);
  void erase(uint32_t hash, uint32_t id);                     // REQUIRES it is there
  void replace(uint32_t hash, uint32_t id, uint32_t new_id);  // REQUIRES it is there
  void reserve(uint64_t count);
  uint64_t size() const noexcept { return size_; }
  uint64_t bytes() const noexcept { return entries_.size() * sizeof(Entry); }

 private:
  struct Entry {
    uint32_t hash, id;
  };
  size_t mask() const noexcept { return entries_.size() - 1; }
  size_t locate(uint32_t hash, uint32_t id) const;
  void rehash(size_t capacity);

  using Entries = std::vector<Entry, HugeAllocator<Entry>>;
  Entries entries_;
  uint64_t size_ = 0;
};

constexpr uint32_t kPageBlockBits = 12;
constexpr uint32_t kPageBlock = 1u << kPageBlockBits;

struct PageBlock {
  template <typename T>
  using Column = std::array<T, kPageBlock>;
  Column<uint32_t> residency;   // byte t: Residency in tier t
  Column<PageId> parent;        // UINT32_MAX unless parent_state is kKnown
  Column<uint32_t> children;    // pages whose parent it is
  Column<uint32_t> depth;       // pages before it in its chain, or kUnknownDepth
  Column<NodeId> node;          // tree edge it lies on, or kNoNode
  Column<uint32_t> lease_pins;  // by leases, page by page, all tiers
  Column<uint32_t> claim_pins;  // by claims, all tiers
  Column<uint32_t> holds;       // that cover it: see Index::hold()
  Column<std::array<uint32_t, kTiers>> slot;
  // of the last claim; never reset, so that claims of an earlier page of this id are stale
  Column<std::array<uint32_t, kTiers>> number;
  Column<uint64_t> epoch;
  Column<std::array<uint8_t, 32>> key_head;
  Column<uint8_t> key_length;  // 0: no record
  Column<uint8_t> kind;
  Column<ParentState> parent_state;
  Column<uint8_t> handed_out;  // bit t: quarantined there and handed out, or not mendable
  Column<uint8_t> staying;     // bit t: RESIDENT there, held, and not to leave
  std::unique_ptr<Column<std::array<uint8_t, 32>>> key_tail;  // where a key of the block is longer than 32 bytes
  std::unique_ptr<int32_t[]> tokens;                          // page_tokens a page
};

class PageTable {
 public:
  explicit PageTable(uint32_t page_tokens) : page_tokens_(page_tokens) {}

  uint32_t page_tokens() const noexcept { return page_tokens_; }
  PageId find(const uint8_t* key, uint8_t length, uint8_t kind, uint64_t epoch) const;
  PageId find(const Key& key, uint8_t kind, uint64_t epoch) const {
    return find(key.bytes.data(), key.length, kind, epoch);
  }
  // Starts fetching what find() will look at. Cost of a find in a large table: 100 ns without, 15 ns with it 16 keys
  // ahead.
  void prefetch(const Key& key, uint8_t kind, uint64_t epoch) const noexcept {
    ids_by_key_.prefetch(hash(key.bytes.data(), key.length, kind, epoch));
  }
  // A block of records whose memory has been touched, tokens included. Touches nothing of the table: needs no lock.
  static std::unique_ptr<PageBlock> make_block(uint32_t page_tokens);
  void add_block(std::unique_ptr<PageBlock> block);
  uint32_t free_records() const noexcept { return ids_.free(); }
  // The records made next should get contiguous ids.
  void seek(uint32_t want);
  // A record with no residency, no parent known, no depth, outside the tree. REQUIRES find() == none.
  PageId create(const Key& key, uint8_t kind, uint64_t epoch);
  void destroy(PageId page);
  void set_tokens(PageId page, const int32_t* tokens);
  void reserve(uint64_t pages) { ids_by_key_.reserve(pages); }

  PageBlock& block(PageId page) noexcept { return *blocks_[page >> kPageBlockBits]; }
  const PageBlock& block(PageId page) const noexcept { return *blocks_[page >> kPageBlockBits]; }
  static uint32_t index(PageId page) noexcept { return page & (kPageBlock - 1); }
  bool exists(PageId page) const noexcept { return page < ids_.size() && block(page).key_length[index(page)] != 0; }
  const int32_t* tokens(PageId page) const noexcept {
    return block(page).tokens.get() + static_cast<size_t>(index(page)) * page_tokens_;
  }
  Key key(PageId page) const;
  bool has_key(PageId page, const uint8_t* key, uint8_t length) const noexcept;

  uint32_t& residency(PageId page) noexcept { return block(page).residency[index(page)]; }
  uint32_t residency(PageId page) const noexcept { return block(page).residency[index(page)]; }
  Residency residency(PageId page, int tier) const noexcept {
    return static_cast<Residency>((residency(page) >> (8 * tier)) & 0xff);
  }
  PageId& parent(PageId page) noexcept { return block(page).parent[index(page)]; }
  PageId parent(PageId page) const noexcept { return block(page).parent[index(page)]; }
  ParentState& parent_state(PageId page) noexcept { return block(page).parent_state[index(page)]; }
  ParentState parent_state(PageId page) const noexcept { return block(page).parent_state[index(page)]; }
  uint32_t& children(PageId page) noexcept { return block(page).children[index(page)]; }
  uint32_t children(PageId page) const noexcept { return block(page).children[index(page)]; }
  uint32_t& depth(PageId page) noexcept { return block(page).depth[index(page)]; }
  uint32_t depth(PageId page) const noexcept { return block(page).depth[index(page)]; }
  NodeId& node(PageId page) noexcept { return block(page).node[index(page)]; }
  NodeId node(PageId page) const noexcept { return block(page).node[index(page)]; }
  uint32_t& lease_pins(PageId page) noexcept { return block(page).lease_pins[index(page)]; }
  uint32_t lease_pins(PageId page) const noexcept { return block(page).lease_pins[index(page)]; }
  uint32_t& claim_pins(PageId page) noexcept { return block(page).claim_pins[index(page)]; }
  uint32_t claim_pins(PageId page) const noexcept { return block(page).claim_pins[index(page)]; }
  uint32_t& slot(PageId page, int tier) noexcept { return block(page).slot[index(page)][static_cast<size_t>(tier)]; }
  uint32_t slot(PageId page, int tier) const noexcept {
    return block(page).slot[index(page)][static_cast<size_t>(tier)];
  }
  uint32_t& number(PageId page, int tier) noexcept {
    return block(page).number[index(page)][static_cast<size_t>(tier)];
  }
  uint32_t number(PageId page, int tier) const noexcept {
    return block(page).number[index(page)][static_cast<size_t>(tier)];
  }
  uint32_t& holds(PageId page) noexcept { return block(page).holds[index(page)]; }
  uint32_t holds(PageId page) const noexcept { return block(page).holds[index(page)]; }
  uint64_t epoch(PageId page) const noexcept { return block(page).epoch[index(page)]; }
  uint8_t kind(PageId page) const noexcept { return block(page).kind[index(page)]; }
  uint8_t& handed_out(PageId page) noexcept { return block(page).handed_out[index(page)]; }
  uint8_t handed_out(PageId page) const noexcept { return block(page).handed_out[index(page)]; }
  uint8_t& staying(PageId page) noexcept { return block(page).staying[index(page)]; }
  uint8_t staying(PageId page) const noexcept { return block(page).staying[index(page)]; }

  uint64_t size() const noexcept { return ids_by_key_.size(); }
  uint32_t id_limit() const noexcept { return ids_.size(); }  // ids are below it
  uint64_t bytes() const noexcept;

 private:
  static uint32_t hash(const uint8_t* key, uint8_t length, uint8_t kind, uint64_t epoch) noexcept;

  uint32_t page_tokens_;
  std::vector<std::unique_ptr<PageBlock>> blocks_;
  FreeMap ids_;
  IdTable ids_by_key_;
};

// A 64-bit mix: of splitmix64 (public domain).
constexpr uint64_t mix64(uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace stepwell
