// SPDX-License-Identifier: MIT
// Checks csrc/cpu/common/simd.h against scalar code. Prints what is wrong; exit code 1 then.

#include "../../csrc/cpu/common/simd.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

using namespace metalcore::simd;

int failures = 0;

void expect(bool condition, const char* type, const char* what, int64_t n) {
  if (condition) return;
  std::printf("%s: %s is wrong for n = %ld\n", type, what, long(n));
  ++failures;
}

template <typename T>
void check(const char* type) {
  for (int64_t n : {0, 1, 3, 7, 15, 16, 17, 31, 33, 64, 133}) {
    std::vector<T> x(n), y(n + 1, T(7.0f));
    double truth = 0;
    for (int64_t i = 0; i < n; ++i) {
      x[i] = T(float(i % 13) * 0.37f - 2.1f);
      truth += double(x[i]) * double(x[i]);
    }
    for_each_pair<T>(n, [&](int64_t i, auto elements) {
      store(y.data() + i, load(x.data() + i, elements) * Acc<T>(0.3), elements);
    });
    bool same = true;
    for (int64_t i = 0; i < n; ++i) same &= y[i] == T(Acc<T>(x[i]) * Acc<T>(0.3));
    expect(same, type, "load, multiply, store", n);
    expect(y[n] == T(7.0f), type, "the value past the end", n);

    const double sum = sum_over<T>(n, [&](int64_t i, auto elements) {
      const auto v = load(x.data() + i, elements);
      return v * v;
    });
    expect(std::fabs(sum - truth) <= 1e-5 * truth, type, "sum_over", n);
  }

  // order of a Pair, what reads back after a store, streaming stores
  T* streamed = static_cast<T*>(std::aligned_alloc(64, 64 * ((sizeof(T) * kStep<T> + 63) / 64)));
  std::vector<T> x(kStep<T>);
  for (int64_t i = 0; i < kStep<T>; ++i) x[i] = T(1.001f * float(i + 1));
  const auto v = load(x.data()) * Acc<T>(1.01);
  stream(streamed, v);
  std::vector<T> stored(kStep<T>);
  store(stored.data(), v);
  const auto back = load(stored.data());
  bool same = true, in_order = true, rounds = true;
  for (int64_t i = 0; i < kStep<T>; ++i) {
    const int64_t s = slot<T>(i), lane = s % kLanes<Acc<T>>;
    const bool second = s >= kLanes<Acc<T>>;
    same &= streamed[i] == stored[i];
    in_order &= (second ? v.second[lane] : v.first[lane]) == Acc<T>(x[i]) * Acc<T>(1.01);
    rounds &= (second ? back.second[lane] : back.first[lane]) == Acc<T>(stored[i]);
  }
  expect(same, type, "stream", kStep<T>);
  expect(in_order, type, "slot", kStep<T>);
  expect(rounds, type, "load of what was stored", kStep<T>);
  std::free(streamed);
}

// Every 16-bit value survives a load and a store, NaN as NaN.
template <typename T>
void check_all_values(const char* type) {
  bool same = true;
  for (int64_t first = 0; first < 65536; first += kStep<T>) {
    std::vector<uint16_t> bits(kStep<T>), out(kStep<T>);
    for (int64_t i = 0; i < kStep<T>; ++i) bits[i] = uint16_t(first + i);
    store(reinterpret_cast<T*>(out.data()), load(reinterpret_cast<const T*>(bits.data())));
    for (int64_t i = 0; i < kStep<T>; ++i) {
      const float a = reinterpret_cast<const T*>(bits.data())[i];
      const float b = reinterpret_cast<const T*>(out.data())[i];
      same &= std::isnan(a) ? std::isnan(b) : bits[i] == out[i];
    }
  }
  expect(same, type, "the way there and back of some value", 65536);
}

int main() {
  check<float>("float");
  check<double>("double");
  check<Half>("half");
  check<BFloat16>("bfloat16");
  check_all_values<Half>("half");
  check_all_values<BFloat16>("bfloat16");
  std::printf("registers of %d bytes: %s\n", MC_REGISTER_BYTES, failures ? "wrong" : "right");
  return failures != 0;
}
