// SPDX-License-Identifier: MIT
// Attention on the CPU: by panels of queries, or over parts of the keys where queries are few.

#include <tuple>

#include "panels.h"
#include "parts.h"

namespace metalcore::cpu {
namespace {

using namespace tiles;

// Up to so many queries of a sequence leave most lanes of a panel empty.
constexpr int64_t kFewQueries = 4;

std::tuple<Tensor, Tensor> attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                     std::optional<Tensor> mask, std::optional<Tensor> slopes,
                                     std::optional<Tensor> sinks, std::optional<Tensor> starts_q,
                                     std::optional<Tensor> starts_k, double scale,
                                     std::optional<double> softcap, std::optional<int64_t> left,
                                     std::optional<int64_t> right) {
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in),
               v = with_contiguous_rows(v_in);
  const Sizes s = sizes_of("attention", q, k, v);
  Tensor out = empty_heads(s.batch, s.heads, s.queries, s.value_size, q.scalar_type());
  const int64_t rows[] = {s.batch, s.heads, s.queries};
  Tensor lse = empty(rows, 3, accumulate_dtype(q.scalar_type()));
  dispatch_float(q.scalar_type(), "attention", [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    Held held;
    const Problem<A> problem = problem_of<A>("attention", s, mask, slopes, sinks, starts_q,
                                             starts_k, scale, softcap, left, right, held);
    Cache<T> cache;
    cache.k = stored_by_heads<T>(k);
    cache.v = stored_by_heads<T>(v);
    int64_t most_queries = 0;
    for (const Sequence& x : problem.sequences) most_queries = std::max(most_queries, x.queries);
    if (most_queries <= kFewQueries) return attend_parts<T>(problem, q, cache, out, lse);
    attend_panels<T>(problem, q, cache, out, lse);
  });
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("attention", kernel<&attention>); }

}  // namespace metalcore::cpu
