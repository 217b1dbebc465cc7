// Storage of the rank's links: see rank.h.
#include "rank.h"

namespace stepwell {

void Rank::make_block(uint32_t block) {
  if (block >= blocks_.size()) blocks_.resize(block + 1);
  blocks_[block] = std::make_unique<Block>();
  ++blocks_allocated_;
}

}  // namespace stepwell
