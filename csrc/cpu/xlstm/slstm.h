// SPDX-License-Identifier: MIT
// What the sLSTM and its gradient share: sizes, weights, and a step of some batch entries in a
// head. Gates are in the order i, f, z, o; rows of a head are padded to whole registers.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../attention/problem.h"
#include "../common/math.h"

namespace metalcore::cpu::slstm {

using product::Lines;
using simd::Acc;
using simd::kLanes;
using simd::Vec;
using tiles::Pieces;

constexpr int64_t kGates = 4;

struct Sizes {
  int64_t batch, steps, heads, size;

  // Batch entries of a task: they share the weights of a head. As many as a product takes at once,
  // fewer where there would be few tasks; by the shape alone, so that sums are the same always.
  int64_t rows() const {
    constexpr int64_t kFewTasks = 4;
    int64_t rows = product::kRows;
    while (rows > 1 && heads * ((batch + rows - 1) / rows) < kFewTasks) rows /= 2;
    return rows;
  }
  int64_t blocks() const { return (batch + rows() - 1) / rows(); }
  int64_t tasks() const { return heads * blocks(); }
  bool is_worth_threads() const {
    return batch * steps * heads * size * size * kGates >= lanes::kGrainFlops;
  }
};

inline Sizes sizes_of(const char* op, const Tensor& x, const Tensor& recurrent,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& states,
                      const std::optional<double>& clip) {
  expect_float(op, x);
  expect_float(op, recurrent);
  STD_TORCH_CHECK(x.dim() == 5 && recurrent.dim() == 4, op,
                  ": x must be [B, T, 4, H, D], recurrent [H, D, 4, D]");
  const Sizes s{x.size(0), x.size(1), x.size(3), x.size(4)};
  STD_TORCH_CHECK(x.size(2) == kGates && s.size > 0 && recurrent.size(0) == s.heads &&
                      recurrent.size(1) == s.size && recurrent.size(2) == kGates &&
                      recurrent.size(3) == s.size,
                  op, ": the shapes of x and recurrent do not go together");
  STD_TORCH_CHECK(
      !bias || (is_float(bias->scalar_type()) && bias->dim() == 3 && bias->size(0) == s.heads &&
                bias->size(1) == kGates && bias->size(2) == s.size),
      op, ": bias must be [H, 4, D]");
  STD_TORCH_CHECK(
      !states || (states->dim() == 4 && states->size(0) == s.batch && states->size(1) == 4 &&
                  states->size(2) == s.heads && states->size(3) == s.size &&
                  states->scalar_type() == accumulate_dtype(x.scalar_type())),
      op, ": states must be [B, 4, H, D], in the type of sums");
  STD_TORCH_CHECK(!clip || *clip >= 0, op, ": clip must not be negative");
  return s;
}

template <typename A>
int64_t padded(int64_t n) {
  return product::round_up(n, 2 * kLanes<A>);
}

// The weights of all heads, in the type of sums: [H][D][4 * dp] from, to; and the other way round.
template <typename A>
struct Weights {
  int64_t size, dp;
  std::vector<A> to, from, bias;

  Weights(const Sizes& s, const Tensor& recurrent, const std::optional<Tensor>& bias_in,
          bool both_ways)
      : size(s.size),
        dp(padded<A>(s.size)),
        to(s.heads * size * kGates * dp),
        from(both_ways ? s.heads * kGates * dp * dp : 0),
        bias(s.heads * kGates * dp) {
    const Tensor R = dense(to_dtype(recurrent, dtype_of<A>()));
    const A* values = data<A>(R);
    for (int64_t row = 0; row < s.heads * size; ++row) {
      const int64_t head = row / size, d = row % size;
      for (int64_t g = 0; g < kGates; ++g, values += size) {
        std::copy_n(values, size, to.data() + (row * kGates + g) * dp);
        for (int64_t e = 0; both_ways && e < size; ++e) {
          from[((head * kGates + g) * dp + e) * dp + d] = values[e];
        }
      }
    }
    if (!bias_in) return;
    const Tensor b = dense(to_dtype(*bias_in, dtype_of<A>()));
    const A* const biases = data<A>(b);
    for (int64_t row = 0; row < s.heads * kGates; ++row) {
      std::copy_n(biases + row * size, size, bias.data() + row * dp);
    }
  }

