#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>
#include <vector>

#include "fault.h"

using namespace stepwell;

namespace {

// Each test starts and ends without rules.
struct Clean {
  Clean() { fault::clear(); }
  ~Clean() { fault::clear(); }
};

}  // namespace

TEST_CASE("an unarmed point does nothing and counts nothing") {
  Clean clean;
  const auto outcome = fault::reach("a.b");
  CHECK(outcome.error == 0);
  CHECK(outcome.short_bytes == -1);
  CHECK(fault::reached("a.b") == 0);
}

TEST_CASE("a rule fires at the nth time only, counted from when it was armed") {
  Clean clean;
  fault::arm("a.b", fault::Action::kCount, 0, 0);
  CHECK(fault::reach("a.b").error == 0);
  fault::arm("a.b", fault::Action::kErrno, 2, EIO);
  CHECK(fault::reach("a.b").error == 0);
  CHECK(fault::reach("a.c").error == 0);
  CHECK(fault::reach("a.b").error == EIO);
  CHECK(fault::reach("a.b").error == 0);
  CHECK(fault::reached("a.b") == 4);
}

TEST_CASE("nth 0 fires each time, and a short rule limits the bytes") {
  Clean clean;
  fault::arm("file.pread", fault::Action::kShort, 0, 7);
  CHECK(fault::reach("file.pread").short_bytes == 7);
  CHECK(fault::reach("file.pread").short_bytes == 7);
  CHECK(fault::reach("file.pwrite").short_bytes == -1);
}

TEST_CASE("a star matches every point with its prefix, and counts over all of them") {
  Clean clean;
  fault::arm("file.*", fault::Action::kErrno, 3, ENOSPC);
  CHECK(fault::reach("file.pread").error == 0);
  CHECK(fault::reach("filename").error == 0);
  CHECK(fault::reach("file.pwrite").error == 0);
  CHECK(fault::reach("file.open").error == ENOSPC);
  CHECK(fault::reached("file.*") == 3);
  CHECK(fault::reached("*") == 4);
}

TEST_CASE("clear drops rules and counters") {
  Clean clean;
  fault::arm("*", fault::Action::kErrno, 0, EIO);
  CHECK(fault::reach("x").error == EIO);
  fault::clear();
  CHECK(fault::reach("x").error == 0);
  CHECK(fault::reached("x") == 0);
}

TEST_CASE("a paused thread stands until it is resumed, once") {
  Clean clean;
  fault::arm("p", fault::Action::kPause, 0, 0);
  std::jthread thread([] {
    fault::reach("p");
    fault::reach("p");
  });
  REQUIRE(fault::wait_paused("p", 60));
  CHECK(fault::paused("p") == 1);
  CHECK(fault::reached("p") == 1);
  fault::resume("p");
  REQUIRE(fault::wait_paused("p", 60));
  CHECK(fault::reached("p") == 2);
  fault::resume("p");
  thread.join();
  CHECK(fault::paused("p") == 0);
}

TEST_CASE("clear wakes all that are paused") {
  Clean clean;
  fault::arm("p*", fault::Action::kPause, 0, 0);
  std::vector<std::jthread> threads;
  for (const char* name : {"p1", "p2", "p3"}) {
    threads.emplace_back([name] { fault::reach(name); });
    REQUIRE(fault::wait_paused(name, 60));
  }
  CHECK(fault::paused("p*") == 3);
  fault::clear();
  threads.clear();
  CHECK(fault::paused("p*") == 0);
}

TEST_CASE("wait_paused gives up when nobody comes") {
  Clean clean;
  fault::arm("p", fault::Action::kPause, 0, 0);
  CHECK_FALSE(fault::wait_paused("p", 0));
}

TEST_CASE("kill and stop act on the process at the point") {
  Clean clean;
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    fault::arm("s", fault::Action::kStop, 1, 0);
    fault::arm("k", fault::Action::kKill, 1, 0);
    fault::reach("s");
    fault::reach("k");
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);
  REQUIRE(WIFSTOPPED(status));
  CHECK(WSTOPSIG(status) == SIGSTOP);
  REQUIRE(kill(child, SIGCONT) == 0);
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGKILL);
}
