// SPDX-License-Identifier: MIT
// Vectors, packed vectors, arrays and matrices.
#pragma once

namespace metal {
template <typename T, int N>
struct packed_vec;

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
constexpr int msl_width = msl_is_number<T> ? 1 : 1000;
template <typename T, int N>
constexpr int msl_width<vec<T, N>> = N;
template <typename T, int N>
constexpr int msl_width<packed_vec<T, N>> = N;

// Ends a list in braces that is shorter than the vector: the rest is zero.
struct msl_rest {};

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
  template <typename U, enable_if_t<!is_same_v<U, T>, int> = 0>
  constexpr explicit packed_vec(vec<U, N> v) : packed_vec(vec<T, N>(v)) {}
  template <typename U, enable_if_t<!is_same_v<U, T>, int> = 0>
  constexpr explicit packed_vec(packed_vec<U, N> p) : packed_vec(vec<T, N>(vec<U, N>(p))) {}
  template <typename... P,
            enable_if_t<(sizeof...(P) > 1) && (msl_width<P> + ... + 0) == N, int> = 0>
  constexpr packed_vec(P... parts) : packed_vec(vec<T, N>(parts...)) {}
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>
  constexpr explicit(MSL_NARROWS(T, U)) packed_vec(U value) : packed_vec(vec<T, N>(value)) {}
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
  constexpr T get(int i) const { return e[i]; }
  T& msl_ref(int i) { return e[i]; }
#define MSL_LETTER(letter, i)                       \
  constexpr T get_##letter() const { return e[i]; } \
  template <typename U>                             \
  constexpr void put_##letter(U u) {                \
    e[i] = static_cast<T>(u);                       \
  }                                                 \
  __declspec(property(get = get_##letter, put = put_##letter)) T letter;
  MSL_LETTER(x, 0)
  MSL_LETTER(y, 1)
  MSL_LETTER(z, 2)
  MSL_LETTER(w, 3)
  MSL_LETTER(r, 0)
  MSL_LETTER(g, 1)
  MSL_LETTER(b, 2)
  MSL_LETTER(a, 3)
#undef MSL_LETTER
#include "packed_swizzles.h"
// A packed vector beside a packed one, a vector or a number computes as vectors do.
#define MSL_PACKED(op)                                                                       \
  friend constexpr auto operator op(packed_vec a, packed_vec b) {                            \
    return vec<T, N>(a) op vec<T, N>(b);                                                     \
  }                                                                                          \
  friend constexpr auto operator op(packed_vec a, vec<T, N> b) { return vec<T, N>(a) op b; } \
  friend constexpr auto operator op(vec<T, N> a, packed_vec b) { return a op vec<T, N>(b); } \
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>                              \
  friend constexpr auto operator op(packed_vec a, U b) {                                     \
    return vec<T, N>(a) op vec<T, N>(b);                                                     \
  }                                                                                          \
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>                              \
  friend constexpr auto operator op(U a, packed_vec b) {                                     \
    return vec<T, N>(a) op vec<T, N>(b);                                                     \
  }
#define MSL_PACKED_ASSIGNING(op)                     \
  MSL_PACKED(op)                                     \
  template <typename U>                              \
  constexpr packed_vec& operator op## = (U b) {      \
    return *this = vec<T, N>(*this) op vec<T, N>(b); \
  }
  MSL_PACKED_ASSIGNING(+)
  MSL_PACKED_ASSIGNING(-)
  MSL_PACKED_ASSIGNING(*)
  MSL_PACKED_ASSIGNING(/)
  MSL_PACKED_ASSIGNING(%)
  MSL_PACKED_ASSIGNING(&)
  MSL_PACKED_ASSIGNING(|)
  MSL_PACKED_ASSIGNING(^)
  MSL_PACKED_ASSIGNING(<<)
  MSL_PACKED_ASSIGNING(>>)
  MSL_PACKED(==)
  MSL_PACKED(!=)
  MSL_PACKED(<)
  MSL_PACKED(>)
  MSL_PACKED(<=)
  MSL_PACKED(>=)
#undef MSL_PACKED
#undef MSL_PACKED_ASSIGNING
  constexpr vec<T, N> operator-() const { return -vec<T, N>(*this); }
};

template <typename T>
constexpr bool msl_is_packed = false;
template <typename T, int N>
constexpr bool msl_is_packed<packed_vec<T, N>> = true;
template <typename T>
constexpr T msl_unpacked(T value) {
  return value;
}
template <typename T, int N>
constexpr vec<T, N> msl_unpacked(packed_vec<T, N> value) {
  return value;
}
// One element of a vector, or a member of another type, as what can be assigned to.
#define MSL_PART(letter, i)                                            \
  template <typename V>                                                \
  inline auto msl_part_##letter(V& v, int) -> decltype(v.msl_ref(i)) { \
    return v.msl_ref(i);                                               \
  }                                                                    \
  template <typename V>                                                \
  inline auto msl_part_##letter(V& v, long) -> decltype((v.letter)) {  \
    return (v.letter);                                                 \
  }
