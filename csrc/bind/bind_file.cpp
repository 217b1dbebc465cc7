#include "bind.h"

namespace stepwell::bind {

void bind_file(nb::module_&) {}

}  // namespace stepwell::bind
