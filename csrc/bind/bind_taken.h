// What a call of Python's has taken of an index, and the transfers that it handed that to.
#pragma once

#include <memory>
#include <vector>

#include "taken.h"
#include "transfer.h"

namespace stepwell::bind {

// Guarded by the GIL.
struct TakenHandle : Taken {
  using Taken::Taken;
  std::vector<std::shared_ptr<Transfer>> transfers;
};

}  // namespace stepwell::bind
