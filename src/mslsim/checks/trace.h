// SPDX-License-Identifier: MIT
// Everything that one thread does, in order, for whoever asks: no check, but it looks as one does.
#pragma once

#include "check.h"

namespace msl {

struct Trace : Check {
  TraceEvent* events = nullptr;
  // A write whose value is not there yet.
  TraceEvent* awaited = nullptr;
  bool mine = false;

  void launch_begin(const Worker&) {
    const Session& s = *memory().session;
    events = nullptr;
    if (s.trace_room) {
      events = static_cast<TraceEvent*>(shared_bytes(s.trace_offset, room_bytes()));
    }
    awaited = nullptr;
    mine = false;
  }
  void launch_end(const Worker&) {
    settle();
    if (events) free_bytes(events, room_bytes());
    events = nullptr;
  }
  void group_begin(const Worker& w) {
    mine = events && w.group_index == memory().session->trace_group;
  }
  void group_end(const Worker&) {
    settle();
    mine = false;
  }
  bool is_on(const Worker& w) const { return mine && w.current == memory().session->trace_thread; }

  __attribute__((noinline)) bool access(const Worker& w, const Access& a) {
    settle();
    if (!is_on(w)) return true;
    TraceEvent* e = add(a.writes ? kTraceWrite : kTraceRead, a.site);
    if (!e) return true;
    e->region = a.region;
    e->size = a.size;
    e->atomic = a.atomic;
    e->offset = static_cast<int64_t>(a.offset);
    e->slot = kNone;
    if (a.region == kArenaRegion) {
      e->slot = w.slot_at(e->offset);
      if (e->slot != kNone) e->offset -= static_cast<char*>(w.slot(e->slot).address) - w.arena;
    }
    e->address = memory().regions[a.region].address + a.offset;
    if (a.writes) {
      awaited = e;
    } else {
      take(*e);
    }
    return true;
  }
  void step(const Worker& w, uint32_t kind, uint32_t site) {
    settle();
    if (is_on(w)) add(kind, site);
  }

 private:
  static size_t room_bytes() { return memory().session->trace_room * sizeof(TraceEvent); }

  TraceEvent* add(uint32_t kind, uint32_t site) {
    Session& s = *memory().session;
    if (s.trace_count == s.trace_room) {
      ++s.trace_lost;
      return nullptr;
    }
    TraceEvent* e = &events[s.trace_count++];
    *e = {};
    e->kind = kind;
    e->site = site;
    return e;
  }
  static void take(TraceEvent& e) {
    if (e.size <= sizeof(e.value)) __builtin_memcpy(e.value, e.address, e.size);
  }
  void settle() {
    if (__builtin_expect(awaited != nullptr, 0)) {
      take(*awaited);
      awaited = nullptr;
    }
  }
};

}  // namespace msl
