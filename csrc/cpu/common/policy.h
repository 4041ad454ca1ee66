// SPDX-License-Identifier: MIT
// Tuned numbers of a kernel. Their values are in `[cpu]` of the op's TOML file and set at load
// time.
#pragma once

#include <cstdint>

namespace metalcore::cpu {

// static const Knob largest("qr", "interleaved_up_to");
class Knob {
 public:
  Knob(const char* op, const char* name) : op(op), name(name), next(first) { first = this; }
  operator int64_t() const { return value; }

  const char* const op;
  const char* const name;
  Knob* const next;
  int64_t value = 0;

  static inline Knob* first = nullptr;
};

}  // namespace metalcore::cpu
