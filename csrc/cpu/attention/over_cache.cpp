// SPDX-License-Identifier: MIT
// Attention over a cache: over parts of the keys where queries are few, or by panels of queries.

#include "over_cache.h"

#include "panels.h"
#include "parts.h"

namespace metalcore::cpu::tiles {

template struct FewQueries<float, float>;
template struct FewQueries<float, Int8>;

namespace {

// Up to so many queries of a sequence are read with its keys, once for all.
constexpr int64_t kFewQueries = 8;

// The scales of codes, in their layout: without its last dimension.
Stored<float> scales_of(const Given& given, const char* name, const std::optional<Tensor>& scale,
                        const Tensor& codes, bool is_paged, std::optional<Tensor>& kept) {
  if (!scale) return {};
  bool fits = scale->dim() == 3 && is_float(scale->scalar_type());
  for (int64_t d = 0; fits && d < 3; ++d) fits = scale->size(d) == codes.size(d);
  STD_TORCH_CHECK(fits, given.op, ": ", name, " must have a number for each row of codes");
  kept = to_dtype(*scale, ScalarType::Float);
  return is_paged ? stored_by_pages<float>(*kept) : stored_by_heads<float>(*kept);
}

template <typename T, typename S>
void attend(const Given& given, const Problem<Acc<T>>& problem, const Places& places,
            const Tensor& out, const Tensor& lse) {
  const bool is_paged = places.table.has_value();
  Cache<S> cache;
  cache.k = is_paged ? stored_by_pages<S>(given.k) : stored_by_heads<S>(given.k);
  cache.v = is_paged ? stored_by_pages<S>(given.v) : stored_by_heads<S>(given.v);
  std::optional<Tensor> kept[2];
  if constexpr (kIsCode<S>) {
    cache.k_scale = scales_of(given, "k_scale", given.k_scale, given.k, is_paged, kept[0]);
    cache.v_scale = scales_of(given, "v_scale", given.v_scale, given.v, is_paged, kept[1]);
  }
  if (is_paged) {
    cache.table = places.table->data();
    cache.page_bits = places.page_bits;
  }
  int64_t most = 0;
  for (const Sequence& x : places.sequences) most = std::max(most, x.queries);
  if (most <= kFewQueries) return attend_parts<T>(problem, given.q, cache, out, lse);
  attend_panels<T>(problem, given.q, cache, out, lse);
}

}  // namespace

std::vector<int64_t> integers(const char* op, const char* name, const Tensor& x, int64_t dim) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.dim() == dim && (dtype == ScalarType::Int || dtype == ScalarType::Long), op,
                  ": ", name, " must be int32 or int64, of ", dim, " dimensions");
  const Tensor dense_x = dense(to_dtype(x, ScalarType::Long));
  const int64_t* values = data<int64_t>(dense_x);
  return std::vector<int64_t>(values, values + dense_x.numel());
}

std::vector<int64_t> lengths_of(const char* op, const Tensor& lengths, int64_t entries,
                                int64_t most) {
  const std::vector<int64_t> found = integers(op, "lengths", lengths, 1);
  STD_TORCH_CHECK(int64_t(found.size()) == entries, op, ": each entry must have a length");
  for (const int64_t n : found) {
    STD_TORCH_CHECK(0 <= n && n <= most, op, ": lengths must be from 0 to the keys of the cache");
  }
  return found;
}

std::tuple<Tensor, Tensor> attend_over_cache(const Given& given_in, const Sizes& s,
                                             const Places& places) {
  Given given = given_in;
  given.q = with_contiguous_rows(given.q);
  given.k = with_contiguous_rows(given.k);
  given.v = with_contiguous_rows(given.v);
  Tensor out = empty_heads(s.batch, s.heads, s.queries, s.value_size, given.q.scalar_type());
  const int64_t rows[] = {s.batch, s.heads, s.queries};
  Tensor lse = empty(rows, 3, accumulate_dtype(given.q.scalar_type()));
  const ScalarType stored = given.k.scalar_type();
  STD_TORCH_CHECK(given.v.scalar_type() == stored, given.op, ": k and v must be of one dtype");
  const bool has_codes = stored == ScalarType::Char || stored == ScalarType::Byte;
  STD_TORCH_CHECK(has_codes || (!given.k_scale && !given.v_scale), given.op,
                  ": scales are for 8 bits");
  STD_TORCH_CHECK(stored != ScalarType::Char || (given.k_scale && given.v_scale), given.op,
                  ": int8 must have scales");
  if (has_codes && given.q.scalar_type() != accumulate_dtype(given.q.scalar_type())) {
    // codes become floats, so that queries may be floats too: half the kernels
    Given wide = given;
    wide.q = to_dtype(given.q, accumulate_dtype(given.q.scalar_type()));
    const auto [found, its_lse] = attend_over_cache(wide, s, places);
    return {to_dtype(found, given.q.scalar_type()), its_lse};
  }
  dispatch_float(given.q.scalar_type(), given.op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    Held held;
    const std::optional<Tensor> none;
    Sizes entries = s;
    entries.batch = int64_t(places.sequences.size());
    Problem<A> problem =
        problem_of<A>(given.op, entries, none, given.slopes, given.sinks, none, none, given.scale,
                      given.softcap, given.left, int64_t(0), held);
    problem.sizes = s;
    problem.sequences = places.sequences;
    if constexpr (std::is_same_v<T, A>) {
      if (stored == ScalarType::Char) return attend<T, Int8>(given, problem, places, out, lse);
      if (stored == ScalarType::Byte) return attend<T, Float8>(given, problem, places, out, lse);
    }
    expect_type<T>(given.k);
    attend<T, T>(given, problem, places, out, lse);
  });
  return {out, lse};
}

}  // namespace metalcore::cpu::tiles
