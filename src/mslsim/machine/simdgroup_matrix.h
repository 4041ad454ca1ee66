// SPDX-License-Identifier: MIT
// simdgroup_matrix: 64 elements, two in each lane, in the layout of Apple's GPUs.
#pragma once

namespace metal {
template <typename T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup_matrix is 8x8");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>,
                "simdgroup_matrix holds float, half or bfloat");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T value) : elements(value, value) {}
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
  friend simdgroup_matrix operator*(const simdgroup_matrix& a, const simdgroup_matrix& b) {
    simdgroup_matrix d;
    simdgroup_multiply(d, a, b);
    return d;
  }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int R, int C = R>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, R, C>(value);
}

// Row, and the first of the two columns, that a lane holds.
struct msl_tile {
  int row, column;
  explicit msl_tile(uint lane)
      : row(int((lane / 4 & 4) + lane / 2 % 4)), column(int((lane / 4 & 2) * 2 + lane % 2 * 2)) {}
};
// An operation that needs all lanes; a lane that is missing is told.
MSL_UNWATCHED inline bool msl_all_lanes(msl::Collective* k) {
  if (k->mask == 0xffffffffu) return true;
  k->undefined = k->mask;
  for (int& number : k->number) number = __builtin_ctz(~k->mask);
  return false;
}
MSL_UNWATCHED inline void msl_serve_all(msl::Collective* k) { msl_all_lanes(k); }
struct msl_product {
  void *d, *a, *b, *c;
};
template <typename D, typename A, typename B, typename C>
MSL_UNWATCHED void msl_serve_multiply(msl::Collective* k) {
  if (!msl_all_lanes(k)) return;
  float a[8][8], b[8][8], sum[8][8];
  for (uint lane = 0; lane < 32; ++lane) {
    const msl_tile at(lane);
    const msl_product* p = static_cast<msl_product*>(k->value[lane]);
    for (int j = 0; j < 2; ++j) {
      a[at.row][at.column + j] = float(static_cast<vec<A, 2>*>(p->a)->get(j));
      b[at.row][at.column + j] = float(static_cast<vec<B, 2>*>(p->b)->get(j));
      sum[at.row][at.column + j] = p->c ? float(static_cast<vec<C, 2>*>(p->c)->get(j)) : 0.0f;
    }
  }
  for (int i = 0; i < 8; ++i)
    for (int l = 0; l < 8; ++l)
      for (int j = 0; j < 8; ++j) sum[i][j] = __builtin_fmaf(a[i][l], b[l][j], sum[i][j]);
  for (uint lane = 0; lane < 32; ++lane) {
    const msl_tile at(lane);
    const msl_product* p = static_cast<msl_product*>(k->value[lane]);
    for (int j = 0; j < 2; ++j)
      static_cast<vec<D, 2>*>(p->d)->set(j, D(sum[at.row][at.column + j]));
  }
}
template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c) {
  vec<D, 2> out;
  vec<A, 2> in_a = a.elements;
  vec<B, 2> in_b = b.elements;
  vec<C, 2> in_c = c.elements;
  msl_product p{&out, &in_a, &in_b, &in_c};
  msl_collective(&p, 0, msl_serve_multiply<D, A, B, C>, msl::kCooperative, 0);
  d.elements = out;
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b) {
  vec<D, 2> out;
  vec<A, 2> in_a = a.elements;
  vec<B, 2> in_b = b.elements;
  msl_product p{&out, &in_a, &in_b, nullptr};
  msl_collective(&p, 0, msl_serve_multiply<D, A, B, D>, msl::kCooperative, 0);
  d.elements = out;
}

// Each lane moves its own two elements; the collective only states that all lanes take part.
template <typename T, typename U>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* source, ulong row_stride = 8,
                           ulong2 origin = ulong2(0, 0), bool transposed = false) {
  const msl_tile at(msl_lane());
  for (int j = 0; j < 2; ++j) {
    const ulong r = ulong(transposed ? at.column + j : at.row);
    const ulong c = ulong(transposed ? at.row : at.column + j);
    m.elements.set(j, T(source[(origin.get(1) + r) * row_stride + origin.get(0) + c]));
  }
  msl_collective(nullptr, 0, msl_serve_nothing, msl::kCooperative, 0);
}
template <typename T, typename U>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, U* target, ulong row_stride = 8,
                            ulong2 origin = ulong2(0, 0), bool transposed = false) {
  const msl_tile at(msl_lane());
  for (int j = 0; j < 2; ++j) {
    const ulong r = ulong(transposed ? at.column + j : at.row);
    const ulong c = ulong(transposed ? at.row : at.column + j);
    target[(origin.get(1) + r) * row_stride + origin.get(0) + c] = U(m.elements.get(j));
  }
  msl_collective(nullptr, 0, msl_serve_nothing, msl::kCooperative, 0);
}
}  // namespace metal
