// SPDX-License-Identifier: MIT
// <metal_atomic>. Real atomics, because threadgroups may run on several cores at once.
#pragma once

// The result of adding reals depends on the order by rounding: told apart by 2.
#define MSL_IS_REAL(T) __is_floating_point(T)
#ifdef MSL_CHECKED
#define MSL_ATOMIC(p, writes) msl_atomic(p, sizeof(*(p)), writes)
#else
#define MSL_ATOMIC(p, writes)
#endif

namespace metal {
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
template <typename T>
struct _atomic {
  T value;
};
template <typename T>
using atomic = _atomic<T>;
}  // namespace metal
typedef metal::_atomic<int> atomic_int;
typedef metal::_atomic<uint> atomic_uint;
typedef metal::_atomic<float> atomic_float;
typedef metal::_atomic<bool> atomic_bool;
typedef metal::_atomic<ulong> atomic_ulong;
typedef metal::_atomic<long> atomic_long;

namespace metal {
using ::atomic_bool;
using ::atomic_float;
using ::atomic_int;
using ::atomic_long;
using ::atomic_uint;
using ::atomic_ulong;

#define MSL_ON_ATOMIC   \
  template <typename T> \
  inline
MSL_ON_ATOMIC T atomic_load_explicit(const volatile _atomic<T>* p, memory_order) {
  MSL_ATOMIC(p, 0);
  T r;
  __atomic_load(const_cast<T*>(&p->value), &r, __ATOMIC_SEQ_CST);
  return r;
}
MSL_ON_ATOMIC void atomic_store_explicit(volatile _atomic<T>* p, type_identity_t<T> x,
                                         memory_order) {
  MSL_ATOMIC(p, 1);
  __atomic_store(const_cast<T*>(&p->value), &x, __ATOMIC_SEQ_CST);
}
MSL_ON_ATOMIC T atomic_exchange_explicit(volatile _atomic<T>* p, type_identity_t<T> x,
                                         memory_order) {
  MSL_ATOMIC(p, 1);
  T r;
  __atomic_exchange(const_cast<T*>(&p->value), &x, &r, __ATOMIC_SEQ_CST);
  return r;
}
MSL_ON_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* p, T* expected,
                                                         type_identity_t<T> desired, memory_order,
                                                         memory_order) {
  MSL_ATOMIC(p, 1);
  return __atomic_compare_exchange(const_cast<T*>(&p->value), expected, &desired, false,
                                   __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
#define MSL_FETCH(name, expression)                                                            \
  MSL_ON_ATOMIC T atomic_fetch_##name##_explicit(volatile _atomic<T>* p, type_identity_t<T> x, \
                                                 memory_order) {                               \
    MSL_ATOMIC(p, MSL_IS_REAL(T) ? 2 : 1);                                                     \
    T old;                                                                                     \
    __atomic_load(const_cast<T*>(&p->value), &old, __ATOMIC_SEQ_CST);                          \
    for (;;) {                                                                                 \
      T next = T(expression);                                                                  \
      if (__atomic_compare_exchange(const_cast<T*>(&p->value), &old, &next, false,             \
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))                       \
        return old;                                                                            \
    }                                                                                          \
  }
MSL_FETCH(add, old + x)
MSL_FETCH(sub, old - x)
MSL_FETCH(min, x < old ? x : old)
MSL_FETCH(max, old < x ? x : old)
MSL_FETCH(and, old& x)
MSL_FETCH(or, old | x)
MSL_FETCH(xor, old ^ x)
#undef MSL_FETCH
#define MSL_UPDATE(name)                                                                          \
  inline void atomic_##name##_explicit(volatile _atomic<ulong>* p, ulong x, memory_order order) { \
    atomic_fetch_##name##_explicit(p, x, order);                                                  \
  }
MSL_UPDATE(min)
MSL_UPDATE(max)
#undef MSL_UPDATE
inline void atomic_thread_fence(mem_flags flags, memory_order = memory_order_seq_cst,
                                thread_scope scope = thread_scope_device) {
  msl_fence(int(flags), int(scope));
}
}  // namespace metal
