// Status, checksums, the hash chain, page shapes, pools, the guard and fault points.
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "bind.h"
#include "copy.h"
#include "crc32c.h"
#include "fault.h"
#include "geometry.h"
#include "guard.h"
#include "sha256.h"
#include "status.h"

namespace stepwell::bind {
namespace {

using Bytes = Array1<uint8_t>;
using MutableBytes = MutableArray1<uint8_t>;

// Arrays as small as this are not worth giving up the GIL for: releasing it costs about as much as the work.
constexpr size_t kReleaseBytes = 4096;

template <typename Work>
auto without_gil(size_t bytes, Work work) {
  if (bytes < kReleaseBytes) return work();
  GilRelease release;
  return work();
}

std::array<uint8_t, kDigestBytes> digest_from(const nb::bytes& bytes, const char* what) {
  std::array<uint8_t, kDigestBytes> digest;
  if (bytes.size() != digest.size())
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(bytes.size()) + " bytes, not 32");
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

Key key_from(const nb::bytes& bytes, const char* what) {
  if (bytes.size() > kMaxKeyBytes)
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(bytes.size()) + " bytes, at most 64 fit");
  Key key;
  key.length = static_cast<uint8_t>(bytes.size());
  std::memcpy(key.bytes.data(), bytes.data(), bytes.size());
  return key;
}

void require_same_size(size_t target, size_t source) {
  if (target != source)
    throw std::invalid_argument("target has " + std::to_string(target) + " bytes, source " + std::to_string(source));
}

void require_page(const char* what, size_t bytes, const PageShape& shape) {
  if (bytes != shape.page_bytes())
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(bytes) + " bytes, a page has " +
                                std::to_string(shape.page_bytes()));
}

fault::Action action_from(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, fault::Action>, 7> kActions = {{
      {"count", fault::Action::kCount},
      {"errno", fault::Action::kErrno},
      {"short", fault::Action::kShort},
      {"kill", fault::Action::kKill},
      {"stop", fault::Action::kStop},
      {"pause", fault::Action::kPause},
      {"delay", fault::Action::kDelay},
  }};
  for (const auto& [known, action] : kActions)
    if (known == name) return action;
  throw std::invalid_argument("unknown fault action '" + std::string(name) +
                              "': count, errno, short, kill, stop, pause or delay");
}

void bind_status(nb::module_& module) {
  nb::enum_<Status> status(module, "Status", nb::is_arithmetic(), "The outcome of one page, call or transfer.");
  for (const Status value : {Status::kOk, Status::kPending, Status::kQueueFull, Status::kFull, Status::kCancelled,
                             Status::kDeadline, Status::kIOError, Status::kChecksum, Status::kStale, Status::kBusFault,
                             Status::kClosed, Status::kPoisoned, Status::kInvalid, Status::kFailed, Status::kGone})
    status.value(status_name(value), value);
}

void bind_checksums(nb::module_& module) {
  // The overload for bytes comes first: a bytes object is read-only and has no array interface.
  module.def(
      "crc32c",
      [](const nb::bytes& data, uint32_t crc) {
        const void* bytes = data.data();
        const size_t size = data.size();
        return without_gil(size, [&] { return crc32c(crc, bytes, size); });
      },
      nb::arg("data"), nb::arg("crc") = 0, "Continue a CRC-32C over `data`. `crc` is the value of what came before.");
  module.def(
      "crc32c",
      [](Bytes data, uint32_t crc) {
        return without_gil(data.size(), [&] { return crc32c(crc, data.data(), data.size()); });
      },
      nb::arg("data"), nb::arg("crc") = 0, "Continue a CRC-32C over `data: uint8[n]`.");
  module.def(
      "crc32c_copy",
      [](MutableBytes target, Bytes source, uint32_t crc) {
        require_same_size(target.size(), source.size());
        return without_gil(source.size(), [&] {
          const uint32_t result = crc32c_copy(crc, target.data(), source.data(), source.size());
          copy_fence();
          return result;
        });
      },
      nb::arg("target"), nb::arg("source"), nb::arg("crc") = 0,
      "Copy `source: uint8[n]` to `target: uint8[n]` and return the CRC-32C of the bytes copied.");
  module.def(
      "stream_copy",
      [](MutableBytes target, Bytes source) {
        require_same_size(target.size(), source.size());
        without_gil(source.size(), [&] {
          stream_copy(target.data(), source.data(), source.size());
          copy_fence();
        });
      },
      nb::arg("target"), nb::arg("source"),
      "Copy `source: uint8[n]` to `target: uint8[n]`, around the cache where it pays.");
  module.def("crc32c_combine", &crc32c_combine, nb::arg("crc_a"), nb::arg("crc_b"), nb::arg("bytes_b"),
             "Return the CRC-32C of A|B from those of A and B.");
  module.def("crc32c_implementation", &crc32c_implementation, "Name the CRC-32C implementation of this machine.");
  module.def("crc32c_implementations", &crc32c_implementations,
             "Name all that this machine can run, its own choice first.");
  module.def("use_crc32c", &use_crc32c, nb::arg("implementation"),
             "Compute and copy by this implementation from now on, in all of the process. False: this machine cannot. "
             "For tests.");
}

