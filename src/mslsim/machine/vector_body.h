// SPDX-License-Identifier: MIT
// vec<T, MSL_N>; included once for each width with MSL_N defined. Elements live in one clang
// vector, so that a load or store of the whole is one memory access. Swizzles come from swizzles.h,
// which is generated: they are properties, hence assignable, usable in templates, and without an
// address.
template <typename T>
struct vec<T, MSL_N> {
  using element = typename msl_element<T>::type;
  typedef element raw __attribute__((ext_vector_type(MSL_N)));
  raw v;

  struct from_raw {};
  vec() = default;
  constexpr vec(from_raw, raw r) : v(r) {}
  template <typename U, enable_if_t<msl_is_number<U>, int> = 0>
  constexpr explicit(MSL_NARROWS(T, U)) vec(U value)
#if MSL_N == 2
      : v{pack(value), pack(value)} {}
#elif MSL_N == 3
      : v{pack(value), pack(value), pack(value)} {}
#else
      : v{pack(value), pack(value), pack(value), pack(value)} {
  }
#endif
        template <typename U, enable_if_t<!is_same_v<U, T>, int> = 0>
        constexpr explicit vec(vec<U, MSL_N> other)
      : v{} {
    if constexpr (msl_is_native<T> && msl_is_native<U>) {
      v = __builtin_convertvector(other.v, raw);
    } else if constexpr (is_same_v<U, bfloat> && msl_is_native<T>) {
      typedef uint wide __attribute__((ext_vector_type(MSL_N)));
      typedef float real __attribute__((ext_vector_type(MSL_N)));
      const wide bits = __builtin_convertvector(other.v, wide) << 16;
      v = __builtin_convertvector(__builtin_bit_cast(real, bits), raw);
    } else {
      T e[MSL_N]{};
      for (int i = 0; i < MSL_N; ++i) e[i] = static_cast<T>(other.get(i));
      assemble(e);
    }
  }
  template <typename U, enable_if_t<!is_same_v<U, T>, int> = 0>
  constexpr explicit vec(packed_vec<U, MSL_N> other) : vec(vec<U, MSL_N>(other)) {}
  template <typename... P,
            enable_if_t<(sizeof...(P) > 1) && (msl_width<P> + ... + 0) == MSL_N, int> = 0>
  constexpr vec(P... parts) : v{} {
    T e[MSL_N]{};
    int i = 0;
    (place(e, i, parts), ...);
    assemble(e);
  }
  // The list of an initialiser, `rest` first.
  template <typename... P, enable_if_t<(msl_width<P> + ... + 0) <= MSL_N, int> = 0>
  constexpr vec(msl_rest, P... parts) : v{} {
    T e[MSL_N]{};
    int i = 0;
    (place(e, i, parts), ...);
    assemble(e);
  }

  template <typename U>
  static constexpr element pack(U value) {
    return __builtin_bit_cast(element, static_cast<T>(value));
  }
  constexpr void assemble(const T (&e)[MSL_N]) {
#if MSL_N == 2
    v = raw{pack(e[0]), pack(e[1])};
#elif MSL_N == 3
    v = raw{pack(e[0]), pack(e[1]), pack(e[2])};
#else
    v = raw{pack(e[0]), pack(e[1]), pack(e[2]), pack(e[3])};
#endif
  }
  template <typename U>
  static constexpr void place(T (&e)[MSL_N], int& i, U part) {
    if constexpr (msl_width<U> == 1) {
      e[i++] = static_cast<T>(part);
    } else {
      for (int k = 0; k < msl_width<U>; ++k) e[i++] = static_cast<T>(part.get(k));
    }
  }
  constexpr T get(int i) const { return __builtin_bit_cast(T, static_cast<element>(v[i])); }
  constexpr void set(int i, T value) { v[i] = pack(value); }
  T& msl_ref(int i) { return reinterpret_cast<T*>(&v)[i]; }

  template <typename I>
  T& operator[](I i) {
    return reinterpret_cast<T*>(&v)[i];
  }
  template <typename I>
  constexpr T operator[](I i) const {
    return get(static_cast<int>(i));
  }

#include "swizzles.h"

#define MSL_BINARY(op)                                                             \
  friend constexpr vec operator op(vec a, vec b) {                                 \
    if constexpr (__is_same(T, element)) {                                         \
      return vec(from_raw{}, a.v op b.v);                                          \
    } else {                                                                       \
      T e[MSL_N]{};                                                                \
      for (int i = 0; i < MSL_N; ++i) e[i] = static_cast<T>(a.get(i) op b.get(i)); \
      vec r{};                                                                     \
      r.assemble(e);                                                               \
      return r;                                                                    \
    }                                                                              \
  }                                                                                \
  friend constexpr vec& operator op## = (vec & a, vec b) {                         \
    a = a op b;                                                                    \
    return a;                                                                      \
  }
  MSL_BINARY(+)
  MSL_BINARY(-)
  MSL_BINARY(*)
  MSL_BINARY(/)
  MSL_BINARY(%)
  MSL_BINARY(&)
  MSL_BINARY(|)
  MSL_BINARY(^)
  MSL_BINARY(<<)
  MSL_BINARY(>>)
#undef MSL_BINARY
#define MSL_COMPARE(op)                                                \
  friend constexpr vec<bool, MSL_N> operator op(vec a, vec b) {        \
    bool e[MSL_N]{};                                                   \
    for (int i = 0; i < MSL_N; ++i) e[i] = bool(a.get(i) op b.get(i)); \
    vec<bool, MSL_N> r{};                                              \
    r.assemble(e);                                                     \
    return r;                                                          \
  }
  MSL_COMPARE(==)
  MSL_COMPARE(!=)
  MSL_COMPARE(<)
  MSL_COMPARE(>)
  MSL_COMPARE(<=)
  MSL_COMPARE(>=)
  MSL_COMPARE(&&)
  MSL_COMPARE(||)
#undef MSL_COMPARE
  constexpr vec operator+() const { return *this; }
  constexpr vec operator-() const {
    if constexpr (__is_same(T, element)) return vec(from_raw{}, -v);
    vec r{};
    for (int i = 0; i < MSL_N; ++i) r.set(i, static_cast<T>(-get(i)));
    return r;
  }
  constexpr vec operator~() const { return vec(from_raw{}, ~v); }
  constexpr vec<bool, MSL_N> operator!() const {
    vec<bool, MSL_N> r{};
    for (int i = 0; i < MSL_N; ++i) r.set(i, !bool(get(i)));
    return r;
  }
  vec& operator++() { return *this = *this + vec(1); }
  vec& operator--() { return *this = *this - vec(1); }
  vec operator++(int) {
    const vec before = *this;
    ++*this;
    return before;
  }
  vec operator--(int) {
    const vec before = *this;
    --*this;
    return before;
  }
};
