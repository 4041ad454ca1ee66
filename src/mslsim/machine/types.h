// SPDX-License-Identifier: MIT
// Scalar types and type traits of the Metal Shading Language.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef _Float16 half;
struct bfloat;

namespace metal {
template <typename T, int N>
struct vec;
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <typename T, T V>
struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return V; }
  constexpr T operator()() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, typename T, typename F>
struct conditional {
  using type = T;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;
template <typename T>
struct type_identity {
  using type = T;
};
template <typename T>
using type_identity_t = typename type_identity<T>::type;

#define MSL_TRANSFORM(name, builtin) \
  template <typename T>              \
  struct name {                      \
    using type = builtin(T);         \
  };                                 \
  template <typename T>              \
  using name##_t = typename name<T>::type;
MSL_TRANSFORM(remove_cv, __remove_cv)
MSL_TRANSFORM(remove_const, __remove_const)
MSL_TRANSFORM(remove_volatile, __remove_volatile)
MSL_TRANSFORM(remove_reference, __remove_reference_t)
MSL_TRANSFORM(remove_pointer, __remove_pointer)
MSL_TRANSFORM(remove_cvref, __remove_cvref)
MSL_TRANSFORM(decay, __decay)
MSL_TRANSFORM(make_unsigned, __make_unsigned)
MSL_TRANSFORM(make_signed, __make_signed)
MSL_TRANSFORM(underlying_type, __underlying_type)
#undef MSL_TRANSFORM
template <typename T>
using remove_addrspace_t = T;
template <typename T>
struct add_const {
  using type = const T;
};
template <typename T>
using add_const_t = const T;

#define MSL_PREDICATE(name, expression) \
  template <typename T>                 \
  constexpr bool name##_v = expression; \
  template <typename T>                 \
  struct name : bool_constant<name##_v<T>> {};
#define MSL_IS_BFLOAT(T) __is_same(__remove_cv(T), bfloat)
// What a type is made of: a vector has the traits of its elements, but is no scalar.
template <typename T>
struct msl_part {
  using type = T;
};
template <typename T, int N>
struct msl_part<vec<T, N>> {
  using type = T;
};
template <typename T, int N>
struct msl_part<const vec<T, N>> {
  using type = T;
};
template <typename T>
using msl_part_t = typename msl_part<T>::type;
template <typename T>
constexpr bool msl_is_number = __is_arithmetic(T) || MSL_IS_BFLOAT(T);
template <typename T>
constexpr bool msl_is_integer = __is_integral(T);
MSL_PREDICATE(is_integral, __is_integral(msl_part_t<T>))
MSL_PREDICATE(is_floating_point, __is_floating_point(msl_part_t<T>) || MSL_IS_BFLOAT(msl_part_t<T>))
MSL_PREDICATE(is_arithmetic, msl_is_number<msl_part_t<T>>)
MSL_PREDICATE(is_scalar, __is_scalar(T) || MSL_IS_BFLOAT(T))
MSL_PREDICATE(is_vector, !__is_same(msl_part_t<T>, T))
MSL_PREDICATE(is_signed, __is_signed(msl_part_t<T>) || MSL_IS_BFLOAT(msl_part_t<T>))
MSL_PREDICATE(is_unsigned, __is_unsigned(msl_part_t<T>))
MSL_PREDICATE(is_pointer, __is_pointer(T))
MSL_PREDICATE(is_enum, __is_enum(T))
MSL_PREDICATE(is_class, __is_class(T))
MSL_PREDICATE(is_union, __is_union(T))
MSL_PREDICATE(is_const, __is_const(T))
MSL_PREDICATE(is_void, __is_void(T))
MSL_PREDICATE(is_array, __is_array(T))
MSL_PREDICATE(is_reference, __is_reference(T))
MSL_PREDICATE(is_trivially_copyable, __is_trivially_copyable(T))
#undef MSL_PREDICATE
#define MSL_RELATION(name, builtin)        \
  template <typename A, typename B>        \
  constexpr bool name##_v = builtin(A, B); \
  template <typename A, typename B>        \
  struct name : bool_constant<builtin(A, B)> {};
MSL_RELATION(is_same, __is_same)
MSL_RELATION(is_convertible, __is_convertible)
MSL_RELATION(is_base_of, __is_base_of)
#undef MSL_RELATION
template <typename... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <typename... B>
struct _conjunction : bool_constant<(B::value && ...)> {};
template <typename... B>
using disjunction = _disjunction<B...>;
template <typename... B>
using conjunction = _conjunction<B...>;
template <typename B>
struct negation : bool_constant<!B::value> {};

template <typename T>
T&& declval() noexcept;
template <typename T>
constexpr remove_reference_t<T>&& move(T&& x) {
  return static_cast<remove_reference_t<T>&&>(x);
}
template <typename To, typename From>
constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  return __builtin_bit_cast(To, value);
}
template <typename T>
using msl_if_integral = enable_if_t<__is_integral(T), int>;
template <typename T>
using msl_if_bfloat = enable_if_t<MSL_IS_BFLOAT(T), int>;
}  // namespace metal
using metal::as_type;

