// SPDX-License-Identifier: MIT
// What kernels of the mLSTM share: sequences, gates, and products of a chunk.
//
// With F the sums of log sigmoid(f) and w_j = i_j - F_j, the weight of step j in step t is
// exp(w_j - c_t), where c_t is the largest w up to t, that of the initial state included, and the
// scale of states is m_t = F_t + c_t. With sigmoid gates log sigmoid(i) is in the place of i, c_t
// is -F_t and m_t 0. No exponent is positive.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../attention/problem.h"
#include "../common/math.h"

namespace metalcore::cpu::mlstm {

using product::Broadcast;
using product::kWidth;
using product::Lines;
using simd::Acc;
using simd::kLanes;
using simd::Vec;
using tiles::Heads;
using tiles::with_contiguous_rows;

struct Sizes {
  int64_t batch, heads, steps, size, value_size, sequences;
};

// Steps of one batch entry that belong together, and whose states they have.
struct Sequence {
  int64_t batch, first, count, state;
};

struct Rule {
  double eps;
  bool sigmoid, normalize, nx;

  const Rule& expect_known(const char* op) const {
    STD_TORCH_CHECK(normalize || sigmoid, op, ": normalize=False is for the sigmoid gate alone");
    return *this;
  }
};

inline Sizes sizes_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& i, const Tensor& f, const std::optional<Tensor>& starts) {
  expect_float(op, q);
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4 && i.dim() == 3, op,
                  ": q and v must be 4-D, gates 3-D");
  const Sizes s{q.size(0), q.size(1), q.size(2),
                q.size(3), v.size(3), starts ? starts->numel() - 1 : q.size(0)};
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(s.size > 0, op, ": queries must have values");
  STD_TORCH_CHECK(same_sizes(q, k) && k.scalar_type() == dtype && v.scalar_type() == dtype &&
                      v.size(0) == s.batch && v.size(1) == s.heads && v.size(2) == s.steps &&
                      i.size(0) == s.batch && i.size(1) == s.heads && i.size(2) == s.steps &&
                      same_sizes(i, f),
                  op, ": the shapes or dtypes of q, k, v, i, f do not go together");
  for (const Tensor* gate : {&i, &f}) {
    STD_TORCH_CHECK(is_float(gate->scalar_type()) &&
                        (gate->scalar_type() != ScalarType::Double || dtype == ScalarType::Double),
                    op, ": gates must be numbers, no wider than q's");
  }
  return s;
}

inline std::vector<Sequence> sequences_of(const char* op, const std::optional<Tensor>& starts,
                                          const Sizes& s) {
  std::vector<Sequence> found;
  if (!starts) {
    for (int64_t b = 0; b < s.batch; ++b) found.push_back({b, 0, s.steps, b});
    return found;
  }
  const ScalarType dtype = starts->scalar_type();
  STD_TORCH_CHECK(s.batch == 1 && starts->dim() == 1 && s.sequences >= 0 &&
                      (dtype == ScalarType::Int || dtype == ScalarType::Long),
                  op, ": packed sequences are one batch entry, with integer cu_seqlens");
  const Tensor ends = dense(to_dtype(*starts, ScalarType::Long));
  const int64_t* at = data<int64_t>(ends);
  STD_TORCH_CHECK(at[0] == 0 && at[s.sequences] == s.steps, op,
                  ": cu_seqlens must go from 0 to the steps");
  for (int64_t n = 0; n < s.sequences; ++n) {
    STD_TORCH_CHECK(at[n] <= at[n + 1], op, ": cu_seqlens must ascend");
    found.push_back({0, at[n], at[n + 1] - at[n], n});
  }
  return found;
}

// States of all sequences, or their gradients: [N, H, D, E], [N, H, D] and [N, H]; null for zeros.
template <typename A>
struct States {
  std::optional<Tensor> held[3];
  const A *c = nullptr, *n = nullptr, *m = nullptr;

  // `together`: all are there, or none of them.
  States(const char* op, const Sizes& s, const std::optional<Tensor>& c_in,
         const std::optional<Tensor>& n_in, const std::optional<Tensor>& m_in, bool together) {
    const int64_t sizes[] = {s.sequences, s.heads, s.size, s.value_size};
    const std::optional<Tensor>* given[] = {&c_in, &n_in, &m_in};
    const A** to[] = {&c, &n, &m};
    for (int64_t t = 0; t < 3; ++t) {
      STD_TORCH_CHECK(!together || given[t]->has_value() == c_in.has_value(), op,
                      ": states must be given together");
      if (!*given[t]) continue;
      const Tensor& x = **given[t];
      STD_TORCH_CHECK(x.dim() == 4 - t && x.scalar_type() == dtype_of<A>() &&
                          std::equal(sizes, sizes + 4 - t, x.sizes().data()),
                      op,
                      ": states must be [N, H, D, E], [N, H, D] and [N, H], in the type of sums");
      held[t] = dense(x);
      *to[t] = data<A>(*held[t]);
    }
  }
};

inline double log_sigmoid(double x) {
  return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
}

