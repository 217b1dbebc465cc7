// Page records and their table: see page_table.h.
#include "page_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "status.h"

namespace stepwell {

void IdTable::insert(uint32_t hash, uint32_t id) {
  if ((size_ + 1) * 4 > entries_.size() * 3) rehash(entries_.size() * 2);
  size_t i = hash & mask();
  while (entries_[i].id != kNone) i = (i + 1) & mask();
  entries_[i] = {hash, id};
  ++size_;
}

size_t IdTable::locate(uint32_t hash, uint32_t id) const {
  size_t i = hash & mask();
  while (entries_[i].id != id) {
    STEPWELL_ASSERT(entries_[i].id != kNone);
    i = (i + 1) & mask();
  }
  return i;
}

void IdTable::erase(uint32_t hash, uint32_t id) {
  size_t hole = locate(hash, id);
  // Backward shift: an entry may fill the hole if its home is not behind the hole.
  for (size_t i = (hole + 1) & mask(); entries_[i].id != kNone; i = (i + 1) & mask()) {
    const size_t home = entries_[i].hash & mask();
    if (((i - home) & mask()) >= ((i - hole) & mask())) {
      entries_[hole] = entries_[i];
      hole = i;
    }
  }
  entries_[hole].id = kNone;
  --size_;
}

void IdTable::replace(uint32_t hash, uint32_t id, uint32_t new_id) { entries_[locate(hash, id)].id = new_id; }

void IdTable::reserve(uint64_t count) {
  const size_t capacity = std::bit_ceil(static_cast<size_t>(count * 4 / 3 + 1));
  if (capacity > entries_.size()) rehash(capacity);
}

void IdTable::rehash(size_t capacity) {
  Entries old(capacity, Entry{0, kNone});
  old.swap(entries_);
  for (const Entry& entry : old) {
    if (entry.id == kNone) continue;
    size_t i = entry.hash & mask();
    while (entries_[i].id != kNone) i = (i + 1) & mask();
    entries_[i] = entry;
  }
}

uint32_t PageTable::hash(const uint8_t* key, uint8_t length, uint8_t kind, uint64_t epoch) noexcept {
  // Keys are digests, or an engine's own hashes: their first 8 bytes are spread; epoch and kind are mixed in.
  uint64_t head = 0;
  std::memcpy(&head, key, std::min<size_t>(length, sizeof head));
  return static_cast<uint32_t>(mix64(head ^ mix64(epoch * 257 + kind)));
}

bool PageTable::has_key(PageId page, const uint8_t* key, uint8_t length) const noexcept {
  const PageBlock& records = block(page);
  const uint32_t i = index(page);
  if (records.key_length[i] != length) return false;
  if (std::memcmp(records.key_head[i].data(), key, std::min<size_t>(length, 32)) != 0) return false;
  return length <= 32 || std::memcmp((*records.key_tail)[i].data(), key + 32, length - 32u) == 0;
}

PageId PageTable::find(const uint8_t* key, uint8_t length, uint8_t kind, uint64_t epoch) const {
  return ids_by_key_.find(hash(key, length, kind, epoch), [&](PageId page) {
    return has_key(page, key, length) && this->kind(page) == kind && this->epoch(page) == epoch;
  });
}

void PageTable::seek(uint32_t want) {
  while (ids_.free() < want) add_block(make_block(page_tokens_));
  uint32_t words = FreeMap::kSeekWords;
  ids_.seek(want, &words);
}

std::unique_ptr<PageBlock> PageTable::make_block(uint32_t page_tokens) {
  auto records = std::make_unique<PageBlock>();  // zeroed: key_length 0 is no record, and numbers start at 0
  records->tokens = std::make_unique<int32_t[]>(static_cast<size_t>(kPageBlock) * page_tokens);
  return records;
}

void PageTable::add_block(std::unique_ptr<PageBlock> block) {
  blocks_.push_back(std::move(block));
  ids_.grow(kPageBlock);
}

PageId PageTable::create(const Key& key, uint8_t kind, uint64_t epoch) {
  STEPWELL_ASSERT(key.length > 0 && key.length <= kMaxKeyBytes);
  if (ids_.free() == 0) add_block(make_block(page_tokens_));
  const PageId page = ids_.take();
  PageBlock& records = block(page);
  const uint32_t i = index(page);
  records.residency[i] = 0;
  records.parent[i] = UINT32_MAX;
  records.children[i] = 0;
  records.depth[i] = kUnknownDepth;
  records.node[i] = kNoNode;
  records.lease_pins[i] = 0;
  records.claim_pins[i] = 0;
  records.holds[i] = 0;
  records.slot[i].fill(kNoSlot);
  records.epoch[i] = epoch;
  records.kind[i] = kind;
  records.parent_state[i] = ParentState::kUnknown;
  records.handed_out[i] = 0;
  records.staying[i] = 0;
  records.key_length[i] = key.length;
  std::memcpy(records.key_head[i].data(), key.bytes.data(), 32);
  if (key.length > 32) {
    if (records.key_tail == nullptr) records.key_tail = std::make_unique<PageBlock::Column<std::array<uint8_t, 32>>>();
    std::memcpy((*records.key_tail)[i].data(), key.bytes.data() + 32, 32);
  }
  ids_by_key_.insert(hash(key.bytes.data(), key.length, kind, epoch), page);
  return page;
}

void PageTable::destroy(PageId page) {
  const Key name = key(page);
  ids_by_key_.erase(hash(name.bytes.data(), name.length, kind(page), epoch(page)), page);
  block(page).key_length[index(page)] = 0;
  ids_.give(page);
}

Key PageTable::key(PageId page) const {
  const PageBlock& records = block(page);
  const uint32_t i = index(page);
  Key out;
  out.length = records.key_length[i];
  std::memcpy(out.bytes.data(), records.key_head[i].data(), std::min<size_t>(out.length, 32));
  if (out.length > 32) std::memcpy(out.bytes.data() + 32, (*records.key_tail)[i].data(), out.length - 32u);
  return out;
}

void PageTable::set_tokens(PageId page, const int32_t* tokens) {
  PageBlock& records = block(page);
  std::memcpy(records.tokens.get() + static_cast<size_t>(index(page)) * page_tokens_, tokens,
              static_cast<size_t>(page_tokens_) * sizeof(int32_t));
}

uint64_t PageTable::bytes() const noexcept {
  uint64_t total = ids_by_key_.bytes() + ids_.size() / 8;
  for (const auto& records : blocks_) {
    total += sizeof(PageBlock) + static_cast<uint64_t>(kPageBlock) * page_tokens_ * sizeof(int32_t);
    if (records->key_tail != nullptr) total += sizeof(*records->key_tail);
  }
  return total;
}

}  // namespace stepwell
