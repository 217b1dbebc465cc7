// Volumes of durability `power`: what a sync stands for, and who is told what of a group that shares one. What is found
// after a power loss: tests/test_powerloss.py.
#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fault.h"
#include "volume.h"
#include "volume_files.h"

namespace stepwell {
namespace {

using testing::label_of;
using testing::shape_of;
using testing::stamped;
using testing::VolumeFiles;

constexpr double kLong_s = 60;

struct Durable {
  ~Durable() { fault::clear(); }

  VolumeFiles files{VolumeMedium::kDisk, shape_of({512, 512}), 400 * 1024};
  std::unique_ptr<Volume> volume = files.open(Durability::kPower);
};

void write_and_settle(Volume& volume, const PageShape& shape, uint32_t slot) {
  const std::string key = std::to_string(slot);
  Scratch scratch;
  REQUIRE(write_page(volume, shape, slot, label_of(key), stamped(shape, key).data(), scratch) == Status::kOk);
}

// All but settling; the page is of zeros, and nobody reads it.
void write(Volume& volume, uint32_t slot) {
  Scratch scratch;
  PageTarget target;
  REQUIRE(volume.begin_write(slot, scratch, &target) == Status::kOk);
  std::memset(target.bytes, 0, volume.header().page_bytes);
  const std::vector<uint32_t> checksums(volume.header().layers);
  REQUIRE(volume.finish_write(slot, label_of(std::to_string(slot)), checksums.data(), target) == Status::kOk);
}

}  // namespace

TEST_CASE("what is freed during a sync is not taken for durable by it") {
  Durable of;
  for (const uint32_t slot : {0u, 1u}) write_and_settle(*of.volume, of.files.shape(), slot);
  REQUIRE(of.volume->retire(0) == Status::kOk);
  fault::arm("file.sync", fault::Action::kPause, 1, 0);
  // The freeing of a slot is to be durable before its bytes are another's: the write waits for a sync.
  std::thread writer([&] { write(*of.volume, 0); });
  REQUIRE(fault::wait_paused("file.sync", kLong_s));
  REQUIRE(of.volume->retire(1) == Status::kOk);
  fault::clear();
  writer.join();
  const uint64_t syncs = of.volume->syncs();
  write(*of.volume, 1);
  CHECK(of.volume->syncs() == syncs + 1);
}

TEST_CASE("a set tells each page its own outcome, volume by volume") {
  // Two syncs a volume, its pages first and its metadata then: each of the four fails.
  for (size_t sync = 0; sync < 4; ++sync) {
    CAPTURE(sync);
    const size_t failing = sync / 2;
    std::array<Durable, 2> of;
    VolumeSet set(true, Durability::kPower);
    std::vector<uint32_t> slots;
    for (Durable& each : of) {
      const std::shared_ptr<Volume> volume = std::move(each.volume);
      const uint32_t first = set.add(volume) << kSlotBits;
      for (const uint32_t slot : {0u, 1u}) {
        write(*volume, slot);
        slots.push_back(first + slot);
      }
    }
    fault::arm("file.sync", fault::Action::kErrno, 1 + sync, EIO);
    std::array<Status, 4> statuses;
    statuses.fill(Status::kPending);
    set.settle(slots.data(), slots.size(), statuses.data());
    for (size_t i = 0; i < slots.size(); ++i) {
      const bool fails = i / 2 == failing;
      CHECK(statuses[i] == (fails ? Status::kIOError : Status::kOk));
      CHECK(of[i / 2].files.generation(slots[i] & kSlotMask) % 2 == (fails ? 1 : 0));
    }
    fault::clear();
  }
}

}  // namespace stepwell
