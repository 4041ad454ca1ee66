// SPDX-License-Identifier: MIT
// Reads of threadgroup memory, and of buffers marked as uninitialised, before anything was written.
#pragma once

#include "check.h"

namespace msl {

struct Uninitialized : Check {
  // One byte for each byte: 1 once written. Null where all of a buffer has a value from the start.
  // Those of buffers are the host's, which hands them to the next launch.
  uint8_t* written[kRegions];
  size_t high = 0;

  void launch_begin(const Worker&) {
    for (unsigned i = 0; i < kBuffers; ++i) {
      const Region& r = memory().regions[i];
      void* known = r.written_offset ? shared_bytes(r.written_offset, r.bytes) : nullptr;
      written[i] = static_cast<uint8_t*>(known);
    }
    written[kArenaRegion] = static_cast<uint8_t*>(lazy_zeros(kArenaBytes));
    high = 0;
  }
  void launch_end(const Worker&) {
    for (unsigned i = 0; i < kRegions; ++i) {
      if (written[i]) free_bytes(written[i], memory().regions[i].bytes);
    }
  }
  void group_begin(const Worker&) {
    for (size_t i = 0; i < high; ++i) written[kArenaRegion][i] = 0;
    high = 0;
  }
  MSL_INLINE bool access(const Worker& w, const Access& a) {
    uint8_t* at = written[a.region];
    // An access outside is for another check to tell.
    if (!at || a.offset + a.size > memory().regions[a.region].bytes) return true;
    at += a.offset;
    if (a.writes) {
      // An atomic update reads too, but what it starts from is checked by a plain read as well.
      __builtin_memset(at, 1, a.size);
      if (a.region == kArenaRegion && a.offset + a.size > high) high = a.offset + a.size;
      return true;
    }
    if (!all_ones(at, a.size)) miss(w, a);
    return true;
  }

 private:
  __attribute__((noinline)) static void miss(const Worker& w, const Access& a) {
    if (!w.stopped()) record(found_at(w, kUninitialized, a));
  }
};

}  // namespace msl
