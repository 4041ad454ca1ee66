// SPDX-License-Identifier: MIT
// Barriers and the simd_* and quad_* functions. A collective publishes the address of the lane's
// own value and gives way; the machine calls the serving function once with the lanes that arrived.
#pragma once

#define MSL_UNWATCHED __attribute__((no_sanitize("thread", "bounds"), noinline))

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

inline MSL_UNWATCHED void msl_serve_nothing(msl::Collective*) {}
inline void threadgroup_barrier(mem_flags flags, thread_scope = thread_scope_threadgroup) {
  msl_threadgroup_barrier(int(flags));
}
inline void simdgroup_barrier(mem_flags flags, thread_scope = thread_scope_simdgroup) {
  msl_collective(nullptr, 0, msl_serve_nothing, msl::kSimdBarrier, int(flags));
}

// Metal has these functions for 8 to 32-bit numbers and their vectors, but not for bool, 64-bit or
// bfloat elements.
template <typename T>
constexpr bool msl_travels =
    msl_is_number<T> && !is_same_v<T, bool> && !MSL_IS_BFLOAT(T) && sizeof(T) <= 4;
template <typename T, int N>
constexpr bool msl_travels<vec<T, N>> = msl_travels<T>;
template <typename T>
struct __is_valid_simdgroup_type : bool_constant<msl_travels<T>> {};
#define MSL_LANE_VALUE template <typename T, enable_if_t<msl_travels<T>, int> = 0>
#define MSL_LANES(c)           \
  for (int i = 0; i < 32; ++i) \
    if ((c)->mask >> i & 1)

struct msl_add {
  template <typename T>
  static T apply(T a, T b) {
    return T(a + b);
  }
  template <typename T>
  static T identity() {
    return T(0);
  }
};
struct msl_multiply {
  template <typename T>
  static T apply(T a, T b) {
    return T(a * b);
  }
  template <typename T>
  static T identity() {
    return T(1);
  }
};
#define MSL_OPERATOR(name, expression) \
  struct name {                        \
    template <typename T>              \
    static T apply(T a, T b) {         \
      return T(expression);            \
    }                                  \
  };
MSL_OPERATOR(msl_minimum, min(a, b))
MSL_OPERATOR(msl_maximum, max(a, b))
MSL_OPERATOR(msl_bit_and, (a & b))
MSL_OPERATOR(msl_bit_or, (a | b))
MSL_OPERATOR(msl_bit_xor, (a ^ b))
#undef MSL_OPERATOR

// A butterfly over the lanes that arrived, `width` lanes at a time (32, or 4 for quads).
template <typename T, typename Op, int width>
MSL_UNWATCHED void msl_serve_reduce(msl::Collective* c) {
  T value[32];
  unsigned has = c->mask;
  MSL_LANES(c) value[i] = *static_cast<T*>(c->value[i]);
  for (int d = width / 2; d > 0; d /= 2) {
    for (int base = 0; base < 32; base += width) {
      for (int i = base; i < base + d; ++i) {
        const bool a = has >> i & 1, b = has >> (i + d) & 1;
        if (a && b) {
          value[i] = Op::apply(value[i], value[i + d]);
        } else if (b) {
          value[i] = value[i + d];
          has |= 1u << i;
        }
      }
    }
  }
  MSL_LANES(c) * static_cast<T*>(c->value[i]) = value[i / width * width];
}
template <typename T, typename Op, bool inclusive, int width>
MSL_UNWATCHED void msl_serve_scan(msl::Collective* c) {
  T sum = Op::template identity<T>();
  for (int i = 0; i < 32; ++i) {
    if (i % width == 0) sum = Op::template identity<T>();
    if (!(c->mask >> i & 1)) continue;
    T* value = static_cast<T*>(c->value[i]);
    const T next = Op::apply(sum, *value);
    *value = inclusive ? next : sum;
    sum = next;
  }
}
// Metal leaves the result undefined where the source lane does not exist: poison it. A shuffle by a
// distance runs off the end by design (only the other lanes' results are used), so that is no
// error.
template <typename T, bool by_distance>
MSL_UNWATCHED void msl_serve_shuffle(msl::Collective* c) {
  T value[32];
  MSL_LANES(c) value[i] = *static_cast<T*>(c->value[i]);
  MSL_LANES(c) {
    const int source = c->number[i];
    if (source >= 0 && source < 32 && (c->mask >> source & 1)) {
      *static_cast<T*>(c->value[i]) = value[source];
    } else {
      __builtin_memset(c->value[i], 0xff, sizeof(T));
      if (!by_distance || (source >= 0 && source < 32)) c->undefined |= 1u << i;
    }
  }
}
template <typename T, int width>
MSL_UNWATCHED void msl_serve_first(msl::Collective* c) {
  T first{};
  int known = -1;  // whose first one it is
  MSL_LANES(c) {
    T* value = static_cast<T*>(c->value[i]);
    if (i / width != known) first = *value;
    known = i / width;
    *value = first;
  }
}
struct msl_ballot {
  uint mine, yes, active;
};
inline MSL_UNWATCHED void msl_serve_ballot(msl::Collective* c) {
  uint yes = 0;
  MSL_LANES(c) yes |= (static_cast<msl_ballot*>(c->value[i])->mine ? 1u : 0u) << i;
  MSL_LANES(c) {
    static_cast<msl_ballot*>(c->value[i])->yes = yes;
    static_cast<msl_ballot*>(c->value[i])->active = c->mask;
  }
}
template <typename T>
inline T msl_ask(T value, int number, msl::Serve serve) {
  msl_collective(&value, number, serve, msl::kCollective, 0);
  return value;
}
inline msl_ballot msl_ask_ballot(bool mine) {
  return msl_ask(msl_ballot{mine, 0, 0}, 0, msl_serve_ballot);
}

