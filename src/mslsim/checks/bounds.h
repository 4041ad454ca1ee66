// SPDX-License-Identifier: MIT
// Accesses outside the buffer or the block of threadgroup memory they were meant for.
#pragma once

#include "check.h"

namespace msl {

struct Bounds : Check {
  // Which bytes of the arena belong to a block, and to which.
  uint8_t valid[kArenaBytes];
  size_t starts[kThreadgroupSlots + kBuffers];
  size_t sizes[kThreadgroupSlots + kBuffers];
  unsigned blocks = 0;
  size_t high = 0;

  void group_begin(const Worker&) {
    for (size_t i = 0; i < high; ++i) valid[i] = 0;
    blocks = 0;
    high = 0;
  }

  void threadgroup_block(const Worker&, size_t offset, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) valid[offset + i] = 1;
    starts[blocks] = offset;
    sizes[blocks++] = bytes;
    if (offset + bytes > high) high = offset + bytes;
  }

  bool access(const Worker& w, const Access& a) {
    const int64_t offset = static_cast<int64_t>(a.offset);
    if (a.region != kArenaRegion) {
      const Region& r = memory().regions[a.region];
      if (offset >= 0 && a.offset + a.size <= r.bytes) return true;
      record(found_at(w, kOutOfBounds, a));
      return false;
    }
    bool inside = offset >= 0 && a.offset + a.size <= kArenaBytes;
    for (uint32_t i = 0; inside && i < a.size; ++i) inside = valid[a.offset + i];
    if (inside) return true;
    Found f = found_at(w, kOutOfBounds, a);
    const unsigned block = nearest(offset);
    f.block_offset = starts[block];
    f.block_bytes = sizes[block];
    record(f);
    return false;
  }

  // The block an index most likely ran out of: the last one that starts before the address.
  unsigned nearest(int64_t offset) const {
    unsigned best = 0;
    for (unsigned i = 0; i < blocks; ++i) {
      const int64_t distance = offset - static_cast<int64_t>(starts[i]);
      const int64_t known = offset - static_cast<int64_t>(starts[best]);
      if (distance >= 0 && (known < 0 || distance < known)) best = i;
    }
    return best;
  }
};

}  // namespace msl
