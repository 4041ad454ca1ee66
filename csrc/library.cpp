// SPDX-License-Identifier: MIT
// What the loader asks of the library. No op is named here.

#define MC_TEXT_OF(x) #x
#define MC_TEXT(x) MC_TEXT_OF(x)

thread_local const char* metalcore_variant = "";

extern "C" {

__attribute__((visibility("default"))) const char* metalcore_last_variant() {
  return metalcore_variant;
}

__attribute__((visibility("default"))) const char* metalcore_build_info() {
#if defined(__clang__)
  return MC_TEXT(MC_ISA) ", clang " __clang_version__ ", torch >= 2.10";
#else
  return MC_TEXT(MC_ISA) ", gcc " __VERSION__ ", torch >= 2.10";
#endif
}
}
