// SPDX-License-Identifier: MIT
// Two threads use one address, at least one writes, and no barrier stands between.
//
// Time is cut into intervals: a new one begins with every group and with every threadgroup_barrier.
// Accesses by different threads are unordered since the last interval that began with a barrier
// for the memory in question, except across a simdgroup_barrier of their common simdgroup; accesses
// of different groups always are, unless both groups used a device-wide fence. Two writes of the
// same value are let pass. A barrier that stands between two accesses and orders nothing is told.
#pragma once

#include "shadow.h"

namespace msl {

struct Race : Check {
  // Of the last write and the last read(s): 0 in `interval` means none.
  struct Stamp {
    uint32_t interval;
    uint32_t who;
    uint32_t site;
    uint32_t also;  // another thread, where there were many
  };
  struct Cell {
    Stamp write;
    Stamp read;
  };
  // Bits of `who`: thread, then these, then the simdgroup's own count of barriers.
  static constexpr uint32_t kThread = 1023;
  static constexpr uint32_t kManyOfSimdgroup = 1 << 10;
  static constexpr uint32_t kManyOfGroup = 1 << 11;
  static constexpr uint32_t kAtomic = 1 << 12;
  static constexpr unsigned kEpochShift = 13;
  static constexpr uint32_t kEpochMask = (1u << (32 - kEpochShift)) - 1;

  Shadow<Cell> shadows[kRegions];
  uint32_t clock;        // current interval
  uint32_t group_first;  // first interval of the current group
  // Of device [0] and threadgroup [1] memory: the interval since which nothing orders it, the
  // barrier that this interval began with, and the last one that did not order it.
  struct Since {
    uint32_t interval;
    uint32_t barrier;
    uint32_t passed;
    int passed_flags;
  };
  Since since[2];
  // The same of the barriers of each simdgroup; its count of them is `epoch`.
  uint32_t epoch[kMaxThreads / kSimdWidth];
  Since lanes[2][kMaxThreads / kSimdWidth];
  // First device interval of each group that was run, and whether it used a device-wide fence.
  struct GroupNote {
    uint32_t first;
    uint32_t group;
    bool fenced;
  };
  // Two writes, of which the second is still to be carried out.
  struct Pending {
    bool active;
    const char* address;
    uint32_t size;
    char before[16];
    Found found;
  };
  Pending pending;
  // A race that is told, whose second value is still to be written.
  struct Awaited {
    Found* found;
    const char* address;
  };
  Awaited awaited;
  bool unsettled;
  GroupNote* notes = nullptr;
  size_t note_count = 0, note_room = 0;

  void launch_begin(const Worker& w) {
    pending.active = false;
    awaited.found = nullptr;
    unsettled = false;
    clock = 0;
    note_count = 0;
    note_room = 1;
    for (int i = 0; i < 3; ++i) {
      note_room *= (w.launch->threads[i] + w.launch->group_size[i] - 1) / w.launch->group_size[i];
    }
    notes = static_cast<GroupNote*>(lazy_zeros(note_room * sizeof(GroupNote)));
    for (unsigned i = 0; i < kRegions; ++i) {
      const Region& r = memory().regions[i];
      const bool watched = i == kArenaRegion || (r.bound && !r.read_only);
      if (watched) shadows[i].begin(r.bytes);
    }
  }

  void launch_end(const Worker&) {
    settle();
    for (Shadow<Cell>& s : shadows) s.end();
    free_bytes(notes, note_room * sizeof(GroupNote));
  }

  void group_begin(const Worker& w) {
    group_first = ++clock;
    for (int space = 0; space < 2; ++space) {
      since[space] = {clock, 0, 0, 0};
      for (Since& l : lanes[space]) l = {0, 0, 0, 0};
    }
    for (uint32_t& e : epoch) e = 0;
    notes[note_count++] = {clock, w.group_index, false};
  }

  void group_end(const Worker&) { settle(); }

  static bool ignored(uint32_t site) {
    const Session& s = *memory().session;
    for (uint32_t i = 0; i < s.ignored_count; ++i) {
      if (s.ignored[i] == site) return true;
    }
    return false;
  }

  void threadgroup_barrier(const Worker& w, int flags) {
    settle();
    if (ignored(w.barrier_site)) return;
    ++clock;
    for (int space = 0; space < 2; ++space) pass(since[space], clock, flags, space, w.barrier_site);
  }

  void collective(const Worker&, unsigned g, int kind, int flags, uint32_t site) {
    if (kind != kSimdBarrier || ignored(site)) return;
    epoch[g] = (epoch[g] + 1) & kEpochMask;
    for (int space = 0; space < 2; ++space) pass(lanes[space][g], epoch[g], flags, space, site);
  }

  void fence(const Worker&, int flags, int scope) {
    // 3: thread_scope_device.
    if ((flags & 1) && scope == 3) notes[note_count - 1].fenced = true;
  }

  MSL_INLINE bool access(const Worker& w, const Access& a) {
    settle();
    Shadow<Cell>& s = shadows[a.region];
    if (!s.is_on()) return true;
    const int space = a.region == kArenaRegion;
    const uint32_t mine =
        w.current | (a.atomic ? kAtomic : 0) | epoch[w.current / 32] << kEpochShift;
    for (Cell& c : s.of(a.offset, a.size)) {
      if (!ordered(c.write, mine, space)) report(w, a, c.write, 2);
      if (a.writes) {
        if (!ordered(c.read, mine, space)) report(w, a, c.read, 0);
        c.write = {clock, mine, a.site, 0};
      } else {
        remember_read(c.read, mine, a.site, space);
      }
    }
    return true;
  }