using simd::DoubleVec;

// The same of a register: log(1 + e) keeps its digits where e is small.
inline DoubleVec log_sigmoid(DoubleVec x) {
  const DoubleVec e = simd::exp(-simd::magnitude(x)), u = 1 + e;
  const DoubleVec log_u = u == 1 ? e : simd::log(u) * (e / (u - 1));
  return simd::smaller(x, DoubleVec{}) - log_u;
}

inline DoubleVec sigmoid(DoubleVec x) { return 1 / (1 + simd::exp(-x)); }

// Numbers of all steps, of which whole registers may be read wherever a step is.
struct PerStep : std::vector<double> {
  explicit PerStep(int64_t steps) : std::vector<double>(steps + kLanes<double>) {}

  DoubleVec at(int64_t t) const { return simd::load_as<DoubleVec>(data() + t); }

  // Each of the first `steps` becomes function(it).
  template <typename Function>
  void apply(int64_t steps, Function function) {
    for (int64_t t = 0; t < steps; t += kLanes<double>) {
      const DoubleVec v = function(at(t));
      std::memcpy(data() + t, &v, sizeof(v));
    }
  }
};

// Of each step of a sequence in one head: w, c and m, the least divisor exp(-m), and c before the
// first one.
struct Gates {
  int64_t steps;
  PerStep w, largest, m, least;
  double first;

  template <typename A>
  Gates(const A* i, const A* f, int64_t count, double m_initial, bool is_sigmoid)
      : steps(count), w(count), largest(count), m(count), least(count), first(m_initial) {
    std::copy_n(i, steps, w.begin());
    std::copy_n(f, steps, m.begin());
    const auto activate = [](DoubleVec v) { return log_sigmoid(v); };
    m.apply(steps, activate);
    if (is_sigmoid) w.apply(steps, activate);
    double total = 0, most = m_initial;
    for (int64_t t = 0; t < steps; ++t) {
      total += m[t];
      w[t] -= total;
      most = is_sigmoid ? -total : std::max(most, w[t]);
      largest[t] = most;
      m[t] = is_sigmoid ? 0 : total + most;
      least[t] = -m[t];
    }
    least.apply(steps, [](DoubleVec v) { return simd::exp(v); });
  }

  double largest_before(int64_t t) const { return t == 0 ? first : largest[t - 1]; }
};

// A register of doubles as values of A, and back.
template <typename A>
inline void store_as(A* to, DoubleVec v) {
  typedef A Part __attribute__((vector_size(sizeof(A) * kLanes<double>)));
  const Part part = __builtin_convertvector(v, Part);
  std::memcpy(to, &part, sizeof(part));
}

template <typename A>
inline DoubleVec load_double(const A* from) {
  typedef A Part __attribute__((vector_size(sizeof(A) * kLanes<double>)));
  return __builtin_convertvector(simd::load_as<Part>(from), DoubleVec);
}

// The steps of a chunk, and what their gates are to each other.
template <typename A>
struct Chunk {
  int64_t first, count;
  // Of each step: of what the chunk starts from (Bbar), and in what it ends with (Abar).
  A *from_start, *to_end;
  // w and c less the chunk's own last c, each as a sum of two; the second parts are 0 for double.
  A *w, *w_rest, *c, *c_rest;
  A kept;  // of the state before the chunk in the one after it (Gbar)

  static int64_t values(int64_t steps) { return 6 * tiles::Pieces<A>::size(padded(steps)); }
  static int64_t padded(int64_t steps) { return product::round_up(steps, kWidth<A>); }

  Chunk(tiles::Pieces<A>& pieces, int64_t steps) {
    for (A** p : {&from_start, &to_end, &w, &w_rest, &c, &c_rest}) *p = pieces.take(padded(steps));
  }

  void set(const Gates& g, int64_t from, int64_t steps) {
    first = from, count = steps;
    const double before = g.largest_before(from), last = g.largest[from + steps - 1];
    kept = A(std::exp(before - last));
    for (int64_t t = 0; t < steps; t += kLanes<double>) {
      const DoubleVec wt = g.w.at(from + t) - last, ct = g.largest.at(from + t) - last;
      store_as(w + t, wt);
      store_as(w_rest + t, wt - load_double(w + t));
      store_as(c + t, ct);
      store_as(c_rest + t, ct - load_double(c + t));
      store_as(from_start + t, simd::exp(before - g.largest.at(from + t)));
      store_as(to_end + t, simd::exp(wt));
    }
    for (int64_t t = steps; t < padded(steps); ++t) w[t] = w_rest[t] = 0;
  }

  // Calls body(j, weights) along the steps j <= t, a register at a time; weights beyond t are 0.
  template <typename Body>
  void weights(int64_t t, Body body) const {
    using V = Vec<A>;
    simd::IntOf<V> lane;
    for (int64_t x = 0; x < kLanes<A>; ++x) lane[x] = x;
    for (int64_t j = 0; j <= t; j += kLanes<A>) {
      const V difference =
          (simd::load_as<V>(w + j) - c[t]) + (simd::load_as<V>(w_rest + j) - c_rest[t]);
      const V weight = simd::exp(difference);
      body(j, lane + int32_t(j - t) <= 0 ? weight : V{});
    }
  }
};