void bind_hashing(nb::module_& module) {
  module.def("sha256_implementation", &sha256_implementation, "Name the SHA-256 implementation of this machine.");
  module.def("sha256_implementations", &sha256_implementations,
             "Name all that this machine can run, its own choice first.");
  module.def("use_sha256", &use_sha256, nb::arg("implementation"),
             "Hash by this implementation from now on, in all of the process. False: this machine cannot. For tests.");
  module.def(
      "sha256",
      [](const nb::bytes& data) {
        std::array<uint8_t, kDigestBytes> digest;
        sha256(data.data(), data.size(), digest.data());
        return nb::bytes(digest.data(), digest.size());
      },
      nb::arg("data"), "Return the SHA-256 of `data`.");
  module.def(
      "first_negative",
      [](const Array1<int32_t>& numbers) {
        const int32_t *first = numbers.data(), *end = first + numbers.size();
        int32_t all = 0;
        for (const int32_t* each = first; each != end; ++each) all |= *each;  // without a branch: it is vectorized
        if (all >= 0) return int64_t{-1};
        return static_cast<int64_t>(std::find_if(first, end, [](int32_t each) { return each < 0; }) - first);
      },
      nb::arg("numbers"), "Return where the first number below 0 of `numbers: int32[n]` is, -1 where there is none.");
  module.def(
      "hash_chain",
      [](std::optional<nb::bytes> prior, Array1<int32_t> tokens, int64_t page_tokens) {
        if (page_tokens < 1)
          throw std::invalid_argument("page_tokens must be positive, not " + std::to_string(page_tokens));
        std::array<uint8_t, kDigestBytes> seed;
        if (prior) seed = digest_from(*prior, "prior");
        const size_t pages = tokens.size() / static_cast<size_t>(page_tokens);
        std::vector<uint8_t> digests(pages * kDigestBytes);
        without_gil(tokens.size() * sizeof(int32_t), [&] {
          hash_chain(prior ? seed.data() : nullptr, tokens.data(), pages, static_cast<size_t>(page_tokens),
                     digests.data());
        });
        return to_numpy(std::move(digests), pages, kDigestBytes);
      },
      nb::arg("prior").none(), nb::arg("tokens"), nb::arg("page_tokens"),
      "Hash the full pages of `tokens: int32[n]`, each chained on the one before. Returns uint8[n // page_tokens, "
      "32].");
}

void bind_shape(nb::module_& module) {
  nb::class_<PageShape>(module, "PageShape", "The layers of a page in canonical order, and its fingerprint. Immutable.")
      .def(
          "__init__",
          [](PageShape* self, std::vector<uint64_t> layer_bytes, const nb::bytes& fingerprint) {
            new (self) PageShape(std::move(layer_bytes), digest_from(fingerprint, "fingerprint"));
          },
          nb::arg("layer_bytes"), nb::arg("fingerprint"))
      .def_prop_ro("layers", &PageShape::layers)
      .def_prop_ro("page_bytes", &PageShape::page_bytes)
      .def_prop_ro("layer_bytes",
                   [](const PageShape& self) {
                     std::vector<uint64_t> bytes(self.layers());
                     for (uint32_t layer = 0; layer < self.layers(); ++layer) bytes[layer] = self.layer_bytes(layer);
                     return bytes;
                   })
      .def_prop_ro("fingerprint", [](const PageShape& self) {
        return nb::bytes(self.fingerprint().data(), self.fingerprint().size());
      });
  module.def(
      "page_seed",
      [](const PageShape& shape, const nb::bytes& key, uint64_t epoch, uint8_t kind) {
        Label label;
        label.key = key_from(key, "key");
        label.epoch = epoch;
        label.kind = kind;
        return shape.page_seed(label);
      },
      nb::arg("shape"), nb::arg("key"), nb::arg("epoch") = 0, nb::arg("kind") = 1,
      "Return the part of a page's checksums that all its layers share (FORMAT.md 2.3).");
  module.def(
      "layer_checksum",
      [](uint32_t page_seed, uint32_t layer, Bytes data) {
        const uint32_t seed = PageShape::layer_seed(page_seed, layer);
        return without_gil(data.size(), [&] { return crc32c(seed, data.data(), data.size()); });
      },
      nb::arg("page_seed"), nb::arg("layer"), nb::arg("data"),
      "Return the checksum of one layer's canonical bytes (FORMAT.md 2.3).");
}

