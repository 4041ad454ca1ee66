// SPDX-License-Identifier: MIT
// os_log as a kernel calls it: the values go to the machine, which writes the text.
#pragma once

namespace msl {
template <typename T>
LogValue logged(const T& x) {
  LogValue v{};
  v.count = 1;
  if constexpr (__is_array(T) || __is_pointer(T)) {
    v.kind = kLogText;
    v.text = reinterpret_cast<const char*>(&x[0]);
  } else if constexpr (__is_integral(T) || __is_enum(T)) {
    v.kind = T(-1) < T(0) ? kLogSigned : kLogUnsigned;
    v.integer[0] = static_cast<long>(x);
  } else {
    v.kind = kLogReal;
    v.real[0] = static_cast<float>(x);
  }
  return v;
}
template <typename T, int N>
LogValue logged(const metal::vec<T, N>& x) {
  LogValue v = logged(x[0]);
  v.count = N;
  for (int i = 1; i < N; ++i) {
    if (v.kind == kLogReal)
      v.real[i] = static_cast<float>(x[i]);
    else
      v.integer[i] = static_cast<long>(x[i]);
  }
  return v;
}
}  // namespace msl

namespace metal {
enum os_log_type : int {
  OS_LOG_TYPE_DEFAULT = 0,
  OS_LOG_TYPE_INFO = 1,
  OS_LOG_TYPE_DEBUG = 2,
  OS_LOG_TYPE_ERROR = 16,
  OS_LOG_TYPE_FAULT = 17
};
struct os_log {
  constexpr os_log(const char*, const char*) {}
#define MSL_LOG(name, level)                                                          \
  template <typename... A>                                                            \
  __attribute__((always_inline)) void name(const char* format, const A&... a) const { \
    const msl::LogValue values[] = {msl::logged(a)..., msl::LogValue{}};              \
    msl_log(level, format, values, sizeof...(A));                                     \
  }
  MSL_LOG(log, OS_LOG_TYPE_DEFAULT)
  MSL_LOG(log_info, OS_LOG_TYPE_INFO)
  MSL_LOG(log_debug, OS_LOG_TYPE_DEBUG)
  MSL_LOG(log_error, OS_LOG_TYPE_ERROR)
  MSL_LOG(log_fault, OS_LOG_TYPE_FAULT)
#undef MSL_LOG
};
static constexpr os_log os_log_default("", "");
}  // namespace metal