 private:
  static void pass(Since& s, uint32_t now, int flags, int space, uint32_t site) {
    if (flags & (space ? 2 : 1)) {
      s = {now, site, 0, 0};
    } else {
      s.passed = site;
      s.passed_flags = flags;
    }
  }

  // Whether a barrier of their simdgroup orders an earlier access of it before what follows.
  bool lanes_ordered(uint32_t who, int space) const {
    const uint32_t last = lanes[space][(who & kThread) / 32].interval;
    const uint32_t distance = (last - (who >> kEpochShift)) & kEpochMask;
    return distance != 0 && distance <= kEpochMask / 2;
  }

  // Whether an earlier access lies certainly before one by `mine` now.
  bool ordered(const Stamp& s, uint32_t mine, int space) const {
    if (s.interval == 0) return true;
    if (s.who & mine & kAtomic) return true;
    // Threadgroup memory of earlier groups is another memory.
    if (s.interval < group_first) return space == 1 || both_fenced(s.interval);
    if (s.interval < since[space].interval) return true;
    if (s.who & kManyOfGroup) return false;
    const bool same_thread = (s.who & kThread) == (mine & kThread);
    if (same_thread && !(s.who & kManyOfSimdgroup)) return true;
    const bool same_simdgroup = (s.who & kThread) / 32 == (mine & kThread) / 32;
    return same_simdgroup && lanes_ordered(s.who, space);
  }

  // Keeps what a later write needs: the reader, or that there were several.
  void remember_read(Stamp& r, uint32_t mine, uint32_t site, int space) {
    const bool fresh = r.interval < since[space].interval;
    if (fresh || (r.who & kThread) == (mine & kThread) || (r.who & kAtomic)) {
      if (fresh || !(r.who & (kManyOfGroup | kManyOfSimdgroup))) r = {clock, mine, site, 0};
      return;
    }
    if (r.who & kManyOfGroup) return;
    if ((r.who & kThread) / 32 != (mine & kThread) / 32) {
      r.who |= kManyOfGroup;
      r.also = mine & kThread;
    } else if (lanes_ordered(r.who, space)) {
      // Earlier readers of this simdgroup are ordered before this one.
      r = {clock, mine, site, 0};
    } else {
      r.who |= kManyOfSimdgroup;
      r.also = mine & kThread;
    }
  }

  // The barrier to be told of two accesses of one group: one that was passed between them without
  // ordering them, or else the one since which they are unordered.
  void add_barrier(Found& f, const Stamp& other, unsigned thread, int space) const {
    const unsigned g = f.other_thread / 32;
    const bool same_simdgroup = g == thread / 32;
    const Since& l = lanes[space][g];
    if (!same_simdgroup) {
      const Since& mine = lanes[space][thread / 32];
      f.simd_site = l.barrier ? l.barrier : mine.barrier;
    }
    if (other.interval < clock && since[space].passed) {
      f.barrier = kPassedBarrier;
      f.barrier_site = since[space].passed;
      f.barrier_flags = since[space].passed_flags;
    } else if (same_simdgroup && other.who >> kEpochShift != epoch[g] && l.passed) {
      f.barrier = kPassedSimdBarrier;
      f.barrier_site = l.passed;
      f.barrier_flags = l.passed_flags;
    } else if (same_simdgroup && l.barrier) {
      f.barrier = kSince;
      f.barrier_site = l.barrier;
    } else if (since[space].barrier) {
      f.barrier = kSince;
      f.barrier_site = since[space].barrier;
    }
  }

  const GroupNote& note_of(uint32_t interval) const {
    size_t low = 0, high = note_count;
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (notes[middle].first <= interval ? low : high) = middle;
    }
    return notes[low];
  }
  bool both_fenced(uint32_t interval) const {
    return notes[note_count - 1].fenced && note_of(interval).fenced;
  }

  __attribute__((noinline)) void report(const Worker& w, const Access& a, const Stamp& other,
                                        uint32_t other_writes) {
    Found f = found_at(w, kRace, a);
    f.other_site = other.site;
    f.other_thread = other.who & kThread;
    if (f.other_thread == w.current && (other.who & (kManyOfGroup | kManyOfSimdgroup))) {
      f.other_thread = other.also;
    }
    f.other_group = a.region == kArenaRegion ? w.group_index : note_of(other.interval).group;
    f.writes = (a.writes ? 1 : 0) | other_writes;
    if (f.other_group == w.group_index) add_barrier(f, other, w.current, a.region == kArenaRegion);
    const char* address = memory().regions[a.region].address + a.offset;
    f.value = f.other_value = value_at(address, a.size);
    if (f.writes == 3 && !a.atomic && a.size <= sizeof(pending.before)) {
      pending.active = unsettled = true;
      pending.address = address;
      pending.size = a.size;
      for (uint32_t i = 0; i < a.size; ++i) pending.before[i] = address[i];
      pending.found = f;
    } else if (Found* told = record(f); told && a.writes) {
      awaited = {told, address};
      unsettled = true;
    }
  }

  void settle() {
    if (__builtin_expect(unsettled, 0)) settle_write();
  }
  // The write has happened: two of them are a race if the second changed anything.
  __attribute__((noinline)) void settle_write() {
    unsettled = false;
    if (awaited.found) {
      awaited.found->value = value_at(awaited.address, awaited.found->size);
      awaited.found = nullptr;
    }
    if (!pending.active) return;
    pending.active = false;
    for (uint32_t i = 0; i < pending.size; ++i) {
      if (pending.address[i] != pending.before[i]) {
        pending.found.value = value_at(pending.address, pending.size);
        record(pending.found);
        return;
      }
    }
  }

  static uint64_t value_at(const char* address, uint32_t size) {
    uint64_t value = 0;
    if (size <= sizeof(value)) __builtin_memcpy(&value, address, size);
    return value;
  }
};

}  // namespace msl
