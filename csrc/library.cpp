// SPDX-License-Identifier: MIT
// What the loader asks of the library. No op is named here.

#include <cstring>

#include "cpu/common/policy.h"

#define MC_TEXT_OF(x) #x
#define MC_TEXT(x) MC_TEXT_OF(x)

thread_local const char* metalcore_variant = "";

extern "C" {

__attribute__((visibility("default"))) const char* metalcore_last_variant() {
  return metalcore_variant;
}

// 1 if a kernel has this knob.
__attribute__((visibility("default"))) int metalcore_set_knob(const char* op, const char* name,
                                                              int64_t value) {
  int found = 0;
  for (auto* knob = metalcore::cpu::Knob::first; knob != nullptr; knob = knob->next) {
    if (std::strcmp(knob->op, op) == 0 && std::strcmp(knob->name, name) == 0) {
      knob->value = value;
      found = 1;
    }
  }
  return found;
}

__attribute__((visibility("default"))) const char* metalcore_build_info() {
#if defined(__clang__)
  return MC_TEXT(MC_ISA) ", clang " __clang_version__ ", torch >= 2.10";
#else
  return MC_TEXT(MC_ISA) ", gcc " __VERSION__ ", torch >= 2.10";
#endif
}
}