#define MSL_REDUCE(name, op)                                                                      \
  MSL_LANE_VALUE inline T simd_##name(T x) { return msl_ask(x, 0, msl_serve_reduce<T, op, 32>); } \
  MSL_LANE_VALUE inline T quad_##name(T x) { return msl_ask(x, 0, msl_serve_reduce<T, op, 4>); }
MSL_REDUCE(sum, msl_add)
MSL_REDUCE(product, msl_multiply)
MSL_REDUCE(min, msl_minimum)
MSL_REDUCE(max, msl_maximum)
MSL_REDUCE(and, msl_bit_and)
MSL_REDUCE(or, msl_bit_or)
MSL_REDUCE(xor, msl_bit_xor)
#undef MSL_REDUCE
#define MSL_SCAN(name, op)                                    \
  MSL_LANE_VALUE inline T simd_prefix_inclusive_##name(T x) { \
    return msl_ask(x, 0, msl_serve_scan<T, op, true, 32>);    \
  }                                                           \
  MSL_LANE_VALUE inline T simd_prefix_exclusive_##name(T x) { \
    return msl_ask(x, 0, msl_serve_scan<T, op, false, 32>);   \
  }                                                           \
  MSL_LANE_VALUE inline T quad_prefix_inclusive_##name(T x) { \
    return msl_ask(x, 0, msl_serve_scan<T, op, true, 4>);     \
  }                                                           \
  MSL_LANE_VALUE inline T quad_prefix_exclusive_##name(T x) { \
    return msl_ask(x, 0, msl_serve_scan<T, op, false, 4>);    \
  }
MSL_SCAN(sum, msl_add)
MSL_SCAN(product, msl_multiply)
#undef MSL_SCAN

