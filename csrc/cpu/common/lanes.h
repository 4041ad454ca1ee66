// SPDX-License-Identifier: MIT
// Small matrices side by side: element e of matrix l stands in lane l of register e, so that one
// instruction does the same step for as many matrices as a register has lanes.
//
//   for_each_group<T>(batch, flops_per_matrix, [&](int64_t first, int64_t count) {
//     T* w = workspace<T>(m * ld * kLanes<T>);
//     pack_matrix(a + first * m * n, m, n, ld, m * n, count, w);   // w[(i * ld + j) * kLanes]
//     ... at(w, i * ld + j) ...
//     unpack_matrix(...);
//   });
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "math.h"
#include "simd.h"
#include "tensor.h"

namespace metalcore::lanes {

using simd::kLanes;
using simd::Vec;

template <typename T>
using Int = std::conditional_t<std::is_same_v<T, double>, int64_t, int32_t>;

typedef int32_t Int32Vec __attribute__((vector_size(MC_REGISTER_BYTES)));
typedef int64_t Int64Vec __attribute__((vector_size(MC_REGISTER_BYTES)));

// What a comparison of registers gives: all bits of a lane, or none. Also a register of integers.
template <typename T>
using Mask = std::conditional_t<std::is_same_v<T, double>, Int64Vec, Int32Vec>;

template <typename T>
inline Vec<T> splat(T x) {
  return Vec<T>{} + x;
}

// Registers in a workspace are aligned.
template <typename T>
inline Vec<T>& at(T* w, int64_t element) {
  return *reinterpret_cast<Vec<T>*>(w + element * kLanes<T>);
}

template <typename T>
inline const Vec<T>& at(const T* w, int64_t element) {
  return *reinterpret_cast<const Vec<T>*>(w + element * kLanes<T>);
}

template <typename V>
inline V sqrt(V v) {
  return simd::square_root(v);
}

template <typename V>
inline V max(V a, V b) {
  return simd::larger(a, b);
}

template <typename V>
inline V min(V a, V b) {
  return simd::smaller(a, b);
}

// |magnitude| with the sign of `sign`; -0 counts as negative.
template <typename V>
inline V copysign(V magnitude, V sign) {
  using T = std::remove_cvref_t<decltype(magnitude[0])>;
  const Mask<T> top = Mask<T>{} + std::numeric_limits<Int<T>>::min();
  return simd::bits_as<V>((simd::bits_as<Mask<T>>(magnitude) & ~top) |
                          (simd::bits_as<Mask<T>>(sign) & top));
}

template <typename V>
inline V abs(V v) {
  return copysign(v, V{});
}

template <typename M>
inline bool any(M mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  for (size_t i = 0; i < sizeof(M) / sizeof(mask[0]); ++i) {
    if (mask[i]) return true;
  }
  return false;
#endif
}

namespace detail {

// In each block of `Block` elements, the lower or upper halves of a and b in turns of `Run`.
template <int Block, int Run, bool Upper, typename V, int... I>
inline V interleave(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int kCount = sizeof...(I);
  // element i of the result: its block, its place in the block, whose turn it is
  return __builtin_shufflevector(
      a, b,
      (I / Block * Block + (Upper ? Block / 2 : 0) + I % Block / (2 * Run) * Run + I % Run +
       (I % Block / Run % 2 ? kCount : 0))...);
}

// One round of the perfect shuffle over `count` registers, at distances of `step`.
template <int Block, int Run, typename T>
inline void shuffle_round(Vec<T>* r, int count, int step) {
  constexpr auto all = std::make_integer_sequence<int, kLanes<T>>();
  Vec<T> s[kLanes<T>];
#pragma GCC unroll 16
  for (int i = 0; i < count / 2; ++i) {
    const Vec<T> a = r[i * step], b = r[(i + count / 2) * step];
    s[2 * i] = interleave<Block, Run, false>(a, b, all);
    s[2 * i + 1] = interleave<Block, Run, true>(a, b, all);
  }
#pragma GCC unroll 16
  for (int i = 0; i < count; ++i) r[i * step] = s[i];
}

}  // namespace detail

// Transposes the square of as many registers as a register has lanes: first inside 16-byte
// chunks, which shuffles do at once, then the chunks.
template <typename T>
inline void transpose(Vec<T>* r) {
  constexpr int kChunk = 16 / sizeof(T), kChunks = kLanes<T> / kChunk;
#pragma GCC unroll 16
  for (int g = 0; g < kChunks; ++g) {
#pragma GCC unroll 16
    for (int round = 1; round < kChunk; round *= 2) {
      detail::shuffle_round<kChunk, 1, T>(r + g * kChunk, kChunk, 1);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChunk; ++i) {
#pragma GCC unroll 16
    for (int round = 1; round < kChunks; round *= 2) {
      detail::shuffle_round<int(kLanes<T>), kChunk, T>(r + i, kChunks, kChunk);
    }
  }
}

// Columns of a row.
struct Part {
  int64_t begin, end;
};

namespace detail {

// Where the matrices of a group start; lanes without a matrix get the first one.
template <typename T>
struct Starts {
  static constexpr int64_t L = kLanes<std::remove_const_t<T>>;
  T* of[L];

  Starts(T* a, int64_t stride, int64_t count) {
    for (int64_t l = 0; l < L; ++l) of[l] = a + (l < count ? l * stride : 0);
  }
};

// Arrays stay in registers only if every index is a constant.
template <typename T>
inline void pack_square(const Starts<const T>& from, int64_t e, T* w) {
  Vec<T> r[kLanes<T>];
#pragma GCC unroll 16
  for (int64_t l = 0; l < kLanes<T>; ++l) r[l] = simd::load_as<Vec<T>>(from.of[l] + e);
  transpose<T>(r);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes<T>; ++i) at(w, i) = r[i];
}

template <typename T>
inline void unpack_square(const T* w, int64_t e, const Starts<T>& to) {
  Vec<T> r[kLanes<T>];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes<T>; ++i) r[i] = at(w, i);
  transpose<T>(r);
  // the first matrix last: lanes without a matrix write there too
#pragma GCC unroll 16
  for (int64_t l = kLanes<T> - 1; l >= 0; --l) std::memcpy(to.of[l] + e, &r[l], sizeof(r[l]));
}

}  // namespace detail

