// SPDX-License-Identifier: MIT
// Attention of many queries on the CPU, tile by tile, without a matrix of scores.
//   S^T = K Q^T,  P^T = exp(S^T - largest),  O^T += V^T P^T
// Queries stand in the lanes: softmax goes down the columns, keys and values are broadcast from
// where they are. A task is a few panels of queries that read the same keys: heads of a group
// first, then the next queries. Tiles of pages, or of codes of 8 bits, are gathered one by one.
#pragma once

#include "cache.h"
#include "scores.h"

namespace metalcore::cpu::tiles {

// Panels that share a tile of keys: 1.03x of one panel, 1.09x for four heads to one (AMD EPYC).
constexpr int64_t kPanels = 4;

template <typename T, typename S>
struct Forward {
  using A = Acc<T>;
  static constexpr int64_t W = kWidth<A>;

  const Problem<A>& problem;
  Heads<const T> q;
  const Cache<S>& cache;
  Heads<T> out;
  A* lse;
  int64_t heads_each, queries_each;  // panels of a task: heads times runs of W queries
  int64_t width, value_width;        // head sizes in whole Pairs
  bool by_dots;                      // products of bfloat16 by instructions for them

  struct Task {
    Sequence sequence;
    int64_t key_head, first_head, heads, first_query;
  };

  struct Memory {
    A *queries, *results, *largest, *sums, *scores, *bias, *factors, *rows, *keys, *values;
    A *gathered_keys, *gathered_values;  // of T, from pages
  };

  Memory memory() const {
    const int64_t panels = heads_each * queries_each;
    const int64_t wide = std::max(width, value_width);
    const int64_t sizes[] = {panels * width * W,
                             panels * value_width * W,
                             panels * W,
                             panels * W,
                             kKeys * W,
                             kKeys * W,
                             W,
                             W * wide,
                             kKeys * width,
                             kKeys * value_width,
                             cache.table ? kKeys * width : 0,
                             cache.table ? kKeys * value_width : 0};
    int64_t total = 0;
    for (const int64_t n : sizes) total += Pieces<A>::size(n);
    Pieces<A> pieces(total);
    A* p[12];
    for (int i = 0; i < 12; ++i) p[i] = pieces.take(sizes[i]);
    return {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11]};
  }

  Panel panel(const Task& t, int64_t p) const {
    const int64_t first = t.first_query + p % queries_each * W;
    return {t.first_head + p / queries_each, first,
            std::max<int64_t>(0, std::min(W, t.sequence.queries - first))};
  }

  void start(const Task& t, int64_t p, const Memory& m) const {
    const Panel of = panel(t, p);
    const T* from = q.at(t.sequence.batch, of.head, t.sequence.first_query + of.first);
    std::fill_n(m.rows, W * width, A(0));
    A* const lanes = m.queries + p * width * W;
    if (by_dots) {
      // two elements in each word
      for (int64_t i = 0; i < of.count; ++i) {
        std::memcpy(m.rows + i * width / 2, from + i * q.row, problem.sizes.size * sizeof(T));
      }
      product::to_lanes<A>({m.rows, width / 2}, width / 2, lanes);
    } else {
      product::widen_rows(from, q.row, of.count, problem.sizes.size, {m.rows, width});
      product::to_lanes<A>({m.rows, width}, width, lanes);
      scale_panel(problem.scale, lanes, width);
    }
    std::fill_n(m.largest + p * W, W, kHidden<A>);
    std::fill_n(m.sums + p * W, W, A(0));
    std::fill_n(m.results + p * value_width * W, value_width * W, A(0));
  }

  // Rows of T, `row` apart.
  struct Rows {
    const T* values;
    int64_t row;

    const T* at(int64_t i) const { return values + i * row; }
  };

  // Keys and values of a task: as rows of A, or with pairs of values, some of which are not finite.
  struct Tile {
    Keys range;
    Rows key_rows, value_rows;
    product::Broadcast<A> keys, values;
    std::vector<int64_t> special;
  };

  // Rows of a tile where they are, or gathered from their pages.
  Rows rows_of(const Task& t, const Stored<S>& x, Keys range, int64_t n, int64_t apart,
               A* memory) const {
    if (cache.table == nullptr) {
      const auto first = cache.place(t.sequence, range.begin);
      return {x.at(first.page, first.row, t.key_head), x.row};
    }
    T* const to = reinterpret_cast<T*>(memory);
    for (int64_t i = 0; i < range.count(); ++i) {
      const auto at = cache.place(t.sequence, range.begin + i);
      std::memcpy(to + i * apart, x.at(at.page, at.row, t.key_head), n * sizeof(T));
    }
    return {to, apart};
  }

