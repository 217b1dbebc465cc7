#include "copy.h"

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
  std::byte* page;  // contiguous canonical bytes; only read when scattering
  bool with_crc;
  uint32_t crc;
};

template <Direction direction>
void copy_layer(void* argument) noexcept {
  LayerCopy& job = *static_cast<LayerCopy*>(argument);
  std::byte* page = job.page;
  uint32_t crc = job.crc;
  for (uint32_t stream = 0; stream < job.streams; ++stream) {
    const StreamView& view = job.views[stream];
    std::byte* const slot = view.base + static_cast<int64_t>(job.slot) * view.slot_stride;
    for (uint32_t outer = 0; outer < view.outer_count; ++outer) {
      std::byte* piece = slot + static_cast<int64_t>(outer) * view.outer_stride;
      for (uint32_t inner = 0; inner < view.inner_count; ++inner, piece += view.inner_stride, page += view.piece_bytes) {
        std::byte* const target = direction == Direction::kGather ? page : piece;
        const std::byte* const source = direction == Direction::kGather ? piece : page;
        if (job.with_crc)
          crc = crc32c_copy(crc, target, source, view.piece_bytes);
        else
          stream_copy(target, source, view.piece_bytes);
      }
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
  return run_layer<Direction::kGather>({&views_[size_t{layer} * streams_], streams_, slot, target, false, 0}, crc,
                                       guarded);
}

Status PoolLayout::scatter_layer(uint64_t slot, uint32_t layer, const std::byte* source, uint32_t* crc,
                                 bool guarded) const noexcept {
  if (slot >= slots_ || layer >= layers_ || !writable_) return Status::kInvalid;
  return run_layer<Direction::kScatter>(
      {&views_[size_t{layer} * streams_], streams_, slot, const_cast<std::byte*>(source), false, 0}, crc, guarded);
}

}  // namespace stepwell
