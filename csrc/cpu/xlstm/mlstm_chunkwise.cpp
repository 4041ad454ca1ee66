// SPDX-License-Identifier: MIT
// mLSTM over sequences, chunk by chunk, on the CPU.
//   A[t][j] = s q_t k_j exp(w_j - c_t), j <= t
//   num_t = A V + kept_t s q_t C,  l_t = A 1 + kept_t s q_t n,  h_t = num_t / (max(|l|, e^-m) +
//   eps) C = Gbar C + (Abar K)^T V,  n = Gbar n + Abar K
//
// A task is a head of a sequence, or some columns of its values where there are few heads: each
// column of C, V and h is on its own, so results do not depend on how they are shared.

#include "mlstm.h"

namespace metalcore::cpu {
namespace {

using namespace mlstm;

template <typename T>
struct Forward {
  using A = Acc<T>;
  Sizes s;
  Rule rule;
  int64_t chunk;
  Heads<const T> q, k, v;
  const A *i, *f;
  States<A> from;
  Heads<T> h;
  A *c_last, *n_last, *m_last;
  std::vector<Sequence> sequences;
  int64_t parts, part_columns;

  int64_t tasks() const { return int64_t(sequences.size()) * s.heads * parts; }

  void operator()(int64_t task) const {
    const int64_t part = task % parts, head = task / parts % s.heads;
    const Sequence& sequence = sequences[task / parts / s.heads];
    const int64_t begin = part * part_columns, end = std::min(s.value_size, begin + part_columns);
    run(sequence, head, begin, end);
  }

  void run(const Sequence& sequence, int64_t head, int64_t begin, int64_t end) const {
    const int64_t D = s.size, dp = padded<T>(D), ep = padded<T>(end - begin);
    const int64_t rows = product::round_up(chunk, kWidth<A>),
                  state = sequence.state * s.heads + head;
    using Memory = tiles::Pieces<A>;
    Memory memory(Chunk<A>::values(chunk) + 2 * Memory::size(dp) + Memory::size(rows) +
                  2 * Memory::size(rows * dp) + 2 * Memory::size(rows * ep) + Memory::size(D * ep) +
                  Memory::size(rows * rows) + Memory::size(dp * kWidth<A>));
    Chunk<A> here(memory, chunk);
    A *const n = memory.take(dp), *const products = memory.take(rows);
    const Lines<A> qs{memory.take(rows * dp), dp}, ks{memory.take(rows * dp), dp},
        vs{memory.take(rows * ep), ep}, hs{memory.take(rows * ep), ep}, C{memory.take(D * ep), ep},
        S{memory.take(rows * rows), rows};
    A* const panel = memory.take(dp * kWidth<A>);
    std::fill_n(ks.values, rows * dp, A(0));
    std::fill_n(n, dp, A(0));
    std::fill_n(C.values, D * ep, A(0));
    if (from.n) {  // c is null where values have no size
      std::copy_n(from.n + state * D, D, n);
      for (int64_t d = 0; d < D; ++d) {
        std::copy_n(from.c + (state * D + d) * s.value_size + begin, end - begin,
                    C.values + d * ep);
      }
    }
    const int64_t gate = (sequence.batch * s.heads + head) * s.steps + sequence.first;
    const double m0 = from.m ? double(from.m[state]) : 0;
    const Gates gates(i + gate, f + gate, sequence.count, m0, rule.sigmoid);

    for (int64_t t = 0; t < sequence.count; t += chunk) {
      const int64_t steps = std::min(chunk, sequence.count - t), at = sequence.first + t;
      here.set(gates, t, steps);
      product::widen_rows(q.at(sequence.batch, head, at), q.row, steps, D, qs);
      product::widen_rows(k.at(sequence.batch, head, at), k.row, steps, D, ks);
      product::widen_rows(v.at(sequence.batch, head, at) + begin, v.row, steps, end - begin, vs);
      for (int64_t r = 0; r < steps; ++r) products[r] = dot(qs.values + r * dp, n, dp);
      weigh(here, qs, ks, panel, S, products);
      product::multiply_wide<A>(steps, ep, {qs.values, dp, 1}, {C.values, ep}, hs, D, false);
      const A root = A(1 / std::sqrt(double(D)));
      for (int64_t r = 0; r < steps; ++r) scale(hs.values + r * ep, here.from_start[r] * root, ep);
      add_lower<A>(steps, ep, {S.values, rows}, {vs.values, ep}, hs);
      for (int64_t r = 0; r < steps; ++r) {
        T* const to = h.at(sequence.batch, head, at + r) + begin;
        const A share = 1 / divisor(products[r], gates.least[t + r]);
        simd::for_each_pair<T>(end - begin, [&](int64_t e, auto elements) {
          simd::store_in_order(to + e, simd::load(hs.values + r * ep + e) * share, elements);
        });
      }
      advance(here, ks, vs, C, n, D, ep, dp);
    }
    finish(gates, sequence.count, state, begin, end, C, n, m0);
  }

