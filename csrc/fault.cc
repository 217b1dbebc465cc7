#include "fault.h"

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

namespace stepwell::fault {

std::atomic<bool> armed{false};

namespace {

struct Rule {
  std::string pattern;
  Action action;
  uint64_t nth;  // 0: each time
  int64_t value;
  uint64_t matched = 0;
};

struct Point {
  uint64_t reached = 0;
  uint64_t standing = 0;  // threads paused here that nobody has resumed yet
  uint64_t resumed = 0;   // grows by one with each resume; a paused thread waits for a change
};

// All fields are guarded by `mutex`, which is never held while a thread stands, sleeps or dies at a point.
struct Registry {
  std::mutex mutex;
  std::condition_variable changed;  // a thread was paused or resumed
  std::vector<Rule> rules;
  std::map<std::string, Point, std::less<>> points;
};

Registry& registry() {
  // Never destroyed: a thread may stand at a point while the process exits, and what it waits on has to stay.
  static Registry* const instance = std::make_unique<Registry>().release();
  return *instance;
}

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.ends_with('*')) return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return pattern == name;
}

template <typename Visit>
void for_each_matching(Registry& all, const std::string& pattern, Visit visit) {
  for (auto& [name, point] : all.points)
    if (matches(pattern, name)) visit(point);
}

uint64_t standing_locked(Registry& all, const std::string& pattern) {
  uint64_t total = 0;
  for_each_matching(all, pattern, [&](const Point& point) { total += point.standing; });
  return total;
}

// What the rules want of one arrival, gathered under the lock and done outside it.
struct Orders {
  Outcome outcome;
  int signal = 0;
  bool pause = false;
  std::chrono::microseconds delay{0};
};

Orders collect(Registry& all, std::string_view name) {
  Orders orders;
  for (Rule& rule : all.rules) {
    if (!matches(rule.pattern, name)) continue;
    ++rule.matched;
    if (rule.nth != 0 && rule.matched != rule.nth) continue;
    switch (rule.action) {
      case Action::kCount: break;
      case Action::kErrno: orders.outcome.error = static_cast<int>(rule.value); break;
      case Action::kShort: orders.outcome.short_bytes = rule.value; break;
      case Action::kKill: orders.signal = SIGKILL; break;
      case Action::kStop: orders.signal = SIGSTOP; break;
      case Action::kPause: orders.pause = true; break;
      case Action::kDelay: orders.delay += std::chrono::microseconds(rule.value); break;
    }
  }
  return orders;
}

}  // namespace

void arm(const std::string& name, Action action, uint64_t nth, int64_t value) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.rules.push_back(Rule{name, action, nth, value});
  armed.store(true, std::memory_order_relaxed);
}

void clear() {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  armed.store(false, std::memory_order_relaxed);
  all.rules.clear();
  // Points stay: a paused thread still refers to its own.
  for (auto& [name, point] : all.points) {
    point.reached = 0;
    point.standing = 0;
    ++point.resumed;
  }
  all.changed.notify_all();
}

void resume(const std::string& name) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  for_each_matching(all, name, [](Point& point) {
    point.standing = 0;
    ++point.resumed;
  });
  all.changed.notify_all();
}

uint64_t reached(const std::string& name) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  uint64_t total = 0;
  for_each_matching(all, name, [&](const Point& point) { total += point.reached; });
  return total;
}

uint64_t paused(const std::string& name) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  return standing_locked(all, name);
}

bool wait_paused(const std::string& name, double timeout_s) {
  Registry& all = registry();
  std::unique_lock lock(all.mutex);
  return all.changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                              [&] { return standing_locked(all, name) > 0; });
}

Outcome reach_slow(const char* name) {
  Registry& all = registry();
  Orders orders;
  {
    std::lock_guard lock(all.mutex);
    ++all.points[name].reached;
    orders = collect(all, name);
  }
  // raise(), not kill(): the signal is taken by this thread before it goes on, at this point and nowhere else.
  if (orders.signal != 0) std::raise(orders.signal);
  if (orders.delay.count() > 0) std::this_thread::sleep_for(orders.delay);
  if (orders.pause) {
    std::unique_lock lock(all.mutex);
    Point& point = all.points[name];
    const uint64_t seen = point.resumed;
    // A clear() between collect() and here has dropped the rule: nobody would resume this thread.
    if (armed.load(std::memory_order_relaxed)) {
      ++point.standing;
      all.changed.notify_all();
      all.changed.wait(lock, [&] { return point.resumed != seen; });
    }
  }
  return orders.outcome;
}

}  // namespace stepwell::fault
