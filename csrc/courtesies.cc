// The batches behind courtesies.h.
#include "courtesies.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace stepwell {

void Courtesies::add(const std::vector<uint32_t>& pages, double until, std::vector<uint32_t>* new_pages) {
  new_pages->clear();
  if (pages.empty()) return;
  // All that may throw comes first.
  new_pages->reserve(pages.size());
  for (const uint32_t page : pages) {
    const size_t block = page >> kBlockBits;
    if (block >= blocks_.size()) blocks_.resize(block + 1);
    if (blocks_[block] == nullptr) blocks_[block] = std::make_unique<Block>();
  }
  std::vector<uint32_t> list;
  list.reserve(pages.size());
  const uint64_t number = last_ + 1;
  const auto end = ends_.emplace(until, number).first;
  Batches::iterator mine;
  try {
    mine = batches_.emplace_hint(batches_.end(), number, Batch{std::move(list), 0, until});
  } catch (...) {
    ends_.erase(end);
    throw;
  }
  last_ = number;
  auto before = batches_.end();  // where the page before came from: most come from one batch
  for (const uint32_t page : pages) {
    Entry& of = entry(page);
    if (of.batch == number) continue;
    if (of.batch == 0) {
      new_pages->push_back(page);
      of.until = until;
      ++size_;
    } else {
      if (before == batches_.end() || before->first != of.batch) before = batches_.find(of.batch);
      of.until = std::max(of.until, until);
      if (before->second.held == 1) {
        drop_one(before);
        before = batches_.end();
      } else {
        --before->second.held;
      }
    }
    of.batch = number;
    mine->second.pages.push_back(page);
    ++mine->second.held;
  }
  listed_ += mine->second.pages.size();
  if (listed_ > 2 * size_ + kSlack) compact();
}

void Courtesies::remove(uint32_t page) noexcept {
  Entry& of = entry(page);
  drop_one(batches_.find(of.batch));
  of.batch = 0;
  --size_;
}

void Courtesies::drop_one(Batches::iterator batch) noexcept {
  if (--batch->second.held > 0) return;
  listed_ -= batch->second.pages.size();
  ends_.erase({batch->second.due, batch->first});
  batches_.erase(batch);
}

void Courtesies::due(double now, std::vector<uint32_t>* out) {
  while (!ends_.empty() && ends_.begin()->first <= now) {
    const uint64_t number = ends_.begin()->second;
    Batch& batch = batches_.find(number)->second;
    double next = std::numeric_limits<double>::infinity();
    for (const uint32_t page : batch.pages) {
      const Entry& of = entry(page);
      if (of.batch != number) continue;
      if (of.until <= now) {
        out->push_back(page);
      } else {
        next = std::min(next, of.until);
      }
    }
    batch.due = next;
    auto node = ends_.extract(ends_.begin());
    node.value().first = next;
    ends_.insert(std::move(node));
  }
}

void Courtesies::compact() noexcept {
  listed_ = 0;
  for (auto& [number, batch] : batches_) {
    std::erase_if(batch.pages, [&, of = number](uint32_t page) { return entry(page).batch != of; });
    batch.pages.shrink_to_fit();
    listed_ += batch.pages.size();
  }
}

uint64_t Courtesies::bytes() const noexcept {
  uint64_t total =
      listed_ * sizeof(uint32_t) + batches_.size() * (sizeof(Batch) + 2 * sizeof(std::pair<double, uint64_t>));
  for (const auto& block : blocks_) total += block == nullptr ? 0 : sizeof(Block);
  return total;
}

const char* Courtesies::check() const {
  uint64_t held = 0, listed = 0, named = 0;
  for (const auto& [number, batch] : batches_) {
    std::unordered_set<uint32_t> own;
    for (const uint32_t page : batch.pages) {
      if (entry(page).batch != number) continue;
      if (!own.insert(page).second) return "a batch of courtesies lists a page twice";
      if (entry(page).until < batch.due) return "a courtesy ends before its batch is looked at";
    }
    if (own.size() != batch.held || own.empty()) return "a batch of courtesies is miscounted";
    if (ends_.count({batch.due, number}) != 1) return "the end of a batch of courtesies is not known";
    held += own.size();
    listed += batch.pages.size();
  }
  for (const auto& block : blocks_) {
    if (block == nullptr) continue;
    for (const Entry& of : *block) named += of.batch != 0;
  }
  if (held != size_ || named != size_ || ends_.size() != batches_.size()) return "courtesies are miscounted";
  if (listed != listed_) return "what courtesies list is miscounted";
  return "";
}

}  // namespace stepwell
