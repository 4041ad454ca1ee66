// SPDX-License-Identifier: MIT
// The gradient of the mLSTM over sequences, on the CPU. With u = dh / R, R the divisor of h, and
// dl_t = -sign(l_t) (dh_t h_t) / R_t where |l_t| > exp(-m_t) (0 where nx), P[t][j] = (u_t v_j +
// dl_t) exp(w_j - c_t), and dC, dn the gradients of the state after a chunk, C, n the state before
// it:
//   dq_t = s (P K + kept_t (u_t C^T + dl_t n)),  dk_j = s P^T Q + Abar_j (dC v_j + dn)
//   dv_j = A^T U + Abar_j k_j dC,  dC' = Gbar dC + (kept s Q)^T U,  dn' = Gbar dn + (kept s Q)^T dl
// Of the gates: dw_j = k_j dk_j, and dF_t = q_t dq_t - dw_t, as every term has exp(F_t) and
// exp(w_j). The exact gradient has what eps makes of m besides: dm_t = -(dh_t h_t) eps / R_t, which
// goes to F_t and to the step that c_t is of. Sums over time are in double.
//
// A task is a head of a sequence: first the states before each chunk, turned, then all chunks from
// the last one on.

#include "mlstm_backward_work.h"

namespace metalcore::cpu {
namespace {

using namespace mlstm;

template <typename T>
struct Backward {
  using A = Acc<T>;
  using Work = mlstm::Work<T>;
  Sizes s;
  Rule rule;
  int64_t chunk;
  Heads<const T> q, k, v, dh;
  const A *i, *f;
  States<A> from, dlast;
  Heads<T> dq, dk, dv;
  A *di, *df, *dc, *dn, *dm;
  std::vector<Sequence> sequences;

  // Terms of the gates: of each step q dq, k dk and dm; of each chunk dF from all later ones, which
  // is the product of the state after it and its gradient. Without it, the rounding of all steps
  // to come would add up in each.
  struct Terms {
    std::vector<double> of_q, of_k, of_m, later;
    Terms(int64_t steps, int64_t chunks) : of_q(steps), of_k(steps), of_m(steps), later(chunks) {}
  };

  void operator()(int64_t task) const {
    const int64_t head = task % s.heads;
    const Sequence& sequence = sequences[task / s.heads];
    const int64_t D = s.size, E = s.value_size, state = sequence.state * s.heads + head;
    const int64_t chunks = (sequence.count + chunk - 1) / chunk;
    Work work(D, E, chunk, chunks);
    const int64_t each = work.each_state(E);
    A* const states = work.states;
    start(state, work.dp, states);
    const int64_t gate = (sequence.batch * s.heads + head) * s.steps + sequence.first;
    const double m0 = from.m ? double(from.m[state]) : 0;
    const Gates gates(i + gate, f + gate, sequence.count, m0, rule.sigmoid);
    for (int64_t c = 0; c < chunks; ++c) {
      advance(sequence, head, gates, c * chunk, states + c * each, work);
    }
    end(state, work);
    Terms terms(sequence.count, std::max<int64_t>(1, chunks));
    terms.later[0] = inner(work, states);
    for (int64_t c = chunks - 1; c >= 0; --c) {
      terms.later[c] = inner(work, states + (c + 1) * each);
      run(sequence, head, gates, c * chunk, states + c * each, work, terms);
    }
    const double carried = finish(gates, terms, gate, state);
    begin(state, work, states, carried);
  }

  void start(int64_t state, int64_t dp, A* to) const {
    const int64_t D = s.size, E = s.value_size;
    std::fill_n(to, E * dp + dp, A(0));
    if (!from.n) return;  // c is null where values have no size
    for (int64_t d = 0; d < D; ++d) {
      for (int64_t e = 0; e < E; ++e) to[e * dp + d] = from.c[(state * D + d) * E + e];
    }
    std::copy_n(from.n + state * D, D, to + E * dp);
  }

  // The state after a chunk from that before it, which it follows in memory.
  void advance(const Sequence& sequence, int64_t head, const Gates& gates, int64_t t,
               const A* before, Work& w) const {
    const int64_t steps = std::min(chunk, sequence.count - t), at = sequence.first + t;
    const int64_t E = s.value_size, each = E * w.dp + w.dp;
    A* const after = const_cast<A*>(before) + each;
    w.here.set(gates, t, steps);
    product::widen_rows(k.at(sequence.batch, head, at), k.row, steps, s.size, w.ks);
    product::widen_rows(v.at(sequence.batch, head, at), v.row, steps, E, w.vs);
    for (int64_t x = 0; x < each; x += kLanes<A>) {
      const Vec<A> v = simd::load_as<Vec<A>>(before + x) * w.here.kept;
      std::memcpy(after + x, &v, sizeof(v));
    }
    for (int64_t j = 0; j < steps; ++j) {
      scale(w.vs.values + j * w.ep, w.here.to_end[j], w.ep);
      scale_and_add(after + E * w.dp, A(1), w.ks.values + j * w.dp, w.here.to_end[j], w.dp);
    }
    product::multiply_wide<A>(E, w.dp, {w.vs.values, 1, w.ep}, {w.ks.values, w.dp}, {after, w.dp},
                              steps, true);
  }

