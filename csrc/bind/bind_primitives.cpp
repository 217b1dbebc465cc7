#include "bind.h"

namespace stepwell::bind {

void bind_primitives(nb::module_&) {}

}  // namespace stepwell::bind