  // S becomes A, and the products of q and n those with all that came before.
  void weigh(const Chunk<A>& here, Lines<A> qs, Lines<A> ks, A* panel, Lines<A> S,
             A* products) const {
    const A root = A(1 / std::sqrt(double(s.size)));
    multiply_lower<A>(here.count, {qs.values, qs.row, 1}, {ks.values, ks.row}, s.size, ks.row,
                      panel, S);
    for (int64_t t = 0; t < here.count; ++t) {
      A* const row = S.values + t * S.row;
      Vec<A> sum = {};
      here.weights(t, [&](int64_t j, Vec<A> weight) {
        const Vec<A> a = simd::load_as<Vec<A>>(row + j) * weight * root;
        std::memcpy(row + j, &a, sizeof(a));
        sum += a;
      });
      // a block of rows reads up to its last step
      const int64_t written = (t / kLanes<A> + 1) * kLanes<A>;
      std::fill(row + std::min(written, S.row), row + std::min(written + kBlock, S.row), A(0));
      products[t] = products[t] * here.from_start[t] * root + sum_of<A>(sum);
    }
  }

  A divisor(A product, double least) const {
    if (!rule.normalize) return 1;
    return std::max(std::abs(product), A(least)) + A(rule.eps);
  }

  static void advance(const Chunk<A>& here, Lines<A> ks, Lines<A> vs, Lines<A> C, A* n, int64_t D,
                      int64_t ep, int64_t dp) {
    scale(C.values, here.kept, D * ep);
    scale(n, here.kept, dp);
    for (int64_t j = 0; j < here.count; ++j) {
      scale(vs.values + j * ep, here.to_end[j], ep);
      scale_and_add(n, A(1), ks.values + j * dp, here.to_end[j], dp);
    }
    product::multiply_wide<A>(D, ep, {ks.values, 1, dp}, {vs.values, ep}, C, here.count, true);
  }

  void finish(const Gates& gates, int64_t steps, int64_t state, int64_t begin, int64_t end,
              Lines<A> C, const A* n, double m0) const {
    for (int64_t d = 0; d < s.size; ++d) {
      std::copy_n(C.values + d * C.row, end - begin,
                  c_last + (state * s.size + d) * s.value_size + begin);
    }
    if (begin) return;
    std::copy_n(n, s.size, n_last + state * s.size);
    m_last[state] = A(rule.sigmoid ? 0 : steps ? gates.m[steps - 1] : m0);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> mlstm_chunkwise(
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& i_in,
    const Tensor& f_in, std::optional<Tensor> c, std::optional<Tensor> n, std::optional<Tensor> m,
    std::optional<Tensor> starts, double eps, bool sigmoid, bool normalize, bool nx,
    int64_t chunk_size) {
  const char* op = "mlstm_chunkwise";
  const Sizes s = sizes_of(op, q_in, k_in, v_in, i_in, f_in, starts);
  STD_TORCH_CHECK(chunk_size >= 1 && chunk_size <= 256, op, ": chunk_size must be from 1 to 256");
  const ScalarType dtype = q_in.scalar_type(), sums = accumulate_dtype(dtype);
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in),
               v = with_contiguous_rows(v_in), i = gates_of(i_in, dtype), f = gates_of(f_in, dtype);
  Tensor h = tiles::empty_heads(s.batch, s.heads, s.steps, s.value_size, dtype);
  Tensor c_last = empty_like_states(s, 4, sums), n_last = empty_like_states(s, 3, sums),
         m_last = empty_like_states(s, 2, sums);
  dispatch_float(dtype, op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    auto sequences = sequences_of(op, starts, s);
    // columns, where heads alone do not keep all threads busy
    const int64_t heads = int64_t(sequences.size()) * s.heads;
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t most = std::max<int64_t>(1, s.value_size / kWidth<A>);
    const int64_t wanted = heads ? std::min(most, (threads + heads - 1) / heads) : 1;
    const int64_t columns =
        std::max<int64_t>(1, product::round_up((s.value_size + wanted - 1) / wanted, kWidth<A>));
    const int64_t parts = std::max<int64_t>(1, (s.value_size + columns - 1) / columns);
    metalcore_variant = parts > 1 ? "chunks_of_columns" : "chunks";
    const Forward<T> run{s,
                         Rule{eps, sigmoid, normalize, nx}.expect_known(op),
                         chunk_size,
                         Heads<const T>(q),
                         Heads<const T>(k),
                         Heads<const T>(v),
                         data<A>(i),
                         data<A>(f),
                         States<A>(op, s, c, n, m, true),
                         Heads<T>(h),
                         mutable_data<A>(c_last),
                         mutable_data<A>(n_last),
                         mutable_data<A>(m_last),
                         sequences,
                         parts,
                         columns};
    const int64_t flops = s.batch * s.heads * s.steps * s.size * s.value_size;
    tiles::for_each_task(run.tasks(), flops >= lanes::kGrainFlops, run);
  });
  return {h, c_last, n_last, m_last};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("mlstm_chunkwise", kernel<&mlstm_chunkwise>);
}

}  // namespace metalcore::cpu