  // dC and dn of the last state.
  void end(int64_t state, Work& w) const {
    const int64_t D = s.size, E = s.value_size;
    for (int64_t d = 0; d < D; ++d) {
      if (dlast.c) std::copy_n(dlast.c + (state * D + d) * E, E, w.dC.values + d * w.ep);
      if (dlast.n) w.dn[d] = dlast.n[state * D + d];
    }
  }

  // The product of a state, C^T and n, and its gradient.
  double inner(Work& w, const A* state) const {
    const int64_t E = s.value_size;
    DoubleVec total = add_products(DoubleVec{}, w.dn, state + E * w.dp, w.dp);
    for (int64_t d = 0; d < w.dp; d += kWidth<A>) {
      product::to_lanes<A>({w.dC.values + d * w.ep, w.ep}, w.ep, w.panel);
      const int64_t width = std::min(kWidth<A>, w.dp - d);
      for (int64_t e = 0; e < E; ++e) {
        total = add_products(total, w.panel + e * kWidth<A>, state + e * w.dp + d, width);
      }
    }
    return sum_of<double>(total);
  }

  // What a chunk's steps give to each other, and the gradients of all their inputs.
  void run(const Sequence& sequence, int64_t head, const Gates& gates, int64_t t, const A* before,
           Work& w, Terms& terms) const {
    const int64_t steps = std::min(chunk, sequence.count - t), at = sequence.first + t;
    const int64_t D = s.size, E = s.value_size, b = sequence.batch;
    const A root = A(1 / std::sqrt(double(D))), *n = before + E * w.dp;
    Chunk<A>& here = w.here;
    here.set(gates, t, steps);
    product::widen_rows(q.at(b, head, at), q.row, steps, D, w.qs);
    product::widen_rows(k.at(b, head, at), k.row, steps, D, w.ks);
    product::widen_rows(v.at(b, head, at), v.row, steps, E, w.vs);
    product::widen_rows(dh.at(b, head, at), dh.row, steps, E, w.us);
    multiply_lower<A>(steps, {w.qs.values, w.dp, 1}, {w.ks.values, w.dp}, D, w.dp, w.panel, w.S);
    weigh(w, root, n);
    divide(gates, t, w);
    multiply_lower<A>(steps, {w.us.values, w.ep, 1}, {w.vs.values, w.ep}, E, w.ep, w.panel, w.P);
    product::multiply_wide<A>(steps, w.dp, {w.us.values, w.ep, 1}, {before, w.dp}, w.dqs, E, false);
    if (rule.normalize && !rule.nx) pull_divisor(gates, t, w, root, terms);
    pull(w);

    // dq
    for (int64_t r = 0; r < steps; ++r) {
      const A factor = here.from_start[r] * root;
      scale_and_add(w.dqs.values + r * w.dp, factor, n, factor * w.dl[r], w.dp);
    }
    add_lower<A>(steps, w.dp, {w.P.values, w.rows}, {w.ks.values, w.dp}, w.dqs);
    // dk
    multiply_turned<A>(steps, w.turned, {w.vs.values, w.ep, 1}, {w.dC.values, w.ep}, E, w.ep,
                       w.panel, w.dks);
    for (int64_t r = 0; r < steps; ++r) {
      scale_and_add(w.dks.values + r * w.turned, here.to_end[r], w.dn, here.to_end[r], w.dp);
    }
    add_upper<A>(steps, w.dp, {w.P.values, w.rows}, {w.qs.values, w.dp}, w.dks);
    // dv
    product::multiply_wide<A>(steps, w.ep, {w.ks.values, w.dp, 1}, {w.dC.values, w.ep}, w.dvs, D,
                              false);
    for (int64_t r = 0; r < steps; ++r) scale(w.dvs.values + r * w.ep, here.to_end[r], w.ep);
    add_upper<A>(steps, w.ep, {w.S.values, w.rows}, {w.us.values, w.ep}, w.dvs);
    for (int64_t r = 0; r < steps; ++r) {
      terms.of_q[t + r] = dot(w.qs.values + r * w.dp, w.dqs.values + r * w.dp, w.dp);
      terms.of_k[t + r] = dot(w.ks.values + r * w.dp, w.dks.values + r * w.turned, w.dp);
      put(w.dqs.values + r * w.dp, D, dq.at(b, head, at + r));
      put(w.dks.values + r * w.turned, D, dk.at(b, head, at + r));
      put(w.dvs.values + r * w.ep, E, dv.at(b, head, at + r));
    }
    retreat(w, root);
  }

