// SPDX-License-Identifier: MIT
// A checked launch: the entry points that instrumented code calls, guards against crashes, and the
// comparison of schedules. Included by machine.cpp, once.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../checks/observers.h"
#include "stray.h"

namespace msl {

bool run_grid(Launch& launch);

void* lazy_zeros(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kLazyMemory, -1, 0);
  if (p == MAP_FAILED) abort();
#ifdef MADV_HUGEPAGE
  // Far fewer faults.
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return p;
}
void* shared_bytes(uint64_t file_offset, size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory().file,
                 static_cast<off_t>(file_offset));
  if (p == MAP_FAILED) abort();
  return p;
}
void free_bytes(void* p, size_t bytes) { munmap(p, bytes); }

namespace {

sigjmp_buf g_host;
volatile sig_atomic_t g_running = 0;

char* slot_address(unsigned region) { return memory().base + region * kSlotBytes + kSlotBytes / 2; }

bool reserve_slots() {
  Memory& m = memory();
  if (m.base) return true;
  void* p = mmap(nullptr, kRegions * kSlotBytes, PROT_NONE, kLazyMemory, -1, 0);
  if (p == MAP_FAILED) return false;
  m.base = static_cast<char*>(p);
  char* arena = slot_address(kArenaRegion);
  if (mprotect(arena, kArenaBytes, PROT_READ | PROT_WRITE)) return false;
  m.regions[kArenaRegion] = {arena, kArenaBytes, 0, true, false, false};
  return true;
}

// Leaves the kernel for good, from wherever it stands.
[[noreturn]] void leave_kernel() { siglongjmp(g_host, 1); }

void record_here(FindingKind kind, uint32_t site) {
  const Worker& w = here();
  Found f{};
  f.kind = kind;
  f.site = site;
  f.thread = w.current;
  f.group = w.group_index;
  f.other_thread = f.other_group = f.region = kNone;
  record(f);
}

void on_signal(int signal_number, siginfo_t*, void*) {
  if (!g_running) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  record_here(signal_number == SIGFPE ? kDivisionByZero : kCrash, memory().session->site);
  leave_kernel();
}

void catch_signals() {
  static bool done = false;
  if (done) return;
  done = true;
  const size_t bytes = 64 * 1024;
  stack_t stack{};
  stack.ss_sp = lazy_zeros(bytes);
  stack.ss_size = bytes;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  for (int s : signals) sigaction(s, &action, nullptr);
}

MSL_INLINE void touch(const volatile void* address, uint32_t size, bool writes, bool atomic,
                      uint32_t site) {
  Memory& m = memory();
  Observers& o = observers();
  m.session->site = site;
  const char* p = const_cast<const char*>(static_cast<const volatile char*>(address));
  const uint64_t distance = static_cast<uint64_t>(p - m.base);
  // Elsewhere lie the thread's own memory and the constants of the program.
  const uint64_t region = distance >> kSlotShift;
  if (region >= m.watched) return;
  settle_stray();
  const uint64_t offset = distance - (region << kSlotShift) - kSlotBytes / 2;
  const Access a{offset, size, site, static_cast<uint32_t>(region), writes, atomic};
  if (o.access(here(), a)) return;
  if (!allow_stray(const_cast<char*>(p), size, a.region, writes)) leave_kernel();
}

// True when the grid ran to its end.
bool run_guarded(Launch& launch, bool watch) {
  Observers& o = observers();
  Worker* w = worker(0);
  if (!w || !reserve_stacks()) abort();
  w->prepare(launch, 0);
  o.watching = watch;
  memory().watched = watch ? kRegions : 0;
  o.launch_begin(*w);
  bool completed = false;
  if (sigsetjmp(g_host, 1) == 0) {
    g_running = 1;
    completed = run_grid(launch) && !launch.failed;
  }
  g_running = 0;
  forget_strays();
  o.launch_end(*w);
  o.watching = false;
  memory().watched = 0;
  return completed;
}

}  // namespace

void* observed_arena() { return memory().regions[kArenaRegion].address; }

}  // namespace msl

#include "again.h"

