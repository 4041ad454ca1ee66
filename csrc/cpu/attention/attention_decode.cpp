// SPDX-License-Identifier: MIT
// Attention of the last few queries of sequences whose keys are in a cache, on the CPU.
// Entry b has lengths[b] keys; what the cache holds after them is never read.

#include <tuple>

#include "few_queries.h"

namespace metalcore::cpu {
namespace {

using namespace tiles;

std::vector<Sequence> sequences_in_cache(const std::optional<Tensor>& lengths, const Sizes& s) {
  std::vector<Sequence> found;
  for (int64_t b = 0; b < s.batch; ++b) found.push_back({b, 0, s.queries, 0, s.keys});
  if (!lengths) return found;
  const ScalarType dtype = lengths->scalar_type();
  STD_TORCH_CHECK(lengths->dim() == 1 && lengths->numel() == s.batch &&
                      (dtype == ScalarType::Int || dtype == ScalarType::Long),
                  "attention_decode: lengths must be int32 or int64 [B]");
  const Tensor counts = dense(to_dtype(*lengths, ScalarType::Long));
  for (int64_t b = 0; b < s.batch; ++b) {
    found[b].keys = data<int64_t>(counts)[b];
    STD_TORCH_CHECK(0 <= found[b].keys && found[b].keys <= s.keys,
                    "attention_decode: lengths must be from 0 to the keys of the cache");
  }
  return found;
}

std::tuple<Tensor, Tensor> attention_decode(const Tensor& q_in, const Tensor& k_in,
                                            const Tensor& v_in, std::optional<Tensor>,
                                            std::optional<Tensor>, std::optional<Tensor> lengths,
                                            std::optional<Tensor> slopes,
                                            std::optional<Tensor> sinks, double scale,
                                            std::optional<double> softcap,
                                            std::optional<int64_t> left) {
  const char* op = "attention_decode";
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in),
               v = with_contiguous_rows(v_in);
  const Sizes s = sizes_of(op, q, k, v);
  Tensor out = empty_heads(s.batch, s.heads, s.queries, s.value_size, q.scalar_type());
  const int64_t rows[] = {s.batch, s.heads, s.queries};
  Tensor lse = empty(rows, 3, accumulate_dtype(q.scalar_type()));
  metalcore_variant = "few_queries";
  dispatch_float(q.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    Held held;
    const std::optional<Tensor> none;
    Problem<A> problem = problem_of<A>(op, s, none, slopes, sinks, none, none, scale, softcap, left,
                                       int64_t(0), held);
    problem.sequences = sequences_in_cache(lengths, s);
    attend_few(FewQueries<T>{problem, Heads<const T>(q), Heads<const T>(k), Heads<const T>(v),
                             Heads<T>(out), mutable_data<A>(lse),
                             product::round_up(s.size, simd::kStep<T>),
                             product::round_up(s.value_size, simd::kStep<T>)},
               is_worth_threads(s));
  });
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("attention_decode", kernel<&attention_decode>);
}

}  // namespace metalcore::cpu
