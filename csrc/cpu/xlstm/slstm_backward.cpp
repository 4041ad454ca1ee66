// SPDX-License-Identifier: MIT
// The gradient of the sLSTM, on the CPU. With dY_t = dy_t + clip(R^T g_(t+1)):
//   dc += dY o / n,  dn -= dY y / n
//   g_i = add (z dc + dn),  g_f = keep (c' dc + n' dn) (1 - sigmoid(f)),  g_z = add dc (1 - z^2),
//   g_o = (1 - o) y dY,  dc' = keep dc,  dn' = keep dn,  dR = sum y' g
// for add = exp(i - m), keep = exp(lf + m' - m). The last states have the scale exp(-m), whose
// gradient goes to the step that m is of: to i there, and to f in the steps that kept it.
//
// A task is a head of a few batch entries: all steps again, which are kept, then back. Its part of
// the gradients of the weights is its own; they are added up in order.

#include <memory>

#include "slstm.h"

namespace metalcore::cpu {
namespace {

using namespace slstm;

// What is kept of all steps of a task: rows of steps, then of entries.
template <typename A>
struct Kept {
  int64_t rows, dp;
  std::unique_ptr<A[]> gates, forgets, y, c, n, m;

  Kept(int64_t steps, int64_t rows_, int64_t dp_) : rows(rows_), dp(dp_) {
    const int64_t each = rows * dp;
    gates = std::make_unique<A[]>(steps * each * kGates);
    forgets = std::make_unique_for_overwrite<A[]>(steps * each);
    for (auto* x : {&y, &c, &n, &m}) *x = std::make_unique_for_overwrite<A[]>((steps + 1) * each);
  }

  // Before step t.
  slstm::States<A> before(int64_t t) const {
    return slstm::States<A>{y.get(), c.get(), n.get(), m.get()}.at(t * rows * dp);
  }
  A* gates_of(int64_t t) const { return gates.get() + t * rows * dp * kGates; }
  A* forgets_of(int64_t t) const { return forgets.get() + t * rows * dp; }
};

template <typename T>
struct Backward {
  using A = Acc<T>;
  using V = Vec<A>;
  Sizes s;
  const Weights<A>& weights;
  std::optional<double> clip;
  const T *dy, *x;
  const A *dlast, *states;
  T* dx;
  A *dweights, *dbias, *dstates;  // of weights and bias: of each task, rows of 4 * dp

  void operator()(int64_t number) const {
    const Task<T> task(s, weights, number);
    const int64_t dp = weights.dp, each = task.rows * dp, width = weights.width();
    const Kept<A> kept(s.steps, task.rows, dp);
    task.start(states, kept.before(0));
    for (int64_t t = 0; t < s.steps; ++t) {
      task.run(x, t, kept.gates_of(t), kept.before(t), kept.before(t + 1), kept.forgets_of(t));
    }
    Pieces<A> memory(5 * Pieces<A>::size(each));
    // of states: dY in the place of y
    const slstm::States<A> d{memory.take(each), memory.take(each), memory.take(each),
                             memory.take(each)};
    A* const from_later = memory.take(each);
    task.start(dlast, d);
    std::copy_n(d.y, each, from_later);
    const auto last = kept.before(s.steps);
    for (int64_t i = 0; s.steps && i < each; ++i) {
      d.m[i] -= d.c[i] * last.c[i] + d.n[i] * last.n[i];
    }
    for (int64_t t = s.steps - 1; t >= 0; --t) {
      for (int64_t r = 0; r < task.rows; ++r) pull(task, t, r, kept, d, from_later);
      std::fill_n(from_later, each, A(0));
      multiply_rows<A>(task.rows, dp, {kept.gates_of(t), width},
                       {weights.from_gates(task.head), dp}, {from_later, dp}, width);
      if (clip) bound(from_later, each);
    }
    of_weights(task, number, kept);
    if (!dstates) return;
    const auto first = kept.before(0);
    for (int64_t i = 0; s.steps && i < each; ++i) {
      d.m[i] += d.c[i] * first.c[i] + d.n[i] * first.n[i];
    }
    task.end({from_later, d.c, d.n, d.m}, dstates);
  }

  void bound(A* values, int64_t count) const {
    const V most = V{} + A(*clip);
    for (int64_t i = 0; i < count; i += kLanes<A>) {
      const V v = simd::load_as<V>(values + i);
      put<A>(values + i, simd::smaller(simd::larger(v, -most), most));
    }
  }

  // Row r of step t: its gates become their gradients.
  void pull(const Task<T>& task, int64_t t, int64_t r, const Kept<A>& kept, slstm::States<A> d_all,
            const A* from_later) const {
    const int64_t dp = weights.dp, width = weights.width(), row = r * dp;
    A* const gates = kept.gates_of(t) + r * width;
    const auto before = kept.before(t).at(row), after = kept.before(t + 1).at(row),
               d = d_all.at(row);
    const T* const up = dy + task.result(r, t);
    simd::for_each_pair<T>(s.size, [&](int64_t i, auto elements) {
      simd::store(d.y + i,
                  simd::load_in_order(up + i, elements) + simd::load(from_later + row + i));
    });
    const auto load = [](const A* p) { return simd::load_as<V>(p); };
    for (int64_t i = 0; i < dp; i += kLanes<A>) {
      A *const gi = gates + i, *const gf = gi + dp, *const gz = gf + dp, *const go = gz + dp;
      const V add = load(gi), keep = load(gf), z = load(gz), o = load(go), dY = load(d.y + i);
      const V w = dY / load(after.n + i), y = load(after.y + i), dm = load(d.m + i);
      const V dc = load(d.c + i) + w * o, dn = load(d.n + i) - w * y;
      const V n = load(before.n + i), c = n == 0 ? V{} : load(before.c + i);
      // m is that of i
      const auto takes_i = add == 1;
      put<A>(gi, add * (z * dc + dn) + (takes_i ? dm : V{}));
      const V passed = takes_i ? V{} : dm;
      put<A>(gf, (keep * (c * dc + n * dn) + passed) * load(kept.forgets_of(t) + row + i));
      put<A>(gz, add * dc * ((1 - z) * (1 + z)));
      put<A>(go, (1 - o) * y * dY);
      put<A>(d.c + i, keep * dc);
      put<A>(d.n + i, keep * dn);
      put<A>(d.m + i, passed);
    }
    for (int64_t g = 0; g < kGates; ++g) {
      narrow_row(gates + g * dp, s.size, dx + task.gate(r, t, g));
    }
  }

