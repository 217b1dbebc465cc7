#include "victims.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "file.h"

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
  owed_ = errors_ = 0;
}

void Victims::take_chain(std::span<Victims* const> from, uint32_t name_space, const int32_t* tokens, uint64_t count,
                         uint32_t keep_pages) {
  if (from.empty()) return;
  TierMask tiers = 0;
  for (Victims* each : from) {
    each->free();
    each->size_ = each->owed_ = each->errors_ = 0;
    tiers |= mask(each->tier_);
  }
  std::array<std::vector<Victim>, kTiers> chosen;
  from[0]->index_->claim_chain(name_space, tokens, count, keep_pages, tiers, chosen.data());
  const auto leaving = [&](const Victims* each) -> const std::vector<Victim>& {
    return chosen[static_cast<size_t>(each->tier_)];
  };
  try {
    for (Victims* each : from) each->slots_.reserve(leaving(each).size());
  } catch (...) {
    for (const Victims* each : from) {
      for (const Victim& victim : leaving(each)) each->index_->keep(victim.page, each->tier_, victim.number);
    }
    throw;
  }
  for (Victims* each : from) {
    for (const Victim& victim : leaving(each)) {
      if (each->index_->finish(victim.page, each->tier_, victim.number) == Status::kOk)
        each->slots_.push_back(victim.slot);
    }
    each->size_ = each->slots_.size();
  }
}

void Victims::take_owed(uint32_t n, uint32_t only_range) {
  free();
  index_->take_owed(tier_, n, only_range, &slots_);
  size_ = slots_.size();
  owed_ = errors_ = 0;
}

size_t Victims::free() {
  size_t retired = 0;
  if (medium_ == nullptr) {
    retired = slots_.size();
  } else {
    std::sort(slots_.begin(), slots_.end());  // records that lie together are written together
    std::array<Status, 64> statuses;
    for (size_t first = 0, end = 0; first < slots_.size(); first = end) {
      for (end = first + 1; end < slots_.size() && end - first < statuses.size();) {
        if (slots_[end] != slots_[end - 1] + 1) break;
        ++end;
      }
      file::forget_error();
      medium_->retire_run(slots_[first], static_cast<uint32_t>(end - first), statuses.data());
      if (const int error = file::last_error(); error != 0) {
        error_ = error;
        if (end - first > 1) ++errors_;  // the call for all of them, also where each record's own works then
      }
      for (size_t i = first; i < end; ++i) {
        if (statuses[i - first] == Status::kOk) std::swap(slots_[retired++], slots_[i]);
      }
    }
  }
  // Owed before any is free: whatever the second call raises, none of these is.
  const size_t owed = slots_.size() - retired;
  errors_ += owed;
  if (owed > 0) {
    index_->owe_slots(tier_, slots_.data() + retired, owed);
  }
  owed_ += owed;
  slots_.resize(retired);
  return free_with_records();
}

size_t Victims::free_with_records() {
  const std::vector<uint32_t> slots = std::exchange(slots_, {});
  if (!slots.empty()) index_->free_slots(tier_, slots.data(), slots.size());
  return slots.size();
}

void Victims::owe() {
  if (!slots_.empty()) index_->owe_slots(tier_, slots_.data(), slots_.size());
  owed_ += slots_.size();
  slots_.clear();
}

}  // namespace stepwell
