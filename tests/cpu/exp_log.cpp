// SPDX-License-Identifier: MIT
// Checks csrc/cpu/train/exp_log.h against the C library in long double. Exit code 1 if it is wrong.

#include "../../csrc/cpu/train/exp_log.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <vector>

using namespace metalcore::simd;

int failures = 0;

// Units in the last place between y and the truth.
template <typename A>
long double units(A y, long double truth) {
  if (std::isnan(y) || std::isnan(truth)) return std::isnan(y) == std::isnan(truth) ? 0 : 1e9L;
  if (A(truth) == y) return 0;
  const A size = std::max(std::numeric_limits<A>::min(), A(std::fabs(truth)));
  return std::fabs(y - truth) / (std::nextafter(size, A(INFINITY)) - size);
}

template <typename A, typename G>
void check(const char* what, A from, A to, Vec<A> (*ours)(Vec<A>), G truth) {
  constexpr int64_t kCount = 200000;
  long double worst = 0;
  A where = 0;
  for (int64_t i = 0; i < kCount; i += kLanes<A>) {
    Vec<A> x;
    for (int64_t j = 0; j < kLanes<A>; ++j) x[j] = from + (to - from) * A(i + j) / A(kCount);
    const Vec<A> y = ours(x);
    for (int64_t j = 0; j < kLanes<A>; ++j) {
      const long double off = units<A>(y[j], truth((long double)x[j]));
      if (off > worst) worst = off, where = x[j];
    }
  }
  if (worst > 3) {
    std::printf("%s: %.2Lf units off at %.9g\n", what, worst, double(where));
    ++failures;
  }
}

template <typename A, typename G>
void check_hard(const char* what, Vec<A> (*ours)(Vec<A>), G truth, std::vector<A> values) {
  for (A v : values) {
    const Vec<A> y = ours(splat(v));
    if (units<A>(y[0], truth((long double)v)) > 3) {
      std::printf("%s(%g) is %g\n", what, double(v), double(y[0]));
      ++failures;
    }
  }
}

template <typename A>
void check_all() {
  const auto exp_ = [](long double x) { return std::exp(x); };
  const auto log_ = [](long double x) { return std::log(x); };
  const auto tanh_ = [](long double x) { return std::tanh(x); };
  const A low = Exact<A>::kLowest + 1, high = Exact<A>::kHighest;
  const A inf = INFINITY, nan = NAN, tiny = std::numeric_limits<A>::min();
  check<A>("exp_nonpositive", low, A(0), exp_nonpositive<A>, exp_);
  check<A>("exp", low, high, exp<A>, exp_);
  check<A>("exp", A(-1), A(1), exp<A>, exp_);
  check<A>("log", A(1e-6), A(3), log<A>, log_);
  check<A>("log", A(1), A(1e30), log<A>, log_);
  check<A>("tanh", A(-1), A(1), tanh<A>, tanh_);
  check<A>("tanh", A(-30), A(30), tanh<A>, tanh_);
  check_hard<A>("exp", exp<A>, exp_, {0, -0.0, inf, -inf, nan, high * A(1.001), -2 * high, high});
  check_hard<A>("exp_nonpositive", exp_nonpositive<A>, exp_, {0, -0.0, -inf, nan, -2 * high});
  check_hard<A>("log", log<A>, log_, {0, 1, inf, nan, -1, -inf, tiny, tiny / 8, 1 / tiny});
  check_hard<A>("tanh", tanh<A>, tanh_, {0, -0.0, inf, -inf, nan, tiny, 1e-20, 25, -1e30});
}

int main() {
  check_all<float>();
  check_all<double>();
  if (failures == 0) std::printf("registers of %d bytes: right\n", MC_REGISTER_BYTES);
  return failures != 0;
}
