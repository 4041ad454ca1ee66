// SPDX-License-Identifier: MIT
// Barriers and simd operations that not all threads reach, and lanes that do not exist.
//
// A simd operation in a branch works on the lanes that take it, which is legal. It is reported
// where the other lanes are at another simd operation, where lanes that took part before have
// dropped out (a loop of varying length), and where all lanes are needed: barriers and matrices.
#pragma once

#include "check.h"

namespace msl {

struct Divergence : Check {
  // Some threads of the group wait at a barrier; others returned or wait at another one.
  void barrier_divergence(const Worker& w) {
    Found f{};
    f.kind = kBarrierDivergence;
    f.group = w.group_index;
    f.other_group = kNone;
    f.thread = f.other_thread = kNone;
    for (unsigned t = 0; t < w.group.threads; ++t) {
      if (!(w.simdgroups[t / 32].live >> (t % 32) & 1)) {
        if (f.other_thread == kNone) f.other_thread = t;
        continue;
      }
      const uint32_t site = w.barrier_sites_[t];
      if (f.thread == kNone) {
        f.thread = t;
        f.site = site;
      } else if (site != f.site && f.other_site == 0) {
        f.other_thread = t;
        f.other_site = site;
      }
    }
    f.size = w.arrived_;
    f.offset = w.group.threads;
    record(f);
  }

  // The lanes that were last seen at a site, for each simdgroup.
  struct Seen {
    uint32_t site;
    uint32_t mask;
  };
  static constexpr unsigned kSeen = 64;
  Seen seen[kMaxThreads / kSimdWidth][kSeen];

  void group_begin(const Worker& w) {
    for (unsigned g = 0; g < w.group.simdgroups; ++g) {
      for (Seen& s : seen[g]) s = {0, 0};
    }
  }

  // The lanes in `mask` reached the operation together.
  void simd_operation(const Worker& w, unsigned g, uint32_t mask, uint32_t site, int kind) {
    if (w.stopped()) return;
    const Simdgroup& s = w.simdgroups[g];
    Seen& before = seen[g][site % kSeen];
    const bool fewer = before.site == site && (before.mask & s.live & ~mask);
    before = {site, mask};
    const uint32_t elsewhere = s.live & ~mask;
    if (!elsewhere) return;
    if (kind == kCollective && !(s.at_collective & ~mask) && !fewer) return;
    Found f{};
    f.kind = kSimdDivergence;
    f.site = site;
    f.thread = g * kSimdWidth + static_cast<unsigned>(__builtin_ctz(mask));
    const unsigned other = static_cast<unsigned>(__builtin_ctz(elsewhere));
    f.other_thread = g * kSimdWidth + other;
    f.other_site = s.at_collective >> other & 1 ? s.site[other] : w.barrier_sites_[f.other_thread];
    f.group = f.other_group = w.group_index;
    f.size = static_cast<uint32_t>(__builtin_popcount(mask));
    f.offset = __builtin_popcount(s.live);
    record(f);
  }

  // A lane asked for the value of one that is not there.
  void undefined_lanes(const Worker& w, unsigned g, uint32_t site) {
    // Where lanes diverge that has been said already.
    if (w.stopped() || is_known(kSimdDivergence, site)) return;
    const Collective& c = w.simdgroups[g].lanes;
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(c.undefined));
    Found f{};
    f.kind = kUndefinedLane;
    f.site = site;
    f.thread = g * kSimdWidth + lane;
    f.other_thread = kNone;
    f.group = w.group_index;
    f.other_group = kNone;
    f.offset = c.number[lane];
    f.size = c.mask;
    record(f);
  }
};

}  // namespace msl
