// SPDX-License-Identifier: MIT
// Tuned numbers of a kernel: which of its algorithms is ahead where. A machine's own values are in
// `[<op>.cpu]` of its policy file and set at load time; what stands in the code holds elsewhere
// (AMD EPYC, AVX2, one thread).
#pragma once

#include <cstdint>

namespace metalcore::cpu {

// const Knob largest("qr", "interleaved_up_to", 128);
class Knob {
 public:
  Knob(const char* op, const char* name, int64_t built_in)
      : op(op), name(name), next(first), value(built_in) {
    first = this;
  }
  operator int64_t() const { return value; }

  const char* const op;
  const char* const name;
  Knob* const next;
  int64_t value;

  static inline Knob* first = nullptr;
};

}  // namespace metalcore::cpu
