// SPDX-License-Identifier: MIT
// Vectors, packed vectors, arrays and matrices.
#pragma once

namespace metal {
template <typename T, int N>
struct vec;

// How one element is stored inside a vector.
template <typename T>
struct msl_element {
  using type = T;
};
template <>
struct msl_element<bfloat> {
  using type = ushort;
};
template <>
struct msl_element<bool> {
  using type = uchar;
};

template <typename T>
constexpr bool msl_is_native = __is_same(T, typename msl_element<T>::type);

// Elements a constructor argument contributes; far too many for what is no scalar or vector.
template <typename T>
constexpr int msl_width = is_arithmetic_v<T> ? 1 : 1000;
template <typename T, int N>
constexpr int msl_width<vec<T, N>> = N;

#define MSL_NARROWS(T, U) (__is_same(T, bfloat) && __is_floating_point(U))

#define MSL_N 2
#include "vector_body.h"
#undef MSL_N
#define MSL_N 3
#include "vector_body.h"
#undef MSL_N
#define MSL_N 4
#include "vector_body.h"
#undef MSL_N

// Without the alignment of vec<T, N>.
template <typename T, int N>
struct packed_vec {
  T e[N];
  packed_vec() = default;
  constexpr packed_vec(vec<T, N> v) : e{} {
    for (int i = 0; i < N; ++i) e[i] = v.get(i);
  }
  template <typename... P, enable_if_t<sizeof...(P) == N && (is_arithmetic_v<P> && ...), int> = 0>
  constexpr packed_vec(P... parts) : e{static_cast<T>(parts)...} {}
  constexpr operator vec<T, N>() const {
    vec<T, N> r{};
    r.assemble(e);
    return r;
  }
  template <typename I>
  constexpr T& operator[](I i) {
    return e[i];
  }
  template <typename I>
  constexpr const T& operator[](I i) const {
    return e[i];
  }
  constexpr T get_x() const { return e[0]; }
  constexpr T get_y() const { return e[1]; }
  constexpr T get_z() const { return e[2]; }
  constexpr T get_w() const { return e[3]; }
  constexpr void put_x(T t) { e[0] = t; }
  constexpr void put_y(T t) { e[1] = t; }
  constexpr void put_z(T t) { e[2] = t; }
  constexpr void put_w(T t) { e[3] = t; }
  __declspec(property(get = get_x, put = put_x)) T x;
  __declspec(property(get = get_y, put = put_y)) T y;
  __declspec(property(get = get_z, put = put_z)) T z;
  __declspec(property(get = get_w, put = put_w)) T w;
  friend constexpr vec<T, N> operator+(packed_vec a, packed_vec b) {
    return vec<T, N>(a) + vec<T, N>(b);
  }
  friend constexpr vec<T, N> operator-(packed_vec a, packed_vec b) {
    return vec<T, N>(a) - vec<T, N>(b);
  }
  friend constexpr vec<T, N> operator*(packed_vec a, packed_vec b) {
    return vec<T, N>(a) * vec<T, N>(b);
  }
};

template <typename T, size_t N>
struct array {
  T e_[N];
  constexpr T& operator[](size_t i) { return e_[i]; }
  constexpr const T& operator[](size_t i) const { return e_[i]; }
  constexpr size_t size() const { return N; }
  constexpr T* data() { return e_; }
  constexpr const T* data() const { return e_; }
  constexpr T* begin() { return e_; }
  constexpr T* end() { return e_ + N; }
  constexpr const T* begin() const { return e_; }
  constexpr const T* end() const { return e_ + N; }
};
template <typename A, typename B>
struct pair {
  A first;
  B second;
};
template <typename T, T... I>
struct integer_sequence {
  static constexpr size_t size() { return sizeof...(I); }
};
template <typename T, T N>
using make_integer_sequence = __make_integer_seq<integer_sequence, T, N>;

// Column-major: C columns of R rows.
template <typename T, int C, int R>
struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  explicit constexpr matrix(T diagonal) : columns{} {
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < R; ++j) columns[i].set(j, i == j ? diagonal : T(0));
  }
  template <typename... V,
            enable_if_t<sizeof...(V) == C && (is_same_v<V, vec<T, R>> && ...), int> = 0>
  constexpr matrix(V... v) : columns{v...} {}
  template <typename U>
  explicit constexpr matrix(const matrix<U, C, R>& other) : columns{} {
    for (int i = 0; i < C; ++i) columns[i] = vec<T, R>(other.columns[i]);
  }
  template <typename I>
  constexpr vec<T, R>& operator[](I i) {
    return columns[i];
  }
  template <typename I>
  constexpr const vec<T, R>& operator[](I i) const {
    return columns[i];
  }
  friend constexpr matrix operator+(matrix a, const matrix& b) {
    for (int i = 0; i < C; ++i) a.columns[i] += b.columns[i];
    return a;
  }
  friend constexpr matrix operator-(matrix a, const matrix& b) {
    for (int i = 0; i < C; ++i) a.columns[i] -= b.columns[i];
    return a;
  }
  friend constexpr matrix operator*(matrix a, T s) {
    for (int i = 0; i < C; ++i) a.columns[i] *= vec<T, R>(s);
    return a;
  }
  friend constexpr matrix operator*(T s, matrix a) { return a * s; }
  friend constexpr matrix operator/(matrix a, T s) {
    for (int i = 0; i < C; ++i) a.columns[i] /= vec<T, R>(s);
    return a;
  }
};
template <typename T, int C, int R>
constexpr vec<T, R> operator*(const matrix<T, C, R>& m, vec<T, C> v) {
  vec<T, R> sum = m.columns[0] * vec<T, R>(v.get(0));
  for (int i = 1; i < C; ++i) sum += m.columns[i] * vec<T, R>(v.get(i));
  return sum;
}
template <typename T, int C, int R>
constexpr vec<T, C> operator*(vec<T, R> v, const matrix<T, C, R>& m) {
  vec<T, C> out{};
  for (int i = 0; i < C; ++i) {
    T sum = T(0);
    for (int j = 0; j < R; ++j) sum = T(sum + v.get(j) * m.columns[i].get(j));
    out.set(i, sum);
  }
  return out;
}
template <typename T, int C, int K, int R>
constexpr matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  matrix<T, C, R> out;
  for (int i = 0; i < C; ++i) out.columns[i] = a * b.columns[i];
  return out;
}
template <typename T, int C, int R>
constexpr matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> out{};
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < R; ++j) out.columns[j].set(i, m.columns[i].get(j));
  return out;
}
}  // namespace metal

