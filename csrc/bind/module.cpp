// The extension module stepwell._core.
#include <unistd.h>

#include "bind.h"

namespace stepwell::bind {

// A function of its own, so that its frame is the first that the unwinding meets.
[[gnu::noinline]] void take_gil(PyThreadState* state) {
  struct Stay {
    bool has_gil = false;
    ~Stay() {
      while (!has_gil) ::pause();
    }
  } stay;
  PyEval_RestoreThread(state);
  stay.has_gil = true;
}

}  // namespace stepwell::bind

NB_MODULE(_core, module) {
  module.doc() = "The C++ core of stepwell: index, media, mover. Private: use the names that stepwell exports.";
  stepwell::bind::bind_primitives(module);
  stepwell::bind::bind_file(module);
  stepwell::bind::bind_index(module);
  stepwell::bind::bind_volume(module);
  stepwell::bind::bind_neighbours(module);
  stepwell::bind::bind_mover(module);
}
