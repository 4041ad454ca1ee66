// SPDX-License-Identifier: MIT
// p (log p - x), where the target is log p if the parameter is 1 and p if it is 0.

#include "divergence.h"

struct kl_div {
  bool log_target;

  kl_div(float parameter) : log_target(parameter != 0.0f) {}

  template <typename wide>
  wide value(wide x, wide t) const thread {
    return log_target ? precise::exp(t) * (t - x) : times(t, precise::log(t)) - t * x;
  }

  template <typename wide>
  void slopes(wide x, wide t, thread wide& dx, thread wide& dt) const thread {
    if (log_target) {
      const wide p = precise::exp(t);
      dx = -p;
      dt = p * (t - x + 1.0f);
    } else {
      dx = -t;
      // log(0) + 1 - x counts for nothing where there is no probability
      dt = times(wide(t != 0.0f), precise::log(t) + 1.0f - x);
    }
  }
};

INSTANTIATE_DIVERGENCE(kl_div)
