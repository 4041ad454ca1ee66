// SPDX-License-Identifier: MIT
// How a kernel's C++ function is called for a thread: the parameter types come from the function,
// what each parameter means comes from its attribute.
#pragma once

// As long as the word it stands for.
#define MSLKRN inline __attribute__((always_inline))

namespace msl {
template <typename F>
struct Signature;
template <typename... P>
struct Signature<void (*)(P...)> {
  template <int I, typename First, typename... Rest>
  struct Pick {
    using type = typename Pick<I - 1, Rest...>::type;
  };
  template <typename First, typename... Rest>
  struct Pick<0, First, Rest...> {
    using type = First;
  };
  template <int I>
  using parameter = typename Pick<I, P...>::type;
};

// 1: an integer, 2: a real number, 0: anything else.
template <typename T>
constexpr int number_kind = __is_integral(T)          ? 1
                            : metal::msl_is_number<T> ? 2
                                                      : 0;

// A buffer parameter: a pointer to many elements or a reference to one.
template <typename T>
struct Buffer;
template <typename T>
struct Buffer<T*> {
  static T* get(void* p) { return static_cast<T*>(p); }
  static constexpr int size = sizeof(metal::conditional_t<__is_void(T), char, T>);
  static constexpr int read_only = __is_const(T);
  static constexpr int is_reference = 0;
  static constexpr int number = 0;
};
template <typename T>
struct Buffer<T&> {
  static T& get(void* p) { return *static_cast<T*>(p); }
  static constexpr int size = sizeof(T);
  static constexpr int read_only = __is_const(T);
  static constexpr int is_reference = 1;
  static constexpr int number = number_kind<metal::remove_cv_t<T>>;
};

// A position attribute as the scalar or vector the kernel declares.
template <typename T>
struct Position {
  static T get(unsigned x, unsigned, unsigned) { return static_cast<T>(x); }
};
template <typename T>
struct Position<metal::vec<T, 2>> {
  static metal::vec<T, 2> get(unsigned x, unsigned y, unsigned) { return metal::vec<T, 2>(x, y); }
};
template <typename T>
struct Position<metal::vec<T, 3>> {
  static metal::vec<T, 3> get(unsigned x, unsigned y, unsigned z) {
    return metal::vec<T, 3>(x, y, z);
  }
};
template <typename T>
struct Position<const T> : Position<T> {};

// Coordinates of one thread in its group.
struct Thread {
  unsigned index, x, y, z;
  Thread(const Group* g, unsigned i)
      : index(i),
        x(i % g->size[0]),
        y(i / g->size[0] % g->size[1]),
        z(i / (g->size[0] * g->size[1])) {}
  Thread(unsigned i, unsigned x_, unsigned y_, unsigned z_) : index(i), x(x_), y(y_), z(z_) {}
};

// Static threadgroup memory: one block for each declaration, shared by the group.
template <typename T>
inline T& threadgroup_memory(unsigned slot) {
  return *static_cast<T*>(msl_threadgroup_memory(slot, sizeof(T), alignof(T)));
}
}  // namespace msl
