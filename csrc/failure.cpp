// SPDX-License-Identifier: MIT
// Throws by the functions of the libstdc++ that torch has loaded.

#include "cpu/common/failure.h"

#if defined(MC_OTHER_RUNTIME)
#include <dlfcn.h>

#include <cstdlib>

namespace metalcore::cpu {

void throw_to_torch(const char* what, bool is_index) {
  void* const library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  const auto find = [&](const char* name) {
    void* const found = library ? dlsym(library, name) : nullptr;
    if (!found) std::abort();
    return found;
  };
  const auto allocate = reinterpret_cast<void* (*)(size_t)>(find("__cxa_allocate_exception"));
  const auto construct = reinterpret_cast<void (*)(void*, const char*)>(
      find(is_index ? "_ZNSt12out_of_rangeC1EPKc" : "_ZNSt13runtime_errorC1EPKc"));
  const auto raise = reinterpret_cast<void (*)(void*, void*, void*)>(find("__cxa_throw"));
  // a table of functions and a text
  void* const error = allocate(2 * sizeof(void*));
  construct(error, what);
  raise(error, find(is_index ? "_ZTISt12out_of_range" : "_ZTISt13runtime_error"),
        find(is_index ? "_ZNSt12out_of_rangeD1Ev" : "_ZNSt13runtime_errorD1Ev"));
  std::abort();
}

}  // namespace metalcore::cpu
#endif
