#include "bind.h"

namespace stepwell::bind {

void bind_volume(nb::module_&) {}

}  // namespace stepwell::bind
