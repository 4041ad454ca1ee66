// SPDX-License-Identifier: MIT
// How an error of a kernel reaches torch: as an exception of torch's own C++ library, since no
// other can be caught there. On Linux that is libstdc++, and a kernel built with libc++ has
// another.
#pragma once

#include <stdexcept>
#include <string>

#if defined(__linux__) && defined(_LIBCPP_VERSION)
#define MC_OTHER_RUNTIME 1
#endif

namespace metalcore::cpu {

#if defined(MC_OTHER_RUNTIME)
// Throws std::runtime_error of libstdc++, or std::out_of_range. No frame between here and torch may
// have anything to clean up: its clean-up would be that of the other library.
[[noreturn]] void throw_to_torch(const char* what, bool is_index);

// What body() throws, or null, and whether it is an index out of range.
template <typename Body>
__attribute__((noinline)) const char* failure_of(Body body, bool& is_index) {
  static thread_local std::string what;
  try {
    body();
    return nullptr;
  } catch (const std::out_of_range& error) {
    is_index = true;
    what = error.what();
  } catch (const std::exception& error) {
    what = error.what();
  }
  return what.c_str();
}
#endif

template <typename Body>
void fail_as_torch(Body body) {
#if defined(MC_OTHER_RUNTIME)
  bool is_index = false;
  if (const char* what = failure_of(body, is_index)) throw_to_torch(what, is_index);
#else
  body();
#endif
}

}  // namespace metalcore::cpu
