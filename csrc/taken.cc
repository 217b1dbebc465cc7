#include "taken.h"

#include <exception>

namespace stepwell {

namespace {

// A failed assertion has poisoned the index, and says so at the next call; the rest is returned all the same.
template <typename F>
void quietly(F&& f) noexcept {
  try {
    f();
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace

Taken::~Taken() { give_back(); }

void Taken::add(const ClaimBatch& batch) {
  try {
    claims_.reserve(claims_.size() + batch.outcomes.size());
    pins_.reserve(pins_.size() + batch.pages.size());
  } catch (...) {
    for (size_t row = 0; row < batch.pages.size(); ++row) take_row(batch, row, /*is_lost=*/true);
    throw;
  }
  for (size_t row = 0; row < batch.pages.size(); ++row) take_row(batch, row, /*is_lost=*/false);
}

void Taken::take_row(const ClaimBatch& batch, size_t row, bool is_lost) noexcept {
  bool is_new = false;
  for (size_t tier = 0; tier < kTiers; ++tier) {
    if (batch.outcomes[row * kTiers + tier] != ClaimOutcome::kNew) continue;
    is_new = true;
    const Claim claim{batch.pages[row], static_cast<Tier>(tier), batch.numbers[row * kTiers + tier]};
    if (is_lost)
      abort(claim);
    else
      claims_.push_back(claim);
  }
  if (!is_new) return;
  if (is_lost)
    unpin(batch.pages[row]);
  else
    pins_.push_back(batch.pages[row]);
}

void Taken::add_pins(const std::vector<PageId>& pages) {
  try {
    pins_.insert(pins_.end(), pages.begin(), pages.end());
  } catch (...) {
    for (const PageId page : pages) unpin(page);
    throw;
  }
}

void Taken::add_lease(uint64_t lease) {
  if (lease == 0) return;
  try {
    leases_.push_back(lease);
  } catch (...) {
    quietly([&] { index_->release(lease); });
    throw;
  }
}

void Taken::add_hold(uint64_t hold) {
  if (hold == 0) return;
  try {
    holds_.push_back(hold);
  } catch (...) {
    quietly([&] { index_->unhold(hold); });
    throw;
  }
}

void Taken::retain(uint64_t lease) {
  if (lease == 0) return;
  index_->retain(lease);
  add_lease(lease);
}

void Taken::hand_on() noexcept {
  claims_.clear();
  pins_.clear();
  leases_.clear();
  holds_.clear();
}

void Taken::give_back() noexcept {
  for (const Claim& claim : claims_) abort(claim);
  for (const PageId page : pins_) unpin(page);
  for (const uint64_t lease : leases_) quietly([&] { index_->release(lease); });
  for (const uint64_t hold : holds_) quietly([&] { index_->unhold(hold); });
  hand_on();
}

void Taken::abort(const Claim& claim) noexcept {
  quietly([&] { index_->abort(claim.page, claim.tier, claim.number); });
}

void Taken::unpin(PageId page) noexcept {
  quietly([&] { index_->unpin_pages(&page, 1); });
}

}  // namespace stepwell
