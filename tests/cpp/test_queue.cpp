#include <doctest/doctest.h>

#include <map>

#include "queue.h"

namespace stepwell {

TEST_CASE("an empty queue gives nothing") {
  WeightedQueue<int> queue(4);
  CHECK(!queue.pop().has_value());
  CHECK(queue.size() == 0);
}

TEST_CASE("room is what was reserved, not what was pushed") {
  WeightedQueue<int> queue(3);
  CHECK(queue.try_reserve(2));
  CHECK(!queue.try_reserve(2));
  CHECK(queue.try_reserve(1));
  CHECK(!queue.try_reserve(1));
  queue.unreserve(3);
  CHECK(queue.reserved() == 0);
  CHECK(queue.try_reserve(3));
  CHECK(!queue.try_reserve(SIZE_MAX));
}

TEST_CASE("eight pops of a full queue are five loads, two saves and a demotion") {
  WeightedQueue<WorkClass> queue(300);
  REQUIRE(queue.try_reserve(300));
  for (const WorkClass work_class : {WorkClass::kDemote, WorkClass::kSave, WorkClass::kLoad}) {
    for (int i = 0; i < 100; ++i) queue.push(work_class, work_class);
  }
  for (int round = 0; round < 12; ++round) {
    std::map<WorkClass, int> taken;
    for (int i = 0; i < 8; ++i) ++taken[*queue.pop()];
    CHECK(taken[WorkClass::kLoad] == 5);
    CHECK(taken[WorkClass::kSave] == 2);
    CHECK(taken[WorkClass::kDemote] == 1);
  }
}

TEST_CASE("the turn of an empty lane goes to the first that is not") {
  WeightedQueue<WorkClass> queue(20);
  for (int i = 0; i < 10; ++i) queue.push(WorkClass::kDemote, WorkClass::kDemote);
  queue.push(WorkClass::kSave, WorkClass::kSave);
  int save_at = -1;
  for (int i = 0; i < 11; ++i) {
    const auto item = queue.pop();
    REQUIRE(item.has_value());
    if (*item == WorkClass::kSave) save_at = i;
  }
  CHECK(save_at == 0);
  CHECK(!queue.pop().has_value());
}

TEST_CASE("a class is served in order") {
  WeightedQueue<int> queue(10);
  for (int i = 0; i < 10; ++i) queue.push(WorkClass::kSave, i);
  for (int i = 0; i < 10; ++i) CHECK(*queue.pop() == i);
}

}  // namespace stepwell