// Rows of n values of each of `count` matrices, `stride` apart, into w[m][ld][lanes]: of row i the
// columns part(i), and those around them that fill registers. Lanes without a matrix get the first
// one, so that they stay as harmless as it is.
template <typename T, typename Parts>
void pack_rows(const T* a, int64_t m, int64_t n, int64_t ld, int64_t stride, int64_t count,
               Parts part, T* w) {
  constexpr int64_t L = kLanes<T>;
  const detail::Starts<const T> from(a, stride, count);
  for (int64_t i = 0; i < m; ++i) {
    if (n < L) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t l = 0; l < L; ++l) w[(i * ld + j) * L + l] = from.of[l][i * n + j];
      }
      continue;
    }
    const Part columns = part(i);
    for (int64_t j = columns.begin / L * L; j < columns.end; j += L) {
      // the last register of a row may overlap the one before it
      const int64_t first = std::min(j, n - L);
      detail::pack_square(from, i * n + first, w + (i * ld + first) * L);
    }
  }
}

// The other way; what is not in the registers of part(i) becomes zero.
template <typename T, typename Parts>
void unpack_rows(const T* w, int64_t m, int64_t n, int64_t ld, int64_t stride, int64_t count,
                 Parts part, T* a) {
  constexpr int64_t L = kLanes<T>;
  const detail::Starts<T> to(a, stride, count);
  for (int64_t i = 0; i < m; ++i) {
    if (n < L) {
      for (int64_t l = 0; l < count; ++l) {
        for (int64_t j = 0; j < n; ++j) to.of[l][i * n + j] = w[(i * ld + j) * L + l];
      }
      continue;
    }
    const Part columns = part(i);
    const int64_t begin = columns.begin / L * L, end = (columns.end + L - 1) / L * L;
    for (int64_t j = 0; j < n; j += L) {
      if (j >= begin && j < end) continue;
      for (int64_t l = 0; l < L; ++l) {
        std::memset(to.of[l] + i * n + std::min(j, n - L), 0, L * sizeof(T));
      }
    }
    for (int64_t j = begin; j < columns.end; j += L) {
      const int64_t first = std::min(j, n - L);
      detail::unpack_square(w + (i * ld + first) * L, i * n + first, to);
    }
  }
}

// `elements` values of each matrix.
template <typename T>
void pack(const T* a, int64_t elements, int64_t stride, int64_t count, T* w) {
  pack_rows(a, 1, elements, elements, stride, count, [=](int64_t) { return Part{0, elements}; }, w);
}

template <typename T>
void unpack(const T* w, int64_t elements, int64_t stride, int64_t count, T* a) {
  unpack_rows(
      w, 1, elements, elements, stride, count, [=](int64_t) { return Part{0, elements}; }, a);
}

