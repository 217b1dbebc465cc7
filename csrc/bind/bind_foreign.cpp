// Foreign: what neighbours have, as Python's keeper and look-ups see it.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bind.h"
#include "foreign.h"

namespace stepwell::bind {
namespace {

using Touches = std::tuple<std::vector<nb::bytes>, nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>,
                           nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>>;

Touches take_touches(Foreign& self) {
  std::vector<nb::bytes> ids;
  std::vector<uint32_t> slots;
  std::vector<uint64_t> generations;
  for (const ForeignTouch& touch : self.take_touches()) {
    ids.emplace_back(touch.volume_id.data(), touch.volume_id.size());
    slots.push_back(touch.slot);
    generations.push_back(touch.generation);
  }
  return {std::move(ids), to_numpy(std::move(slots)), to_numpy(std::move(generations))};
}

// The keys of a run: uint8[n, length of the first].
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> keys_of(const ForeignRun& run) {
  const size_t length = run.keys.empty() ? 32 : run.keys.front().length;
  std::vector<uint8_t> bytes;
  bytes.reserve(run.keys.size() * length);
  for (const Key& key : run.keys) bytes.insert(bytes.end(), key.bytes.begin(), key.bytes.begin() + length);
  return to_numpy(std::move(bytes), run.keys.size(), length);
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> offered_of(const ForeignRun& run) {
  std::vector<uint8_t> offered;
  for (const ForeignPlace& place : run.places) offered.push_back(place.is_known() ? 1 : 0);
  return to_numpy(std::move(offered));
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> tiers_of(const ForeignRun& run) {
  std::vector<uint8_t> tiers;
  for (const ForeignPlace& place : run.places) tiers.push_back(static_cast<uint8_t>(place.tier));
  return to_numpy(std::move(tiers));
}

}  // namespace

void bind_neighbours(nb::module_& module) {
  nb::class_<ForeignRun>(module, "ForeignRun", "Pages of a chain that are here or with a neighbour, without a gap.")
      .def_ro("foreign", &ForeignRun::foreign, "How many only a neighbour has.")
      .def_prop_ro("pages", [](const ForeignRun& self) { return self.keys.size(); })
      .def("keys", &keys_of, "uint8[n, k], the keys of its pages.")
      .def("offered", &offered_of, "uint8[n]: 1 where only a neighbour has the page.")
      .def("tiers", &tiers_of, "uint8[n] of Tier: where such a page lies; undefined where the page is ours.");

  nb::class_<Foreign>(module, "Foreign", "The pages of other processes' volumes: hints, see csrc/foreign.h.")
      .def(nb::init<const PageShape&, uint32_t>(), nb::arg("shape"), nb::arg("most_pages"))
      .def(
          "attach",
          [](Foreign& self, const VolumeHeader& header, int metadata_fd, int pages_fd) {
            Descriptor metadata(metadata_fd);
            Descriptor pages(pages_fd);
            const GilRelease release;
            return self.attach(header, std::move(metadata), std::move(pages));
          },
          nb::arg("header"), nb::arg("metadata_fd"), nb::arg("pages_fd") = -1,
          "Take a volume's files, also where it raises ValueError: it is of another shape. Returns its number.")
      .def("detach", &Foreign::detach, nb::arg("volume"), nb::call_guard<GilRelease>(),
           "Forget a volume and its pages.")
      .def("poll", &Foreign::poll, nb::call_guard<GilRelease>(),
           "Read what has changed. Returns the numbers of volumes that cannot be used any more.")
      .def(
          "find_run",
          [](const Foreign& self, const Index& index, const std::optional<nb::bytes>& prior,
             const Array1<int32_t>& tokens, uint32_t first, uint64_t epoch, int usable) {
            if (prior && prior->size() != 32) throw nb::value_error("what a page is hashed on has 32 bytes");
            const auto* before = prior ? reinterpret_cast<const uint8_t*>(prior->c_str()) : nullptr;
            const auto total = static_cast<uint32_t>(tokens.shape(0) / index.page_tokens());
            const GilRelease release;
            return self.find_run(index, before, tokens.data(), std::min(first, total), total, epoch,
                                 static_cast<TierMask>(usable));
          },
          nb::arg("index"), nb::arg("prior").none(), nb::arg("tokens"), nb::arg("first"), nb::arg("epoch"),
          nb::arg("usable"), "Find the pages behind the first `first` of some tokens. Returns ForeignRun.")
      .def(
          "find_keys",
          [](const Foreign& self, const Index& index, const Array2<uint8_t>& keys, uint8_t kind, uint64_t epoch,
             int usable) {
            const size_t n = keys.shape(0), length = keys.shape(1);
            if (length == 0 || length > kMaxKeyBytes) throw nb::value_error("a key has 1 to 64 bytes");
            std::vector<Key> list(n);
            for (size_t i = 0; i < n; ++i) {
              std::memcpy(list[i].bytes.data(), keys.data() + i * length, length);
              list[i].length = static_cast<uint8_t>(length);
            }
            const GilRelease release;
            return self.find_keys(index, list.data(), static_cast<uint32_t>(n), kind, epoch,
                                  static_cast<TierMask>(usable));
          },
          nb::arg("index"), nb::arg("keys"), nb::arg("kind"), nb::arg("epoch"), nb::arg("usable"),
          "Find the pages of leading keys. Returns ForeignRun.")
      .def_prop_ro("pages", &Foreign::pages, "Pages known now.")
      .def(
          "counts",
          [](const Foreign& self) {
            const ForeignCounts counts = self.counts();
            nb::typed<nb::dict, nb::str, int> result;
            result["volumes"] = counts.volumes;
            result["pages"] = counts.pages;
            result["left_out"] = counts.left_out;
            result["delivered"] = counts.delivered;
            result["stale"] = counts.stale;
            result["refused"] = counts.refused;
            return result;
          },
          "Return volumes, pages (known now), left_out, delivered, stale, refused (pages since it was made).")
      .def("take_touches", &take_touches,
           "Return what was read since the last call: (volume ids: list[bytes], slots u32[n], generations u64[n]).");
}

}  // namespace stepwell::bind