  static void put(const A* from, int64_t n, T* to) {
    simd::for_each_pair<T>(n, [&](int64_t x, auto elements) {
      simd::store_in_order(to + x, simd::load(from + x), elements);
    });
  }

  // S becomes A, the weights are kept; products become those of q with all that came before.
  void weigh(Work& w, A root, const A* n) const {
    for (int64_t t = 0; t < w.here.count; ++t) {
      A *const row = w.S.values + t * w.rows, *const kept = w.weights.values + t * w.rows;
      Vec<A> sum = {};
      w.here.weights(t, [&](int64_t j, Vec<A> weight) {
        const Vec<A> scaled = weight * root, a = simd::load_as<Vec<A>>(row + j) * scaled;
        std::memcpy(kept + j, &scaled, sizeof(scaled));
        std::memcpy(row + j, &a, sizeof(a));
        sum += a;
      });
      const A of_state = dot(w.qs.values + t * w.dp, n, w.dp);
      w.products[t] = of_state * w.here.from_start[t] * root + sum_of<A>(sum);
      clear_after(row, t, w.rows);
    }
  }

  // A block of rows reads up to its last step.
  static void clear_after(A* row, int64_t t, int64_t rows) {
    const int64_t written = std::min((t / kLanes<A> + 1) * kLanes<A>, rows);
    std::fill(row + written, row + std::min(written + kBlock, rows), A(0));
  }

  // dh becomes u = dh / R.
  void divide(const Gates& gates, int64_t t, Work& w) const {
    std::fill_n(w.dl, w.here.count, A(0));
    for (int64_t r = 0; rule.normalize && r < w.here.count; ++r) {
      const A divisor = std::max(std::abs(w.products[r]), A(gates.least[t + r])) + A(rule.eps);
      scale(w.us.values + r * w.ep, 1 / divisor, w.ep);
    }
  }

  // dl, and the terms of m. What dh and h give together is in what there is already: u_t num_t is
  // the sum of A (u v), and of s q C u of the state.
  void pull_divisor(const Gates& gates, int64_t t, Work& w, A root, Terms& terms) const {
    for (int64_t r = 0; r < w.here.count; ++r) {
      const int64_t written = (r / kLanes<A> + 1) * kLanes<A>;
      const A of_state = dot(w.qs.values + r * w.dp, w.dqs.values + r * w.dp, w.dp);
      const A delta = of_state * w.here.from_start[r] * root +
                      dot(w.S.values + r * w.rows, w.P.values + r * w.rows, written);
      const A product = w.products[r], size = std::abs(product), other = A(gates.least[t + r]);
      const A share = 1 / (std::max(size, other) + A(rule.eps));
      if (size > other) w.dl[r] = (product < 0 ? delta : -delta) * share;
      if (!rule.sigmoid) terms.of_m[t + r] = -double(delta) * rule.eps * double(share);
    }
  }

  // P = s (u_t v_j + dl_t) exp(w_j - c_t)
  void pull(Work& w) const {
    for (int64_t t = 0; t < w.here.count; ++t) {
      A* const row = w.P.values + t * w.rows;
      const A* const kept = w.weights.values + t * w.rows;
      for (int64_t j = 0; j <= t; j += kLanes<A>) {
        const Vec<A> weight = simd::load_as<Vec<A>>(kept + j);
        const Vec<A> p = (simd::load_as<Vec<A>>(row + j) + w.dl[t]) * weight;
        std::memcpy(row + j, &p, sizeof(p));
      }
      clear_after(row, t, w.rows);
    }
  }

  // dC and dn of the state before the chunk.
  void retreat(Work& w, A root) const {
    scale(w.dC.values, w.here.kept, s.size * w.ep);
    scale(w.dn, w.here.kept, w.dp);
    for (int64_t r = 0; r < w.here.count; ++r) {
      const A factor = w.here.from_start[r] * root;
      scale(w.us.values + r * w.ep, factor, w.ep);
      scale_and_add(w.dn, A(1), w.qs.values + r * w.dp, factor * w.dl[r], w.dp);
    }
    product::multiply_wide<A>(s.size, w.ep, {w.qs.values, 1, w.dp}, {w.us.values, w.ep}, w.dC,
                              w.here.count, true);
  }

  // Of log sigmoid, at each step.
  static PerStep slopes(const A* gates, int64_t steps) {
    PerStep found(steps);
    std::copy_n(gates, steps, found.begin());
    found.apply(steps, [](DoubleVec v) { return sigmoid(-v); });
    return found;
  }