  // Codes of a tile, times their scales.
  product::Broadcast<A> decode(const Task& t, const Stored<S>& x, const Stored<float>& scale,
                               Keys range, int64_t n, product::Lines<A> to) const {
    for (int64_t i = 0; i < range.count(); ++i) {
      const auto at = cache.place(t.sequence, range.begin + i);
      const S* const from = x.at(at.page, at.row, t.key_head);
      const A factor = scale.values ? A(*scale.at(at.page, at.row, t.key_head)) : A(1);
      simd::for_each_pair<T>(n, [&](int64_t d, auto elements) {
        simd::store(to.values + i * to.row + d, load_stored<A>(from + d, elements) * factor);
      });
    }
    return {to.values, to.row, 1};
  }

  void load_tile(const Task& t, Keys range, const Memory& m, Tile& tile) const {
    const Sizes& s = problem.sizes;
    tile.range = range;
    if constexpr (kIsCode<S>) {
      tile.keys = decode(t, cache.k, cache.k_scale, range, s.size, {m.keys, width});
      tile.values = decode(t, cache.v, cache.v_scale, range, s.value_size, {m.values, value_width});
    } else {
      tile.key_rows = rows_of(t, cache.k, range, s.size, width, m.gathered_keys);
      tile.value_rows = rows_of(t, cache.v, range, s.value_size, value_width, m.gathered_values);
#if defined(MC_DOTS)
      if constexpr (std::is_same_v<T, simd::BFloat16>) {
        if (by_dots) {
          product::pair_rows(tile.value_rows.values, tile.value_rows.row, range.count(),
                             s.value_size, reinterpret_cast<uint32_t*>(m.values), value_width,
                             tile.special);
          return;
        }
      }
#endif
      const int64_t count = range.count();
      tile.keys =
          widened<T>(tile.key_rows.values, tile.key_rows.row, count, s.size, {m.keys, width});
      tile.values = widened<T>(tile.value_rows.values, tile.value_rows.row, count, s.value_size,
                               {m.values, value_width});
    }
  }

  // scale * q.k of the keys from `skipped` on.
  void score(int64_t p, const Tile& tile, int64_t skipped, int64_t count, const Memory& m) const {
    const A* const lanes = m.queries + p * width * W;
#if defined(MC_DOTS)
    if constexpr (std::is_same_v<T, simd::BFloat16>) {
      if (by_dots) {
        const T* from = tile.key_rows.at(skipped);
        product::multiply_pairs(count, W,
                                {reinterpret_cast<const uint16_t*>(from), tile.key_rows.row, 2},
                                {reinterpret_cast<const uint32_t*>(lanes), W}, {m.scores, W},
                                problem.sizes.size / 2, false);
        return scale_panel(problem.scale, m.scores, count);
      }
    }
#endif
    product::multiply<A>(count, tile.keys.from_row(skipped), {lanes, W}, {m.scores, W},
                         problem.sizes.size, false);
  }

  // sums += V^T P of the keys from `skipped` on.
  void add_values(const Tile& tile, int64_t skipped, int64_t count, Cover hides, const Memory& m,
                  A* sums) const {
    const int64_t n = problem.sizes.value_size;
#if defined(MC_DOTS)
    if constexpr (std::is_same_v<T, simd::BFloat16>) {
      if (by_dots) {
        const auto pairs = reinterpret_cast<const uint32_t*>(m.values) + skipped / 2 * value_width;
        const auto shares = reinterpret_cast<uint32_t*>(m.bias);
        product::pair_values(m.scores, count, W, shares);
        product::multiply_pairs(n, W,
                                {reinterpret_cast<const uint16_t*>(pairs), 2, 2 * value_width},
                                {shares, W}, {sums, W}, (count + 1) / 2, true);
        for (const int64_t key : tile.special) {
          if (key < skipped || key >= skipped + count) continue;
          const A* const share = m.scores + (key - skipped) * W;
          add_special(tile.value_rows.at(key), n, share, share, sums);
        }
        return;
      }
    }
#endif
    multiply_keys(n, tile.values.from_row(skipped), m.scores, m.scores, sums, count, hides);
  }

  // Adds the keys that the panel sees of the tile.
  void add(const Task& t, int64_t p, const Tile& tile, const Memory& m) const {
    const Panel of = panel(t, p);
    const Keys range = problem.range(t.sequence, of);
    Keys seen{std::max(tile.range.begin, range.begin), std::min(tile.range.end, range.end)};
    if (seen.count() <= 0 || of.count == 0) return;
    int64_t skipped = seen.begin - tile.range.begin;
    if (by_dots && skipped % 2 == 1) {
      // values are in pairs
      --skipped;
      --seen.begin;
    }
    const int64_t count = seen.count();
    const Cover mask = cover(problem.mask, t.sequence, of, seen, m.bias);
    if (mask == Cover::kAll) return;
    score(p, tile, skipped, count, m);
    const Cover hides =
        finish_scores<A>(problem, t.sequence, of, seen, mask, m.scores, m.bias, nullptr);
    const Softmax<A> softmax{m.largest + p * W, m.sums + p * W};
    const bool grew = hides == Cover::kSome
                          ? softmax_keys<true>(m.scores, count, softmax, m.factors)
                          : softmax_keys<false>(m.scores, count, softmax, m.factors);
    A* const sums = m.results + p * value_width * W;
    if (grew) {
      change_scores(sums, problem.sizes.value_size, [&](Vec<A> x, int64_t, int j) {
        return x * simd::load_as<Vec<A>>(m.factors + j * kLanes<A>);
      });
    }
    add_values(tile, skipped, count, hides, m, sums);
  }

