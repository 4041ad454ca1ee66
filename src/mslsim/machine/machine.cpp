// SPDX-License-Identifier: MIT
// Runs launches: spreads threadgroups over OS threads, and the threads of a group over fibers. A
// thread that never blocks costs no switch, since the next one starts on the same stack.
#include "machine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fiber.h"
#include "hooks.h"

namespace msl {
namespace {

// All fiber stacks lie in one reservation, so that the stack pointer tells the worker.
char* g_stacks = nullptr;
Worker* g_workers[kMaxWorkers];

#ifdef MSL_CHECKED
// Checked launches run on one OS thread.
inline Worker& here() { return *g_workers[0]; }
#define MSL_ENTER_WORKER(w) ((void)0)
#elif defined(__linux__) && !defined(MSL_FIND_BY_STACK)
// Does not wait for the stack pointer, as the way below does: 16 ns a switch become 9.
__thread Worker* g_here __attribute__((tls_model("initial-exec")));
inline Worker& here() { return *g_here; }
#define MSL_ENTER_WORKER(w) (g_here = (w))
#else
inline Worker& here() {
  const char* stack = static_cast<char*>(__builtin_frame_address(0));
  return *g_workers[static_cast<size_t>(stack - g_stacks) / kWorkerStackBytes];
}
#define MSL_ENTER_WORKER(w) ((void)0)
#endif

constexpr uint32_t lane_mask(unsigned lanes) { return lanes >= 32 ? ~0u : (1u << lanes) - 1; }

#ifdef MAP_NORESERVE
constexpr int kLazyMemory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
constexpr int kLazyMemory = MAP_PRIVATE | MAP_ANON;
#endif

bool reserve_stacks() {
  if (g_stacks) return true;
  void* p =
      mmap(nullptr, kWorkerStackBytes * kMaxWorkers, PROT_READ | PROT_WRITE, kLazyMemory, -1, 0);
  if (p == MAP_FAILED) return false;
  g_stacks = static_cast<char*>(p);
  return true;
}

}  // namespace

// Where a fiber begins: it runs threads until none is left that has not started.
void fiber_main() {
  Worker& w = here();
  for (;;) {
    const unsigned thread = w.current;
    w.launch->thread(&w.arguments_, &w.group, thread);
    w.retire(thread);
    const unsigned fiber = w.fiber_of_[thread];
    const unsigned next = w.next();
    if (next != kNone && !(w.simdgroups[next / 32].started >> (next % 32) & 1)) {
      w.simdgroups[next / 32].started |= 1u << (next % 32);
      w.fiber_of_[next] = static_cast<uint16_t>(fiber);
      w.current = next;
      continue;
    }
    w.free_[w.free_count_++] = static_cast<uint16_t>(fiber);
    void* unused;
    if (next == kNone) {
      msl_switch(&unused, w.host_stack_);
    } else {
      w.enter(next, &unused);
    }
    __builtin_unreachable();
  }
}

void Worker::prepare(const Launch& l, unsigned index) {
  launch = &l;
  order_ = static_cast<Order>(l.order);
  random_ = l.seed | 1;
  failed_ = false;
  most_threadgroup_bytes = 0;
  stacks_ = g_stacks + index * kWorkerStackBytes;
  free_count_ = 0;
  for (unsigned i = kMaxThreads; i-- > 0;) free_[free_count_++] = static_cast<uint16_t>(i);
}

void Worker::place_group(uint64_t index) {
  group_index = static_cast<uint32_t>(index);
  group.threads = 1;
  for (int i = 0; i < 3; ++i) {
    const uint32_t size = launch->group_size[i];
    group.grid_threads[i] = launch->threads[i];
    group.dispatch_size[i] = size;
    group.grid_groups[i] = (launch->threads[i] + size - 1) / size;
    group.position[i] = static_cast<unsigned>(index % group.grid_groups[i]);
    index /= group.grid_groups[i];
    const uint32_t left = launch->threads[i] - group.position[i] * size;
    group.size[i] = left < size ? left : size;
    group.threads *= group.size[i];
  }
  group.simdgroups = (group.threads + kSimdWidth - 1) / kSimdWidth;
}

bool Worker::run_group(uint64_t index) {
  place_group(index);
  if (launch->group) {
    launch->group(&launch->arguments, &group);
    return true;
  }
  ++generation_;
  arena_used = threadgroup_bytes = 0;
  arguments_ = launch->arguments;
  MSL_NOTIFY(group_begin(*this));
  for (unsigned i = 0; i < kBuffers; ++i) {
    if (launch->threadgroup_bytes[i]) {
      arguments_.threadgroup[i] =
          threadgroup_memory(kThreadgroupSlots + i, launch->threadgroup_bytes[i], kArenaAlign);
    }
  }
  if (failed_) return false;
  arrived_ = returned_ = stopped_ = 0;
  mixed_barriers_ = false;
  runnable_ = lane_mask(group.simdgroups);
  for (unsigned g = 0; g < group.simdgroups; ++g) {
    Simdgroup& s = simdgroups[g];
    s.ready = s.live = lane_mask(group.threads - g * kSimdWidth);
    s.at_collective = s.started = s.discarded = 0;
    s.mixed_sites = false;
  }
  if (launch->synchronised) {
    run_fibers();
  } else {
    // A thread that is ended comes back here.
    if (MSL_THREAD_ENDED) retire(current);
    while (!failed_ && (current = next()) != kNone) {
      launch->thread(&arguments_, &group, current);
      retire(current);
    }
  }
  if (threadgroup_bytes > most_threadgroup_bytes) most_threadgroup_bytes = threadgroup_bytes;
  MSL_NOTIFY(group_end(*this));
  current = kNone;
  return !failed_;
}

void Worker::run_fibers() {
  const unsigned first = next();
  start(first);
  // The fibers of a group that fails stay where they are; the next launch uses their stacks again.
  enter(first, &host_stack_);
}

__attribute__((noinline)) void Worker::start(unsigned thread) {
  const unsigned fiber = free_[--free_count_];
  fiber_of_[thread] = static_cast<uint16_t>(fiber);
  simdgroups[thread / 32].started |= 1u << (thread % 32);
  if (fiber >= guarded_) {
    // Running out of stack must not reach the neighbour's.
    mprotect(stacks_ + fiber * kStackBytes, kGuardBytes, PROT_NONE);
    guarded_ = fiber + 1;
  }
  // Stack tops at one distance would share their cache sets.
  const size_t colour = fiber * 320 % 16384;
  saved_[fiber] = prepare_stack(stacks_ + (fiber + 1) * kStackBytes - 64 - colour, fiber_main);
}

inline void Worker::enter(unsigned thread, void** save) {
  current = thread;
  // Those after it are likely to follow: their stacks are on the way by then.
  const char* later = static_cast<char*>(saved_[fiber_of_[(thread + 4) % kMaxThreads]]);
  __builtin_prefetch(later);
  __builtin_prefetch(later + 64);
  msl_switch(save, saved_[fiber_of_[thread]]);
}

void Worker::retire(unsigned thread) {
  Simdgroup& s = simdgroups[thread / 32];
  const uint32_t bit = 1u << (thread % 32);
  s.ready &= ~bit;
  s.live &= ~bit;
  ++returned_;
  rest_simdgroup(thread / 32);
}

inline void Worker::rest_simdgroup(unsigned g) {
  if (!(simdgroups[g].ready | simdgroups[g].at_collective)) runnable_ &= ~(1u << g);
}

// Lets another thread run. The common case, a lane of the same simdgroup, is kept short and inline:
// every stack frame here is one more cache line for each thread of the group.
MSL_INLINE void Worker::yield() {
  const unsigned me = current;
  const uint32_t ready = simdgroups[me / 32].ready;
  unsigned thread;
  if (__builtin_expect(order_ != kRandom && ready, 1)) {
    thread = me / 32 * 32 + choose(ready);
  } else {
    thread = next();
    if (thread == kNone) abandon();
    if (thread == me) return;
  }
  if (__builtin_expect(!(simdgroups[thread / 32].started >> (thread % 32) & 1), 0)) start(thread);
  enter(thread, &saved_[fiber_of_[me]]);
}

void Worker::abandon() {
  failed_ = true;
  MSL_LEAVE_KERNEL;
  void* unused;
  msl_switch(&unused, host_stack_);
  __builtin_unreachable();
}

#ifdef MSL_CHECKED
void Worker::end_thread() {
  ++stopped_;
  if (!launch->synchronised) longjmp(g_thread, 1);
  const unsigned fiber = fiber_of_[current];
  retire(current);
  const unsigned thread = next();
  void* unused;
  if (thread == kNone) {
    msl_switch(&unused, host_stack_);
  } else {
    if (!(simdgroups[thread / 32].started >> (thread % 32) & 1)) start(thread);
    free_[free_count_++] = static_cast<uint16_t>(fiber);
    enter(thread, &unused);
  }
  __builtin_unreachable();
}
#endif

inline uint32_t Worker::random() {
  random_ = random_ * 1664525u + 1013904223u;
  return random_ >> 8;
}

MSL_INLINE unsigned Worker::choose(uint32_t mask) {
  if (__builtin_expect(order_ == kAscending, 1)) return static_cast<unsigned>(__builtin_ctz(mask));
  if (order_ == kDescending) return 31u - static_cast<unsigned>(__builtin_clz(mask));
  // The first one from some bit on.
  const unsigned from = random() % 32;
  const uint32_t turned = mask >> from | mask << (-from % 32);
  return (static_cast<unsigned>(__builtin_ctz(turned)) + from) % 32;
}

// The thread to run now, after serving whatever can be served; kNone when the group is finished or
// cannot go on.
__attribute__((noinline)) unsigned Worker::next() {
  for (;;) {
    while (runnable_) {
      const unsigned g = choose(runnable_);
      Simdgroup& s = simdgroups[g];
      if (s.ready || serve(g)) return g * kSimdWidth + choose(s.ready);
      if (failed_) return kNone;
    }
    if (!release_barrier()) return kNone;
  }
}

bool Worker::release_barrier() {
  if (arrived_ == 0) return false;
  if (arrived_ + stopped_ != group.threads || mixed_barriers_) {
    MSL_NOTIFY(barrier_divergence(*this));
    failed_ = true;
    return false;
  }
  MSL_NOTIFY(threadgroup_barrier(*this, barrier_flags_));
  arrived_ = 0;
  for (unsigned g = 0; g < group.simdgroups; ++g) simdgroups[g].ready = simdgroups[g].live;
  runnable_ = lane_mask(group.simdgroups);
  return true;
}

MSL_INLINE void Worker::threadgroup_barrier(int flags, uint32_t site) {
  const unsigned t = current;
  MSL_NOTIFY(step(*this, kTraceBarrier, site));
  simdgroups[t / 32].ready &= ~(1u << (t % 32));
  if (arrived_++ == 0) {
    barrier_site = site;
    barrier_flags_ = flags;
  } else if (site != barrier_site) {
    mixed_barriers_ = true;
  }
#ifdef MSL_CHECKED
  barrier_sites_[t] = site;
#endif
  rest_simdgroup(t / 32);
  yield();
}

MSL_INLINE void Worker::collective(void* value, int number, Serve serve, int kind, int flags,
                                   uint32_t site) {
  const unsigned t = current, lane = t % 32;
  MSL_NOTIFY(step(*this, kTraceCollective, site));
  Simdgroup& s = simdgroups[t / 32];
  if (!s.at_collective) {
    s.first_site = site;
    s.mixed_sites = false;
  } else if (site != s.first_site) {
    s.mixed_sites = true;
  }
  s.ready &= ~(1u << lane);
  s.at_collective |= 1u << lane;
  s.site[lane] = site;
  s.serve[lane] = serve;
  s.kind[lane] = kind;
  s.flags[lane] = flags;
  s.lanes.value[lane] = value;
  s.lanes.number[lane] = number;
  yield();
}

// Serves the lanes that wait at the first site in source order; the rest are divergent.
bool Worker::serve(unsigned g) {
  Simdgroup& s = simdgroups[g];
  if (!s.at_collective) {
    rest_simdgroup(g);
    return false;
  }
  uint32_t mask = s.at_collective;
  uint32_t site = s.first_site;
  if (s.mixed_sites) {
    for (unsigned i = 0; i < kSimdWidth; ++i) {
      if ((mask >> i & 1) && s.site[i] < site) site = s.site[i];
    }
    uint32_t chosen = 0;
    for (unsigned i = 0; i < kSimdWidth; ++i) {
      if ((mask >> i & 1) && s.site[i] == site) chosen |= 1u << i;
    }
    mask = chosen;
  }
  const unsigned first = static_cast<unsigned>(__builtin_ctz(mask));
  s.lanes.mask = mask;
  s.lanes.undefined = 0;
  MSL_NOTIFY(simd_operation(*this, g, mask, site, s.kind[first]));
  s.serve[first](&s.lanes);
  if (s.lanes.undefined) MSL_NOTIFY(undefined_lanes(*this, g, site));
  MSL_NOTIFY(collective(*this, g, s.kind[first], s.flags[first], site));
  s.at_collective &= ~mask;
  s.ready = mask;
  if (s.at_collective) {
    s.first_site = s.site[__builtin_ctz(s.at_collective)];
    s.mixed_sites = true;
  }
  return true;
}

void* Worker::threadgroup_memory(uint32_t slot, size_t bytes, size_t align) {
  Slot& s = slots_[slot];
  if (s.generation == generation_) return s.address;
  const size_t unit = align > kArenaAlign ? align : kArenaAlign;
  const size_t at = (arena_used + MSL_REDZONE + unit - 1) / unit * unit;
  if (at + bytes + MSL_REDZONE > kArenaBytes) {
    MSL_NOTIFY(arena_exhausted(*this, bytes));
    if (current == kNone) {
      failed_ = true;
      return arena;
    }
    abandon();
  }
  arena_used = at + bytes;
  threadgroup_bytes += bytes;
  s = {arena + at, bytes, generation_};
  // A quiet NaN in float, half and bfloat: what is read before it is written shows.
  memset(s.address, MSL_POISON, bytes);
  MSL_NOTIFY(threadgroup_block(*this, at, bytes));
  return s.address;
}

uint32_t Worker::slot_at(int64_t offset) const {
  uint32_t best = kNone;
  for (uint32_t i = 0; i < kThreadgroupSlots + kBuffers; ++i) {
    const Slot& s = slots_[i];
    const bool before = s.generation == generation_ && s.address <= arena + offset;
    if (before && (best == kNone || s.address > slots_[best].address)) best = i;
  }
  return best;
}

}  // namespace msl

#include "team.h"
#ifdef MSL_CHECKED
#include "checked.h"
#endif
#include "log.h"

using msl::here;
extern "C" {
int msl_run(msl::Launch* launch) { return msl::run_grid(*launch) ? 0 : -1; }
void msl_threadgroup_barrier(int flags, uint32_t site) { here().threadgroup_barrier(flags, site); }
void msl_collective(void* value, int number, msl::Serve serve, int kind, int flags, uint32_t site) {
  here().collective(value, number, serve, kind, flags, site);
}
void* msl_threadgroup_memory(unsigned slot, unsigned long bytes, unsigned long align) {
  return here().threadgroup_memory(slot, bytes, align);
}
unsigned msl_lane(void) { return here().current % msl::kSimdWidth; }
unsigned msl_thread(void) { return here().current; }
void msl_discard(void) {
  msl::Worker& w = here();
  w.simdgroups[w.current / 32].discarded |= 1u << (w.current % 32);
}
bool msl_discarded(void) {
  const msl::Worker& w = here();
  return w.simdgroups[w.current / 32].discarded >> (w.current % 32) & 1;
}
}
