#include "bind.h"

namespace stepwell::bind {

void bind_index(nb::module_&) {}

}  // namespace stepwell::bind
