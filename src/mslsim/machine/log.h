// SPDX-License-Identifier: MIT
// The text of os_log: formatted here, printed by the host. Included by machine.cpp, once.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace msl {
namespace {

// A record: thread, threadgroup, site, level and text, ended by a byte that no text has.
constexpr char kRecordEnd = '\x1e';

struct LogWriter {
  char text[1024];
  size_t used = 0;

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(text + used, sizeof(text) - used, format, arguments);
    va_end(arguments);
    if (n > 0) used += static_cast<size_t>(n);
    if (used >= sizeof(text)) used = sizeof(text) - 1;
  }
};

void add_value(LogWriter& out, const char* flags, char conversion, const LogValue& v, int element) {
  char format[40];
  const bool is_real = strchr("fFeEgGaA", conversion) != nullptr;
  snprintf(format, sizeof(format), "%%%s%s%c", flags, is_real || conversion == 'c' ? "" : "l",
           conversion == 'i' ? 'd' : conversion);
  if (v.kind == kLogText) {
    out.add("%s", v.text);
  } else if (is_real) {
    out.add(format, v.kind == kLogReal ? v.real[element] : static_cast<double>(v.integer[element]));
  } else {
    const long n = v.kind == kLogReal ? static_cast<long>(v.real[element]) : v.integer[element];
    if (conversion == 'c') {
      out.add(format, static_cast<int>(n));
    } else {
      out.add(format, n);
    }
  }
}

// As printf, with %v4f for vectors; the length of a number is known, so `l` and `h` mean nothing.
void add_formatted(LogWriter& out, const char* format, const LogValue* values, unsigned count) {
  unsigned next = 0;
  for (const char* p = format; *p; ++p) {
    if (*p != '%') {
      out.add("%c", *p);
      continue;
    }
    if (*++p == '%') {
      out.add("%%");
      continue;
    }
    char flags[24];
    size_t n = 0;
    while (*p && strchr("-+ #0123456789.", *p) && n + 1 < sizeof(flags)) flags[n++] = *p++;
    flags[n] = 0;
    if (*p == 'v') {
      ++p;
      while (*p >= '0' && *p <= '9') ++p;
    }
    while (*p && strchr("hlqzjt", *p)) ++p;
    if (!*p) return;
    if (!strchr("diouxXcfFeEgGaAsp", *p) || next == count) {
      out.add("%%%c", *p);
      continue;
    }
    const LogValue& v = values[next++];
    const char conversion = *p == 'p' ? 'x' : *p == 's' && v.kind != kLogText ? 'd' : *p;
    for (int i = 0; i < v.count; ++i) {
      if (i) out.add(",");
      add_value(out, flags, conversion, v, i);
    }
  }
}

#ifdef MSL_CHECKED
inline Log& launch_log() { return memory().session->log; }
inline bool is_logging() { return observers().watching; }
#else
inline Log g_log;
inline Log& launch_log() { return g_log; }
inline bool is_logging() { return true; }
#endif
pthread_mutex_t g_log_lock = PTHREAD_MUTEX_INITIALIZER;

void write_log(const Worker& w, int level, const char* format, const LogValue* values,
               unsigned count, uint32_t site) {
  if (!is_logging()) return;
  LogWriter out;
  out.add("%u %u %u %d ", w.current, w.group_index, site, level);
  add_formatted(out, format, values, count);
  for (size_t i = 0; i < out.used; ++i) {
    if (out.text[i] == kRecordEnd) out.text[i] = ' ';
  }
  pthread_mutex_lock(&g_log_lock);
  Log& log = launch_log();
  if (log.used + out.used + 1 > sizeof(log.text)) {
    ++log.lost;
  } else {
    memcpy(log.text + log.used, out.text, out.used);
    log.text[log.used + out.used] = kRecordEnd;
    log.used += static_cast<uint32_t>(out.used) + 1;
  }
  pthread_mutex_unlock(&g_log_lock);
}

}  // namespace
}  // namespace msl

extern "C" {
void msl_log(int level, const char* format, const msl::LogValue* values, unsigned count,
             uint32_t site) {
  msl::write_log(msl::here(), level, format, values, count, site);
}
msl::Log* msl_launch_log(void) { return &msl::launch_log(); }
}
