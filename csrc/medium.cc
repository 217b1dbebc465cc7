#include "medium.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "crc32c.h"
#include "guard.h"
#include "huge.h"

namespace stepwell {

namespace {

constexpr size_t kScratchAlignment = 4096;  // the largest direct-I/O alignment a volume may have
// From here on a buffer lies in huge pages. A disk is told which pieces of memory a call is about, pays for each, and
// takes a bounded number at a time (virtio 254): in pages of 4 KiB, 2 MiB are 512 pieces in three requests, in a huge
// page they are one in one (measured: 4 threads read 2 MiB at a time at 0.6 and 1.2 GB/s, 64 KiB at 0.4 and 0.6, and
// write 2 MiB at 0.4 and 0.6; benchmarks/bench_volume.py has it for one thread).
constexpr size_t kHugeFrom = 64 << 10;

constexpr size_t round_up(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

// Not initialised; null where memory is short.
std::byte* allocate(size_t bytes) noexcept {
  if (bytes < kHugePage) return static_cast<std::byte*>(std::aligned_alloc(kScratchAlignment, bytes));
  try {
    return static_cast<std::byte*>(huge_allocate(bytes));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

Status copy_layer(std::byte* target, const std::byte* source, uint64_t bytes, bool guarded, uint32_t* crc) noexcept {
  if (guarded) return guard::copy(target, source, bytes, crc);
  *crc = crc32c_copy(*crc, target, source, bytes);
  return Status::kOk;
}

}  // namespace

void Scratch::Free::operator()(std::byte* memory) const noexcept { huge_free(memory); }

std::byte* Scratch::grow(Buffer* buffer, size_t want) noexcept {
  if (want <= buffer->bytes) return buffer->first;
  if (want > SIZE_MAX - kHugePage) return nullptr;
  const size_t bytes = round_up(want, kScratchAlignment);
  if (bytes >= kHugeFrom && bytes <= kHugePage - common_taken_) {
    if (common_ == nullptr) common_.reset(allocate(kHugePage));
    if (common_ == nullptr) return nullptr;
    *buffer = {common_.get() + common_taken_, bytes, nullptr};
    common_taken_ += bytes;  // where it was before is left as it is: a worker's pages are of one size
    return buffer->first;
  }
  const size_t rounded = bytes < kHugeFrom ? bytes : round_up(bytes, kHugePage);
  Memory own(allocate(rounded));
  if (own == nullptr) return nullptr;
  std::byte* const first = own.get();
  *buffer = {first, rounded, std::move(own)};
  return first;
}

void PageRun::reset(uint32_t first, uint32_t count, uint32_t layers) {
  slot = first;
  labels.assign(count, nullptr);
  checksums.resize(size_t{count} * layers);
  sources.assign(count, {});
  targets.assign(count, {});
  generations.assign(count, 0);
  statuses.assign(count, Status::kOk);
}

void Medium::read_run(PageRun*, Scratch&) noexcept {}

bool Medium::begin_run(PageRun*, Scratch&) noexcept { return false; }

bool Medium::finish_run(PageRun*, uint32_t, uint32_t) noexcept { return false; }

void Medium::retire_run(uint32_t slot, uint32_t count, Status* statuses) noexcept {
  for (uint32_t i = 0; i < count; ++i) statuses[i] = retire(slot + i);
}

void Medium::settle(const uint32_t*, size_t count, Status* statuses) noexcept {
  std::fill_n(statuses, count, Status::kOk);
}

Status write_page(Medium& medium, const PageShape& shape, uint32_t slot, const Label& label, const std::byte* data,
                  Scratch& scratch) noexcept {
  if (Status status = resize_checksums(&scratch.target_checksums, shape.layers()); status != Status::kOk) return status;
  PageTarget target;
  if (Status status = medium.begin_write(slot, scratch, &target); status != Status::kOk) return status;
  const uint32_t page_seed = shape.page_seed(label);
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    const uint64_t offset = shape.layer_offset(layer);
    uint32_t crc = PageShape::layer_seed(page_seed, layer);
    const Status status =
        copy_layer(target.bytes + offset, data + offset, shape.layer_bytes(layer), target.guarded, &crc);
    if (status != Status::kOk) return status;
    scratch.target_checksums[layer] = crc;
  }
  Status status = medium.finish_write(slot, label, scratch.target_checksums.data(), target);
  if (status == Status::kOk && medium.settles()) medium.settle(&slot, 1, &status);
  return status;
}

Status read_page(Medium& medium, const PageShape& shape, uint32_t slot, const Label& label, std::byte* out,
                 Scratch& scratch) noexcept {
  PageSource source;
  if (Status status = medium.prepare_read(slot, label, scratch, &source); status != Status::kOk) return status;
  const uint32_t page_seed = shape.page_seed(label);
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    const uint64_t offset = shape.layer_offset(layer);
    uint32_t crc = PageShape::layer_seed(page_seed, layer);
    const Status status =
        copy_layer(out + offset, source.bytes + offset, shape.layer_bytes(layer), source.guarded, &crc);
    if (status != Status::kOk) return status;
    if (crc != source.checksums[layer]) return Status::kChecksum;
  }
  copy_fence();
  return Status::kOk;
}

Status resize_checksums(std::vector<uint32_t>* checksums, uint32_t layers) noexcept {
  try {
    checksums->resize(layers);
  } catch (const std::bad_alloc&) {
    return Status::kIOError;
  }
  return Status::kOk;
}

}  // namespace stepwell
