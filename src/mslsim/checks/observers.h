// SPDX-License-Identifier: MIT
// All checks together. A check is added by naming it here twice and giving it a bit in check.h.
#pragma once

#include "bounds.h"
#include "counters.h"
#include "divergence.h"
#include "race.h"
#include "trace.h"
#include "uninitialized.h"

namespace msl {

struct Observers {
  Bounds bounds;
  Race race;
  Uninitialized uninitialized;
  Counters counters;
  Divergence divergence;
  Trace trace;
  uint32_t checks = 0;
  // Off while other schedules are tried: then only their results matter.
  bool watching = false;

  template <typename F>
  void each(F f) {
    if (!watching) return;
    if (checks & kCheckBounds) f(bounds);
    if (checks & kCheckRace) f(race);
    if (checks & kCheckUninitialized) f(uninitialized);
    if (checks & kCheckCounters) f(counters);
    if (checks & kTraceThread) f(trace);
  }

  MSL_INLINE bool access(const Worker& w, const Access& a) {
    if ((checks & kCheckBounds) && !bounds.access(w, a)) return false;
    if (checks & kCheckRace) race.access(w, a);
    if (checks & kCheckUninitialized) uninitialized.access(w, a);
    if (checks & kCheckCounters) counters.access(w, a);
    if (__builtin_expect(checks & kTraceThread, 0)) trace.access(w, a);
    return true;
  }
  void launch_begin(const Worker& w) {
    each([&](auto& c) { c.launch_begin(w); });
  }
  void launch_end(const Worker& w) {
    each([&](auto& c) { c.launch_end(w); });
  }
  void group_begin(const Worker& w) {
    Session& s = *memory().session;
    ++s.steps;
    s.group = w.group_index;
    divergence.group_begin(w);
    each([&](auto& c) { c.group_begin(w); });
  }
  void group_end(const Worker& w) {
    each([&](auto& c) { c.group_end(w); });
  }
  void threadgroup_barrier(const Worker& w, int flags) {
    ++memory().session->steps;
    each([&](auto& c) { c.threadgroup_barrier(w, flags); });
  }
  void collective(const Worker& w, unsigned g, int kind, int flags, uint32_t site) {
    each([&](auto& c) { c.collective(w, g, kind, flags, site); });
  }
  // What the thread that runs is about to do.
  void step(const Worker& w, uint32_t kind, uint32_t site) {
    if (watching && (checks & kTraceThread)) trace.step(w, kind, site);
  }
  void fence(const Worker& w, int flags, int scope) {
    each([&](auto& c) { c.fence(w, flags, scope); });
  }
  void threadgroup_block(const Worker& w, size_t offset, size_t bytes) {
    each([&](auto& c) { c.threadgroup_block(w, offset, bytes); });
  }
  // Divergence depends on the schedule, so it is looked for in all of them.
  void barrier_divergence(const Worker& w) { divergence.barrier_divergence(w); }
  void simd_operation(const Worker& w, unsigned g, uint32_t mask, uint32_t site, int kind) {
    if (checks & kCheckDivergence) divergence.simd_operation(w, g, mask, site, kind);
  }
  void undefined_lanes(const Worker& w, unsigned g, uint32_t site) {
    if (checks & kCheckDivergence) divergence.undefined_lanes(w, g, site);
  }
  void arena_exhausted(const Worker& w, size_t bytes) {
    Found f{};
    f.kind = kArenaExhausted;
    f.thread = f.other_thread = f.other_group = kNone;
    f.group = w.group_index;
    f.block_bytes = bytes;
    record(f);
  }
};

inline Observers g_observers;
inline Observers& observers() { return g_observers; }
void* observed_arena();

}  // namespace msl
