// SPDX-License-Identifier: MIT
// The five products of attention's gradient, of a panel of queries and the keys it sees of a tile:
//   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T
// ByFloats widens what is half; ByDots leaves bfloat16 as it is, in pairs along each sum, and
// rounds P and dS to it.
#pragma once

#include "scores.h"

namespace metalcore::cpu::tiles {

// What a panel of queries is multiplied as. `rows` and `gradient_rows` are q and dO at first.
template <typename A>
struct PanelMemory {
  A *queries, *gradients;   // [D][lanes]
  A *rows, *gradient_rows;  // [lanes][D]
};

// Room for a tile: its keys and values, scores and their gradients, and for what is written
// between.
template <typename A>
struct TileMemory {
  A *keys, *values, *scores, *gradients, *bias, *slopes;
};

// Where the sums of a panel and of the keys it sees are kept.
template <typename A>
struct Sums {
  A *dvalues, *dkeys, *dqueries;
};

template <typename T>
struct ByFloats {
  using A = Acc<T>;
  static constexpr int64_t W = kWidth<A>;

  const Problem<A>& problem;
  int64_t width, value_width;

  struct Tile {
    product::Broadcast<A> keys, values;
  };

  void start(const PanelMemory<A>& p, A*) const {
    product::to_lanes<A>({p.rows, width}, width, p.queries);
    scale_panel(problem.scale, p.queries, width);
    product::to_lanes<A>({p.gradient_rows, value_width}, value_width, p.gradients);
  }

  void load(const T* keys, int64_t key_row, const T* values, int64_t value_row, int64_t count,
            const TileMemory<A>& m, Tile& tile) const {
    tile.keys = widened<T>(keys, key_row, count, problem.sizes.size, {m.keys, width});
    tile.values =
        widened<T>(values, value_row, count, problem.sizes.value_size, {m.values, value_width});
  }

  // The first key of a tile that a product may start with.
  static int64_t whole(int64_t skipped) { return skipped; }

  void scores(const PanelMemory<A>& p, const Tile& tile, int64_t skipped, int64_t count,
              A* to) const {
    product::multiply<A>(count, tile.keys.from_row(skipped), {p.queries, W}, {to, W},
                         problem.sizes.size, false);
  }

  void gradients(const PanelMemory<A>& p, const Tile& tile, int64_t skipped, int64_t count,
                 A* to) const {
    product::multiply<A>(count, tile.values.from_row(skipped), {p.gradients, W}, {to, W},
                         problem.sizes.value_size, false);
  }

  // m.scores are P and m.gradients dS, of `queries` queries.
  void add(const PanelMemory<A>& p, const Tile& tile, int64_t skipped, int64_t count,
           int64_t queries, Cover hides, const TileMemory<A>& m, Sums<A> to) const {
    product::multiply_wide<A>(count, value_width, {m.scores, W, 1}, {p.gradient_rows, value_width},
                              {to.dvalues, value_width}, queries, true);
    product::multiply_wide<A>(count, width, {m.gradients, W, 1}, {p.rows, width}, {to.dkeys, width},
                              queries, true);
    multiply_keys(problem.sizes.size, tile.keys.from_row(skipped), m.gradients, m.scores,
                  to.dqueries, count, hides);
  }
};

#if defined(MC_DOTS)
struct ByDots {
  using T = simd::BFloat16;
  using A = float;
  static constexpr int64_t W = kWidth<A>;

  const Problem<A>& problem;
  int64_t width, value_width;

  // Rows as they are; keys also in pairs of rows, without those values that are not finite.
  struct Tile {
    const T *keys, *values;
    int64_t key_row, value_row;
    const uint16_t* pairs;
    std::vector<int64_t> special;
  };

  static product::Words words(const void* values, int64_t row) {
    return {static_cast<const uint16_t*>(values), row, 2};
  }

  static const uint32_t* pairs(const A* x) { return reinterpret_cast<const uint32_t*>(x); }

  void start(const PanelMemory<A>& p, A* rounded) const {
    pair_up(p.rows, width, p.queries, rounded);
    pair_up(p.gradient_rows, value_width, p.gradients, rounded);
  }

  // Rows of a panel: in lanes, pairs along the head, and as they are, pairs of rows.
  static void pair_up(A* rows, int64_t n, A* lanes, A* rounded) {
    product::round_values(rows, W * n, reinterpret_cast<uint16_t*>(rounded));
    product::to_lanes<A>({rounded, n / 2}, n / 2, lanes);
    product::pair_values(rows, W, n, reinterpret_cast<uint32_t*>(rows));
  }

  void load(const T* keys, int64_t key_row, const T* values, int64_t value_row, int64_t count,
            const TileMemory<A>& m, Tile& tile) const {
    tile.keys = keys;
    tile.values = values;
    tile.key_row = key_row;
    tile.value_row = value_row;
    tile.pairs = reinterpret_cast<const uint16_t*>(m.keys);
    product::pair_rows(keys, key_row, count, problem.sizes.size,
                       reinterpret_cast<uint32_t*>(m.keys), width, tile.special);
  }

  static int64_t whole(int64_t skipped) { return skipped / 2 * 2; }

  void scores(const PanelMemory<A>& p, const Tile& tile, int64_t skipped, int64_t count,
              A* to) const {
    product::multiply_pairs(count, W, words(tile.keys + skipped * tile.key_row, tile.key_row),
                            {pairs(p.queries), W}, {to, W}, problem.sizes.size / 2, false);
    scale_panel(problem.scale, to, count);
  }

  void gradients(const PanelMemory<A>& p, const Tile& tile, int64_t skipped, int64_t count,
                 A* to) const {
    product::multiply_pairs(count, W, words(tile.values + skipped * tile.value_row, tile.value_row),
                            {pairs(p.gradients), W}, {to, W}, problem.sizes.value_size / 2, false);
  }

  void add(const PanelMemory<A>& p, const Tile& tile, int64_t skipped, int64_t count, int64_t,
           Cover, const TileMemory<A>& m, Sums<A> to) const {
    const auto rounded = reinterpret_cast<uint16_t*>(m.bias);
    product::round_values(m.scores, count * W, rounded);
    product::multiply_pairs(count, value_width, words(rounded, W),
                            {pairs(p.gradient_rows), value_width}, {to.dvalues, value_width}, W / 2,
                            true);
    product::round_values(m.gradients, count * W, rounded);
    product::multiply_pairs(count, width, words(rounded, W), {pairs(p.rows), width},
                            {to.dkeys, width}, W / 2, true);
    const auto paired = reinterpret_cast<uint32_t*>(m.slopes);
    product::pair_values(m.gradients, count, W, paired);
    product::multiply_pairs(problem.sizes.size, W, {tile.pairs + skipped * width, 2, 2 * width},
                            {paired, W}, {to.dqueries, W}, (count + 1) / 2, true);
    for (const int64_t key : tile.special) {
      if (key < skipped || key >= skipped + count) continue;
      const int64_t at = (key - skipped) * W;
      add_special(tile.keys + key * tile.key_row, problem.sizes.size, m.gradients + at,
                  m.scores + at, to.dqueries);
    }
  }
};
#endif

}  // namespace metalcore::cpu::tiles
