// SPDX-License-Identifier: MIT
// Switching between stacks. Only the registers that a called function must keep are saved, so a
// switch costs a few nanoseconds and no system call.
#pragma once

extern "C" void msl_switch(void** save, void* to);

#if defined(__APPLE__)
#define MSL_LABEL "_msl_switch"
#define MSL_HIDE ".private_extern _msl_switch\n"
#else
#define MSL_LABEL "msl_switch"
#define MSL_HIDE ".hidden msl_switch\n"
#endif

#if defined(__x86_64__)
asm(".text\n.globl " MSL_LABEL "\n" MSL_HIDE MSL_LABEL
    ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    // An indirect jump is predicted better than a return to where nobody called from.
    "  popq %rcx\n  jmpq *%rcx\n");
namespace msl {
// A stack that starts in `entry` when switched to.
inline void* prepare_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<unsigned long>(top) & ~63ul);
  *--sp = nullptr;
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
}  // namespace msl
#elif defined(__aarch64__)
asm(".text\n.p2align 2\n.globl " MSL_LABEL "\n" MSL_HIDE MSL_LABEL
    ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  br x30\n");
namespace msl {
inline void* prepare_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<unsigned long>(top) & ~63ul) - 20;
  for (int i = 0; i < 20; ++i) sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(entry);
  return sp;
}
}  // namespace msl
#else
#error "mslsim runs on x86-64 and aarch64"
#endif