// Rows of n values, `ld` apart in the workspace.
template <typename T>
void pack_matrix(const T* a, int64_t m, int64_t n, int64_t ld, int64_t stride, int64_t count,
                 T* w) {
  if (ld == n) return pack(a, m * n, stride, count, w);
  pack_rows(a, m, n, ld, stride, count, [=](int64_t) { return Part{0, n}; }, w);
}

template <typename T>
void unpack_matrix(const T* w, int64_t m, int64_t n, int64_t ld, int64_t stride, int64_t count,
                   T* a) {
  if (ld == n) return unpack(w, m * n, stride, count, a);
  unpack_rows(w, m, n, ld, stride, count, [=](int64_t) { return Part{0, n}; }, a);
}

// Matrices [m, n] that stand column by column, into w[m][ld].
template <typename T>
void pack_transposed(const T* a, int64_t m, int64_t n, int64_t ld, int64_t stride, int64_t count,
                     T* w) {
  constexpr int64_t L = kLanes<T>;
  const detail::Starts<const T> from(a, stride, count);
  const int64_t elements = m * n;
  if (elements < L) {
    for (int64_t e = 0; e < elements; ++e) {
      T* to = w + (e % m * ld + e / m) * L;
      for (int64_t l = 0; l < L; ++l) to[l] = from.of[l][e];
    }
    return;
  }
  alignas(64) T square[L * L];
  for (int64_t e = 0; e < elements; e += L) {
    const int64_t first = std::min(e, elements - L);
    detail::pack_square(from, first, square);
    int64_t j = first / m, i = first % m;
    for (int64_t r = 0; r < L; ++r) {
      at(w, i * ld + j) = at(square, r);
      if (++i == m) {
        i = 0;
        ++j;
      }
    }
  }
}

// The transposes [n, m] of matrices [m, n] in w[m][ld]; of the lower triangle alone where `lower`.
template <typename T>
void unpack_transposed(const T* w, int64_t m, int64_t n, int64_t ld, bool lower, int64_t stride,
                       int64_t count, T* a) {
  constexpr int64_t L = kLanes<T>;
  const detail::Starts<T> to(a, stride, count);
  const int64_t elements = m * n;
  if (elements < L) {
    for (int64_t l = 0; l < count; ++l) {
      for (int64_t j = 0, e = 0; j < n; ++j) {
        for (int64_t i = 0; i < m; ++i, ++e) {
          to.of[l][e] = lower && i < j ? T(0) : w[(i * ld + j) * L + l];
        }
      }
    }
    return;
  }
  alignas(64) T square[L * L];
  for (int64_t e = 0; e < elements; e += L) {
    // the last registers may overlap those before them
    const int64_t first = std::min(e, elements - L);
    int64_t j = first / m, i = first % m;
    for (int64_t r = 0; r < L; ++r) {
      at(square, r) = lower && i < j ? Vec<T>{} : at(w, i * ld + j);
      if (++i == m) {
        i = 0;
        ++j;
      }
    }
    detail::unpack_square(square, first, to);
  }
}

// A row length that spreads the elements of a column over the cache.
inline int64_t padded(int64_t n) { return n < 16 || n % 2 == 1 ? n : n + 1; }

// Registers' worth of memory that stays with the thread; what an earlier call held is gone.
template <typename T>
T* workspace(int64_t values) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local int64_t size = 0;
  const int64_t bytes = (values * int64_t(sizeof(T)) + 63) / 64 * 64;
  if (bytes > size) {
    memory.reset(std::aligned_alloc(64, bytes));
    size = memory ? bytes : 0;
    STD_TORCH_CHECK(memory != nullptr, "metalcore: no memory for a workspace of ", bytes, " bytes");
  }
  return static_cast<T*>(memory.get());
}

// Operations per task. Below this, starting a thread costs more than it saves.
constexpr int64_t kGrainFlops = 64 * 1024;

// Calls body(first, count) for groups of up to kLanes<T> matrices, on all threads.
template <typename T, typename Body>
void for_each_group(int64_t batch, int64_t flops_per_matrix, Body body) {
  constexpr int64_t L = kLanes<T>;
  const int64_t groups = (batch + L - 1) / L;
  const int64_t grain =
      std::max<int64_t>(1, kGrainFlops / std::max<int64_t>(1, flops_per_matrix * L));
  cpu::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) body(g * L, std::min(L, batch - g * L));
  });
}

}  // namespace metalcore::lanes
