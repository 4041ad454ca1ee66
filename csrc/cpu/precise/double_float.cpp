// SPDX-License-Identifier: MIT
// Functions of numbers that are sums of two floats, in the float64 that a CPU has.

#include "double_float.h"

#include <array>

#include "../common/text.h"

namespace metalcore::precise {
namespace {

using Optional = std::optional<Tensor>;

enum Function { kAdd, kSub, kMul, kDiv, kFma, kSqrt, kExp, kLog, kFunctionCount };

constexpr std::array<const char*, kFunctionCount> kNames = {"add", "sub",  "mul", "div",
                                                            "fma", "sqrt", "exp", "log"};

int operands(int function) { return function == kFma ? 3 : function < kFma ? 2 : 1; }

double value_of(int function, double x, double y, double z) {
  switch (function) {
    case kAdd:
      return x + y;
    case kSub:
      return x - y;
    case kMul:
      return x * y;
    case kDiv:
      return x / y;
    case kFma:
      return std::fma(x, y, z);
    case kSqrt:
      return std::sqrt(x);
    case kExp:
      return std::exp(x);
    default:
      return std::log(x);
  }
}

template <typename T, int kFunction>
void compute(const std::array<Tensor, 6>& in, const Tensor& high, const Tensor& low) {
  const Values<T> x(in[0], in[1]), y(in[2], in[3]), z(in[4], in[5]);
  const Results<T> result(high, low);
  cpu::parallel_for(0, high.numel(), cpu::kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) result.set(i, value_of(kFunction, x[i], y[i], z[i]));
  });
}

template <typename T, int... kFunctions>
void choose(int function, const std::array<Tensor, 6>& in, const Tensor& high, const Tensor& low,
            std::integer_sequence<int, kFunctions...>) {
  ((function == kFunctions ? compute<T, kFunctions>(in, high, low) : void()), ...);
}

Pair double_float(const Tensor& x, const Tensor& x_low, const Optional& y, const Optional& y_low,
                  const Optional& z, const Optional& z_low, StringHandle name_in) {
  const char* op = "double_float";
  const std::string name = cpu::taken(name_in);
  const int function = int(std::find(kNames.begin(), kNames.end(), name) - kNames.begin());
  STD_TORCH_CHECK(function < kFunctionCount, op, ": there is no function ", name);
  expect_pair(op, x, x_low);
  const int count = operands(function);
  const bool has_two = y.has_value() && y_low.has_value();
  const bool has_three = z.has_value() && z_low.has_value();
  STD_TORCH_CHECK(has_two == (count > 1) && has_three == (count > 2) &&
                      y.has_value() == y_low.has_value() && z.has_value() == z_low.has_value(),
                  op, ": ", name, " is of ", count, " numbers");
  const Tensor of_x = cpu::dense(x), below_x = cpu::dense(x_low);
  // numbers that a function does not look at
  std::array<Tensor, 6> in = {of_x, below_x, of_x, below_x, of_x, below_x};
  for (int i = 1; i < count; ++i) {
    const Optional &more = i == 1 ? y : z, &more_low = i == 1 ? y_low : z_low;
    cpu::expect_like(op, "y and z", *more, x);
    cpu::expect_like(op, "y and z", *more_low, x);
    in[2 * i] = cpu::dense(*more);
    in[2 * i + 1] = cpu::dense(*more_low);
  }
  const Tensor high = cpu::empty_like(of_x), low = cpu::empty_like(of_x);
  metalcore_variant = "float64";
  dispatch_pair(high, [&](auto type) {
    choose<decltype(type)>(function, in, high, low,
                           std::make_integer_sequence<int, kFunctionCount>());
  });
  return {high, low};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("double_float", cpu::kernel<&double_float>);
}

}  // namespace metalcore::precise
