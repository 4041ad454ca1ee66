// SPDX-License-Identifier: MIT
// Accesses outside the buffer or the block of threadgroup memory they were meant for.
#pragma once

#include "check.h"

namespace msl {

struct Bounds : Check {
  // Which bytes of the arena belong to a block.
  uint8_t valid[kArenaBytes];
  size_t high = 0;

  void group_begin(const Worker&) {
    for (size_t i = 0; i < high; ++i) valid[i] = 0;
    high = 0;
  }

  void threadgroup_block(const Worker&, size_t offset, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) valid[offset + i] = 1;
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
    record(found_at(w, kOutOfBounds, a));
    return false;
  }
};

}  // namespace msl