void require_done(Status status) {
  if (status != Status::kOk) throw std::invalid_argument(std::string("copy refused: ") + status_name(status));
}

// Copies all layers of a slot one after the other. Checksums start from 0 in each layer; `checksums` may be null.
template <typename CopyLayer>
void copy_page(const PageShape& shape, uint32_t* checksums, CopyLayer copy_layer) {
  require_done(without_gil(shape.page_bytes(), [&] {
    for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
      const Status status =
          copy_layer(layer, shape.layer_offset(layer), checksums != nullptr ? checksums + layer : nullptr);
      if (status != Status::kOk) return status;
    }
    copy_fence();
    return Status::kOk;
  }));
}

void gather_page(const PoolHandle& pool, uint64_t slot, MutableBytes target, uint32_t* checksums) {
  require_page("target", target.size(), pool.shape);
  auto* bytes = reinterpret_cast<std::byte*>(target.data());
  copy_page(pool.shape, checksums, [&](uint32_t layer, uint64_t offset, uint32_t* crc) {
    return pool.layout->gather_layer(slot, layer, bytes + offset, crc, false);
  });
}

void scatter_page(const PoolHandle& pool, uint64_t slot, Bytes source, uint32_t* checksums) {
  require_page("source", source.size(), pool.shape);
  const auto* bytes = reinterpret_cast<const std::byte*>(source.data());
  copy_page(pool.shape, checksums, [&](uint32_t layer, uint64_t offset, uint32_t* crc) {
    return pool.layout->scatter_layer(slot, layer, bytes + offset, crc, false);
  });
}

// How far slots go, and whether they are all different; what is not within the pool is not looked at for that.
std::tuple<int64_t, int64_t, bool> slot_range(const Array1<int64_t>& slots, int64_t count) {
  const int64_t *first = slots.data(), *end = first + slots.shape(0);
  if (first == end) return {0, -1, true};
  const auto [low, high] = std::minmax_element(first, end);
  if (*low < 0 || *high >= count) return {*low, *high, true};
  std::vector<bool> is_named(static_cast<size_t>(*high - *low) + 1);
  for (const int64_t* each = first; each != end; ++each) {
    const auto at = static_cast<size_t>(*each - *low);
    if (is_named[at]) return {*low, *high, false};
    is_named[at] = true;
  }
  return {*low, *high, true};
}

