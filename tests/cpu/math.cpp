// SPDX-License-Identifier: MIT
// Checks csrc/cpu/common/math.h against the long double functions of the C library.
// Prints the largest error of each function in ulp; exit code 1 if one is over its bound.

#include "../../csrc/cpu/common/math.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

using namespace metalcore::simd;

int failures = 0;

// Distance in units of the last place of the truth, which below the normal numbers is a constant.
template <typename A>
double ulps(A found, long double truth) {
  if (std::isnan(truth)) return std::isnan(found) ? 0 : INFINITY;
  if (A(truth) == found) return 0;
  if (std::isinf(A(truth)) || !std::isfinite(found)) return INFINITY;
  int exponent;
  std::frexp(truth, &exponent);
  constexpr int kDigits = std::numeric_limits<A>::digits;
  exponent = std::max(exponent, std::numeric_limits<A>::min_exponent);
  return double(std::fabs((long double)found - truth) / std::ldexp(1.0L, exponent - kDigits));
}

// All sizes and signs, densely where something happens, and the values between the numbers.
template <typename A>
std::vector<A> arguments() {
  using Limits = std::numeric_limits<A>;
  std::vector<A> x = {0,
                      A(-0.0),
                      Limits::infinity(),
                      -Limits::infinity(),
                      Limits::quiet_NaN(),
                      bits_as<A>(std::numeric_limits<Lane<IntOf<Vec<A>>>>::max()),  // a NaN
                      Limits::max(),
                      Limits::lowest(),
                      Limits::denorm_min(),
                      -Limits::denorm_min()};
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> near(-6, 6), far(-110, 110), wide(-760, 760);
  std::uniform_real_distribution<double> exponent(Limits::min_exponent - 20, Limits::max_exponent);
  for (int i = 0; i < 100000; ++i) {
    for (const double v : {near(random), far(random), wide(random)}) x.push_back(A(v));
    const A size = A(std::ldexp(1.0 + i % 97 / 97.0, int(exponent(random))));
    x.push_back(i % 2 ? size : -size);
  }
  x.resize(x.size() / kLanes<A> * kLanes<A>);
  return x;
}

template <typename A, typename Function, typename Truth>
void check(const char* type, const char* name, double bound, Function function, Truth truth) {
  double worst = 0, where = 0;
  const std::vector<A> x = arguments<A>();
  for (size_t i = 0; i < x.size(); i += kLanes<A>) {
    const Vec<A> y = function(load_as<Vec<A>>(x.data() + i));
    for (int64_t lane = 0; lane < kLanes<A>; ++lane) {
      const double off = ulps<A>(y[lane], truth((long double)x[i + lane]));
      if (!(off <= worst)) worst = off, where = double(x[i + lane]);
    }
  }
  if (worst <= bound) return;
  std::printf("%s %s: %.2f ulp at %.17g, allowed %.2f\n", type, name, worst, where, bound);
  ++failures;
}

template <typename A>
void check_type(const char* type) {
  using V = Vec<A>;
  check<A>(
      type, "exp", 2, [](V x) { return exp(x); },
      [](long double x) {
        const long double y = std::exp(x);
        return y < 2 * std::numeric_limits<A>::min() ? 0 : y;
      });
  check<A>(type, "log", 2, [](V x) { return log(x); }, [](long double x) { return std::log(x); });
  // around 1, where the result is small
  check<A>(
      type, "log", 2, [](V x) { return log(1 + x * A(0.01)); },
      [](long double x) { return std::log((long double)(1 + A(x) * A(0.01))); });
  check<A>(
      type, "tanh", 3, [](V x) { return Tanh<V>(x).value; },
      [](long double x) { return std::tanh(x); });
  // plus 2^-9: the tail's exponent, a square, is rounded
  check<A>(
      type, "normal", 6, [](V x) { return Normal<V>(x).below + A(0x1p-9); },
      [](long double x) { return std::erfc(x / -std::sqrt(2.0L)) / 2 + 0x1p-9L; });
}

// What is enough for half types, up to where it may be infinite a little early.
void check_coarse() {
  using V = Vec<float>;
  check<float>(
      "float", "exp_minus_as", 200,
      [](V x) { return exp_minus_as<BFloat16>(-smaller(splat<V>(88.5f), x)); },
      [](long double x) {
        const long double y = std::exp(x > 88.5L ? 88.5L : x);
        return y < 2 * std::numeric_limits<float>::min() ? 0 : y;
      });
}

int main() {
  check_type<float>("float");
  check_coarse();
  check_type<double>("double");
  if (failures == 0) std::printf("registers of %d bytes: right\n", MC_REGISTER_BYTES);
  return failures != 0;
}
