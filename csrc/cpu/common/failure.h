// SPDX-License-Identifier: MIT
// How an error of a kernel reaches torch: as an exception of torch's own C++ library, since no
// other can be caught there. On Linux that is libstdc++, and a kernel built with libc++ has
// another.
#pragma once

#include <exception>
#include <string>

#if defined(__linux__) && defined(_LIBCPP_VERSION)
#define MC_OTHER_RUNTIME 1
#endif

namespace metalcore::cpu {

#if defined(MC_OTHER_RUNTIME)
// Throws std::runtime_error of libstdc++. No frame between here and torch may have anything to
// clean up: its clean-up would be that of the other library.
[[noreturn]] void throw_to_torch(const char* what);

// What body() throws, or null.
template <typename Body>
__attribute__((noinline)) const char* failure_of(Body body) {
  static thread_local std::string what;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    what = error.what();
  }
  return what.c_str();
}
#endif

template <typename Body>
void fail_as_torch(Body body) {
#if defined(MC_OTHER_RUNTIME)
  if (const char* what = failure_of(body)) throw_to_torch(what);
#else
  body();
#endif
}

}  // namespace metalcore::cpu