void bind_pool(nb::module_& module) {
  module.def(
      "slot_range", &slot_range, nb::arg("slots"), nb::arg("count"),
      "Return the least and the greatest of `slots: int64[n]`, (0, -1) for none, and whether they are all different, "
      "which is looked at where they are within 0..count - 1.");
  nb::class_<PoolHandle>(module, "Pool", "The layout of a pool in memory that the caller keeps alive. Immutable.")
      .def(
          "__init__",
          [](PoolHandle* self, const PageShape& shape, uint32_t streams, Array1<uint64_t> base,
             Array1<int64_t> slot_stride, Array1<int64_t> outer_stride, Array1<int64_t> inner_stride,
             Array1<uint32_t> outer_count, Array1<uint32_t> inner_count, Array1<uint64_t> piece_bytes, uint64_t slots,
             bool writable) {
            const size_t count = base.size();
            for (const size_t size : {slot_stride.size(), outer_stride.size(), inner_stride.size(), outer_count.size(),
                                      inner_count.size(), piece_bytes.size()})
              if (size != count)
                throw std::invalid_argument("the arrays of a pool have different lengths: " + std::to_string(count) +
                                            " and " + std::to_string(size));
            std::vector<StreamView> views(count);
            for (size_t i = 0; i < count; ++i) {
              views[i].base = reinterpret_cast<std::byte*>(static_cast<uintptr_t>(base.data()[i]));
              views[i].slot_stride = slot_stride.data()[i];
              views[i].outer_stride = outer_stride.data()[i];
              views[i].inner_stride = inner_stride.data()[i];
              views[i].outer_count = outer_count.data()[i];
              views[i].inner_count = inner_count.data()[i];
              views[i].piece_bytes = piece_bytes.data()[i];
            }
            new (self) PoolHandle{std::make_shared<const PoolLayout>(shape, streams, std::move(views), slots, writable),
                                  shape};
          },
          nb::arg("shape"), nb::arg("streams"), nb::arg("base"), nb::arg("slot_stride"), nb::arg("outer_stride"),
          nb::arg("inner_stride"), nb::arg("outer_count"), nb::arg("inner_count"), nb::arg("piece_bytes"),
          nb::arg("slots"), nb::arg("writable"))
      .def_prop_ro("slots", [](const PoolHandle& self) { return self.layout->slots(); })
      .def_prop_ro("writable", [](const PoolHandle& self) { return self.layout->writable(); })
      .def_prop_ro("layers", [](const PoolHandle& self) { return self.layout->layers(); })
      .def(
          "gather",
          [](const PoolHandle& self, uint64_t slot, MutableBytes target) {
            std::vector<uint32_t> checksums(self.shape.layers(), 0);
            gather_page(self, slot, target, checksums.data());
            return to_numpy(std::move(checksums));
          },
          nb::arg("slot"), nb::arg("target"),
          "Copy a slot to `target: uint8[page_bytes]` in canonical order. Returns uint32[layers], the CRC-32C of each "
          "layer.")
      .def(
          "scatter",
          [](const PoolHandle& self, uint64_t slot, Bytes source) {
            std::vector<uint32_t> checksums(self.shape.layers(), 0);
            scatter_page(self, slot, source, checksums.data());
            return to_numpy(std::move(checksums));
          },
          nb::arg("slot"), nb::arg("source"),
          "Copy `source: uint8[page_bytes]` into a slot. Returns uint32[layers], the CRC-32C of each layer.")
      .def(
          "gather_unchecked",
          [](const PoolHandle& self, uint64_t slot, MutableBytes target) { gather_page(self, slot, target, nullptr); },
          nb::arg("slot"), nb::arg("target"), "Copy a slot to `target: uint8[page_bytes]` without checksums.")
      .def(
          "scatter_unchecked",
          [](const PoolHandle& self, uint64_t slot, Bytes source) { scatter_page(self, slot, source, nullptr); },
          nb::arg("slot"), nb::arg("source"), "Copy `source: uint8[page_bytes]` into a slot without checksums.");
}

void bind_fault(nb::module_& module) {
  module.def(
      "fault_arm",
      [](const std::string& name, std::string_view action, uint64_t nth, int64_t value) {
        fault::arm(name, action_from(action), nth, value);
      },
      nb::arg("name"), nb::arg("action"), nb::arg("nth") = 0, nb::arg("value") = 0,
      "Do `action` at the nth time from now (0: each time) that a point matching `name` is reached.");
  module.def("fault_clear", &fault::clear, "Drop all rules, wake all paused threads, zero the counters.");
  module.def("fault_resume", &fault::resume, nb::arg("name"), "Let the threads paused at a point go on, once.");
  module.def("fault_reached", &fault::reached, nb::arg("name"), "Count how often a point was reached while armed.");
  module.def("fault_paused", &fault::paused, nb::arg("name"), "Count the threads that stand at a point.");
  module.def("fault_wait_paused", &fault::wait_paused, nb::arg("name"), nb::arg("timeout"),
             nb::call_guard<GilRelease>(),
             "Wait, at most `timeout` seconds, until a thread stands at a point. False: none came.");
}

void bind_guard(nb::module_& module) {
  module.def("guard_install", &guard::install, "Install the SIGBUS guard, once per process. False: sigaction failed.");
  module.def("guard_is_ours", &guard::is_ours, "Tell whether the process's SIGBUS handler is the guard's.");
  module.def("guard_caught", &guard::caught, "Count the faults caught since the process started.");
}

}  // namespace

void bind_primitives(nb::module_& module) {
  bind_status(module);
  bind_checksums(module);
  bind_hashing(module);
  bind_shape(module);
  bind_pool(module);
  bind_fault(module);
  bind_guard(module);
}

}  // namespace stepwell::bind