extern "C" {
// Maps the buffers of `session` from the file behind `fd`; 0 on success.
int msl_map(msl::Session* session, int fd, uint32_t sites) {
  using namespace msl;
  if (!reserve_slots()) return -1;
  catch_signals();
  Memory& m = memory();
  m.session = session;
  m.file = fd;
  m.sites = sites;
  for (unsigned i = 0; i < kBuffers; ++i) {
    const RegionInfo& info = session->regions[i];
    Region& r = m.regions[i];
    if (r.address && r.bytes) {
      mmap(r.address, r.bytes, PROT_NONE, kLazyMemory | MAP_FIXED, -1, 0);
    }
    r = {slot_address(i), info.bytes,          info.written_offset,
         info.bound != 0, info.read_only != 0, false};
    if (!info.bound || !info.bytes) continue;
    if (info.bytes > kSlotBytes / 2) return -1;
    if (mmap(r.address, info.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
             static_cast<off_t>(info.file_offset)) == MAP_FAILED) {
      return -1;
    }
    // The rest of the last page is read by strays.
    memset(r.address + info.bytes, 0, (page_bytes() - info.bytes % page_bytes()) % page_bytes());
  }
  return 0;
}
void* msl_region(uint32_t i) { return msl::slot_address(i); }

int msl_run_checked(msl::Launch* launch) {
  using namespace msl;
  Session& s = *memory().session;
  observers().checks = s.checks;
  Copies inputs{};
  Marks marks{};
  const bool schedules = s.checks & kCheckSchedule;
  if (schedules || (s.checks & kCheckUninitialized)) inputs.take();
  marks.take();
  const bool completed = run_guarded(*launch, true);
  s.threadgroup_bytes = launch->static_threadgroup_bytes;
  if (completed && found_unwritten()) weigh_unwritten(*launch, inputs, marks);
  if (schedules && completed && !found_harm()) compare_schedules(*launch, inputs, launch->order);
  marks.drop();
  inputs.drop();
  return 0;
}

#define MSL_ENTRIES(n)                                                                            \
  void __tsan_read##n(void* p, uint32_t site) { msl::touch(p, n, false, false, site); }           \
  void __tsan_write##n(void* p, uint32_t site) { msl::touch(p, n, true, false, site); }           \
  void __tsan_unaligned_read##n(void* p, uint32_t site) { msl::touch(p, n, false, false, site); } \
  void __tsan_unaligned_write##n(void* p, uint32_t site) { msl::touch(p, n, true, false, site); }
MSL_ENTRIES(1)
MSL_ENTRIES(2)
MSL_ENTRIES(4)
MSL_ENTRIES(8)
MSL_ENTRIES(16)
void __tsan_init(void) {}
void* __tsan_memcpy(void* to, const void* from, size_t n, uint32_t site) {
  msl::touch(from, static_cast<uint32_t>(n), false, false, site);
  msl::touch(to, static_cast<uint32_t>(n), true, false, site);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n, uint32_t site) {
  msl::touch(from, static_cast<uint32_t>(n), false, false, site);
  msl::touch(to, static_cast<uint32_t>(n), true, false, site);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n, uint32_t site) {
  msl::touch(to, static_cast<uint32_t>(n), true, false, site);
  return memset(to, value, n);
}
void msl_atomic(const volatile void* p, unsigned size, int writes, uint32_t site) {
  msl::touch(p, size, writes != 0, true, site);
  const uint64_t region =
      static_cast<uint64_t>(static_cast<const volatile char*>(p) - msl::memory().base) >>
      msl::kSlotShift;
  if (writes == 2 && region < msl::kBuffers) msl::memory().regions[region].float_atomics = true;
}
void msl_fence(int flags, int scope, uint32_t) { MSL_NOTIFY(fence(msl::here(), flags, scope)); }
void msl_texture_missed(const void* texels, int x, int y, int z, int writes, uint32_t site) {
  using namespace msl;
  if (!(observers().checks & kCheckBounds)) return;
  const char* p = static_cast<const char*>(texels);
  const Access a{0,           0,    site, static_cast<uint32_t>((p - memory().base) >> kSlotShift),
                 writes != 0, false};
  Found f = found_at(here(), kTextureMissed, a);
  f.offset = x;
  f.block_offset = static_cast<uint32_t>(y);
  f.block_bytes = static_cast<uint32_t>(z);
  record(f);
}
void msl_assertion_failed(uint32_t site) { msl::record_here(msl::kAssertion, site); }
void __sanitizer_cov_trace_pc(uint32_t site) {
  MSL_NOTIFY(step(msl::here(), msl::kTraceBranch, site));
}
// There is no way on for the thread, but there is for the others.
void __ubsan_handle_out_of_bounds_abort(void* array, uintptr_t index, uint32_t site) {
  msl::settle_stray();
  msl::record_index(*static_cast<msl::IndexedArray*>(array), index, site);
  msl::here().end_thread();
}
void __ubsan_handle_divrem_overflow_abort(void*, uintptr_t, uintptr_t, uint32_t site) {
  msl::settle_stray();
  msl::record_here(msl::kDivisionByZero, site);
  msl::here().end_thread();
}
}
