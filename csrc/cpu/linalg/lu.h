// SPDX-License-Identifier: MIT
// P A = L U with partial pivoting of matrices that stand side by side, one per lane, and the
// substitutions with its factors.
//
// By panels of four columns, looking left: a panel is read from the matrices in the order of rows
// that each lane has reached, so that only L is ever swapped; then it takes all that the columns
// before it do to it, in register tiles, and is factored. Rows and columns are padded with zeros to
// whole tiles.
#pragma once

#include "../common/lanes.h"

namespace metalcore::lanes {

// Whether matrices of A's size go into lanes: up to one size where there are many, and up to
// another times their number where these are few and leave lanes idle.
inline bool fit(const cpu::Tensor& A, int64_t up_to, int64_t alone_up_to) {
  const int64_t m = A.size(-2), n = A.size(-1);
  if (m * n == 0) return true;
  return std::max(m, n) <= std::min(up_to, A.numel() / (m * n) * alone_up_to);
}

// Rows of a register tile, and columns of a panel.
constexpr int64_t kPanel = 4;
// Columns of a register tile: with 16 registers 4 x 2 sums, 2 columns and a row value are the most.
constexpr int kTileColumns = MC_REGISTER_BYTES == 32 ? 2 : 4;
// Columns that are read and written at a time.
template <typename T>
constexpr int64_t kChunk = std::max<int64_t>(kLanes<T>, kPanel);

inline int64_t whole_panels(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

// The factors of one group of matrices, in the memory of a workspace.
template <typename T>
struct LU {
  int64_t m, n, rows, columns, ld;  // rows and columns: m and n in whole panels
  T* w;                             // [rows, ld]: U, and below it L without its ones
  Mask<T>* order;                   // [rows]: row i of L U is row order[i] of A
  Vec<T>* scale;                    // [columns]: 1 / u_ii is scale * reciprocal, because the
  Vec<T>* reciprocal;               // reciprocal of a denormal number is infinite
  Mask<T> info;                     // 0, or 1 + the first i with u_ii = 0
  Mask<T> odd;                      // all bits where the number of swaps is odd

  LU(int64_t m, int64_t n)
      : m(m), n(n), rows(whole_panels(m)), columns(whole_panels(n)), ld(padded(columns)) {}

  // Registers that `place` takes of a workspace.
  int64_t size() const { return rows * ld + rows + 2 * columns; }

  // Returns what is left of the memory.
  T* place(T* memory) {
    w = memory;
    memory += rows * ld * kLanes<T>;
    order = reinterpret_cast<Mask<T>*>(memory);
    scale = reinterpret_cast<Vec<T>*>(memory + rows * kLanes<T>);
    reciprocal = scale + columns;
    for (int64_t i = 0; i < rows; ++i) order[i] = Mask<T>{} + Int<T>(i);
    for (int64_t j = 0; j < columns; ++j) scale[j] = reciprocal[j] = Vec<T>{};
    info = odd = Mask<T>{};
    return reinterpret_cast<T*>(reciprocal + columns);
  }

  T* row(int64_t i) const { return w + i * ld * kLanes<T>; }
};

// Rows order[0..rows) of columns first.. of matrices [m, n], `stride` apart, into x [rows, ldx].
// Reads `width` columns and writes up to whole panels of them, with zeros past the matrix.
template <typename T>
void pack_ordered(const LU<T>& lu, const T* a, int64_t n, int64_t stride, int64_t count,
                  int64_t first, int64_t width, T* x, int64_t ldx, int64_t written) {
  constexpr int64_t L = kLanes<T>;
  const detail::Starts<const T> start(a + first, stride, count);
  for (int64_t i = 0; i < lu.m; ++i) {
    const Mask<T> skipped = lu.order[i] * Int<T>(n);
    const T* from[L];
#pragma GCC unroll 16
    for (int64_t l = 0; l < L; ++l) from[l] = start.of[l] + skipped[l];
    T* to = x + i * ldx * L;
    int64_t j = 0;
    for (; j < width && n >= L; j += L) {
      // at the end of a row the last L values are read, and those that are known dropped
      const int64_t back = std::max<int64_t>(0, first + j + L - n);
      Vec<T> r[L];
#pragma GCC unroll 16
      for (int64_t l = 0; l < L; ++l) r[l] = simd::load_as<Vec<T>>(from[l] + j - back);
      transpose<T>(r);
      if (back == 0) {
#pragma GCC unroll 16
        for (int64_t c = 0; c < L; ++c) at(to, j + c) = r[c];
      } else {
#pragma GCC unroll 16
        for (int64_t c = 0; c < L; ++c) {
          if (c >= back) at(to, j + c - back) = r[c];
        }
      }
    }
    for (; j < width; ++j) {
      for (int64_t l = 0; l < L; ++l) to[j * L + l] = from[l][j];
    }
    for (j = width; j < written; ++j) at(to, j) = Vec<T>{};
  }
  for (int64_t i = lu.m; i < lu.rows; ++i) {
    for (int64_t j = 0; j < written; ++j) at(x, i * ldx + j) = Vec<T>{};
  }
}

// c -= l x for a tile: l [kPanel, count] with rows ld apart, x [count, W] with rows ldx apart.
template <typename T, int W>
inline void subtract_product(const T* l, int64_t ld, const T* x, int64_t ldx, int64_t count,
                             Vec<T> (&c)[kPanel][W]) {
  for (int64_t k = 0; k < count; ++k) {
    Vec<T> b[W];
    for (int j = 0; j < W; ++j) b[j] = at(x, k * ldx + j);
    for (int64_t i = 0; i < kPanel; ++i) {
      const Vec<T> a = at(l, i * ld + k);
      for (int j = 0; j < W; ++j) c[i][j] -= a * b[j];
    }
  }
}

template <typename T, int W>
inline void load_tile(const T* x, int64_t ldx, Vec<T> (&c)[kPanel][W]) {
  for (int64_t i = 0; i < kPanel; ++i) {
    for (int j = 0; j < W; ++j) c[i][j] = at(x, i * ldx + j);
  }
}

template <typename T, int W>
inline void store_tile(const Vec<T> (&c)[kPanel][W], T* x, int64_t ldx) {
  for (int64_t i = 0; i < kPanel; ++i) {
    for (int j = 0; j < W; ++j) at(x, i * ldx + j) = c[i][j];
  }
}

// x = L^-1 x in the first `solved` rows; the rest loses what these take away. W columns.
template <typename T, int W>
void eliminate(const LU<T>& lu, int64_t solved, T* x, int64_t ldx) {
  for (int64_t I = 0; I < lu.rows; I += kPanel) {
    Vec<T> c[kPanel][W];
    const T* l = lu.row(I);
    T* to = x + I * ldx * kLanes<T>;
    load_tile(to, ldx, c);
    subtract_product(l, lu.ld, x, ldx, std::min(I, solved), c);
    if (I < solved) {
      for (int64_t i = 1; i < kPanel; ++i) {
        for (int64_t k = 0; k < i; ++k) {
          const Vec<T> a = at(l, i * lu.ld + I + k);
          for (int j = 0; j < W; ++j) c[i][j] -= a * c[k][j];
        }
      }
    }
    store_tile(c, to, ldx);
  }
}

// x = U^-1 x, W columns.
template <typename T, int W>
void substitute_back(const LU<T>& lu, T* x, int64_t ldx) {
  for (int64_t I = lu.rows - kPanel; I >= 0; I -= kPanel) {
    Vec<T> c[kPanel][W];
    const T* u = lu.row(I);
    T* to = x + I * ldx * kLanes<T>;
    const int64_t next = I + kPanel;
    load_tile(to, ldx, c);
    subtract_product(u + next * kLanes<T>, lu.ld, x + next * ldx * kLanes<T>, ldx, lu.rows - next,
                     c);
    for (int64_t i = kPanel - 1; i >= 0; --i) {
      for (int64_t k = i + 1; k < kPanel; ++k) {
        const Vec<T> a = at(u, i * lu.ld + I + k);
        for (int j = 0; j < W; ++j) c[i][j] -= a * c[k][j];
      }
      for (int j = 0; j < W; ++j) c[i][j] = c[i][j] * lu.scale[I + i] * lu.reciprocal[I + i];
    }
    store_tile(c, to, ldx);
  }
}

// body(integral_constant<W>, j) for `columns` columns in tiles.
template <typename Body>
inline void for_each_tile(int64_t columns, Body body) {
  int64_t j = 0;
  for (; j + kTileColumns <= columns; j += kTileColumns) {
    body(std::integral_constant<int, kTileColumns>(), j);
  }
  for (; j < columns; ++j) body(std::integral_constant<int, 1>(), j);
}

// The different rows among the lanes' own, but for row p, into `rows`. Returns how many there are.
template <typename T>
inline int different_rows(const LU<T>& lu, int64_t p, Mask<T> with, Int<T> (&rows)[kLanes<T>]) {
  int count = 0;
  // by bits, 64 rows at a time, without a branch on each
  for (int64_t from = p + 1; from < lu.m; from += 64) {
    uint64_t found = 0;
    for (int64_t l = 0; l < kLanes<T>; ++l) {
      const uint64_t bit = uint64_t(with[l] - from);
      found |= uint64_t(bit < 64) << (bit % 64);
    }
    for (; found; found &= found - 1) rows[count++] = Int<T>(from + __builtin_ctzll(found));
  }
  return count;
}

// Swaps row p with row `with` of each lane, in `Columns` columns from j on; `rows` are those that
// some lane swaps.
template <typename T, int64_t Columns>
inline void swap_columns(LU<T>& lu, int64_t p, Mask<T> with, const Int<T>* rows, int count,
                         int64_t j) {
  T* top = lu.row(p) + j * kLanes<T>;
  Vec<T> next[Columns];
  for (int64_t t = 0; t < Columns; ++t) next[t] = at(top, t);
  for (int r = 0; r < count; ++r) {
    const Mask<T> here = with == rows[r];
    T* row = lu.row(rows[r]) + j * kLanes<T>;
    for (int64_t t = 0; t < Columns; ++t) {
      const Vec<T> v = at(row, t);
      next[t] = here ? v : next[t];
      at(row, t) = here ? at(top, t) : v;
    }
  }
  for (int64_t t = 0; t < Columns; ++t) at(top, t) = next[t];
}

// The same in the first `columns` columns, and in the order.
template <typename T>
void swap_rows(LU<T>& lu, int64_t p, Mask<T> with, int64_t columns) {
  Int<T> rows[kLanes<T>];
  const int count = different_rows(lu, p, with, rows);
  if (count == 0) return;
  lu.odd ^= with != Int<T>(p);
  for (int r = 0; r < count; ++r) {
    const Mask<T> here = with == rows[r], a = lu.order[p], b = lu.order[rows[r]];
    lu.order[p] = here ? b : a;
    lu.order[rows[r]] = here ? a : b;
  }
  int64_t j = 0;
  for (; j + 2 * kPanel <= columns; j += 2 * kPanel) {
    swap_columns<T, 2 * kPanel>(lu, p, with, rows, count, j);
  }
  if (j < columns) swap_columns<T, kPanel>(lu, p, with, rows, count, j);
}

// The row of the largest value so far in each lane. Starts at `first`, which a NaN does not leave.
template <typename T>
struct Largest {
  Vec<T> value = splat<T>(-1);
  Mask<T> row;

  explicit Largest(int64_t first) : row(Mask<T>{} + Int<T>(first)) {}
  void see(Vec<T> x, int64_t i) {
    const Vec<T> size = abs(x);
    const Mask<T> larger = size > value;
    value = larger ? size : value;
    row = larger ? Mask<T>{} + Int<T>(i) : row;
  }
};

// Column J + C of a panel: its pivot, the multipliers below it, and what they take from the columns
// after it in the panel. `largest` holds the pivot's row, and then that of the next column.
template <int C, typename T>
inline void factor_column(LU<T>& lu, int64_t J, int64_t columns, Largest<T>& largest) {
  const int64_t p = J + C;
  swap_rows(lu, p, largest.row, columns);
  Vec<T> top[kPanel];
  for (int64_t j = C; j < kPanel; ++j) top[j] = at(lu.row(p), J + j);
  const Mask<T> singular = top[C] == 0, tiny = abs(top[C]) < std::numeric_limits<T>::min();
  lu.info = (lu.info == 0) & singular ? Mask<T>{} + Int<T>(p + 1) : lu.info;
  const Vec<T> scale = tiny ? splat<T>(1 / std::numeric_limits<T>::epsilon()) : splat<T>(1);
  lu.scale[p] = scale;
  lu.reciprocal[p] = 1 / (top[C] * scale);
  const Vec<T> reciprocal = singular ? Vec<T>{} : lu.reciprocal[p];
  largest = Largest<T>(p + 1);
  for (int64_t i = p + 1; i < lu.m; ++i) {
    T* row = lu.row(i) + J * kLanes<T>;
    const Vec<T> l = at(row, C) * scale * reciprocal;
    at(row, C) = l;
    for (int64_t j = C + 1; j < kPanel; ++j) {
      const Vec<T> v = at(row, j) - l * top[j];
      at(row, j) = v;
      if (j == C + 1) largest.see(v, i);
    }
  }
}

// Factors the panel at column J, to which all columns before it were applied.
template <typename T>
void factor_panel(LU<T>& lu, int64_t J, int64_t pivots, int64_t columns) {
  Largest<T> largest(J);
  for (int64_t i = J; i < lu.m; ++i) largest.see(at(lu.row(i), J), i);
  [&]<int... C>(std::integer_sequence<int, C...>) {
    ((C < pivots ? factor_column<C>(lu, J, columns, largest) : void()), ...);
  }(std::make_integer_sequence<int, kPanel>());
}

// Factors `count` matrices [m, n] that stand one after the other at a.
template <typename T>
void factor(LU<T>& lu, const T* a, int64_t count) {
  const int64_t pivots = std::min(lu.m, lu.n);
  for (int64_t first = 0; first < lu.n; first += kChunk<T>) {
    const int64_t width = std::min(kChunk<T>, lu.n - first), end = first + whole_panels(width);
    pack_ordered(lu, a, lu.n, lu.m * lu.n, count, first, width, lu.w + first * kLanes<T>, lu.ld,
                 end - first);
    for (int64_t J = first; J < end; J += kPanel) {
      for_each_tile(kPanel, [&]<int W>(std::integral_constant<int, W>, int64_t j) {
        eliminate<T, W>(lu, std::min(J, lu.rows), lu.w + (J + j) * kLanes<T>, lu.ld);
      });
      factor_panel(lu, J, std::min(kPanel, pivots - J), end);
    }
  }
}

}  // namespace metalcore::lanes