MSL_LANE_VALUE inline T simd_shuffle(T x, ushort lane) {
  return msl_ask(x, lane, msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T simd_broadcast(T x, ushort lane) {
  return msl_ask(x, lane, msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T simd_shuffle_xor(T x, ushort mask) {
  return msl_ask(x, int(msl_lane() ^ mask), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T simd_shuffle_down(T x, ushort d) {
  return msl_ask(x, int(msl_lane()) + d, msl_serve_shuffle<T, true>);
}
MSL_LANE_VALUE inline T simd_shuffle_up(T x, ushort d) {
  return msl_ask(x, int(msl_lane()) - d, msl_serve_shuffle<T, true>);
}
MSL_LANE_VALUE inline T simd_shuffle_rotate_down(T x, ushort d) {
  return msl_ask(x, int((msl_lane() + d) & 31), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T simd_shuffle_rotate_up(T x, ushort d) {
  return msl_ask(x, int((msl_lane() - d) & 31), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T simd_shuffle_and_fill_down(T x, T fill, ushort d, ushort modulo = 32) {
  const int source = int(msl_lane()) + d, last = int(msl_lane()) / modulo * modulo + modulo;
  const T own = msl_ask(x, source, msl_serve_shuffle<T, true>);
  const T filled = msl_ask(fill, source - modulo, msl_serve_shuffle<T, true>);
  return source < last ? own : filled;
}
MSL_LANE_VALUE inline T simd_shuffle_and_fill_up(T x, T fill, ushort d, ushort modulo = 32) {
  const int source = int(msl_lane()) - d, first = int(msl_lane()) / modulo * modulo;
  const T own = msl_ask(x, source, msl_serve_shuffle<T, true>);
  const T filled = msl_ask(fill, source + modulo, msl_serve_shuffle<T, true>);
  return source >= first ? own : filled;
}
MSL_LANE_VALUE inline T simd_broadcast_first(T x) { return msl_ask(x, 0, msl_serve_first<T, 32>); }

#define MSL_QUAD_BASE int(msl_lane() & ~3u)
// Outside the quad the source does not exist.
inline int msl_in_quad(int lane) { return lane >= 0 && lane < 4 ? MSL_QUAD_BASE + lane : -1; }
MSL_LANE_VALUE inline T quad_shuffle(T x, ushort lane) {
  return msl_ask(x, msl_in_quad(lane), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T quad_broadcast(T x, ushort lane) {
  return msl_ask(x, msl_in_quad(lane), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T quad_shuffle_xor(T x, ushort mask) {
  return msl_ask(x, msl_in_quad(int((msl_lane() & 3) ^ mask)), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T quad_shuffle_down(T x, ushort d) {
  return msl_ask(x, msl_in_quad(int(msl_lane() & 3) + d), msl_serve_shuffle<T, true>);
}
MSL_LANE_VALUE inline T quad_shuffle_up(T x, ushort d) {
  return msl_ask(x, msl_in_quad(int(msl_lane() & 3) - d), msl_serve_shuffle<T, true>);
}
MSL_LANE_VALUE inline T quad_shuffle_rotate_down(T x, ushort d) {
  return msl_ask(x, msl_in_quad((msl_lane() + d) & 3), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T quad_shuffle_rotate_up(T x, ushort d) {
  return msl_ask(x, msl_in_quad((msl_lane() - d) & 3), msl_serve_shuffle<T, false>);
}
MSL_LANE_VALUE inline T quad_shuffle_and_fill_down(T x, T fill, ushort d, ushort modulo = 4) {
  return simd_shuffle_and_fill_down(x, fill, d, modulo);
}
MSL_LANE_VALUE inline T quad_shuffle_and_fill_up(T x, T fill, ushort d, ushort modulo = 4) {
  return simd_shuffle_and_fill_up(x, fill, d, modulo);
}
MSL_LANE_VALUE inline T quad_broadcast_first(T x) { return msl_ask(x, 0, msl_serve_first<T, 4>); }
#undef MSL_QUAD_BASE

template <typename T, ulong every>
struct msl_vote {
  using vote_t = T;
  T bits;
  constexpr explicit msl_vote(T b = 0) : bits(b) {}
  constexpr explicit operator T() const { return bits; }
  constexpr bool all() const { return bits == T(every); }
  constexpr bool any() const { return bits != 0; }
};
using simd_vote = msl_vote<ulong, 0xffffffff>;
using quad_vote = msl_vote<uint, 15>;
inline uint msl_of_quad(uint lanes) { return lanes >> (msl_lane() & ~3u) & 15; }
inline simd_vote simd_ballot(bool b) { return simd_vote(msl_ask_ballot(b).yes); }
inline bool simd_any(bool b) { return msl_ask_ballot(b).yes != 0; }
inline bool simd_all(bool b) {
  const msl_ballot r = msl_ask_ballot(b);
  return r.yes == r.active;
}
inline simd_vote simd_active_threads_mask() { return simd_vote(msl_ask_ballot(true).active); }
inline bool simd_is_first() {
  return int(msl_lane()) == __builtin_ctz(msl_ask_ballot(true).active);
}
inline quad_vote quad_ballot(bool b) { return quad_vote(msl_of_quad(msl_ask_ballot(b).yes)); }
inline bool quad_any(bool b) { return quad_ballot(b).any(); }
inline bool quad_all(bool b) {
  const msl_ballot r = msl_ask_ballot(b);
  return !msl_of_quad(r.yes ^ r.active);
}
inline quad_vote quad_active_threads_mask() { return quad_ballot(true); }
inline bool quad_is_first() {
  return int(msl_lane() & 3) == __builtin_ctz(uint(quad_active_threads_mask()));
}
inline bool simd_is_helper_thread() { return false; }
inline bool quad_is_helper_thread() { return false; }

template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T x) {
  return x;
}
}  // namespace metal
