// Python's view of the index: arrays in, arrays out, no GIL while it works.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "../index.h"
#include "../transfer.h"
#include "../victims.h"
#include "../volume.h"
#include "bind.h"
#include "bind_taken.h"

namespace stepwell::bind {

namespace {

using Release = nb::call_guard<GilRelease>;

Tier to_tier(int tier) {
  if (tier < 0 || tier >= kTiers) throw nb::value_error("a tier is 0 (device), 1 (host), 2 (shared) or 3 (disk)");
  return static_cast<Tier>(tier);
}

TierMask to_mask(int tiers) {
  if (tiers < 0 || tiers >= (1 << kTiers)) throw nb::value_error("tiers is a mask of 1 << tier, 0 to 15");
  return static_cast<TierMask>(tiers);
}

// uint8[n, k]: n keys of k bytes.
std::vector<Key> to_keys(const Array2<uint8_t>& keys) {
  const size_t n = keys.shape(0), length = keys.shape(1);
  if (n > 0 && (length == 0 || length > kMaxKeyBytes)) throw nb::value_error("a key has 1 to 64 bytes");
  if (n >= kUnknownDepth) throw nb::value_error("too many keys");
  return make_keys(keys.data(), n, length);
}

Key to_key(const nb::bytes& key, size_t least) {
  if (key.size() < least || key.size() > kMaxKeyBytes) throw nb::value_error("a key has 1 to 64 bytes");
  Key out;
  std::memcpy(out.bytes.data(), key.c_str(), key.size());
  out.length = static_cast<uint8_t>(key.size());
  return out;
}

nb::bytes to_bytes(const Key& key) { return nb::bytes(reinterpret_cast<const char*>(key.bytes.data()), key.length); }

void check_same_length(size_t a, size_t b, const char* what) {
  if (a != b) throw nb::value_error(what);
}

void check_tokens(const Index& index, size_t tokens, size_t pages) {
  if (tokens / index.page_tokens() < pages) throw nb::value_error("fewer tokens than the pages need");
}

using VictimArrays =
    std::tuple<nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>, nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>,
               nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>>;

VictimArrays to_arrays(const std::vector<Victim>& victims) {
  std::vector<uint32_t> pages, slots, numbers;
  pages.reserve(victims.size());
  slots.reserve(victims.size());
  numbers.reserve(victims.size());
  for (const Victim& victim : victims) {
    pages.push_back(victim.page);
    slots.push_back(victim.slot);
    numbers.push_back(victim.number);
  }
  return {to_numpy(std::move(pages)), to_numpy(std::move(slots)), to_numpy(std::move(numbers))};
}

// One of commit, abort, finish, keep over arrays.
template <Status (Index::*method)(PageId, Tier, uint32_t)>
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> for_each(Index& index, const Array1<uint32_t>& pages, int tier,
                                                      const Array1<uint32_t>& numbers) {
  check_same_length(pages.shape(0), numbers.shape(0), "pages and numbers differ in length");
  const Tier checked = to_tier(tier);
  std::vector<uint8_t> out(pages.shape(0));
  {
    GilRelease release;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<uint8_t>((index.*method)(pages.data()[i], checked, numbers.data()[i]));
    }
  }
  return to_numpy(std::move(out));
}

// A read-only view of memory that the Python object owns.
template <typename T, typename... Sizes>
nb::ndarray<nb::numpy, const T, nb::ndim<sizeof...(Sizes)>> view(const T* data, Sizes... sizes) {
  const size_t shape[] = {static_cast<size_t>(sizes)...};
  return nb::ndarray<nb::numpy, const T, nb::ndim<sizeof...(Sizes)>>(data, sizeof...(Sizes), shape);
}

constexpr size_t kNewRow = 0;

// kNewRow: new in some tier; 1: present in some and new in none; 2: neither.
size_t kind_of_row(const ClaimBatch& batch, size_t row) {
  const auto* outcomes = batch.outcomes.data() + row * kTiers;
  const auto has = [&](ClaimOutcome outcome) {
    return std::find(outcomes, outcomes + kTiers, outcome) != outcomes + kTiers;
  };
  return has(ClaimOutcome::kNew) ? kNewRow : has(ClaimOutcome::kPresent) ? 1 : 2;
}

// The columns of Mover.submit(): pages: uint32[n]; roles: uint8[n, 4]; slots, numbers: uint32[n, 4].
using PlanArrays =
    std::tuple<nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>, nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>,
               nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>>, nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>>>;

// The copies of the pages that a save has claimed somewhere: from its pool, or, for one that is in shared memory already
// and only lacks its disk copy, from there: it is verified on the way.
PlanArrays plan_save(const ClaimBatch& batch, const Array1<int64_t>& pool_slots) {
  check_same_length(pool_slots.shape(0), batch.pages.size(), "pages and slots differ in length");
  std::vector<uint32_t> pages, slots, numbers;
  std::vector<uint8_t> roles;
  for (size_t row = 0; row < batch.pages.size(); ++row) {
    if (kind_of_row(batch, row) != kNewRow) continue;
    const size_t first = row * kTiers;
    const auto outcome = [&](Tier tier) { return batch.outcomes[first + static_cast<size_t>(tier)]; };
    const size_t source = outcome(Tier::kShared) == ClaimOutcome::kPresent && outcome(Tier::kDisk) == ClaimOutcome::kNew
                              ? static_cast<size_t>(Tier::kShared)
                              : static_cast<size_t>(kPoolColumn);
    const size_t at = roles.size();
    pages.push_back(batch.pages[row]);
    for (size_t column = 0; column < kTiers; ++column) {
      const bool is_new = batch.outcomes[first + column] == ClaimOutcome::kNew;
      roles.push_back(static_cast<uint8_t>(is_new ? Role::kSink : Role::kUnused));
      slots.push_back(batch.slots[first + column]);
      numbers.push_back(batch.numbers[first + column]);
    }
    roles[at + source] = static_cast<uint8_t>(Role::kSource);
    slots[at + kPoolColumn] = static_cast<uint32_t>(pool_slots.data()[row]);
  }
  const size_t count = pages.size();
  return {to_numpy(std::move(pages)), to_numpy(std::move(roles), count, kTiers),
          to_numpy(std::move(slots), count, kTiers), to_numpy(std::move(numbers), count, kTiers)};
}

// What a match was taken further by: claims, and a lease where it had none.
void hold_extended(TakenHandle* into, TakenHandle* claims, const MatchResult& found, const MatchResult& result,
                   const ClaimBatch& batch) {
  if (claims != nullptr) claims->add(batch);
  if (into != nullptr && found.lease == 0) into->add_lease(result.lease);
}

std::vector<std::string> residency_names() { return {"absent", "arriving", "resident", "leaving", "quarantined"}; }

std::vector<std::string> move_names() {
  return {"claim", "commit", "abort", "claim_victim", "finish", "keep", "quarantine", "mend"};
}

}  // namespace