  // dR = sum y' g and db = sum g over all steps of the task.
  void of_weights(const Task<T>& task, int64_t number, const Kept<A>& kept) const {
    const int64_t dp = weights.dp, width = weights.width(), count = s.steps * task.rows;
    A *const dR = dweights + number * s.size * width, *const db = dbias + number * width;
    std::fill_n(dR, s.size * width, A(0));
    std::fill_n(db, width, A(0));
    constexpr int64_t kAtOnce = 64;
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const A* const g = kept.gates.get() + first * width;
      const int64_t depth = std::min(kAtOnce, count - first);
      product::multiply_wide<A>(s.size, width, {kept.y.get() + first * dp, 1, dp}, {g, width},
                                {dR, width}, depth, true);
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t j = 0; j < width; ++j) db[j] += g[k * width + j];
      }
    }
  }
};

// The sum of what all tasks have of a head, in order, as [H, rows, 4, D].
template <typename A>
Tensor add_up(const Sizes& s, const Weights<A>& weights, const A* parts, int64_t rows,
              bool with_rows) {
  const int64_t of_weights[] = {s.heads, s.size, kGates, s.size},
                of_bias[] = {s.heads, kGates, s.size};
  Tensor total = with_rows ? empty(of_weights, 4, dtype_of<A>()) : empty(of_bias, 3, dtype_of<A>());
  A* to = mutable_data<A>(total);
  for (int64_t row = 0; row < s.heads * rows * kGates; ++row) {
    for (int64_t e = 0; e < s.size; ++e) {
      A sum = 0;
      for (int64_t b = 0; b < s.blocks(); ++b) {
        sum += parts[(b * s.heads * rows * kGates + row) * weights.dp + e];
      }
      *to++ = sum;
    }
  }
  return total;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> slstm_backward(
    const Tensor& dy_in, std::optional<Tensor> dlast_in, const Tensor& x_in,
    const Tensor& recurrent, std::optional<Tensor> bias, std::optional<Tensor> states_in,
    std::optional<double> clip) {
  const char* op = "slstm_backward";
  const Sizes s = sizes_of(op, x_in, recurrent, bias, states_in, clip);
  const Tensor x = dense(x_in), dy = dense(dy_in), states = states_in ? dense(*states_in) : x,
               dlast = dlast_in ? dense(*dlast_in) : x;
  const ScalarType dtype = x.scalar_type(), sums = accumulate_dtype(dtype);
  const int64_t sizes[] = {s.batch, s.steps, s.heads, s.size};
  const int64_t of_state[] = {s.batch, 4, s.heads, s.size};
  constexpr int64_t kNothing = 0;
  STD_TORCH_CHECK(dy.scalar_type() == dtype && std::ranges::equal(dy.sizes(), sizes), op,
                  ": dy must be [B, T, H, D], in the dtype of x");
  STD_TORCH_CHECK(
      !dlast_in || (dlast.scalar_type() == sums && std::ranges::equal(dlast.sizes(), of_state)), op,
      ": dlast must be [B, 4, H, D], in the type of sums");
  Tensor dx = cpu::empty_like(x), nothing = empty(&kNothing, 1, dtype);
  Tensor dstates = states_in ? empty(of_state, 4, sums) : nothing;
  metalcore_variant = "steps";
  return dispatch_float(dtype, op, [&](auto type) -> std::tuple<Tensor, Tensor, Tensor, Tensor> {
    using T = decltype(type);
    using A = Acc<T>;
    const Weights<A> weights(s, recurrent, bias, true);
    const int64_t width = weights.width();
    const auto dweights = std::make_unique_for_overwrite<A[]>(s.tasks() * s.size * width);
    const auto dbias = std::make_unique_for_overwrite<A[]>(s.tasks() * width);
    const Backward<T> run{s,
                          weights,
                          clip,
                          data<T>(dy),
                          data<T>(x),
                          dlast_in ? data<A>(dlast) : nullptr,
                          states_in ? data<A>(states) : nullptr,
                          mutable_data<T>(dx),
                          dweights.get(),
                          dbias.get(),
                          states_in ? mutable_data<A>(dstates) : nullptr};
    tiles::for_each_task(s.tasks(), s.is_worth_threads(), run);
    const Tensor dR = add_up<A>(s, weights, dweights.get(), s.size, true);
    return {dx, to_dtype(dR, recurrent.scalar_type()),
            bias ? to_dtype(add_up<A>(s, weights, dbias.get(), 1, false), bias->scalar_type())
                 : nothing,
            dstates};
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("slstm_backward", kernel<&slstm_backward>);
}

}  // namespace metalcore::cpu
