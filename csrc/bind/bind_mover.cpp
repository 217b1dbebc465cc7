#include "bind.h"

namespace stepwell::bind {

void bind_mover(nb::module_&) {}

}  // namespace stepwell::bind
