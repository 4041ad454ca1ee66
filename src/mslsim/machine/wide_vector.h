// SPDX-License-Identifier: MIT
// Vectors of 8 and 16 elements, which tensor operations hold their fragments in: elements by index,
// and arithmetic.
#pragma once

namespace metal {
template <typename T, int N>
struct msl_wide {
  T e[N];
  msl_wide() = default;
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>
  constexpr msl_wide(U value) : e{} {
    for (T& x : e) x = T(value);
  }
  template <typename U, enable_if_t<!is_same_v<U, T>, int> = 0>
  constexpr explicit msl_wide(const vec<U, N>& v) : e{} {
    for (int i = 0; i < N; ++i) e[i] = T(v[i]);
  }
  template <typename I>
  constexpr T& operator[](I i) {
    return e[i];
  }
  template <typename I>
  constexpr const T& operator[](I i) const {
    return e[i];
  }
};
#define MSL_WIDE_OPERATOR(op)                                        \
  friend constexpr vec operator op(const vec& a, const vec& b) {     \
    vec r{};                                                         \
    for (int i = 0; i < MSL_WIDE; ++i) r.e[i] = T(a.e[i] op b.e[i]); \
    return r;                                                        \
  }                                                                  \
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>      \
  friend constexpr vec operator op(const vec& a, U b) {              \
    return a op vec(b);                                              \
  }                                                                  \
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>      \
  friend constexpr vec operator op(U a, const vec& b) {              \
    return vec(a) op b;                                              \
  }                                                                  \
  template <typename U>                                              \
  constexpr vec& operator op## = (const U& b) {                      \
    return *this = *this op b;                                       \
  }
#define MSL_WIDE_VECTOR                                           \
  template <typename T>                                           \
  struct vec<T, MSL_WIDE> : msl_wide<T, MSL_WIDE> {               \
    using msl_wide<T, MSL_WIDE>::msl_wide;                        \
    vec() = default;                                              \
    MSL_WIDE_OPERATOR(+)                                          \
    MSL_WIDE_OPERATOR(-)                                          \
    MSL_WIDE_OPERATOR(*)                                          \
    MSL_WIDE_OPERATOR(/)                                          \
    constexpr vec operator-() const { return vec(T(0)) - *this; } \
  };
#define MSL_WIDE 8
MSL_WIDE_VECTOR
#undef MSL_WIDE
#define MSL_WIDE 16
MSL_WIDE_VECTOR
#undef MSL_WIDE
#undef MSL_WIDE_VECTOR
#undef MSL_WIDE_OPERATOR
}  // namespace metal
