// What a call of Python's has taken of an index, and the transfer that it handed that to.
#pragma once

#include <memory>

#include "taken.h"
#include "transfer.h"

namespace stepwell::bind {

// Guarded by the GIL.
struct TakenHandle : Taken {
  using Taken::Taken;
  std::shared_ptr<Transfer> transfer;
};

}  // namespace stepwell::bind
