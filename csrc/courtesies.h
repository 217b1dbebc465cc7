// Which pages probes have asked for: until when each is kept for them, and which is given up first.
//
// A page is here once, whoever asks for it how often: a later asking makes it the youngest, and moves its end further
// away, never nearer. Of the pages of one asking the last is the oldest: those before it are of use without it.
//
// One batch an asking, in the order of askings; a page names its batch. What a later batch has taken over stays listed
// in the earlier one until that is empty, or lists are too long for what they hold: so asking again for 8,192 pages
// costs two stores and a comparison each (9 ns: benchmarks/bench_probe.py).
// Threads: none of its own; under the index's mutex.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace stepwell {

// Invariant: size() pages have a batch; a batch lists each of its own once, and counts them: none counts 0.
class Courtesies {
 public:
  bool has(uint32_t page) const noexcept {
    const size_t block = page >> kBlockBits;
    return block < blocks_.size() && blocks_[block] != nullptr && entry(page).batch != 0;
  }
  // Seconds. REQUIRES has(page).
  double until(uint32_t page) const noexcept { return entry(page).until; }
  uint64_t size() const noexcept { return size_; }
  uint64_t bytes() const noexcept;

  // One asking for `pages`. new_pages: those that nobody had asked for. Throws std::bad_alloc: nothing was changed.
  void add(const std::vector<uint32_t>& pages, double until, std::vector<uint32_t>* new_pages);
  // REQUIRES has(page).
  void remove(uint32_t page) noexcept;
  // Appends the pages whose end has come. They stay until they are removed. REQUIRES now is finite.
  void due(double now, std::vector<uint32_t>* out);
  // f(page), the oldest first, while it says true. REQUIRES that f changes nothing here.
  template <typename F>
  void each(F&& f) const;
  // "" or what is wrong.
  const char* check() const;

 private:
  static constexpr uint32_t kBlockBits = 12;
  static constexpr uint64_t kSlack = 4096;  // pages that may be listed beside twice those that are held
  struct Entry {
    uint64_t batch = 0;  // 0: nobody asks for it
    double until = 0;
  };
  struct Batch {
    std::vector<uint32_t> pages;  // the youngest first; some may be of a later batch, or of none
    uint32_t held = 0;
    double due = 0;  // no page of it ends before
  };
  using Block = std::array<Entry, 1u << kBlockBits>;
  using Batches = std::map<uint64_t, Batch>;

  Entry& entry(uint32_t page) noexcept { return (*blocks_[page >> kBlockBits])[page & ((1u << kBlockBits) - 1)]; }
  const Entry& entry(uint32_t page) const noexcept { return const_cast<Courtesies*>(this)->entry(page); }
  void drop_one(Batches::iterator batch) noexcept;
  void compact() noexcept;

  std::vector<std::unique_ptr<Block>> blocks_;  // one for 4,096 pages of which some were asked for
  Batches batches_;                             // by number: the oldest first
  std::set<std::pair<double, uint64_t>> ends_;  // (due, number) of each batch
  uint64_t last_ = 0;
  uint64_t size_ = 0;
  uint64_t listed_ = 0;
};

template <typename F>
void Courtesies::each(F&& f) const {
  for (const auto& [number, batch] : batches_) {
    for (auto page = batch.pages.rbegin(); page != batch.pages.rend(); ++page) {
      if (entry(*page).batch == number && !f(*page)) return;
    }
  }
}

}  // namespace stepwell
