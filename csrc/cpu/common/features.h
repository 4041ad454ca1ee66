// SPDX-License-Identifier: MIT
// What an x86 CPU has beyond the instruction set that is compiled for.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace metalcore::cpu {

// Part `part` of what cpuid tells of newer instructions. Compilers have a function that asks for
// one by name, but zig's needs memory that a library cannot link.
struct Features {
  unsigned a = 0, b = 0, c = 0, d = 0;

  explicit Features(unsigned part) { __get_cpuid_count(7, part, &a, &b, &c, &d); }
};

inline bool has_byte_dots() { return Features(0).c >> 11 & 1; }     // avx512vnni
inline bool has_bfloat16_dots() { return Features(1).a >> 5 & 1; }  // avx512bf16

}  // namespace metalcore::cpu
#endif
