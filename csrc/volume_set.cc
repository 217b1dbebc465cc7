#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "volume.h"

namespace stepwell {

uint32_t VolumeSet::add(std::shared_ptr<Volume> volume) {
  if (volume == nullptr) throw std::invalid_argument("no volume given");
  if (volume->does_io() != does_io_) throw std::invalid_argument("a set holds volumes of one medium only");
  if (volume->settles() != settles()) throw std::invalid_argument("a set holds volumes of one durability only");
  if (volume->header().slots > 1u << kSlotBits) {
    throw std::invalid_argument("a volume of " + std::to_string(volume->header().slots) +
                                " slots cannot be part of a set: at most 2^20");
  }
  const std::lock_guard lock(mutex_);
  uint32_t number = 0;
  while (number < owners_.size() && owners_[number] != nullptr) ++number;
  if (number == kMaxVolumes) throw std::length_error("a tier holds at most 4096 volumes");
  if (number == owners_.size()) owners_.emplace_back();
  table_[number].store(volume.get(), std::memory_order_release);
  owners_[number] = std::move(volume);
  return number;
}

std::shared_ptr<Volume> VolumeSet::remove(uint32_t number) {
  const std::lock_guard lock(mutex_);
  if (number >= owners_.size()) return nullptr;
  table_[number].store(nullptr, std::memory_order_release);
  return std::exchange(owners_[number], nullptr);
}

std::shared_ptr<Volume> VolumeSet::get(uint32_t number) const {
  const std::lock_guard lock(mutex_);
  return number < owners_.size() ? owners_[number] : nullptr;
}

Volume* VolumeSet::volume_of(uint32_t slot) const noexcept {
  return table_[slot >> kSlotBits].load(std::memory_order_acquire);
}

Status VolumeSet::prepare_read(uint32_t slot, const Label& label, Scratch& scratch, PageSource* source) noexcept {
  Volume* volume = volume_of(slot);
  return volume == nullptr ? Status::kInvalid : volume->prepare_read(slot & kSlotMask, label, scratch, source);
}

Status VolumeSet::begin_write(uint32_t slot, Scratch& scratch, PageTarget* target) noexcept {
  Volume* volume = volume_of(slot);
  return volume == nullptr ? Status::kInvalid : volume->begin_write(slot & kSlotMask, scratch, target);
}

Status VolumeSet::finish_write(uint32_t slot, const Label& label, const uint32_t* checksums,
                               const PageTarget& target) noexcept {
  Volume* volume = volume_of(slot);
  return volume == nullptr ? Status::kInvalid : volume->finish_write(slot & kSlotMask, label, checksums, target);
}

// Not under a pin, as reads and writes are: the volume is kept until its record is written, whoever removes it meanwhile.
Status VolumeSet::retire(uint32_t slot) noexcept {
  const std::shared_ptr<Volume> volume = get(slot >> kSlotBits);
  return volume == nullptr ? Status::kInvalid : volume->retire(slot & kSlotMask);
}

// Volume by volume, a run of its slots at a time: no memory is asked for, and pages of one batch lie together.
void VolumeSet::settle(const uint32_t* slots, size_t count, Status* statuses) noexcept {
  constexpr size_t kRun = 1024;
  std::array<uint32_t, kRun> inside;
  for (size_t first = 0; first < count;) {
    const uint32_t number = slots[first] >> kSlotBits;
    size_t run = 0;
    while (run < kRun && first + run < count && slots[first + run] >> kSlotBits == number) {
      inside[run] = slots[first + run] & kSlotMask;
      ++run;
    }
    if (Volume* volume = volume_of(slots[first]); volume != nullptr) {
      volume->settle(inside.data(), run, statuses + first);
    } else {
      std::fill_n(statuses + first, run, Status::kInvalid);
    }
    first += run;
  }
}

uint32_t VolumeSet::longest_run(uint32_t slot) const noexcept {
  const Volume* volume = volume_of(slot);
  return volume == nullptr ? 1 : volume->longest_run(slot & kSlotMask);
}

// A run is in one volume: longest_run() says so.
void VolumeSet::read_run(PageRun* run, Scratch& scratch) noexcept {
  Volume* volume = volume_of(run->slot);
  if (volume == nullptr) return;
  const uint32_t base = run->slot & ~kSlotMask;
  run->slot &= kSlotMask;
  volume->read_run(run, scratch);
  run->slot |= base;
}

bool VolumeSet::begin_run(PageRun* run, Scratch& scratch) noexcept {
  Volume* volume = volume_of(run->slot);
  if (volume == nullptr) return false;
  const uint32_t base = run->slot & ~kSlotMask;
  run->slot &= kSlotMask;
  const bool begun = volume->begin_run(run, scratch);
  run->slot |= base;
  return begun;
}

bool VolumeSet::finish_run(PageRun* run, uint32_t first, uint32_t count) noexcept {
  Volume* volume = volume_of(run->slot);
  if (volume == nullptr) return false;
  const uint32_t base = run->slot & ~kSlotMask;
  run->slot &= kSlotMask;
  const bool finished = volume->finish_run(run, first, count);
  run->slot |= base;
  return finished;
}

void VolumeSet::retire_run(uint32_t slot, uint32_t count, Status* statuses) noexcept {
  for (uint32_t first = 0, taken = 0; first < count; first += taken) {
    taken = std::min(count - first, kSlotMask - ((slot + first) & kSlotMask) + 1);
    if (const std::shared_ptr<Volume> volume = get((slot + first) >> kSlotBits); volume != nullptr) {
      volume->retire_run((slot + first) & kSlotMask, taken, statuses + first);
    } else {
      std::fill_n(statuses + first, taken, Status::kInvalid);
    }
  }
}

Status VolumeSet::rewrite_and_check(uint32_t slot, Scratch& scratch) noexcept {
  const std::shared_ptr<Volume> volume = get(slot >> kSlotBits);
  return volume == nullptr ? Status::kInvalid : volume->rewrite_and_check(slot & kSlotMask, scratch);
}

}  // namespace stepwell
