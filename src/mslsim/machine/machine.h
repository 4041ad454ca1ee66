// SPDX-License-Identifier: MIT
// The machine: threadgroups of fibers, one OS thread for each group that is being run. It executes
// and notifies; it judges nothing. In the words of the Metal specification.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

#define MSL_INLINE inline __attribute__((always_inline))

namespace msl {

constexpr unsigned kNone = ~0u;
// Not a power of two: stacks at such a distance share a few sets of the TLB. 256 KiB in place of
// 272 makes the barrier of 256 threads twice as slow on a Zen 3 core.
constexpr size_t kStackBytes = 272 * 1024;
constexpr size_t kGuardBytes = 16 * 1024;  // a page on every supported system
constexpr size_t kWorkerStackBytes = kStackBytes * kMaxThreads;
constexpr unsigned kMaxWorkers = 16;
// 32 KiB is Metal's limit; more room lets the report say by how much it was passed.
constexpr size_t kArenaBytes = 1 << 20;
constexpr unsigned kArenaAlign = 16;

enum Order : int { kAscending = 0, kDescending = 1, kRandom = 2 };

// What the host asks for. Shared with Python, which fills it through ctypes.
struct Launch {
  ThreadFunction thread;
  GroupFunction group;
  Arguments arguments;
  uint32_t threads[3];
  uint32_t group_size[3];
  uint32_t threadgroup_bytes[kBuffers];
  int32_t order;
  uint32_t seed;
  uint32_t workers;
  int32_t synchronised;
  // Results.
  uint32_t static_threadgroup_bytes;
  uint32_t failed;
};

// What kernels log, record after record.
struct Log {
  uint32_t used;
  uint32_t lost;
  char text[1 << 16];
};

struct Simdgroup {
  uint32_t ready;          // lanes that can run
  uint32_t live;           // lanes that have not returned
  uint32_t at_collective;  // lanes waiting at a simd operation
  uint32_t started;
  uint32_t discarded;   // fragments that write nothing
  uint32_t first_site;  // of the waiting lanes
  bool mixed_sites;
  uint32_t site[kSimdWidth];
  Serve serve[kSimdWidth];
  int kind[kSimdWidth];
  int flags[kSimdWidth];
  Collective lanes;
};

struct Slot {
  void* address;
  size_t bytes;
  uint32_t generation;
};

// Runs threadgroups one after another.
class Worker {
 public:
  void prepare(const Launch& launch, unsigned index);
  // False when the group could not be completed.
  bool run_group(uint64_t index);

  void threadgroup_barrier(int flags, uint32_t site);
  void collective(void* value, int number, Serve serve, int kind, int flags, uint32_t site);
  void* threadgroup_memory(uint32_t slot, size_t bytes, size_t align);
  // The slot whose memory an address in the arena belongs to, or ran out of: the last one that
  // starts before it; kNone if there is none.
  uint32_t slot_at(int64_t offset) const;
  const Slot& slot(uint32_t index) const { return slots_[index]; }
  [[noreturn]] void abandon();
  // Ends the thread that runs, from wherever it stands; the others go on without it.
  [[noreturn]] void end_thread();
  // Threads of the group that were ended so: what they would have done, nobody has.
  uint32_t stopped() const { return stopped_; }

  unsigned current = kNone;
  uint32_t group_index = 0;
  Group group;
  Simdgroup simdgroups[kMaxThreads / kSimdWidth];
  char* arena = nullptr;
  size_t arena_used = 0;
  size_t threadgroup_bytes = 0;
  size_t most_threadgroup_bytes = 0;
  // Set while serving, for the hooks.
  uint32_t barrier_site = 0;
  const Launch* launch = nullptr;

 private:
  friend void fiber_main();
  void place_group(uint64_t index);
  void run_fibers();
  void yield();
  unsigned next();
  bool serve(unsigned simdgroup);
  bool release_barrier();
  void retire(unsigned thread);
  void start(unsigned thread);
  void enter(unsigned thread, void** save);
  unsigned choose(uint32_t mask);
  uint32_t random();
  void rest_simdgroup(unsigned g);

  Order order_ = kAscending;
  uint32_t random_ = 1;
  uint32_t runnable_ = 0;  // simdgroups with a lane that can run or be served
  uint32_t arrived_ = 0;   // threads at the barrier
  uint32_t returned_ = 0;
  uint32_t stopped_ = 0;
  int barrier_flags_ = 0;
  bool mixed_barriers_ = false;
  bool failed_ = false;
  void* host_stack_ = nullptr;
  char* stacks_ = nullptr;
  uint16_t fiber_of_[kMaxThreads];
  uint16_t free_[kMaxThreads];
  unsigned free_count_ = 0;
  unsigned guarded_ = 0;      // stacks whose end is protected
  void* saved_[kMaxThreads];  // stack pointers, by fiber
  Arguments arguments_;
  Slot slots_[kThreadgroupSlots + kBuffers];
  uint32_t generation_ = 0;
  uint32_t barrier_sites_[kMaxThreads];
  friend struct Divergence;
};

}  // namespace msl
