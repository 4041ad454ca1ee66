// SPDX-License-Identifier: MIT
// Device and threadgroup memory of a checked launch. Every buffer lies in the middle of its own
// slot of address space, so an address tells the buffer it was meant for, even when it misses it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "machine.h"

namespace msl {

constexpr unsigned kRegions = kBuffers + 1;
constexpr unsigned kArenaRegion = kBuffers;
constexpr unsigned kSlotShift = 34;
constexpr uint64_t kSlotBytes = 1ull << kSlotShift;

// What the host says of a buffer. Shared with Python.
struct RegionInfo {
  uint64_t file_offset;
  uint64_t bytes;
  // Where the file has a byte for each byte of the buffer, 1 once written; 0: all has a value.
  uint64_t written_offset;
  int32_t bound;
  int32_t read_only;
};

enum FindingKind : uint32_t {
  kOutOfBounds = 1,
  kRace = 2,
  kUninitialized = 3,
  kBarrierDivergence = 4,
  kSimdDivergence = 5,
  kUndefinedLane = 6,
  kScheduleDependence = 7,
  kCrash = 8,
  kThreadArrayBounds = 9,
  kDivisionByZero = 10,
  kArenaExhausted = 11,
  kAssertion = 12,
  kTextureMissed = 13,
};

// One finding, in numbers; the host makes sentences of them.
struct Found {
  uint32_t kind;
  uint32_t site;
  uint32_t other_site;
  uint32_t thread;
  uint32_t other_thread;
  uint32_t group;
  uint32_t other_group;
  uint32_t region;
  uint32_t size;
  uint32_t writes;        // 1: this access, 2: the other one
  int64_t offset;         // in the region
  uint64_t block_offset;  // start, size and slot of the block of threadgroup memory
  uint64_t block_bytes;
  uint64_t block_slot;
  uint64_t value;  // what a race has written, and what was there before
  uint64_t other_value;
  uint32_t barrier;  // BarrierRole
  uint32_t barrier_site;
  uint32_t barrier_flags;
  uint32_t simd_site;  // a simdgroup_barrier of one of two simdgroups
  uint32_t harmless;   // memory that nobody wrote, whose value reaches no result
  uint32_t unused;
};

// What a barrier has to do with a race.
enum BarrierRole : uint32_t {
  kPassedBarrier = 1,      // a threadgroup_barrier between, for other memory
  kPassedSimdBarrier = 2,  // a simdgroup_barrier between, for other memory
  kSince = 3,              // the last one before both
};

// One thing that a traced thread does.
enum TraceKind : uint32_t {
  kTraceRead = 0,
  kTraceWrite = 1,
  kTraceBranch = 2,
  kTraceBarrier = 3,
  kTraceCollective = 4,
};
struct TraceEvent {
  uint32_t kind;
  uint32_t site;
  uint32_t region;
  uint32_t slot;  // of threadgroup memory; `offset` is in it
  uint32_t size;
  uint32_t atomic;
  int64_t offset;
  char value[16];
  const char* address;
};

struct RegionCounts {
  uint64_t read;
  uint64_t written;
  uint64_t distinct_read;
  uint64_t distinct_written;
  uint64_t fetched;  // read, without what other groups had read before
};

constexpr unsigned kMaxFound = 64;
constexpr unsigned kMaxIgnored = 64;

// Lies in memory shared with the host, which can read it even after this process has died.
struct Session {
  uint32_t checks;
  int32_t order;
  // Sites of barriers that the race check takes for absent.
  uint32_t ignored_count;
  uint32_t ignored[kMaxIgnored];
  RegionInfo regions[kRegions];
  // Progress, for the watchdog.
  uint64_t steps;
  uint32_t site;
  uint32_t thread;
  uint32_t group;
  // Results.
  uint32_t found_count;
  Found found[kMaxFound];
  RegionCounts counts[kRegions];
  uint64_t threads;
  uint64_t barriers;
  uint64_t collectives;
  uint64_t atomics;
  uint64_t sampled_accesses;
  uint64_t sampled_lines;
  uint64_t threadgroup_bytes;
  // The thread to be traced, and where the file has room for what it does.
  uint64_t trace_offset;
  uint32_t trace_room;
  uint32_t trace_group;
  uint32_t trace_thread;
  uint32_t trace_count;
  uint32_t trace_lost;
  uint32_t unused;
  Log log;
};

struct Region {
  char* address;
  uint64_t bytes;
  uint64_t written_offset;
  bool bound;
  bool read_only;
  bool float_atomics;
};

// One access of a thread to a region.
struct Access {
  uint64_t offset;
  uint32_t size;
  uint32_t site;
  uint32_t region;
  bool writes;
  bool atomic;
};

struct Memory {
  char* base = nullptr;
  Region regions[kRegions];
  Session* session = nullptr;
  int file = -1;
  uint32_t sites = 0;
  // Regions whose accesses are looked at: none of them while only results matter.
  uint32_t watched = 0;
};

inline Memory g_memory;
inline Memory& memory() { return g_memory; }

inline bool is_known(FindingKind kind, uint32_t site) {
  const Session& s = *memory().session;
  for (uint32_t i = 0; i < s.found_count; ++i) {
    if (s.found[i].kind == kind && s.found[i].site == site) return true;
  }
  return false;
}

// Adds a finding unless one of this kind is known for these lines; null if it is.
inline Found* record(const Found& f) {
  Session& s = *memory().session;
  for (uint32_t i = 0; i < s.found_count; ++i) {
    const Found& g = s.found[i];
    if (g.kind == f.kind && g.site == f.site && g.other_site == f.other_site) return nullptr;
  }
  if (s.found_count == kMaxFound) return nullptr;
  s.found[s.found_count] = f;
  return &s.found[s.found_count++];
}

}  // namespace msl