MSL_PART(x, 0)
MSL_PART(y, 1)
MSL_PART(z, 2)
MSL_PART(w, 3)
MSL_PART(r, 0)
MSL_PART(g, 1)
MSL_PART(b, 2)
MSL_PART(a, 3)
#undef MSL_PART
template <typename T>
struct vec_elements : integral_constant<int, 1> {};
template <typename T, int N>
struct vec_elements<vec<T, N>> : integral_constant<int, N> {};

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
  // Columns, which may be lists themselves.
  template <int N = C, enable_if_t<N == 2, int> = 0>
  constexpr matrix(vec<T, R> a, vec<T, R> b) : columns{a, b} {}
  template <int N = C, enable_if_t<N == 3, int> = 0>
  constexpr matrix(vec<T, R> a, vec<T, R> b, vec<T, R> c) : columns{a, b, c} {}
  template <int N = C, enable_if_t<N == 4, int> = 0>
  constexpr matrix(vec<T, R> a, vec<T, R> b, vec<T, R> c, vec<T, R> d) : columns{a, b, c, d} {}
  template <typename... S, enable_if_t<sizeof...(S) == C * R && (msl_is_number<S> && ...), int> = 0>
  constexpr matrix(S... numbers) : columns{} {
    int i = 0;
    ((columns[i / R].set(i % R, static_cast<T>(numbers)), ++i), ...);
  }
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
  // Friends are found for matrices alone: a function of this name that everybody sees would keep
  // the compiler from finding those of two swizzles in a template.
  friend constexpr vec<T, R> operator*(const matrix& m, vec<T, C> v) {
    vec<T, R> sum = m.columns[0] * vec<T, R>(v.get(0));
    for (int i = 1; i < C; ++i) sum += m.columns[i] * vec<T, R>(v.get(i));
    return sum;
  }
  friend constexpr vec<T, C> operator*(vec<T, R> v, const matrix& m) {
    vec<T, C> out{};
    for (int i = 0; i < C; ++i) {
      T sum = T(0);
      for (int j = 0; j < R; ++j) sum = T(sum + v.get(j) * m.columns[i].get(j));
      out.set(i, sum);
    }
    return out;
  }
  template <int K>
  friend constexpr matrix<T, K, R> operator*(const matrix& a, const matrix<T, K, C>& b) {
    matrix<T, K, R> out;
    for (int i = 0; i < K; ++i) out.columns[i] = a * b.columns[i];
    return out;
  }
  constexpr matrix operator-() const { return *this * T(-1); }
  constexpr matrix& operator+=(const matrix& b) { return *this = *this + b; }
  constexpr matrix& operator-=(const matrix& b) { return *this = *this - b; }
  constexpr matrix& operator*=(T s) { return *this = *this * s; }
  constexpr bool operator==(const matrix& b) const {
    bool same = true;
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < R; ++j) same = same && columns[i].get(j) == b.columns[i].get(j);
    return same;
  }
  constexpr bool operator!=(const matrix& b) const { return !(*this == b); }
};
template <typename T, int C, int R>
constexpr matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> out{};
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < R; ++j) out.columns[j].set(i, m.columns[i].get(j));
  return out;
}
// By its first row.
template <typename T, int N>
constexpr T determinant(const matrix<T, N, N>& m) {
  if constexpr (N == 2) {
    return T(m.columns[0].get(0) * m.columns[1].get(1) - m.columns[1].get(0) * m.columns[0].get(1));
  } else {
    T sum = T(0);
    for (int out = 0; out < N; ++out) {
      matrix<T, N - 1, N - 1> minor{};
      for (int i = 0, k = 0; i < N; ++i) {
        if (i == out) continue;
        for (int j = 1; j < N; ++j) minor.columns[k].set(j - 1, m.columns[i].get(j));
        ++k;
      }
      const T part = T(m.columns[out].get(0) * determinant(minor));
      sum = T(out % 2 ? sum - part : sum + part);
    }
    return sum;
  }
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
#define MSL_MATRIX(name, t, c, r)      \
  typedef metal::matrix<t, c, r> name; \
  namespace metal {                    \
  using ::name;                        \
  }
#define MSL_MATRICES(t)       \
  MSL_MATRIX(t##2x2, t, 2, 2) \
  MSL_MATRIX(t##2x3, t, 2, 3) \
  MSL_MATRIX(t##2x4, t, 2, 4) \
  MSL_MATRIX(t##3x2, t, 3, 2) \
  MSL_MATRIX(t##3x3, t, 3, 3) \
  MSL_MATRIX(t##3x4, t, 3, 4) \
  MSL_MATRIX(t##4x2, t, 4, 2) \
  MSL_MATRIX(t##4x3, t, 4, 3) \
  MSL_MATRIX(t##4x4, t, 4, 4)
MSL_MATRICES(float)
MSL_MATRICES(half)
#undef MSL_MATRICES
#undef MSL_MATRIX
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
