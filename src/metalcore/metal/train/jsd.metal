// SPDX-License-Identifier: MIT
// Of log q (x) and log p (y), where the parameter is b:
//   b p (log p - log m) + (1 - b) q (log q - log m),  m = b p + (1 - b) q
// and its limits p (log p - log q) for b = 0 and q (log q - log p) for b = 1.

#include "divergence.h"

struct jsd {
  float beta;

  jsd(float parameter) : beta(parameter) {}

  template <typename wide>
  wide value(wide x, wide y) const thread {
    const wide q = precise::exp(x);
    const wide p = precise::exp(y);
    if (beta == 0.0f) {
      return times(p, y - x);
    }
    if (beta == 1.0f) {
      return times(q, x - y);
    }
    const wide m = precise::log(beta * p + (1.0f - beta) * q);
    return beta * times(p, y - m) + (1.0f - beta) * times(q, x - m);
  }

  template <typename wide>
  void slopes(wide x, wide y, thread wide& dx, thread wide& dy) const thread {
    const wide q = precise::exp(x);
    const wide p = precise::exp(y);
    if (beta == 0.0f) {
      dx = -p;
      dy = times(p, y - x + 1.0f);
    } else if (beta == 1.0f) {
      dx = times(q, x - y + 1.0f);
      dy = -q;
    } else {
      const wide m = precise::log(beta * p + (1.0f - beta) * q);
      dx = (1.0f - beta) * times(q, x - m);
      dy = beta * times(p, y - m);
    }
  }
};
