// SPDX-License-Identifier: MIT
// How much a kernel moves and how often it waits.
#pragma once

#include "shadow.h"

namespace msl {

struct Counters : Check {
  static constexpr unsigned kLineShift = 7;  // cache lines of 128 bytes
  static constexpr unsigned kSampledGroups = 2;
  static constexpr uint32_t kTable = 1 << 16;

  // One bit for each byte of a buffer, set once written.
  uint8_t* written[kRegions];
  // Who last read each part of a buffer: group plus one, thread, site.
  Shadow<uint64_t> readers[kRegions];
  // Sample of lines per simdgroup access: how often each lane was at each site, and the pairs of
  // (site, time) and (site, time, line) met so far.
  uint32_t* times = nullptr;
  uint64_t accesses_met[kTable];
  uint64_t lines_met[kTable];
  uint32_t used = 0;
  bool sampling = false;

  void launch_begin(const Worker&) {
    for (unsigned i = 0; i < kRegions; ++i) {
      const Region& r = memory().regions[i];
      const bool watched = i != kArenaRegion && r.bound;
      written[i] = watched ? static_cast<uint8_t*>(lazy_zeros(map_bytes(i))) : nullptr;
      if (watched) readers[i].begin(r.bytes);
    }
    times = static_cast<uint32_t*>(lazy_zeros(times_bytes()));
    used = 0;
  }
  void launch_end(const Worker&) {
    Session& s = *memory().session;
    for (unsigned i = 0; i < kRegions; ++i) {
      if (!written[i]) continue;
      uint64_t bits = 0;
      for (size_t b = 0; b < map_bytes(i) / 8; ++b) {
        bits +=
            static_cast<uint64_t>(__builtin_popcountll(reinterpret_cast<uint64_t*>(written[i])[b]));
      }
      s.counts[i].distinct_written = bits;
      free_bytes(written[i], map_bytes(i));
      readers[i].end();
    }
    free_bytes(times, times_bytes());
  }
  void group_begin(const Worker& w) {
    memory().session->threads += w.group.threads;
    sampling = w.group_index < kSampledGroups && used < kTable / 2;
    if (sampling) {
      for (uint32_t i = 0; i < kTable; ++i) accesses_met[i] = lines_met[i] = 0;
      for (size_t i = 0; i < times_bytes() / 4; ++i) times[i] = 0;
      used = 0;
    }
  }
  void threadgroup_barrier(const Worker&, int) { ++memory().session->barriers; }
  void collective(const Worker&, unsigned, int, int, uint32_t) { ++memory().session->collectives; }

  MSL_INLINE bool access(const Worker& w, const Access& a) {
    Session& s = *memory().session;
    RegionCounts& c = s.counts[a.region];
    (a.writes ? c.written : c.read) += a.size;
    s.atomics += a.atomic;
    if (!written[a.region]) return true;
    if (a.writes) {
      mark(written[a.region], a.offset, a.size);
    } else {
      count_fetched(w, a, c);
    }
    // The first simdgroup stands for the others of its group.
    if (sampling && w.current < kSimdWidth) sample(w, a, s);
    return true;
  }

 private:
  static size_t map_bytes(unsigned region) {
    return (memory().regions[region].bytes / 8 + 16) / 8 * 8;
  }
  static size_t times_bytes() { return size_t{kSimdWidth} * (memory().sites + 1) * 4; }

  MSL_INLINE static void mark(uint8_t* map, uint64_t offset, uint32_t size) {
    if (offset % 8 + size <= 8) {
      map[offset / 8] |= static_cast<uint8_t>(((1u << size) - 1) << offset % 8);
    } else if ((offset | size) % 8 == 0) {
      for (uint32_t i = 0; i < size / 8; ++i) map[offset / 8 + i] = 0xff;
    } else {
      for (uint64_t b = offset; b < offset + size; ++b) {
        map[b / 8] |= static_cast<uint8_t>(1u << b % 8);
      }
    }
  }

  // What another group has read is taken to be in the cache; what this group has read before is
  // not, because it could have kept it. One place for all lanes of a simdgroup is one read.
  MSL_INLINE void count_fetched(const Worker& w, const Access& a, RegionCounts& c) {
    const uint64_t group = uint64_t{w.group_index} + 1;
    const uint64_t mine = group << 32 | uint64_t{w.current} << 20 | (a.site & 0xfffff);
    const auto cells = readers[a.region].of(a.offset, a.size);
    const uint32_t bytes = readers[a.region].bytes_per_cell();
    for (uint64_t& who : cells) {
      // Another lane of the simdgroup, at the same site.
      const uint64_t difference = who ^ mine;
      if (difference && !(difference & ~(uint64_t{kSimdWidth - 1} << 20))) continue;
      if (who == 0) c.distinct_read += bytes;
      if (who == 0 || who >> 32 == group) c.fetched += bytes;
      who = mine;
    }
  }

  __attribute__((noinline)) void sample(const Worker& w, const Access& a, Session& s) {
    const uint64_t time = ++times[(w.current % kSimdWidth) * (memory().sites + 1) + a.site];
    const uint64_t key = (uint64_t{a.site} << 40 | time << 8 | a.region) * 2 + 1;
    s.sampled_accesses += add(accesses_met, key);
    const uint64_t last = (a.offset + a.size - 1) >> kLineShift;
    for (uint64_t line = a.offset >> kLineShift; line <= last; ++line) {
      s.sampled_lines += add(lines_met, key * 0x9e3779b97f4a7c15ull + line * 2 + 1);
    }
    if (used > kTable / 2) sampling = false;
  }
  // Whether `key` is new.
  bool add(uint64_t* table, uint64_t key) {
    uint32_t i = static_cast<uint32_t>((key * 0x9e3779b97f4a7c15ull) >> 48);
    while (table[i] && table[i] != key) i = (i + 1) % kTable;
    if (table[i]) return false;
    table[i] = key;
    ++used;
    return true;
  }
};

}  // namespace msl
