#include "copy.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "crc32c.h"
#include "guard.h"

namespace stepwell {
namespace {

uint64_t magnitude(int64_t v) noexcept { return v < 0 ? 0 - static_cast<uint64_t>(v) : static_cast<uint64_t>(v); }

// Bytes of one stream of one slot; throws where a count is zero or an offset inside the pool cannot be represented.
uint64_t checked_bytes(const StreamView& view, uint64_t slots, bool writable, const std::string& where) {
  if (view.base == nullptr) throw std::invalid_argument(where + " has no address");
  if (view.outer_count == 0 || view.inner_count == 0 || view.piece_bytes == 0)
    throw std::invalid_argument(where + " has a count or size of zero");
  uint64_t bytes = 0, slot_reach = 0, outer_reach = 0, inner_reach = 0, reach = 0;
  const uint64_t pieces = uint64_t{view.outer_count} * view.inner_count;
  if (__builtin_mul_overflow(pieces, view.piece_bytes, &bytes) ||
      __builtin_mul_overflow(slots - 1, magnitude(view.slot_stride), &slot_reach) ||
      __builtin_mul_overflow(uint64_t{view.outer_count} - 1, magnitude(view.outer_stride), &outer_reach) ||
      __builtin_mul_overflow(uint64_t{view.inner_count} - 1, magnitude(view.inner_stride), &inner_reach) ||
      __builtin_add_overflow(slot_reach, outer_reach, &reach) || __builtin_add_overflow(reach, inner_reach, &reach) ||
      __builtin_add_overflow(reach, view.piece_bytes, &reach) || reach > static_cast<uint64_t>(INT64_MAX))
    throw std::invalid_argument(where + " reaches further than 2^63 bytes");
  const auto overlaps = [&](uint64_t count, int64_t stride) {
    return count > 1 && magnitude(stride) < view.piece_bytes;
  };
  if (writable && (overlaps(slots, view.slot_stride) || overlaps(view.outer_count, view.outer_stride) ||
                   overlaps(view.inner_count, view.inner_stride)))
    throw std::invalid_argument(where + " is writable, but its pieces of " + std::to_string(view.piece_bytes) +
                                " bytes overlap");
  return bytes;
}

// The same bytes in the same order with fewer, larger pieces.
StreamView coalesce(StreamView view) noexcept {
  if (view.inner_count > 1 && view.inner_stride > 0 && static_cast<uint64_t>(view.inner_stride) == view.piece_bytes) {
    view.piece_bytes *= view.inner_count;
    view.inner_count = 1;
  }
  if (view.inner_count == 1) {
    view.inner_count = std::exchange(view.outer_count, 1);
    view.inner_stride = view.outer_stride;
    if (view.inner_count > 1 && view.inner_stride > 0 && static_cast<uint64_t>(view.inner_stride) == view.piece_bytes) {
      view.piece_bytes *= view.inner_count;
      view.inner_count = 1;
    }
  }
  return view;
}

enum class Direction : uint8_t { kGather, kScatter };

// One layer of one slot: what a guarded leaf needs, and nothing to destroy.
struct LayerCopy {
  const StreamView* views;
  uint32_t streams;
  uint64_t slot;
  std::byte* page;        // contiguous canonical bytes; only read when scattering
  const std::byte* next;  // where the pool's next layer starts, or null
  bool with_crc;
  uint32_t crc;
};

// The pieces of one stream of one slot, in canonical order.
struct Cursor {
  const StreamView& view;
  std::byte* row;
  std::byte* piece;
  uint32_t outer = 0, inner = 0;

