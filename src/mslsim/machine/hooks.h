// SPDX-License-Identifier: MIT
// Where the machine tells what happens. Without MSL_CHECKED nobody listens and nothing is compiled.
#pragma once

#ifdef MSL_CHECKED
#include <setjmp.h>

#include "../checks/observers.h"
#define MSL_NOTIFY(call) (msl::observers().call)
// Free bytes between blocks of threadgroup memory, so that running past one is seen.
#define MSL_REDZONE 64
#define MSL_ARENA(index) (msl::observed_arena())
namespace msl {
namespace {
[[noreturn]] void leave_kernel();
jmp_buf g_thread;
// What memory holds before it is written.
int g_poison = 0xff;
}  // namespace
}  // namespace msl
#define MSL_POISON g_poison
#define MSL_LEAVE_KERNEL leave_kernel()
#define MSL_THREAD_ENDED _setjmp(g_thread)
#else
#define MSL_NOTIFY(call) ((void)0)
#define MSL_REDZONE 0
#define MSL_POISON 0xff
#define MSL_LEAVE_KERNEL ((void)0)
#define MSL_THREAD_ENDED false
#define MSL_ARENA(index) mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, kLazyMemory, -1, 0)
extern "C" void msl_fence(int, int, uint32_t) {}
extern "C" void msl_assertion_failed(uint32_t) {}
extern "C" void msl_texture_missed(const void*, int, int, int, int, uint32_t) {}
#endif