void bind_index(nb::module_& module) {
  module.def(
      "move_table",
      [] {
        std::vector<uint8_t> table;
        for (const auto& row : kMoveTable) {
          for (const Residency to : row) table.push_back(static_cast<uint8_t>(to));
        }
        return to_numpy(std::move(table), kMoves, kResidencies);
      },
      "Return the legal moves: uint8[move, from] = to, 255 where illegal.");
  module.def("move_names", &move_names, "Return the names of the moves, by number.");
  module.def("residency_names", &residency_names, "Return the names of the residencies, by number.");

  nb::class_<MatchResult>(module, "MatchResult", "A pinned prefix. Invariant: lease is 0 exactly if pages is 0.")
      .def_ro("lease", &MatchResult::lease)
      .def_ro("pages", &MatchResult::pages)
      .def_ro("pending", &MatchResult::pending)
      .def_ro("epoch", &MatchResult::epoch, "The epoch that was current when the pages were found.")
      .def_prop_ro("miss", [](const MatchResult& self) { return static_cast<int>(self.miss); })
      .def_prop_ro(
          "spans",
          [](const MatchResult& self) {
            std::vector<std::tuple<uint32_t, uint32_t, int>> out;
            for (const Span& span : self.spans)
              out.emplace_back(span.first_page, span.pages, static_cast<int>(span.tier));
            return out;
          },
          "Return (first page, pages, tier) of each run, in order.");

  nb::class_<HoldResult>(module, "HoldResult", "What a hold covers. Invariant: hold is 0 where nothing is held.")
      .def_ro("hold", &HoldResult::hold)
      .def_ro("pages", &HoldResult::pages, "Leading pages that are resident in a keeping tier.")
      .def_ro("pending", &HoldResult::pending, "Pages directly behind, kept once they arrive in a keeping tier.")
      .def_ro("added", &HoldResult::added, "Pages that no hold covered before.")
      .def_ro("held", &HoldResult::held, "Pages that some hold covers.")
      .def_ro("refused", &HoldResult::refused);

  nb::class_<ClaimBatch>(module, "ClaimBatch",
                         "What a claim over n pages did; columns are tiers. The arrays are views of it.")
      .def_prop_ro(
          "pages", [](const ClaimBatch& self) { return view(self.pages.data(), self.pages.size()); },
          nb::rv_policy::reference_internal)
      .def(
          "tally",
          [](const ClaimBatch& self, size_t rows) {
            uint32_t of[3] = {0, 0, 0};
            for (size_t row = 0; row < std::min(rows, self.pages.size()); ++row) ++of[kind_of_row(self, row)];
            return std::tuple(of[0], of[1], of[2]);
          },
          nb::arg("rows"), "Count the first rows: (new in some tier, present and new nowhere, the rest).")
      .def(
          "full_rows",
          [](const ClaimBatch& self, int tier, size_t rows) {
            const Tier checked = to_tier(tier);
            uint32_t full = 0;
            for (size_t row = 0; row < std::min(rows, self.pages.size()); ++row) {
              full += self.outcomes[row * kTiers + static_cast<size_t>(checked)] == ClaimOutcome::kFull;
            }
            return full;
          },
          nb::arg("tier"), nb::arg("rows"), "Count those of the first rows that found no slot in a tier.")
      .def("plan_save", &plan_save, nb::arg("pool_slots"),
           "Plan the copies of the pages that are new somewhere, out of `pool_slots: int64[n]`, one a page of the "
           "claim; "
           "one that only lacks its disk copy comes from shared memory. Returns pages, roles, slots, numbers as "
           "Mover.submit() takes them.")
      .def_prop_ro(
          "outcomes",
          [](const ClaimBatch& self) {
            return view(reinterpret_cast<const uint8_t*>(self.outcomes.data()), self.pages.size(), kTiers);
          },
          nb::rv_policy::reference_internal)
      .def_prop_ro(
          "slots", [](const ClaimBatch& self) { return view(self.slots.data(), self.pages.size(), kTiers); },
          nb::rv_policy::reference_internal)
      .def_prop_ro(
          "numbers", [](const ClaimBatch& self) { return view(self.numbers.data(), self.pages.size(), kTiers); },
          nb::rv_policy::reference_internal)
      .def_ro("full_at", &ClaimBatch::full_at)
      .def_ro("lacking", &ClaimBatch::lacking);

  nb::class_<Index> index(module, "Index",
                          "Tokens and keys -> pages; residency, slots, claims, pins, rank. See csrc/index.h.");
  index.def(nb::new_(&made_to_end_without_gil<Index, uint32_t>), nb::arg("page_tokens"))
      .def_prop_ro("page_tokens", &Index::page_tokens)
      // ---- slots
      .def(
          "add_slots",
          [](Index& self, int tier, uint32_t first, uint32_t count, bool closed) {
            self.add_slots(to_tier(tier), first, count, closed);
          },
          nb::arg("tier"), nb::arg("first"), nb::arg("count"), nb::arg("closed") = false, Release())
      .def(
          "open_slots", [](Index& self, int tier, uint32_t first) { self.open_slots(to_tier(tier), first); },
          nb::arg("tier"), nb::arg("first"), Release())
      .def(
          "claimable", [](const Index& self, int tier) { return self.claimable(to_tier(tier)); }, nb::arg("tier"),
          Release())
      .def(
          "pin_resident",
          [](Index& self, int tier, std::optional<uint32_t> after, uint32_t n, TakenHandle* into) {
            std::vector<PageId> pages;
            std::vector<uint32_t> slots;
            {
              GilRelease release;
              self.pin_resident(to_tier(tier), after.value_or(kNoPage), n, &pages, &slots);
              if (into != nullptr) into->add_pins(pages);
            }
            return std::tuple(to_numpy(std::move(pages)), to_numpy(std::move(slots)));
          },
          nb::arg("tier"), nb::arg("after").none(), nb::arg("n"), nb::arg("into").none() = nb::none())
      .def(
          "close_slots", [](Index& self, int tier, uint32_t first) { self.close_slots(to_tier(tier), first); },
          nb::arg("tier"), nb::arg("first"), Release())
      .def(
          "drop_slots", [](Index& self, int tier, uint32_t first) { return self.drop_slots(to_tier(tier), first); },
          nb::arg("tier"), nb::arg("first"), Release())
      // ---- namespaces, epochs
      .def(
          "open_namespace",
          [](Index& self, const std::optional<nb::bytes>& seed) {
            if (!seed) return self.open_namespace(nullptr);
            if (seed->size() != 32) throw nb::value_error("a namespace seed has 32 bytes");
            return self.open_namespace(reinterpret_cast<const uint8_t*>(seed->c_str()));
          },
          nb::arg("seed").none() = nb::none())
      .def("set_epoch", &Index::set_epoch, nb::arg("epoch"), Release())
      .def_prop_ro("epoch", &Index::epoch)
      // ---- match
      .def(
          "match_and_pin",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, int usable, TakenHandle* into) {
            MatchResult result = self.match_and_pin(name_space, tokens.data(), tokens.shape(0), to_mask(usable));
            if (into != nullptr) into->add_lease(result.lease);
            return result;
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("usable"), nb::arg("into").none() = nb::none(), Release())
      .def(
          "match_length",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, int usable) {
            uint32_t pending = 0;
            const uint32_t pages =
                self.match_length(name_space, tokens.data(), tokens.shape(0), to_mask(usable), &pending);
            return std::tuple(pages, pending);
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("usable"), Release(),
          "Return (pages, pending) of a match, without making it.")
      .def(
          "match_keys_and_pin",
          [](Index& self, const Array2<uint8_t>& keys, uint8_t kind, int usable, TakenHandle* into) {
            const std::vector<Key> list = to_keys(keys);
            MatchResult result =
                self.match_keys_and_pin(list.data(), static_cast<uint32_t>(list.size()), kind, to_mask(usable));
            if (into != nullptr) into->add_lease(result.lease);
            return result;
          },
          nb::arg("keys"), nb::arg("kind"), nb::arg("usable"), nb::arg("into").none() = nb::none(), Release())
      .def(
          "touch",
          [](Index& self, const Volume& volume, const Array1<uint32_t>& slots, const Array1<uint64_t>& generations) {
            if (slots.shape(0) != generations.shape(0))
              throw std::invalid_argument("slots and generations differ in length");
            std::vector<Label> labels;
            const Status status = volume.labels_of(slots.data(), generations.data(), slots.shape(0), &labels);
            return std::pair(status, self.touch(labels.data(), labels.size()));
          },
          nb::arg("volume"), nb::arg("slots"), nb::arg("generations"), Release(),
          "Count pages of a volume as used, by slot and generation, each with its ancestors; those that have changed "
          "since "
          "are left out.\n\nReturns (status of reading the records, pages found).")
      .def(
          "lease_pages",
          [](const Index& self, uint64_t lease, uint32_t first, uint32_t count) {
            const uint32_t most = std::min(count, self.lease_length(lease));
            std::vector<uint32_t> pages(most), slots(most);
            std::vector<uint8_t> tiers(most);
            uint32_t n;
            {
              GilRelease release;
              n = self.lease_pages(lease, first, most, pages.data(), tiers.data(), slots.data());
            }
            pages.resize(n);
            tiers.resize(n);
            slots.resize(n);
            return std::tuple(to_numpy(std::move(pages)), to_numpy(std::move(tiers)), to_numpy(std::move(slots)));
          },
          nb::arg("lease"), nb::arg("first"), nb::arg("count"))
      .def("retain", &Index::retain, nb::arg("lease"), Release())
      .def("release", &Index::release, nb::arg("lease"), Release())
      .def("shorten", &Index::shorten, nb::arg("lease"), nb::arg("pages"), Release())
      .def("shorten_match", &Index::shorten_match, nb::arg("found"), nb::arg("pages"), Release(),
           "Return the match cut to its first pages; the pins of the others are returned.")
      // ---- a match continued
      .def(
          "extend_match",
          [](Index& self, const MatchResult& found, uint32_t name_space, const Array1<int32_t>& tokens,
             const Array2<uint8_t>& keys, const Array1<uint8_t>& offered, int usable, int staging, TakenHandle* into,
             TakenHandle* claims) {
            const std::vector<Key> list = to_keys(keys);
            check_same_length(list.size(), offered.shape(0), "keys and offered differ in length");
            check_tokens(self, tokens.shape(0), found.pages + list.size());
            ClaimBatch out;
            MatchResult result =
                self.extend_match(found, name_space, tokens.data(), list.data(), static_cast<uint32_t>(list.size()),
                                  offered.data(), to_mask(usable), to_tier(staging), &out);
            hold_extended(into, claims, found, result, out);
            return std::tuple(std::move(result), std::move(out));
          },
          nb::arg("found"), nb::arg("name_space"), nb::arg("tokens"), nb::arg("keys"), nb::arg("offered"),
          nb::arg("usable"), nb::arg("staging"), nb::arg("into").none() = nb::none(),
          nb::arg("claims").none() = nb::none(), Release(),
          "Take a match further along the keys behind it. Returns (MatchResult in place of `found`, ClaimBatch).")
      .def(
          "extend_match_keys",
          [](Index& self, const MatchResult& found, const Array2<uint8_t>& keys, uint8_t kind,
             const Array1<uint8_t>& offered, int usable, int staging, TakenHandle* into, TakenHandle* claims) {
            const std::vector<Key> list = to_keys(keys);
            check_same_length(list.size(), offered.shape(0), "keys and offered differ in length");
            ClaimBatch out;
            MatchResult result = self.extend_match_keys(found, list.data(), static_cast<uint32_t>(list.size()), kind,
                                                        offered.data(), to_mask(usable), to_tier(staging), &out);
            hold_extended(into, claims, found, result, out);
            return std::tuple(std::move(result), std::move(out));
          },
          nb::arg("found"), nb::arg("keys"), nb::arg("kind"), nb::arg("offered"), nb::arg("usable"), nb::arg("staging"),
          nb::arg("into").none() = nb::none(), nb::arg("claims").none() = nb::none(), Release(),
          "The same for a match by keys.")
      .def(
          "lease_states",
          [](const Index& self, uint64_t lease) {
            std::vector<PageId> pages;
            std::vector<uint8_t> tiers, residencies;
            std::vector<uint32_t> slots, numbers;
            {
              GilRelease release;
              self.lease_states(lease, &pages, &tiers, &slots, &numbers, &residencies);
            }
            return std::tuple(to_numpy(std::move(pages)), to_numpy(std::move(tiers)), to_numpy(std::move(slots)),
                              to_numpy(std::move(numbers)), to_numpy(std::move(residencies)));
          },
          nb::arg("lease"),
          "Return (page ids u32[n], tiers u8[n], slots u32[n], claim numbers u32[n], Residency u8[n]) of a lease's "
          "pages, each in the tier it is pinned in, as of one moment.")
      .def(
          "lease_key",
          [](const Index& self, uint64_t lease, uint32_t page) { return to_bytes(self.lease_key(lease, page)); },
          nb::arg("lease"), nb::arg("page"), "Return the key of a page of a lease.")
      // ---- holds
      .def(
          "set_keeping", [](Index& self, int tiers) { self.set_keeping(to_mask(tiers)); }, nb::arg("tiers"), Release())
      .def(
          "hold",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, uint64_t most_pages, TakenHandle* into) {
            const HoldResult result = self.hold(name_space, tokens.data(), tokens.shape(0), most_pages);
            if (into != nullptr) into->add_hold(result.hold);
            return result;
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("most_pages"), nb::arg("into").none() = nb::none(),
          Release())
      .def("unhold", &Index::unhold, nb::arg("hold"), Release())
      .def(
          "hold_extent",
          [](const Index& self, uint64_t hold) {
            uint32_t pages = 0, pending = 0;
            self.hold_extent(hold, &pages, &pending);
            return std::tuple(pages, pending);
          },
          nb::arg("hold"), Release(), "Return (pages, pending) that a hold covers now.")
      .def("holds", &Index::holds)
      .def("held_pages", &Index::held_pages)
      // ---- claims
      .def(
          "claim_absent",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, const Array2<uint8_t>& keys,
             uint32_t first_page, uint32_t total, int tiers, const std::optional<Array1<uint8_t>>& row_tiers,
             TakenHandle* into) {
            check_tokens(self, tokens.shape(0), total);
            if (keys.shape(0) < total) throw nb::value_error("fewer keys than pages");
            if (row_tiers && row_tiers->shape(0) + first_page < total)
              throw nb::value_error("fewer row tiers than pages");
            const std::vector<Key> list = to_keys(keys);
            ClaimBatch out;
            self.claim_absent(name_space, tokens.data(), list.data(), first_page, total, to_mask(tiers), &out,
                              row_tiers ? row_tiers->data() : nullptr);
            if (into != nullptr) into->add(out);
            return out;
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("keys"), nb::arg("first_page"), nb::arg("total"),
          nb::arg("tiers"), nb::arg("row_tiers").none() = nb::none(), nb::arg("into").none() = nb::none(), Release())
      .def(
          "claim_absent_keys",
          [](Index& self, const Array2<uint8_t>& keys, uint8_t kind, int parent_state, const nb::bytes& parent,
             int tiers, const std::optional<Array1<uint8_t>>& row_tiers, TakenHandle* into) {
            if (row_tiers && row_tiers->shape(0) < keys.shape(0)) throw nb::value_error("fewer row tiers than keys");
            if (parent_state < 0 || parent_state > 2)
              throw nb::value_error("parent_state is 0 (root), 1 (known) or 2 (unknown)");
            const ParentState state = static_cast<ParentState>(parent_state);
            const Key parent_key = to_key(parent, state == ParentState::kKnown ? 1 : 0);
            ClaimBatch out;
            {
              GilRelease release;
              const std::vector<Key> list = to_keys(keys);
              self.claim_absent_keys(list.data(), static_cast<uint32_t>(list.size()), kind, state, parent_key,
                                     to_mask(tiers), &out, row_tiers ? row_tiers->data() : nullptr);
              if (into != nullptr) into->add(out);
            }
            return out;
          },
          nb::arg("keys"), nb::arg("kind"), nb::arg("parent_state"), nb::arg("parent"), nb::arg("tiers"),
          nb::arg("row_tiers").none() = nb::none(), nb::arg("into").none() = nb::none())
      .def(
          "claim_leased",
          [](Index& self, uint64_t lease, int tier, const std::optional<Array1<bool>>& rows, TakenHandle* into) {
            if (rows && rows->shape(0) < self.lease_length(lease))
              throw nb::value_error("fewer rows than pages of the lease");
            ClaimBatch out;
            self.claim_leased(lease, to_tier(tier), rows ? reinterpret_cast<const uint8_t*>(rows->data()) : nullptr,
                              &out);
            if (into != nullptr) into->add(out);
            return out;
          },
          nb::arg("lease"), nb::arg("tier"), nb::arg("rows").none() = nb::none(), nb::arg("into").none() = nb::none(),
          Release())
      .def(
          "claim_copies",
          [](Index& self, uint64_t lease, int source, int target, uint32_t most, TakenHandle* into, int unless) {
            ClaimBatch out;
            self.claim_copies(lease, to_tier(source), to_tier(target), most, &out, to_mask(unless));
            if (into != nullptr) into->add(out);
            return out;
          },
          nb::arg("lease"), nb::arg("source"), nb::arg("target"), nb::arg("most"), nb::arg("into").none() = nb::none(),
          nb::arg("unless") = 0, Release(),
          "Claim in `target` what a lease covers in `source` and lacks there; one row a claimed page.")
      .def(
          "pin_copies",
          [](Index& self, uint64_t lease, int tier, const Array1<uint32_t>& numbers, TakenHandle& into) {
            if (numbers.shape(0) < self.lease_length(lease))
              throw nb::value_error("fewer numbers than pages of the lease");
            ClaimBatch out;
            self.pin_copies(lease, to_tier(tier), numbers.data(), &out);
            std::vector<PageId> pinned = out.pages;
            std::erase(pinned, kNoPage);
            into.add_pins(pinned);
            return out;
          },
          nb::arg("lease"), nb::arg("tier"), nb::arg("numbers"), nb::arg("into"), Release(),
          "Pin those of a lease's pages that a claim brings to a tier, or has brought; numbers: uint32[n], 0 for none, "
          "as "
          "the\nrows of the batch one a page of the lease.")
      .def(
          "commit",
          [](Index& self, uint32_t page, int tier, uint32_t number) {
            return self.commit(page, to_tier(tier), number);
          },
          nb::arg("page"), nb::arg("tier"), nb::arg("number"), Release())
      .def(
          "abort",
          [](Index& self, uint32_t page, int tier, uint32_t number) { return self.abort(page, to_tier(tier), number); },
          nb::arg("page"), nb::arg("tier"), nb::arg("number"), Release())
      .def(
          "finish",
          [](Index& self, uint32_t page, int tier, uint32_t number) {
            return self.finish(page, to_tier(tier), number);
          },
          nb::arg("page"), nb::arg("tier"), nb::arg("number"), Release())
      .def(
          "keep",
          [](Index& self, uint32_t page, int tier, uint32_t number) { return self.keep(page, to_tier(tier), number); },
          nb::arg("page"), nb::arg("tier"), nb::arg("number"), Release())
      .def("commit_many", &for_each<&Index::commit>, nb::arg("pages"), nb::arg("tier"), nb::arg("numbers"),
           "Return uint8[n] of Status.")
      .def("abort_many", &for_each<&Index::abort>, nb::arg("pages"), nb::arg("tier"), nb::arg("numbers"),
           "Return uint8[n] of Status.")
      .def("finish_many", &for_each<&Index::finish>, nb::arg("pages"), nb::arg("tier"), nb::arg("numbers"),
           "Return uint8[n] of Status.")
      .def("keep_many", &for_each<&Index::keep>, nb::arg("pages"), nb::arg("tier"), nb::arg("numbers"),
           "Return uint8[n] of Status.")
      .def(
          "unpin_pages",
          [](Index& self, const Array1<uint32_t>& pages) { self.unpin_pages(pages.data(), pages.shape(0)); },
          nb::arg("pages"), Release())
      .def(
          "labels",
          [](const Index& self, const Array1<uint32_t>& pages) {
            std::vector<Label> labels(pages.shape(0));
            {
              GilRelease release;
              self.labels(pages.data(), labels.size(), labels.data());
            }
            std::vector<std::tuple<nb::bytes, nb::bytes, int, int, uint32_t, uint64_t>> out;
            for (const Label& label : labels) {
              out.emplace_back(to_bytes(label.key), to_bytes(label.parent), static_cast<int>(label.parent_state),
                               label.kind, label.depth, label.epoch);
            }
            return out;
          },
          nb::arg("pages"), "Return (key, parent key, parent state, kind, depth, epoch) of each page.")
      // ---- eviction
      .def(
          "claim_victims",
          [](Index& self, int tier, uint32_t n, std::optional<uint32_t> only_range) {
            std::vector<Victim> victims;
            {
              GilRelease release;
              self.claim_victims(to_tier(tier), n, only_range.value_or(kNoSlot), &victims);
            }
            return to_arrays(victims);
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("only_range").none() = nb::none())
      .def(
          "take_victims",
          [](Index& self, int tier, uint32_t n, std::optional<uint32_t> only_range, bool even_held) {
            std::vector<uint32_t> slots;
            {
              GilRelease release;
              self.take_victims(to_tier(tier), n, only_range.value_or(kNoSlot), &slots, even_held);
            }
            return to_numpy(std::move(slots));
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("only_range").none() = nb::none(), nb::arg("even_held") = false,
          "Take up to n unpinned pages of lowest rank out of a tier; return their slots: retire, then free_slots().")
      .def(
          "free_slots",
          [](Index& self, int tier, const Array1<uint32_t>& slots) {
            self.free_slots(to_tier(tier), slots.data(), slots.shape(0));
          },
          nb::arg("tier"), nb::arg("slots"), Release())
      .def(
          "free_slots", [](Index&, int, Victims& slots) { slots.free_with_records(); }, nb::arg("tier"),
          nb::arg("slots"), Release(),
          "Free the slots of victims, whose records stay: a restart finds the pages again.")
      .def(
          "owe_slots",
          [](Index& self, int tier, const Array1<uint32_t>& slots) {
            self.owe_slots(to_tier(tier), slots.data(), slots.shape(0));
          },
          nb::arg("tier"), nb::arg("slots"), Release(),
          "Keep slots that are on their way back, or free in a closed range, from everybody: their records could not "
          "be "
          "retired.")
      .def(
          "take_owed",
          [](Index& self, int tier, uint32_t n, std::optional<uint32_t> only_range) {
            std::vector<uint32_t> slots;
            {
              GilRelease release;
              self.take_owed(to_tier(tier), n, only_range.value_or(kNoSlot), &slots);
            }
            return to_numpy(std::move(slots));
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("only_range").none() = nb::none(),
          "Take up to n slots that are owed, in turn; return them: retire, then free_slots() or owe_slots().")
      .def(
          "retry_owed",
          [](Index& self, int tier, uint32_t n, Medium* medium) {
            Victims victims(&self, medium, to_tier(tier));
            victims.take_owed(n, kNoSlot);
            return victims.free();
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("medium"), Release(),
          "Try again to retire the records of up to n slots that are owed. Return how many are free now.")
      .def(
          "reclaim",
          [](Index& self, int tier, uint32_t n, Medium* medium) {
            Victims victims(&self, medium, to_tier(tier));
            victims.take_owed(n, kNoSlot);
            return victims;
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("medium"), Release(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 4>(),
          "Take up to n slots that are owed, as evict() takes pages: in turn.")
      .def(
          "evict",
          [](Index& self, int tier, uint32_t n, Medium* medium) {
            Victims victims(&self, medium, to_tier(tier));
            victims.take(n);
            return victims;
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("medium").none(), Release(), nb::keep_alive<0, 1>(),
          nb::keep_alive<0, 4>(), "Take up to n unpinned pages of lowest rank out of a tier.")
      .def(
          "victims", [](Index& self, int tier, Medium* medium) { return Victims(&self, medium, to_tier(tier)); },
          nb::arg("tier"), nb::arg("medium").none(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 3>(),
          "Make victims of a tier that are none yet, for forget().")
      .def(
          "forget",
          [](Index&, const std::vector<Victims*>& victims, uint32_t name_space, const Array1<int32_t>& tokens,
             uint32_t keep_pages) {
            Victims::take_chain(victims, name_space, tokens.data(), tokens.shape(0), keep_pages);
          },
          nb::arg("victims"), nb::arg("name_space"), nb::arg("tokens"), nb::arg("keep_pages"), Release(),
          "Take the unpinned pages of a chain past its first keep_pages out of the tiers of these victims, one for "
          "each "
          "tier, at once.")
      .def(
          "quarantine",
          [](Index& self, uint32_t page, int tier, uint32_t slot) {
            return self.quarantine(page, to_tier(tier), slot);
          },
          nb::arg("page"), nb::arg("tier"), nb::arg("slot"), Release())
      .def(
          "claim_quarantined",
          [](Index& self, int tier, uint32_t n, bool even_retired) {
            std::vector<Victim> victims;
            {
              GilRelease release;
              self.claim_quarantined(to_tier(tier), n, &victims, even_retired);
            }
            return to_arrays(victims);
          },
          nb::arg("tier"), nb::arg("n"), nb::arg("even_retired") = false)
      .def(
          "mend",
          [](Index& self, uint32_t page, int tier, uint32_t number, bool mended, bool retired) {
            return self.mend(page, to_tier(tier), number, mended, retired);
          },
          nb::arg("page"), nb::arg("tier"), nb::arg("number"), nb::arg("mended"), nb::arg("retired") = false, Release())
      .def(
          "claim_chain",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, uint32_t keep_pages, int tiers) {
            std::vector<Victim> victims[kTiers];
            {
              GilRelease release;
              self.claim_chain(name_space, tokens.data(), tokens.shape(0), keep_pages, to_mask(tiers), victims);
            }
            std::vector<VictimArrays> out;
            for (const std::vector<Victim>& of_tier : victims) out.push_back(to_arrays(of_tier));
            return out;
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("keep_pages"), nb::arg("tiers"))
      // ---- private slots
      .def(
          "take_private",
          [](Index& self, int tier, uint32_t n) -> std::optional<nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>> {
            const Tier checked = to_tier(tier);
            if (n > self.counts(checked).free) return std::nullopt;  // before room is made for the answer
            std::vector<uint32_t> slots(n);
            {
              GilRelease release;
              if (!self.take_private(checked, n, slots.data())) slots.clear();
            }
            if (slots.size() != n) return std::nullopt;
            return to_numpy(std::move(slots));
          },
          nb::arg("tier"), nb::arg("n"))
      .def(
          "free_private",
          [](Index& self, int tier, const Array1<uint32_t>& slots) {
            self.free_private(to_tier(tier), slots.data(), slots.shape(0));
          },
          nb::arg("tier"), nb::arg("slots"), Release())
      .def(
          "publish_private",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, const Array2<uint8_t>& keys,
             uint32_t page, int tier, uint32_t slot) {
            check_tokens(self, tokens.shape(0), page + size_t{1});
            if (keys.shape(0) < page + size_t{1}) throw nb::value_error("fewer keys than pages");
            const std::vector<Key> list = to_keys(keys);
            PageId published = kNoPage;
            const ClaimOutcome outcome =
                self.publish_private(name_space, tokens.data(), list.data(), page, to_tier(tier), slot, &published);
            return std::tuple(static_cast<int>(outcome), published);
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("keys"), nb::arg("page"), nb::arg("tier"), nb::arg("slot"),
          Release(), "Return (outcome, page); outcome 1 (new): published, else the slot stays private.")
      .def(
          "publish_private_many",
          [](Index& self, uint32_t name_space, const Array1<int32_t>& tokens, const Array2<uint8_t>& keys,
             const Array1<uint32_t>& pages, int tier, const Array1<uint32_t>& slots) {
            check_same_length(pages.shape(0), slots.shape(0), "pages and slots differ in length");
            const size_t n = pages.shape(0);
            const size_t total = n == 0 ? 0 : *std::max_element(pages.data(), pages.data() + n) + size_t{1};
            check_tokens(self, tokens.shape(0), total);
            if (keys.shape(0) < total) throw nb::value_error("fewer keys than pages");
            const Tier checked = to_tier(tier);
            std::vector<uint8_t> outcomes(n);
            std::vector<PageId> published(n);
            {
              GilRelease release;
              const std::vector<Key> list = to_keys(keys);
              for (size_t i = 0; i < n; ++i) {
                outcomes[i] = static_cast<uint8_t>(self.publish_private(
                    name_space, tokens.data(), list.data(), pages.data()[i], checked, slots.data()[i], &published[i]));
              }
            }
            return std::tuple(to_numpy(std::move(outcomes)), to_numpy(std::move(published)));
          },
          nb::arg("name_space"), nb::arg("tokens"), nb::arg("keys"), nb::arg("pages"), nb::arg("tier"),
          nb::arg("slots"),
          "Return (outcomes uint8[n], ids uint32[n]); outcome 1 (new): published, else the slot stays private.")
      // ---- recovery, export, statistics
      .def(
          "recover",
          [](Index& self, int tier, const Array1<uint32_t>& slots, const Array2<uint8_t>& keys,
             const Array1<uint8_t>& key_lengths, const Array2<uint8_t>& parents, const Array1<uint8_t>& parent_lengths,
             const Array1<uint8_t>& parent_states, const Array1<uint32_t>& depths, const Array1<uint8_t>& kinds,
             const Array1<uint64_t>& epochs, const Array1<uint64_t>& stamps) {
            const size_t n = slots.shape(0);
            for (const size_t length :
                 {keys.shape(0), key_lengths.shape(0), parents.shape(0), parent_lengths.shape(0),
                  parent_states.shape(0), depths.shape(0), kinds.shape(0), epochs.shape(0), stamps.shape(0)}) {
              check_same_length(n, length, "the columns of recover() differ in length");
            }
            if (keys.shape(1) != kMaxKeyBytes || parents.shape(1) != kMaxKeyBytes)
              throw nb::value_error("keys and parents are uint8[n, 64]");
            const Tier checked = to_tier(tier);
            std::vector<uint8_t> accepted(n);
            {
              GilRelease release;
              std::vector<Label> labels(n);
              for (size_t i = 0; i < n; ++i) {
                Label& label = labels[i];
                label.key.length = std::min<uint8_t>(key_lengths.data()[i], kMaxKeyBytes + 1);
                std::memcpy(label.key.bytes.data(), keys.data() + i * kMaxKeyBytes,
                            std::min<size_t>(label.key.length, kMaxKeyBytes));
                label.parent.length = std::min<uint8_t>(parent_lengths.data()[i], kMaxKeyBytes + 1);
                std::memcpy(label.parent.bytes.data(), parents.data() + i * kMaxKeyBytes,
                            std::min<size_t>(label.parent.length, kMaxKeyBytes));
                label.parent_state = static_cast<ParentState>(std::min<uint8_t>(parent_states.data()[i], 2));
                label.depth = depths.data()[i];
                label.kind = kinds.data()[i];
                label.epoch = epochs.data()[i];
              }
              self.recover(checked, slots.data(), labels.data(), stamps.data(), n, accepted.data());
            }
            return to_numpy(std::move(accepted));
          },
          nb::arg("tier"), nb::arg("slots"), nb::arg("keys"), nb::arg("key_lengths"), nb::arg("parents"),
          nb::arg("parent_lengths"), nb::arg("parent_states"), nb::arg("depths"), nb::arg("kinds"), nb::arg("epochs"),
          nb::arg("stamps"))
      .def(
          "rank_order",
          [](const Index& self, int tier) {
            std::vector<uint32_t> slots;
            {
              GilRelease release;
              self.rank_order(to_tier(tier), &slots);
            }
            return to_numpy(std::move(slots));
          },
          nb::arg("tier"))
      .def(
          "take_stamps",
          [](Index& self, int tier, size_t most) {
            std::vector<uint32_t> slots;
            std::vector<uint64_t> stamps;
            {
              GilRelease release;
              self.take_stamps(to_tier(tier), most, &slots, &stamps);
            }
            return std::tuple(to_numpy(std::move(slots)), to_numpy(std::move(stamps)));
          },
          nb::arg("tier"), nb::arg("most"))
      .def(
          "has_stamps", [](const Index& self, int tier) { return self.has_stamps(to_tier(tier)); }, nb::arg("tier"),
          nb::call_guard<GilRelease>())
      .def("stand_clock_at", &Index::stand_clock_at, nb::arg("ns"), nb::call_guard<GilRelease>(),
           "From now on the wall clock stands there; 0: it runs. For tests.")
      .def(
          "state",
          [](const Index& self, const nb::bytes& key, uint8_t kind) {
            const std::array<Residency, kTiers> s = self.state(to_key(key, 1), kind);
            return std::tuple(static_cast<int>(s[0]), static_cast<int>(s[1]), static_cast<int>(s[2]),
                              static_cast<int>(s[3]));
          },
          nb::arg("key"), nb::arg("kind") = 1)
      .def(
          "probe",
          [](const Index& self, const Array2<uint8_t>& keys, uint8_t kind, int usable) {
            const TierMask tiers = to_mask(usable);
            const std::vector<Key> list = to_keys(keys);
            std::vector<uint8_t> out(list.size());
            uint32_t run;
            {
              GilRelease release;
              run = self.probe(list.data(), static_cast<uint32_t>(list.size()), kind, tiers, out.data());
            }
            return std::tuple(run, to_numpy(std::move(out)));
          },
          nb::arg("keys"), nb::arg("kind"), nb::arg("usable"))
      .def(
          "counts",
          [](const Index& self, int tier) {
            const Tier checked = to_tier(tier);
            TierCounts counts;
            {
              GilRelease release;
              counts = self.counts(checked);
            }
            nb::typed<nb::dict, nb::str, int> out;
            out["capacity"] = counts.capacity;
            out["free"] = counts.free;
            out["arriving"] = counts.arriving;
            out["resident"] = counts.resident;
            out["leaving"] = counts.leaving;
            out["quarantined"] = counts.quarantined;
            out["pinned"] = counts.pinned;
            out["held"] = counts.held;
            out["owed"] = counts.owed;
            return out;
          },
          nb::arg("tier"))
      .def("prepare", &Index::prepare, nb::arg("pages"), Release(), "Make room for records ahead of need.")
      .def("pages", &Index::pages)
      .def("nodes", &Index::nodes)
      .def(
          "tree",
          [](const Index& self, uint32_t most) {
            TreeEdges edges;
            {
              GilRelease release;
              self.tree(most, &edges);
            }
            const size_t n = edges.parents.size();
            return std::tuple(to_numpy(std::move(edges.parents)), to_numpy(std::move(edges.name_spaces)),
                              to_numpy(std::move(edges.epochs)), to_numpy(std::move(edges.first_pages)),
                              to_numpy(std::move(edges.pages)), to_numpy(std::move(edges.pages_below)),
                              to_numpy(std::move(edges.residents), n, kTiers), edges.edges, edges.tree_pages);
          },
          nb::arg("most"),
          "Return (parent rows, namespaces, epochs, first pages, pages, pages in and below, residents[n, tiers], edges "
          "in "
          "all, pages in all) of the edges with most below them.")
      // ---- courtesies
      .def("keep_until", &Index::keep_until, nb::arg("lease"), nb::arg("now"), nb::arg("until"), Release(),
           "Keep a lease's pages for a probe until then, once each.")
      .def(
          "allow_courtesies",
          [](Index& self, int tier, uint64_t pages) { self.allow_courtesies(to_tier(tier), pages); }, nb::arg("tier"),
          nb::arg("pages"), Release(), "Say how many pages probes may keep in a tier.")
      .def(
          "spend",
          [](Index& self, const Array2<uint8_t>& keys, uint8_t kind, const Array1<bool>& rows) {
            check_same_length(keys.shape(0), rows.shape(0), "keys and rows differ in length");
            if (self.courtesies() == 0) return uint32_t{0};
            const std::vector<Key> list = to_keys(keys);
            return self.spend(list.data(), static_cast<uint32_t>(list.size()), kind,
                              reinterpret_cast<const uint8_t*>(rows.data()));
          },
          nb::arg("keys"), nb::arg("kind"), nb::arg("rows"), Release(),
          "End what probes keep of the keys whose rows are true. Return how many.")
      .def("end_due_courtesies", &Index::end_due_courtesies, nb::arg("now"), Release(),
           "End what probes keep until now or before. Return how many pages.")
      .def("end_courtesies", &Index::end_courtesies, Release(), "End all that probes keep.")
      .def(
          "end_older_courtesies", [](Index& self, int tier) { return self.end_older_courtesies(to_tier(tier)); },
          nb::arg("tier"), Release(), "End the older half of what probes keep in a tier. Return how many pages.")
      .def(
          "has_courtesy",
          [](const Index& self, const Array1<uint32_t>& pages) {
            return self.has_courtesy(pages.data(), pages.shape(0));
          },
          nb::arg("pages"), Release(), "Say whether a probe keeps any of these pages.")
      .def("courtesies", &Index::courtesies, "Return how many pages probes keep.")
      .def(
          "list_courtesies",
          [](const Index& self) {
            std::vector<PageId> pages;
            std::vector<double> until;
            self.list_courtesies(&pages, &until);
            return std::pair(to_numpy(std::move(pages)), to_numpy(std::move(until)));
          },
          "Return (page ids u32[n], f64[n] until when) of what probes keep, the oldest first. For tests and tools.")
      .def("leases", &Index::leases)
      .def("bytes", &Index::bytes)
      .def("poison", &Index::poison)
      .def("poisoned", &Index::poisoned)
      .def("check", &Index::check, Release());

  nb::class_<Victims>(module, "Victims",
                      "Slots of pages that have left a tier. Whatever ends the `with` block, their records are retired "
                      "and they are free then; those whose record cannot be retired are owed. One thread at a time.")
      .def_prop_ro("size", &Victims::size, "How many, freed since or not.")
      .def_prop_ro("owed", &Victims::owed, "How many of them could not be freed: their records could not be retired.")
      .def_prop_ro(
          "errors", &Victims::errors,
          "How many calls to retire records failed: one for each that is owed, and those for several together.")
      .def_prop_ro("error", &Victims::error, "errno of the last such call; 0: there is none, or it is not known.")
      .def("free", &Victims::free, Release(),
           "Retire the records, then free the slots. Return how many are free; none the second time.")
      .def("owe", &Victims::owe, Release(),
           "Have the slots owed without a call on a file: who retires their records gets them by reclaim().")
      .def(
          "__enter__", [](Victims& self) -> Victims& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__",
          [](Victims& self, const nb::object&, const nb::object&, const nb::object&) {
            if (self.empty()) return;
            const GilRelease release;
            self.free();
          },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none());

  nb::class_<TakenHandle>(
      module, "Taken",
      "What a call has taken of an index and not handed on: claims with their pins, leases, holds. Whatever "
      "ends the `with` block, it is returned then; an exception also ends the transfers that it "
      "was handed to, so that no byte of the lent pool is read or written any more. One thread at a "
      "time.")
      .def(nb::init<Index*>(), nb::arg("index"), nb::keep_alive<1, 2>())
      .def("retain", &TakenHandle::retain, nb::arg("lease"), Release(), "Take one more owner of a lease, if it is one.")
      .def("hand_on", &TakenHandle::hand_on, "Leave all of it to somebody else.")
      .def("give_back", &TakenHandle::give_back, Release(), "Return all of it.")
      .def(
          "__enter__", [](TakenHandle& self) -> TakenHandle& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__",
          [](TakenHandle& self, const nb::object& kind, const nb::object&, const nb::object&) {
            const auto transfers = std::exchange(self.transfers, {});
            const bool is_interrupted = !kind.is_none() && !transfers.empty();
            if (self.empty() && !is_interrupted) return;
            const GilRelease release;
            self.give_back();
            if (!is_interrupted) return;
            for (const std::shared_ptr<Transfer>& transfer : transfers) transfer->cancel();
            for (const std::shared_ptr<Transfer>& transfer : transfers) transfer->close_gate();
          },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none());
}

}  // namespace stepwell::bind