template <typename A>
inline A sum_of(Vec<A> v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) return _mm512_reduce_add_ps((__m512)v);
  if constexpr (std::is_same_v<A, double>) return _mm512_reduce_add_pd((__m512d)v);
#endif
  A total = 0;
  for (int64_t x = 0; x < kLanes<A>; ++x) total += v[x];
  return total;
}

// The product of two rows of whole registers.
template <typename A>
inline A dot(const A* a, const A* b, int64_t n) {
  Vec<A> sum = {};
  for (int64_t x = 0; x < n; x += kLanes<A>) {
    sum += simd::load_as<Vec<A>>(a + x) * simd::load_as<Vec<A>>(b + x);
  }
  return sum_of<A>(sum);
}

// The same with the sum in double.
template <typename A>
inline DoubleVec add_products(DoubleVec sum, const A* a, const A* b, int64_t n) {
  for (int64_t x = 0; x < n; x += kLanes<A>) {
    alignas(MC_REGISTER_BYTES) A products[kLanes<A>];
    const Vec<A> v = simd::load_as<Vec<A>>(a + x) * simd::load_as<Vec<A>>(b + x);
    std::memcpy(products, &v, sizeof(v));
    for (int64_t y = 0; y < kLanes<A>; y += kLanes<double>) sum += load_double(products + y);
  }
  return sum;
}

// y = y * factor + x * by, of whole registers.
template <typename A>
inline void scale_and_add(A* y, A factor, const A* x, A by, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vec<A> v = simd::load_as<Vec<A>>(y + i) * factor + simd::load_as<Vec<A>>(x + i) * by;
    std::memcpy(y + i, &v, sizeof(v));
  }
}

template <typename A>
inline void scale(A* y, A factor, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vec<A> v = simd::load_as<Vec<A>>(y + i) * factor;
    std::memcpy(y + i, &v, sizeof(v));
  }
}

// Rows of a block in which those of a triangle end or start together.
constexpr int64_t kBlock = 16;

// S[t][j] = a_t b_j for j <= t: a in rows of `depth` values, b in padded rows of whole registers.
// `panel` holds kWidth rows of b.
template <typename A>
void multiply_lower(int64_t steps, Broadcast<A> a, Lines<const A> b, int64_t depth, int64_t width,
                    A* panel, Lines<A> s) {
  for (int64_t j = 0; j < steps; j += kWidth<A>) {
    product::to_lanes(b.from_row(j), width, panel);
    product::multiply<A>(steps - j, a.from_row(j), {panel, kWidth<A>}, s.from_row(j).from_column(j),
                         depth, false);
  }
}

// y[t] += sum over j <= t of p[t][j] x[j], n columns.
template <typename A>
void add_lower(int64_t steps, int64_t n, Lines<const A> p, Lines<const A> x, Lines<A> y) {
  for (int64_t t = 0; t < steps; t += kBlock) {
    const int64_t rows = std::min(kBlock, steps - t);
    product::multiply_wide<A>(rows, n, {p.values + t * p.row, p.row, 1}, x, y.from_row(t), t + rows,
                              true);
  }
}

// y[j] += sum over t >= j of p[t][j] x[t], n columns.
template <typename A>
void add_upper(int64_t steps, int64_t n, Lines<const A> p, Lines<const A> x, Lines<A> y) {
  for (int64_t j = 0; j < steps; j += kBlock) {
    const int64_t rows = std::min(kBlock, steps - j);
    product::multiply_wide<A>(rows, n, {p.values + j * p.row + j, 1, p.row}, x.from_row(j),
                              y.from_row(j), steps - j, true);
  }
}

// y[t][i] = sum over e of x[t][e] b[i][e], `rows` rows of b, which are padded to kWidth of them.
template <typename A>
void multiply_turned(int64_t steps, int64_t rows, Broadcast<A> x, Lines<const A> b, int64_t depth,
                     int64_t width, A* panel, Lines<A> y) {
  for (int64_t i = 0; i < rows; i += kWidth<A>) {
    product::to_lanes(b.from_row(i), width, panel);
    product::multiply<A>(steps, x, {panel, kWidth<A>}, y.from_column(i), depth, false);
  }
}

// The columns of a task's rows in memory: whole Pairs of T.
template <typename T>
inline int64_t padded(int64_t n) {
  return product::round_up(std::max<int64_t>(1, n), simd::kStep<T>);
}

inline Tensor empty_like_states(const Sizes& s, int64_t dim, ScalarType dtype) {
  const int64_t sizes[] = {s.sequences, s.heads, s.size, s.value_size};
  return empty(sizes, dim, dtype);
}

// In float or double, [B, H, T], from which kernels read gates.
inline Tensor gates_of(const Tensor& x, ScalarType dtype) {
  return dense(to_dtype(x, accumulate_dtype(dtype)));
}

}  // namespace metalcore::cpu::mlstm