#define MSL_NAMES(name, type)                          \
  typedef metal::vec<type, 2> name##2;                 \
  typedef metal::vec<type, 3> name##3;                 \
  typedef metal::vec<type, 4> name##4;                 \
  typedef metal::packed_vec<type, 2> packed_##name##2; \
  typedef metal::packed_vec<type, 3> packed_##name##3; \
  typedef metal::packed_vec<type, 4> packed_##name##4; \
  namespace metal {                                    \
  using ::name##2;                                     \
  using ::name##3;                                     \
  using ::name##4;                                     \
  using ::packed_##name##2;                            \
  using ::packed_##name##3;                            \
  using ::packed_##name##4;                            \
  }
MSL_NAMES(bool, bool)
MSL_NAMES(char, char)
MSL_NAMES(uchar, uchar)
MSL_NAMES(short, short)
MSL_NAMES(ushort, ushort)
MSL_NAMES(int, int)
MSL_NAMES(uint, uint)
MSL_NAMES(long, long)
MSL_NAMES(ulong, ulong)
MSL_NAMES(half, half)
MSL_NAMES(bfloat, bfloat)
MSL_NAMES(float, float)
#undef MSL_NAMES
#define MSL_MATRICES(t)                  \
  typedef metal::matrix<t, 2, 2> t##2x2; \
  typedef metal::matrix<t, 2, 3> t##2x3; \
  typedef metal::matrix<t, 2, 4> t##2x4; \
  typedef metal::matrix<t, 3, 2> t##3x2; \
  typedef metal::matrix<t, 3, 3> t##3x3; \
  typedef metal::matrix<t, 3, 4> t##3x4; \
  typedef metal::matrix<t, 4, 2> t##4x2; \
  typedef metal::matrix<t, 4, 3> t##4x3; \
  typedef metal::matrix<t, 4, 4> t##4x4;
MSL_MATRICES(float)
MSL_MATRICES(half)
#undef MSL_MATRICES
namespace metal {
using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;
}  // namespace metal
