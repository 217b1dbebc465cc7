// Gather and scatter between any strided pool layout and the canonical page, checksum fused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "geometry.h"
#include "status.h"

namespace stepwell {

// Where one stream of one layer of a slot lies: outer x inner pieces of `piece_bytes` contiguous bytes.
// Canonical order inside a stream is (token, head, dim): outer = tokens, inner = heads, piece = dim; a layout in which
// heads (or whole pages) are contiguous is given with fewer, larger pieces (coalesce()).
struct StreamView {
  std::byte* base = nullptr;  // of slot 0
  int64_t slot_stride = 0;    // bytes
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
  uint32_t outer_count = 1;
  uint32_t inner_count = 1;
  uint64_t piece_bytes = 0;
};

// A pool in the caller's memory. Plain data; who keeps the memory alive is the transfer's matter.
class PoolLayout {
 public:
  // views[layer * streams + stream]. Throws std::invalid_argument where a layer's streams do not add up to the shape's
  // layer bytes (message names both).
  PoolLayout(const PageShape& shape, uint32_t streams, std::vector<StreamView> views, uint64_t slots, bool writable);

  uint64_t slots() const noexcept { return slots_; }
  bool writable() const noexcept { return writable_; }
  uint32_t layers() const noexcept { return layers_; }

  // Copies layer `layer` of `slot` to contiguous `target`; *crc continues over its canonical bytes.
  // `guarded`: target (source for scatter) is a mapping; the copies run inside the SIGBUS guard.
  Status gather_layer(uint64_t slot, uint32_t layer, std::byte* target, uint32_t* crc, bool guarded) const noexcept;
  Status scatter_layer(uint64_t slot, uint32_t layer, const std::byte* source, uint32_t* crc,
                       bool guarded) const noexcept;

 private:
  std::vector<StreamView> views_;
  uint32_t layers_;
  uint32_t streams_;
  uint64_t slots_;
  bool writable_;
};

}  // namespace stepwell