  Cursor(const StreamView& of, uint64_t slot) noexcept
      : view(of), row(of.base + static_cast<int64_t>(slot) * of.slot_stride), piece(row) {}
  bool is_at_end() const noexcept { return outer == view.outer_count; }
  void advance() noexcept {
    if (++inner < view.inner_count) {
      piece += view.inner_stride;
    } else if (++outer < view.outer_count) {
      inner = 0;
      piece = row += view.outer_stride;
    }
  }
};

// How far the gather runs ahead of itself. Pieces lie too far apart for the hardware prefetcher, and the checksum's
// instructions fill the reorder buffer before the next piece's first load: without this a piece of 256 bytes costs one
// DRAM latency (measured: 1.5 GB/s; benchmarks/bench_copy.py).
constexpr uint64_t kAheadBytes = 2048;

void prefetch_head(const std::byte* piece, uint64_t bytes) noexcept {
  for (uint64_t line = 0; line < std::min(bytes, kAheadBytes); line += 64) __builtin_prefetch(piece + line);
}

template <Direction direction>
void copy_layer(void* argument) noexcept {
  LayerCopy& job = *static_cast<LayerCopy*>(argument);
  std::byte* page = job.page;
  uint32_t crc = job.crc;
  for (uint32_t stream = 0; stream < job.streams; ++stream) {
    const StreamView& view = job.views[stream];
    Cursor ahead(view, job.slot);
    if constexpr (direction == Direction::kGather) {
      const std::byte* const next = stream + 1 < job.streams ? Cursor(job.views[stream + 1], job.slot).piece : job.next;
      if (next != nullptr) prefetch_head(next, view.piece_bytes);
      for (uint64_t bytes = 0; bytes < kAheadBytes && !ahead.is_at_end(); bytes += view.piece_bytes, ahead.advance())
        prefetch_head(ahead.piece, view.piece_bytes);
    }
    for (Cursor at(view, job.slot); !at.is_at_end(); at.advance(), page += view.piece_bytes) {
      if constexpr (direction == Direction::kGather) {
        if (!ahead.is_at_end()) {
          prefetch_head(ahead.piece, view.piece_bytes);
          ahead.advance();
        }
      }
      std::byte* const target = direction == Direction::kGather ? page : at.piece;
      const std::byte* const source = direction == Direction::kGather ? at.piece : page;
      if (job.with_crc)
        crc = crc32c_copy(crc, target, source, view.piece_bytes);
      else
        stream_copy(target, source, view.piece_bytes);
    }
  }
  job.crc = crc;
}

template <Direction direction>
Status run_layer(LayerCopy job, uint32_t* crc, bool guarded) noexcept {
  job.with_crc = crc != nullptr;
  job.crc = crc != nullptr ? *crc : 0;
  if (guarded) {
    const Status status = guard::run(copy_layer<direction>, &job);
    if (status != Status::kOk) return status;
  } else {
    copy_layer<direction>(&job);
  }
  if (crc != nullptr) *crc = job.crc;
  return Status::kOk;
}

}  // namespace

PoolLayout::PoolLayout(const PageShape& shape, uint32_t streams, std::vector<StreamView> views, uint64_t slots,
                       bool writable)
    : views_(std::move(views)), layers_(shape.layers()), streams_(streams), slots_(slots), writable_(writable) {
  if (streams == 0) throw std::invalid_argument("a pool needs at least one stream");
  if (slots == 0) throw std::invalid_argument("a pool needs at least one slot");
  if (views_.size() != uint64_t{layers_} * streams_)
    throw std::invalid_argument("a pool of " + std::to_string(layers_) + " layers and " + std::to_string(streams_) +
                                " streams needs " + std::to_string(uint64_t{layers_} * streams_) + " views, not " +
                                std::to_string(views_.size()));
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    uint64_t total = 0;
    for (uint32_t stream = 0; stream < streams_; ++stream) {
      StreamView& view = views_[size_t{layer} * streams_ + stream];
      const std::string where = "stream " + std::to_string(stream) + " of layer " + std::to_string(layer);
      if (__builtin_add_overflow(total, checked_bytes(view, slots_, writable_, where), &total))
        throw std::invalid_argument(where + " overflows the size of its layer");
      view = coalesce(view);
    }
    if (total != shape.layer_bytes(layer))
      throw std::invalid_argument("the streams of layer " + std::to_string(layer) + " have " + std::to_string(total) +
                                  " bytes in the pool, but the geometry says " +
                                  std::to_string(shape.layer_bytes(layer)));
  }
}

Status PoolLayout::gather_layer(uint64_t slot, uint32_t layer, std::byte* target, uint32_t* crc,
                                bool guarded) const noexcept {
  if (slot >= slots_ || layer >= layers_) return Status::kInvalid;
  const StreamView* const views = &views_[size_t{layer} * streams_];
  const std::byte* const next = layer + 1 < layers_ ? Cursor(views[streams_], slot).piece : nullptr;
  return run_layer<Direction::kGather>({views, streams_, slot, target, next, false, 0}, crc, guarded);
}

Status PoolLayout::scatter_layer(uint64_t slot, uint32_t layer, const std::byte* source, uint32_t* crc,
                                 bool guarded) const noexcept {
  if (slot >= slots_ || layer >= layers_ || !writable_) return Status::kInvalid;
  const StreamView* const views = &views_[size_t{layer} * streams_];
  return run_layer<Direction::kScatter>({views, streams_, slot, const_cast<std::byte*>(source), nullptr, false, 0}, crc,
                                        guarded);
}

}  // namespace stepwell
