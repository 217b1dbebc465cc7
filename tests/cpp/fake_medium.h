// A medium in plain memory that keeps the rules of medium.h, notes who breaks them, and fails, stalls or lies on order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "medium.h"

namespace stepwell::testing {

// Where a worker can be held: hold() arms it, a worker that passes stands until release().
class Stall {
 public:
  void hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  void release() {
    std::lock_guard lock(mutex_);
    held_ = false;
    condition_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    if (!held_) return;
    ++standing_;
    condition_.notify_all();
    condition_.wait(lock, [this] { return !held_; });
    --standing_;
  }
  // False: nobody came within a time that no machine needs.
  bool wait_standing(int workers = 1) {
    std::unique_lock lock(mutex_);
    return condition_.wait_for(lock, std::chrono::seconds(60), [&] { return standing_ >= workers; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool held_ = false;
  int standing_ = 0;
};

// Fails the n-th call from now (1 = the next); 0: none.
struct FailNth {
  std::atomic<int> left{0};
  std::atomic<Status> status{Status::kIOError};
  void arm(int nth, Status with) {
    status = with;
    left = nth;
  }
  Status pass() {
    if (left.load() == 0) return Status::kOk;
    return left.fetch_sub(1) == 1 ? status.load() : Status::kOk;
  }
};

class FakeMedium final : public Medium {
 public:
  enum class State : uint8_t { kFree, kWriting, kWritten, kHolds };

  FakeMedium(const PageShape& shape, uint32_t slots, bool does_io)
      : shape_(shape),
        does_io_(does_io),
        states_(slots),
        labels_(slots),
        checksums_(size_t{slots} * shape.layers()),
        memory_(slots * shape.page_bytes()) {
    for (auto& state : states_) state = State::kFree;
  }

  Stall before_read, before_finish, before_settle;
  FailNth read_fails, begin_fails, finish_fails, settle_fails, retire_fails;
  std::atomic<bool> is_settling{false};      // settles() as a volume of durability `power`
  std::atomic<int> settled{0};               // calls of settle()
  std::atomic<int> yields{0};                // a slow medium: lets others run so many times before each call
  std::atomic<bool> through_scratch{false};  // reads into scratch, as a mapping does whose guard is not ours
  std::atomic<int> reads{0}, retires{0};
  std::function<void()> at_retire;

  bool does_io() const noexcept override { return does_io_; }

  Status prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept override {
    slow();
    ++reads;
    if (const Status status = read_fails.pass(); status != Status::kOk) return status;
    if (states_[slot] != State::kHolds || !(labels_[slot].key == label.key)) return Status::kStale;
    source->checksums = &checksums_[size_t{slot} * shape_.layers()];
    source->bytes = bytes(slot);
    if (does_io_ || through_scratch) {
      std::byte* const copy = scratch.source(shape_.page_bytes());
      before_read.pass();  // a read that stalls and then completes writes to memory that is still there
      std::memcpy(copy, bytes(slot), shape_.page_bytes());
      source->bytes = copy;
    } else {
      before_read.pass();
    }
    return Status::kOk;
  }

  Status begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept override {
    slow();
    if (states_[slot] == State::kHolds) note("begin_write on a slot that holds a page");
    if (const Status status = begin_fails.pass(); status != Status::kOk) return status;
    states_[slot] = State::kWriting;
    target->bytes = does_io_ ? scratch.target(shape_.page_bytes()) : bytes(slot);
    return Status::kOk;
  }

  Status finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                      const PageTarget& target) noexcept override {
    slow();
    before_finish.pass();
    if (states_[slot] != State::kWriting) note("finish_write without begin_write");
    if (const Status status = finish_fails.pass(); status != Status::kOk) return status;
    if (target.bytes != bytes(slot)) std::memcpy(bytes(slot), target.bytes, shape_.page_bytes());
    std::memcpy(&checksums_[size_t{slot} * shape_.layers()], checksums, 4 * size_t{shape_.layers()});
    labels_[slot] = label;
    states_[slot] = is_settling ? State::kWritten : State::kHolds;
    return Status::kOk;
  }

  bool settles() const noexcept override { return is_settling; }
  void settle(const uint32_t* slots, size_t count, Status* statuses) noexcept override {
    if (inside_.exchange(true)) note("two calls of settle at a time");
    ++settled;
    slow();
    before_settle.pass();
    for (size_t i = 0; i < count; ++i) {
      if (states_[slots[i]] != State::kWritten) note("settle without finish_write");
      statuses[i] = settle_fails.pass();
      if (statuses[i] == Status::kOk) states_[slots[i]] = State::kHolds;
    }
    inside_ = false;
  }

  Status retire(uint32_t slot) noexcept override {
    if (at_retire) at_retire();
    ++retires;
    if (const Status status = retire_fails.pass(); status != Status::kOk) return status;
    states_[slot] = State::kFree;
    return Status::kOk;
  }
  Status rewrite_and_check(uint32_t slot, Scratch&) noexcept override {
    states_[slot] = State::kFree;
    return Status::kOk;
  }

  std::byte* bytes(uint32_t slot) { return memory_.data() + slot * shape_.page_bytes(); }
  State state(uint32_t slot) const { return states_[slot]; }
  void corrupt(uint32_t slot, uint64_t at) { bytes(slot)[at] ^= std::byte{1}; }
  size_t holding() const {
    size_t count = 0;
    for (const auto& state : states_) count += state == State::kHolds;
    return count;
  }
  std::string violations() const {
    std::lock_guard lock(mutex_);
    return violations_;
  }

 private:
  void slow() {
    for (int i = yields; i > 0; --i) std::this_thread::yield();
  }
  void note(const char* what) {
    std::lock_guard lock(mutex_);
    violations_ += std::string(what) + "; ";
  }

  std::atomic<bool> inside_{false};
  PageShape shape_;
  bool does_io_;
  std::vector<std::atomic<State>> states_;
  std::vector<Label> labels_;
  std::vector<uint32_t> checksums_;
  std::vector<std::byte> memory_;
  mutable std::mutex mutex_;
  std::string violations_;
};

}  // namespace stepwell::testing
