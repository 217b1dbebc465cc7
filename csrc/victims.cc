#include "victims.h"

#include <array>
#include <exception>
#include <utility>

namespace stepwell {

Victims::~Victims() {
  try {
    free();
  } catch (const std::exception&) {
    return;  // a failed assertion has poisoned the index, and says so at the next call
  }
}

void Victims::take(uint32_t n) {
  free();
  index_->take_victims(tier_, n, kNoSlot, &slots_);
  size_ = slots_.size();
}

void Victims::take_chain(uint32_t name_space, const int32_t* tokens, uint64_t count, uint32_t keep_pages) {
  free();
  std::array<std::vector<Victim>, kTiers> chosen;
  index_->claim_chain(name_space, tokens, count, keep_pages, mask(tier_), chosen.data());
  const std::vector<Victim>& leaving = chosen[static_cast<size_t>(tier_)];
  try {
    slots_.reserve(leaving.size());
  } catch (...) {
    for (const Victim& victim : leaving) index_->keep(victim.page, tier_, victim.number);
    throw;
  }
  for (const Victim& victim : leaving) {
    if (index_->finish(victim.page, tier_, victim.number) == Status::kOk) slots_.push_back(victim.slot);
  }
  size_ = slots_.size();
}

size_t Victims::free() {
  if (medium_ != nullptr) {
    for (const uint32_t slot : slots_) medium_->retire(slot);
  }
  return free_with_records();
}

size_t Victims::free_with_records() {
  const std::vector<uint32_t> slots = std::exchange(slots_, {});
  if (!slots.empty()) index_->free_slots(tier_, slots.data(), slots.size());
  return slots.size();
}

}  // namespace stepwell
