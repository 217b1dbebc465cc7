// What the binding files share. Only files in csrc/bind include nanobind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "copy.h"
#include "geometry.h"

namespace nb = nanobind;

namespace stepwell::bind {

// Takes the GIL again, or stays here for ever: a thread that comes for it while the interpreter ends is ended by it
// (Python before 3.14), by unwinding through frames that may not be left that way, and that aborts the process.
void take_gil(PyThreadState* state);

// Lets go of the GIL for as long as it lives. In place of nanobind's own, which a call that returns that late aborts.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() { take_gil(state_); }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

template <typename T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using MutableArray1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using MutableArray2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Hands a vector to numpy without a copy.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  size_t shape[1] = {owned->size()};
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), 1, shape, owner);
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<2>> to_numpy(std::vector<T> values, size_t rows, size_t columns) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  size_t shape[2] = {rows, columns};
  return nb::ndarray<nb::numpy, T, nb::ndim<2>>(owned->data(), 2, shape, owner);
}

// Makes what maps, opens or takes much when it begins, and unmaps, closes or frees it when it ends: that takes as long as
// the kernel and its disks like, and other Python threads run on meanwhile (LMCache/LMCache#4676: a destructor that waited
// with the GIL stopped the server). For nb::new_: the last reference is Python's, so the deleter has the GIL to let go of.
template <typename T, typename... Args>
std::shared_ptr<T> made_to_end_without_gil(Args&&... args) {
  std::unique_ptr<T> made;
  {
    const GilRelease release;
    made = std::make_unique<T>(std::forward<Args>(args)...);
  }
  return std::shared_ptr<T>(made.release(), [](T* ending) {
    const GilRelease release;
    const std::unique_ptr<T> owned(ending);
  });
}

// What Python calls a Pool. The layout is shared in C++ alone: a worker that lets go of it last must not need the GIL.
struct PoolHandle {
  std::shared_ptr<const PoolLayout> layout;
  PageShape shape;
};

void bind_primitives(nb::module_& module);  // status, crc32c, sha256, fault, PageShape, PoolLayout, guard
void bind_file(nb::module_& module);        // Descriptor, file functions
void bind_index(nb::module_& module);       // residency table, Index
void bind_volume(nb::module_& module);      // Slab, Volume, VolumeSet, read_foreign_page
void bind_neighbours(nb::module_& module);  // Foreign: pages of neighbours
void bind_mover(nb::module_& module);       // Transfer, Inbox, Mover

}  // namespace stepwell::bind
