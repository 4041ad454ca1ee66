// SPDX-License-Identifier: MIT
// p (log p - x), where the target is p, or log p. The parameter means nothing.

#include "divergence.h"

template <bool LOG_TARGET>
struct divergence_from {
  divergence_from(float) {}

  template <typename wide>
  wide value(wide x, wide t) const thread {
    return LOG_TARGET ? precise::exp(t) * (t - x) : times(t, precise::log(t)) - t * x;
  }

  template <typename wide>
  void slopes(wide x, wide t, thread wide& dx, thread wide& dt) const thread {
    if (LOG_TARGET) {
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

typedef divergence_from<false> kl_div;
typedef divergence_from<true> kl_div_log_target;
