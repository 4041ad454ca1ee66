// SPDX-License-Identifier: MIT
// What the loader asks of the library. No op is named here.

#include <cstdint>
#include <cstring>
#include <string>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/common/policy.h"

#define MC_TEXT_OF(x) #x
#define MC_TEXT(x) MC_TEXT_OF(x)

thread_local const char* metalcore_variant = "";

extern "C" {

// Counts up with every change of what the loader and the schemas expect of a library.
__attribute__((visibility("default"))) int metalcore_interface() { return 3; }

__attribute__((visibility("default"))) const char* metalcore_last_variant() {
  return metalcore_variant;
}

// A line `op name value` for each knob.
__attribute__((visibility("default"))) const char* metalcore_knobs() {
  static thread_local std::string lines;
  lines.clear();
  for (auto* knob = metalcore::cpu::Knob::first; knob != nullptr; knob = knob->next) {
    lines += std::string(knob->op) + " " + knob->name + " " + std::to_string(knob->value) + "\n";
  }
  return lines.c_str();
}

__attribute__((visibility("default"))) void metalcore_set_knob(const char* op, const char* name,
                                                               int64_t value) {
  for (auto* knob = metalcore::cpu::Knob::first; knob != nullptr; knob = knob->next) {
    if (std::strcmp(knob->op, op) == 0 && std::strcmp(knob->name, name) == 0) knob->value = value;
  }
}

__attribute__((visibility("default"))) int metalcore_any(const int32_t* values, int64_t count) {
  int32_t all = 0;
  for (int64_t i = 0; i < count; ++i) all |= values[i];
  return all != 0;
}

__attribute__((visibility("default"))) const char* metalcore_build_info() {
#if defined(__clang__)
  return MC_TEXT(MC_ISA) ", clang " __clang_version__ ", torch >= 2.10";
#else
  return MC_TEXT(MC_ISA) ", gcc " __VERSION__ ", torch >= 2.10";
#endif
}

// Asks for huge pages for memory that is not touched yet. Where the advice is not taken, pages stay
// small.
__attribute__((visibility("default"))) void metalcore_prefer_huge_pages(void* start,
                                                                        int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(start);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage,
                  last = (begin + bytes) / kPage * kPage;
  if (last > first + kPage) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  static_cast<void>(start), static_cast<void>(bytes);
#endif
}
}
