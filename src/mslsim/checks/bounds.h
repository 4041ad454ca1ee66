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

  MSL_INLINE bool access(const Worker& w, const Access& a) {
    // What lies before a region has an offset that is larger than all.
    const uint64_t bytes = memory().regions[a.region].bytes;
    const bool inside = a.offset <= bytes && a.size <= bytes - a.offset;
    if (inside && (a.region != kArenaRegion || all_ones(valid + a.offset, a.size))) return true;
    miss(w, a);
    return false;
  }

 private:
  __attribute__((noinline)) static void miss(const Worker& w, const Access& a) {
    record(found_at(w, kOutOfBounds, a));
  }
};

}  // namespace msl