// Converts implicitly to float and from integers, and to nothing else: not to half, and not from
// float or half without a cast, as Apple's compiler has it. To integers it needs a cast here.
struct bfloat {
  ushort bits;

  struct from_bits {};
  bfloat() = default;
  constexpr bfloat(from_bits, ushort b) : bits(b) {}
  template <typename F, metal::enable_if_t<__is_floating_point(F), int> = 0>
  constexpr explicit bfloat(F f) : bits(round(static_cast<float>(f))) {}
  template <typename I, metal::msl_if_integral<I> = 0>
  constexpr bfloat(I i) : bits(round(static_cast<float>(i))) {}
  // For what is no number but converts to one.
  constexpr explicit bfloat(bool b) : bits(b ? 0x3f80 : 0) {}

  // To float alone: `c ? 0 : b` would be ambiguous if it also went to integers by itself.
  template <typename F, metal::enable_if_t<__is_same(F, float), int> = 0>
  constexpr operator F() const {
    return __builtin_bit_cast(float, uint(bits) << 16);
  }
  constexpr explicit operator half() const { return static_cast<half>(float(*this)); }
  template <typename I, metal::enable_if_t<__is_integral(I), int> = 0>
  constexpr explicit operator I() const {
    return static_cast<I>(float(*this));
  }

  // To nearest, ties to even; a NaN stays one.
  static constexpr ushort round(float f) {
    uint u = __builtin_bit_cast(uint, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return ushort((u >> 16) | 0x40);
    return ushort((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }

  constexpr bfloat operator-() const { return bfloat(from_bits{}, ushort(bits ^ 0x8000)); }
  constexpr bfloat operator+() const { return *this; }
  bfloat& operator++() { return *this = bfloat(float(*this) + 1); }
  bfloat& operator--() { return *this = bfloat(float(*this) - 1); }

#define MSL_ARITHMETIC(op)                                                                         \
  friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <typename U, metal::enable_if_t<__is_arithmetic(U), int> = 0>                           \
  friend constexpr auto operator op(bfloat a, U b) {                                               \
    return metal::conditional_t<__is_integral(U), bfloat, float>(float(a) op float(b));            \
  }                                                                                                \
  template <typename U, metal::enable_if_t<__is_arithmetic(U), int> = 0>                           \
  friend constexpr auto operator op(U a, bfloat b) {                                               \
    return metal::conditional_t<__is_integral(U), bfloat, float>(float(a) op float(b));            \
  }                                                                                                \
  template <typename U, metal::enable_if_t<metal::msl_is_number<U>, int> = 0>                      \
  constexpr bfloat& operator op## = (U b) {                                                        \
    return *this = bfloat(float(*this) op float(b));                                               \
  }
  MSL_ARITHMETIC(+)
  MSL_ARITHMETIC(-)
  MSL_ARITHMETIC(*)
  MSL_ARITHMETIC(/)
#undef MSL_ARITHMETIC
#define MSL_COMPARISON(op)                                                               \
  friend constexpr bool operator op(bfloat a, bfloat b) { return float(a) op float(b); } \
  template <typename U, metal::enable_if_t<__is_arithmetic(U), int> = 0>                 \
  friend constexpr bool operator op(bfloat a, U b) {                                     \
    return float(a) op float(b);                                                         \
  }                                                                                      \
  template <typename U, metal::enable_if_t<__is_arithmetic(U), int> = 0>                 \
  friend constexpr bool operator op(U a, bfloat b) {                                     \
    return float(a) op float(b);                                                         \
  }
  MSL_COMPARISON(==)
  MSL_COMPARISON(!=)
  MSL_COMPARISON(<)
  MSL_COMPARISON(>)
  MSL_COMPARISON(<=)
  MSL_COMPARISON(>=)
#undef MSL_COMPARISON
};
