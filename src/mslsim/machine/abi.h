// SPDX-License-Identifier: MIT
// What a compiled kernel library and the machine that runs it agree on. Included by both; no system
// header may be included here, because a kernel's names would collide with it.
#pragma once

namespace msl {

constexpr unsigned kBuffers = 31;
constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kThreadgroupSlots = 256;

// The buffers and the dynamic threadgroup memory of a launch, by index.
struct Arguments {
  void* buffer[kBuffers];
  void* threadgroup[kBuffers];
};

// Where a threadgroup stands. `size` is smaller than `dispatch_size` at the edge of the grid.
struct Group {
  unsigned position[3];
  unsigned size[3];
  unsigned dispatch_size[3];
  unsigned grid_threads[3];
  unsigned grid_groups[3];
  unsigned threads;
  unsigned simdgroups;
};

// A simdgroup operation that the lanes in `mask` have reached: each gave a value and a number.
// Whoever serves it marks in `undefined` the lanes whose source does not exist.
struct Collective {
  void* value[kSimdWidth];
  int number[kSimdWidth];
  unsigned mask;
  unsigned undefined;
};
using Serve = void (*)(Collective*);

// An exchange among the lanes that arrive, a barrier, or an operation that needs all lanes.
enum CollectiveKind : int { kCollective = 0, kSimdBarrier = 1, kCooperative = 2 };

// A value that a kernel logs: a number, a vector or text.
enum LogKind : int { kLogSigned = 0, kLogUnsigned = 1, kLogReal = 2, kLogText = 3 };
struct LogValue {
  int kind;
  int count;
  union {
    long integer[4];
    double real[4];
    const char* text;
  };
};

using ThreadFunction = void (*)(const Arguments*, const Group*, unsigned thread);
using GroupFunction = void (*)(const Arguments*, const Group*);

}  // namespace msl

// The kernel side declares these without `site`: the build adds that last argument to each call in
// the intermediate code, from the debug location of the call.
#ifndef MSL_MACHINE
#define MSL_SYNC __attribute__((convergent, nomerge))
extern "C" {
MSL_SYNC void msl_threadgroup_barrier(int flags);
MSL_SYNC void msl_collective(void* value, int number, msl::Serve serve, int kind, int flags);
void msl_fence(int flags, int scope);
void* msl_threadgroup_memory(unsigned slot, unsigned long size, unsigned long align);
unsigned msl_lane(void);
unsigned msl_thread(void);
void msl_atomic(const volatile void* address, unsigned size, int writes);
void msl_assertion_failed(void);
// Of a fragment: it writes no color.
void msl_discard(void);
bool msl_discarded(void);
void msl_log(int level, const char* format, const msl::LogValue* values, unsigned count);
// A texel that a texture does not have: x, y, z or layer, and whether it was to be written.
void msl_texture_missed(const void* texels, int x, int y, int z, int writes);
}
#endif
