// The extension module stepwell._core.
#include "bind.h"

NB_MODULE(_core, module) {
  module.doc() = "The C++ core of stepwell: index, media, mover. Private: use the names that stepwell exports.";
  stepwell::bind::bind_primitives(module);
  stepwell::bind::bind_file(module);
  stepwell::bind::bind_index(module);
  stepwell::bind::bind_volume(module);
  stepwell::bind::bind_neighbours(module);
  stepwell::bind::bind_mover(module);
}