  // The gradients of the gates, from the last step on; what is left for the initial m.
  double finish(const Gates& gates, Terms& terms, int64_t gate, int64_t state) const {
    const int64_t steps = gates.steps;
    const PerStep of_i = slopes(i + gate, steps), of_f = slopes(f + gate, steps);
    const bool has_m = !rule.sigmoid && !rule.nx;
    // C and n of the last states have exp(-m)
    double carried =
        has_m ? (dlast.m ? double(dlast.m[state]) : 0) - terms.later[terms.later.size() - 1] : 0;
    double sum = 0;
    for (int64_t t = steps - 1; t >= 0; --t) {
      if (t == steps - 1 || (t + 1) % chunk == 0) sum = terms.later[t / chunk] + carried;
      double dw = terms.of_k[t];
      carried += terms.of_m[t];
      const double taken = has_m && gates.largest[t] > gates.largest_before(t) ? carried : 0;
      carried -= taken;
      sum += terms.of_q[t] + terms.of_m[t] - dw - taken;
      dw += taken;
      di[gate + t] = A(rule.sigmoid ? dw * of_i[t] : dw);
      df[gate + t] = A(sum * of_f[t]);
    }
    return carried;
  }

  void begin(int64_t state, Work& w, const A* first, double carried) const {
    if (!dn) return;
    const int64_t D = s.size, E = s.value_size;
    for (int64_t d = 0; d < D; ++d) {
      std::copy_n(w.dC.values + d * w.ep, E, dc + (state * D + d) * E);
    }
    std::copy_n(w.dn, D, dn + state * D);
    dm[state] = A(inner(w, first) + carried);
  }
};

using Eight = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Eight mlstm_chunkwise_backward(const Tensor& dh_in, std::optional<Tensor> dc_last,
                               std::optional<Tensor> dn_last, std::optional<Tensor> dm_last,
                               const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                               const Tensor& i_in, const Tensor& f_in, std::optional<Tensor> c,
                               std::optional<Tensor> n, std::optional<Tensor> m,
                               std::optional<Tensor> starts, double eps, bool sigmoid,
                               bool normalize, bool nx, int64_t chunk_size) {
  const char* op = "mlstm_chunkwise_backward";
  const Sizes s = sizes_of(op, q_in, k_in, v_in, i_in, f_in, starts);
  STD_TORCH_CHECK(chunk_size >= 1 && chunk_size <= 256, op, ": chunk_size must be from 1 to 256");
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in),
               v = with_contiguous_rows(v_in), dh = with_contiguous_rows(dh_in);
  expect_like(op, "dh", dh, v);
  const ScalarType dtype = q.scalar_type(), sums = accumulate_dtype(dtype);
  const Tensor i = gates_of(i_in, dtype), f = gates_of(f_in, dtype);
  const auto like = [&](int64_t size) {
    return tiles::empty_heads(s.batch, s.heads, s.steps, size, dtype);
  };
  Tensor dq = like(s.size), dk = like(s.size), dv = like(s.value_size);
  Tensor di = cpu::empty_like(i), df = cpu::empty_like(f);
  constexpr int64_t kNothing = 0;
  const auto of_state = [&](int64_t dim) {
    return c ? empty_like_states(s, dim, sums) : empty(&kNothing, 1, dtype);
  };
  Tensor dc = of_state(4), dn = of_state(3), dm = of_state(2);
  metalcore_variant = "chunks";
  dispatch_float(dtype, op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Backward<T> run{s,
                          Rule{eps, sigmoid, normalize, nx}.expect_known(op),
                          chunk_size,
                          Heads<const T>(q),
                          Heads<const T>(k),
                          Heads<const T>(v),
                          Heads<const T>(dh),
                          data<A>(i),
                          data<A>(f),
                          States<A>(op, s, c, n, m, true),
                          States<A>(op, s, dc_last, dn_last, dm_last, false),
                          Heads<T>(dq),
                          Heads<T>(dk),
                          Heads<T>(dv),
                          mutable_data<A>(di),
                          mutable_data<A>(df),
                          c ? mutable_data<A>(dc) : nullptr,
                          c ? mutable_data<A>(dn) : nullptr,
                          c ? mutable_data<A>(dm) : nullptr,
                          sequences_of(op, starts, s)};
    const int64_t flops = s.batch * s.heads * s.steps * s.size * s.value_size;
    tiles::for_each_task(int64_t(run.sequences.size()) * s.heads, flops >= lanes::kGrainFlops, run);
  });
  return {dq, dk, dv, to_dtype(di, i_in.scalar_type()), to_dtype(df, f_in.scalar_type()),
          dc, dn, dm};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("mlstm_chunkwise_backward", kernel<&mlstm_chunkwise_backward>);
}

}  // namespace metalcore::cpu
