// A bounded queue of work with weighted classes: loads before saves before demotions, none starved.
//
// Not thread safe by itself: the mover guards it with its queue mutex. Room is reserved before it is filled, so that a
// stage that follows another can never find the queue full.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

namespace stepwell {

enum class WorkClass : uint8_t { kLoad = 0, kSave = 1, kDemote = 2 };
constexpr size_t kWorkClasses = 3;

template <typename T>
class WeightedQueue {
 public:
  explicit WeightedQueue(size_t capacity) : capacity_(capacity) {}

  bool try_reserve(size_t count) {
    if (count > capacity_ - reserved_) return false;
    reserved_ += count;
    return true;
  }
  void unreserve(size_t count) { reserved_ -= count; }
  // REQUIRES a reservation; it is returned by unreserve() when the work is done.
  void push(WorkClass work_class, T item) { lanes_[static_cast<size_t>(work_class)].push_back(std::move(item)); }

  // Of each 8 pops: up to 5 loads, 2 saves, 1 demotion; an empty lane's turn goes to the first that is not empty.
  std::optional<T> pop() {
    static constexpr std::array<uint8_t, 8> kTurns{0, 1, 0, 0, 1, 0, 2, 0};
    const size_t turn = kTurns[turn_++ % kTurns.size()];
    for (size_t i = 0; i <= kWorkClasses; ++i) {
      auto& lane = lanes_[i == 0 ? turn : i - 1];
      if (lane.empty()) continue;
      T item = std::move(lane.front());
      lane.pop_front();
      return item;
    }
    return std::nullopt;
  }
  size_t size() const {
    size_t total = 0;
    for (const auto& lane : lanes_) total += lane.size();
    return total;
  }
  size_t reserved() const { return reserved_; }
  size_t capacity() const { return capacity_; }

 private:
  size_t capacity_;
  size_t reserved_ = 0;
  uint64_t turn_ = 0;
  std::array<std::deque<T>, kWorkClasses> lanes_;
};

}  // namespace stepwell
