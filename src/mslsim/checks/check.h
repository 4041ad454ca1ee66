// SPDX-License-Identifier: MIT
// The interface of a check: it derives from Check and hides the hooks it needs. The machine calls
// them as things happen; a check looks, keeps its own notes, and records findings.
#pragma once

#include "../machine/memory.h"

namespace msl {

enum CheckBits : uint32_t {
  kCheckBounds = 1,
  kCheckRace = 2,
  kCheckUninitialized = 4,
  kCheckDivergence = 8,
  kCheckCounters = 16,
  kCheckSchedule = 32,
  kTraceThread = 64,
};

struct Check {
  void launch_begin(const Worker&) {}
  void launch_end(const Worker&) {}
  void group_begin(const Worker&) {}
  void group_end(const Worker&) {}
  // False when the access must not be carried out. Called for each, so it is kept short and inline.
  bool access(const Worker&, const Access&) { return true; }
  void threadgroup_barrier(const Worker&, int /*flags*/) {}
  void collective(const Worker&, unsigned /*simdgroup*/, int /*kind*/, int /*flags*/, uint32_t) {}
  void fence(const Worker&, int /*flags*/, int /*scope*/) {}
  // A block of threadgroup memory came into use.
  void threadgroup_block(const Worker&, size_t /*offset*/, size_t /*bytes*/) {}
};

// A finding about the access that a thread is making.
inline Found found_at(const Worker& w, FindingKind kind, const Access& a) {
  Found f{};
  f.kind = kind;
  f.site = a.site;
  f.thread = w.current;
  f.other_thread = kNone;
  f.group = w.group_index;
  f.other_group = kNone;
  f.region = a.region;
  f.size = a.size;
  f.writes = a.writes;
  f.offset = static_cast<int64_t>(a.offset);
  f.block_slot = kNone;
  if (a.region == kArenaRegion) {
    const uint32_t slot = w.slot_at(f.offset);
    if (slot != kNone) {
      f.block_slot = slot;
      f.block_offset = static_cast<char*>(w.slot(slot).address) - w.arena;
      f.block_bytes = w.slot(slot).bytes;
    }
  }
  return f;
}

// Zeroed memory that costs nothing until it is touched.
void* lazy_zeros(size_t bytes);
// Part of the file that is shared with the host.
void* shared_bytes(uint64_t file_offset, size_t bytes);
void free_bytes(void* p, size_t bytes);

// Whether each of `size` bytes is 1. Most accesses have a size that the compiler knows.
MSL_INLINE bool all_ones(const uint8_t* at, uint32_t size) {
  static const uint8_t ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  if (__builtin_constant_p(size)) return !__builtin_memcmp(at, ones, size);
  for (uint32_t i = 0; i < size; ++i) {
    if (!at[i]) return false;
  }
  return true;
}

}  // namespace msl