  void finish(const Task& t, int64_t p, const Memory& m) const {
    const Panel of = panel(t, p);
    const Sizes& s = problem.sizes;
    const int64_t row = t.sequence.first_query + of.first;
    A* const to = lse + (t.sequence.batch * s.heads + of.head) * s.queries + row;
    for (int64_t i = 0; i < W; ++i) {
      A most = m.largest[p * W + i], sum = m.sums[p * W + i], share = 1;
      if (problem.sinks && problem.sinks[of.head] != kHidden<A>) {
        // one more key, whose value is zero
        const A sink = problem.sinks[of.head], top = std::max(sink, most);
        share = std::exp(most - top);
        sum = sum * share + std::exp(sink - top);
        most = top;
      }
      m.factors[i] = sum == 0 ? A(0) : share / sum;
      if (i < of.count) to[i] = most + std::log(sum);
    }
    product::from_lanes<A>(m.results + p * value_width * W, value_width, m.factors,
                           {m.rows, value_width});
    for (int64_t i = 0; i < of.count; ++i) {
      T* const y = out.at(t.sequence.batch, of.head, row + i);
      simd::for_each_pair<T>(s.value_size, [&](int64_t d, auto elements) {
        simd::store_in_order(y + d, simd::load(m.rows + i * value_width + d), elements);
      });
    }
  }

  void operator()(const Task& t) const {
    const Memory m = memory();
    const int64_t panels = t.heads * queries_each;
    Keys all{t.sequence.keys, 0};
    for (int64_t p = 0; p < panels; ++p) {
      start(t, p, m);
      if (panel(t, p).count == 0) continue;
      const Keys range = problem.range(t.sequence, panel(t, p));
      all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
    }
    Tile tile;
    while (all.count() > 0) {
      const Keys keys = cache.next(t.sequence, all, kKeys);
      all.begin = keys.end;
      if (keys.count() == 0) continue;
      load_tile(t, keys, m, tile);
      for (int64_t p = 0; p < panels; ++p) add(t, p, tile, m);
    }
    for (int64_t p = 0; p < panels; ++p) finish(t, p, m);
  }
};

template <typename T, typename S>
std::vector<typename Forward<T, S>::Task> tasks_of(const Forward<T, S>& f) {
  const Sizes& s = f.problem.sizes;
  std::vector<typename Forward<T, S>::Task> tasks;
  const int64_t step = f.queries_each * Forward<T, S>::W;
  for (const Sequence& sequence : f.problem.sequences) {
    // the last queries see most keys: they come first
    for (int64_t tile = (sequence.queries + step - 1) / step - 1; tile >= 0; --tile) {
      for (int64_t h = 0; h < s.key_heads; ++h) {
        for (int64_t g = 0; g < s.group(); g += f.heads_each) {
          const int64_t heads = std::min(f.heads_each, s.group() - g);
          tasks.push_back({sequence, h, h * s.group() + g, heads, tile * step});
        }
      }
    }
  }
  return tasks;
}

template <typename T, typename S>
void attend_panels(const Problem<Acc<T>>& problem, const Tensor& q, const Cache<S>& cache,
                   const Tensor& out, const Tensor& lse) {
  const Sizes& s = problem.sizes;
  const int64_t heads = std::max<int64_t>(1, std::min(s.group(), kPanels));
  const Forward<T, S> forward{problem,
                              Heads<const T>(q),
                              cache,
                              Heads<T>(out),
                              mutable_data<Acc<T>>(lse),
                              heads,
                              std::max<int64_t>(1, kPanels / heads),
                              product::round_up(s.size, simd::kStep<T>),
                              product::round_up(s.value_size, simd::kStep<T>),
                              std::is_same_v<T, S> && takes_dots<T>(s.size)};
  const auto tasks = tasks_of(forward);
  metalcore_variant = forward.by_dots ? "panels_dots" : "panels";
  for_each_task(int64_t(tasks.size()), is_worth_threads(s), [&](int64_t t) { forward(tasks[t]); });
}

}  // namespace metalcore::cpu::tiles
