// SPDX-License-Identifier: MIT
// One step of the mLSTM on the CPU: m' = max(lf + m, i), C' = a C + b k v^T, n' = a n + b k,
// h = s q C' / (max(|s q n'|, exp(-m')) + eps), with a = exp(lf + m - m') and b = exp(i - m').
//
// The state is read once and written once. A task is some rows of columns of one head's state.

#include "mlstm.h"

namespace metalcore::cpu {
namespace {

using namespace mlstm;

// Columns of a task, as many as h keeps in the first cache.
constexpr int64_t kColumns = 256;

template <typename T>
struct Step {
  using A = Acc<T>;
  Sizes s;
  Rule rule;
  const T *q, *k, *v;
  const A *i, *f, *c, *n, *m;
  T* h;
  A *c_next, *n_next, *m_next;

  int64_t parts() const { return std::max<int64_t>(1, (s.value_size + kColumns - 1) / kColumns); }
  int64_t tasks() const { return s.batch * s.heads * parts(); }

  void operator()(int64_t task) const {
    const int64_t head = task / parts(), begin = task % parts() * kColumns;
    const int64_t D = s.size, E = s.value_size, count = std::min(kColumns, E - begin);
    const double lf = log_sigmoid(f[head]), before = double(m[head]);
    const double write = rule.sigmoid ? log_sigmoid(i[head]) : double(i[head]);
    const double after = rule.sigmoid ? 0 : std::max(lf + before, write);
    const A keep = A(std::exp(lf + before - after)), add = A(std::exp(write - after));
    const A root = A(1 / std::sqrt(double(D)));
    constexpr int64_t kPair = simd::kStep<A>;
    const int64_t width = product::round_up(std::max<int64_t>(1, count), kPair);
    A* const values = lanes::workspace<A>(2 * width);
    A* const sums = values + width;
    std::fill_n(sums, width, A(0));
    for (int64_t e = 0; e < count; ++e) values[e] = A(v[head * E + begin + e]);
    std::fill(values + count, values + width, A(0));
    A product = 0;
    for (int64_t d = 0; d < D; ++d) {
      const A key = A(k[head * D + d]) * add, query = A(q[head * D + d]) * root;
      const A next = keep * n[head * D + d] + key;
      product += query * next;
      if (begin == 0) n_next[head * D + d] = next;
      const A* const row = c + (head * D + d) * E + begin;
      A* const to = c_next + (head * D + d) * E + begin;
      simd::for_each_pair<A>(count, [&](int64_t e, auto elements) {
        const auto x = simd::load(row + e, elements) * keep + simd::load(values + e) * key;
        simd::store(to + e, x, elements);
        simd::store(sums + e, simd::load(sums + e) + x * query);
      });
    }
    const A divisor =
        rule.normalize ? std::max(std::abs(product), A(std::exp(-after))) + A(rule.eps) : A(1);
    for (int64_t e = 0; e < count; ++e) h[head * E + begin + e] = static_cast<T>(sums[e] / divisor);
    if (begin == 0) m_next[head] = A(after);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> mlstm_step(const Tensor& q_in, const Tensor& k_in,
                                                      const Tensor& v_in, const Tensor& i_in,
                                                      const Tensor& f_in, const Tensor& c,
                                                      const Tensor& n, const Tensor& m, double eps,
                                                      bool sigmoid, bool normalize, bool nx) {
  const char* op = "mlstm_step";
  expect_float(op, q_in);
  const ScalarType dtype = q_in.scalar_type(), sums = accumulate_dtype(dtype);
  STD_TORCH_CHECK(q_in.dim() == 3 && v_in.dim() == 3 && i_in.dim() == 2, op,
                  ": q and v must be 3-D, gates 2-D");
  const Sizes s{q_in.size(0), q_in.size(1), 1, q_in.size(2), v_in.size(2), q_in.size(0)};
  STD_TORCH_CHECK(s.size > 0, op, ": queries must have values");
  STD_TORCH_CHECK(same_sizes(q_in, k_in) && k_in.scalar_type() == dtype &&
                      v_in.scalar_type() == dtype && v_in.size(0) == s.batch &&
                      v_in.size(1) == s.heads && i_in.size(0) == s.batch &&
                      i_in.size(1) == s.heads && same_sizes(i_in, f_in),
                  op, ": the shapes or dtypes of q, k, v, i, f do not go together");
  for (const Tensor* gate : {&i_in, &f_in}) {
    STD_TORCH_CHECK(is_float(gate->scalar_type()) &&
                        (gate->scalar_type() != ScalarType::Double || dtype == ScalarType::Double),
                    op, ": gates must be numbers, no wider than q's");
  }
  const Tensor q = dense(q_in), k = dense(k_in), v = dense(v_in), i = gates_of(i_in, dtype),
               f = gates_of(f_in, dtype);
  Tensor h = cpu::empty_like(v), c_next = empty_like_states(s, 4, sums),
         n_next = empty_like_states(s, 3, sums), m_next = empty_like_states(s, 2, sums);
  metalcore_variant = "state";
  dispatch_float(dtype, op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const States<A> from(op, s, c, n, m, true);
    const Step<T> run{s,
                      Rule{eps, sigmoid, normalize, nx}.expect_known(op),
                      data<T>(q),
                      data<T>(k),
                      data<T>(v),
                      data<A>(i),
                      data<A>(f),
                      from.c,
                      from.n,
                      from.m,
                      mutable_data<T>(h),
                      mutable_data<A>(c_next),
                      mutable_data<A>(n_next),
                      mutable_data<A>(m_next)};
    parallel_for(0, run.tasks(), grain_rows(s.size * std::min(s.value_size, kColumns)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t task = begin; task < end; ++task) run(task);
                 });
  });
  return {h, c_next, n_next, m_next};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("mlstm_step", kernel<&mlstm_step>); }

}  // namespace metalcore::cpu