  int64_t width() const { return kGates * dp; }
  const A* to_gates(int64_t head) const { return to.data() + head * size * width(); }
  const A* from_gates(int64_t head) const { return from.data() + head * width() * dp; }
};

// y (+)= x times `depth` rows of b, for a single row: more registers of it at once than of many.
template <typename A>
inline void multiply_row(int64_t n, const A* x, Lines<const A> b, A* y, int64_t depth) {
  constexpr int kAtOnce = 8;
  constexpr int64_t L = kLanes<A>;
  int64_t j = 0;
  for (; j + kAtOnce * L <= n; j += kAtOnce * L) {
    Vec<A> sum[kAtOnce];
#pragma GCC unroll 8
    for (int r = 0; r < kAtOnce; ++r) sum[r] = simd::load_as<Vec<A>>(y + j + r * L);
    const A* line = b.values + j;
    for (int64_t k = 0; k < depth; ++k, line += b.row) {
#pragma GCC unroll 8
      for (int r = 0; r < kAtOnce; ++r) sum[r] += simd::load_as<Vec<A>>(line + r * L) * x[k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < kAtOnce; ++r) std::memcpy(y + j + r * L, &sum[r], sizeof(sum[r]));
  }
  if (j < n)
    product::multiply_wide<A>(1, n - j, {x, 0, 1}, b.from_column(j), {y + j, n}, depth, true);
}

template <typename A>
inline void multiply_rows(int64_t rows, int64_t n, Lines<const A> x, Lines<const A> b, Lines<A> y,
                          int64_t depth) {
  if (rows == 1) return multiply_row<A>(n, x.values, b, y.values, depth);
  product::multiply_wide<A>(rows, n, {x.values, x.row, 1}, b, y, depth, true);
}

template <typename V>
inline V sigmoid(V x) {
  return 1 / (1 + simd::exp(-x));
}

template <typename A>
inline void put(A* to, Vec<A> v) {
  std::memcpy(to, &v, sizeof(v));
}

// Rows of the states of a task, dp values each.
template <typename A>
struct States {
  A *y, *c, *n, *m;

  States at(int64_t value) const { return {y + value, c + value, n + value, m + value}; }
};

// A register of a step: `gates` point to i, f, z and o, dp apart, which become exp(i - m), what is
// kept, tanh(z) and sigmoid(o). `forgets` gets 1 - sigmoid(f) where it is wanted.
template <typename A>
inline void step(A* gates, int64_t dp, States<A> before, States<A> after, A* forgets) {
  using V = Vec<A>;
  const auto load = [](const A* p) { return simd::load_as<V>(p); };
  const V i = load(gates), f = load(gates + dp), n = load(before.n);
  // log sigmoid(f) = min(f, 0) - log(1 + e), whose digits are kept where e is small
  const V e = simd::exp(-simd::magnitude(f)), u = 1 + e;
  const V log_u = u == 1 ? e : simd::log(u) * (e / (u - 1));
  const V kept = (simd::smaller(f, V{}) - log_u) + load(before.m);
  const auto empty = n == 0;
  const V m = empty ? i : simd::larger(kept, i);
  const V add = simd::exp(i - m), keep = empty ? V{} : simd::exp(kept - m);
  const V z = simd::Tanh<V>(load(gates + 2 * dp)).value, o = sigmoid(load(gates + 3 * dp));
  const V c_next = (empty ? V{} : keep * load(before.c)) + add * z, n_next = keep * n + add;
  put<A>(after.c, c_next);
  put<A>(after.n, n_next);
  put<A>(after.m, m);
  put<A>(after.y, o * (c_next / n_next));
  if (!forgets) return;
  put<A>(gates, add);
  put<A>(gates + dp, keep);
  put<A>(gates + 2 * dp, z);
  put<A>(gates + 3 * dp, o);
  put<A>(forgets, (f > 0 ? e : 1 + V{}) / u);
}

// A head of a few batch entries.
template <typename T>
struct Task {
  using A = Acc<T>;
  const Sizes& s;
  const Weights<A>& weights;
  int64_t head, entry, rows;

  Task(const Sizes& sizes, const Weights<A>& w, int64_t task)
      : s(sizes),
        weights(w),
        head(task % s.heads),
        entry(task / s.heads * s.rows()),
        rows(std::min(s.rows(), s.batch - entry)) {}

  // Where rows of x, of y and of a state stand.
  int64_t gate(int64_t row, int64_t t, int64_t g) const {
    return ((((entry + row) * s.steps + t) * kGates + g) * s.heads + head) * s.size;
  }
  int64_t result(int64_t row, int64_t t) const {
    return (((entry + row) * s.steps + t) * s.heads + head) * s.size;
  }
  int64_t state(int64_t row) const { return ((entry + row) * 4 * s.heads + head) * s.size; }
  int64_t part() const { return s.heads * s.size; }

  // Zeros, or states [B, 4, H, D] of this task.
  void start(const A* from, States<A> to) const {
    A* const parts[] = {to.y, to.c, to.n, to.m};
    for (int64_t p = 0; p < 4; ++p) {
      std::fill_n(parts[p], rows * weights.dp, A(0));
      for (int64_t r = 0; from && r < rows; ++r) {
        std::copy_n(from + p * part() + state(r), s.size, parts[p] + r * weights.dp);
      }
    }
  }

  void end(States<A> from, A* to) const {
    const A* const parts[] = {from.y, from.c, from.n, from.m};
    for (int64_t p = 0; p < 4; ++p) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(parts[p] + r * weights.dp, s.size, to + p * part() + state(r));
      }
    }
  }

  // Step t, from `before` to `after`, which may be the same. gates: [rows][4 * dp].
  void run(const T* x, int64_t t, A* gates, States<A> before, States<A> after, A* forgets) const {
    const int64_t dp = weights.dp, width = weights.width();
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < kGates; ++g) {
        const T* const from = x + gate(r, t, g);
        const A* const bias = weights.bias.data() + (head * kGates + g) * dp;
        simd::for_each_pair<T>(s.size, [&](int64_t i, auto elements) {
          const auto sum = simd::load_in_order(from + i, elements) + simd::load(bias + i);
          simd::store(gates + r * width + g * dp + i, sum);
        });
      }
    }
    multiply_rows<A>(rows, width, {before.y, dp}, {weights.to_gates(head), width}, {gates, width},
                     s.size);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < dp; i += kLanes<A>) {
        const int64_t at = r * dp + i;
        step<A>(gates + r * width + i, dp, before.at(at), after.at(at),
                forgets ? forgets + at : nullptr);
      }
    }
  }
};

template <typename T>
inline void narrow_row(const Acc<T>* from, int64_t n, T* to) {
  simd::for_each_pair<T>(n, [&](int64_t i, auto elements) {
    simd::store_in_order(to + i, simd::load(from + i), elements);
  });
}

}  // namespace metalcore::cpu::slstm
