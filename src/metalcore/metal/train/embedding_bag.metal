// SPDX-License-Identifier: MIT
// y[b] = sum, mean or maximum over the indices i of bag b of w_i table[i]
// dtable[r] = sum over the places where r is used of factor dy[bag of the place]
//
// Forward: one thread per bag and WIDTH columns. Backward: one thread per row and WIDTH columns,
// over the places that use the row, which come sorted, so that there are no atomics on floats and
// one order of the sum. n is counted in chunks of WIDTH columns. An index outside of the table is
// not read; the largest such place + 1 is left in `wrong`.

#include "chunk.h"

inline float lane_of(float v, int) { return v; }
inline float lane_of(float4 v, int k) { return v[k]; }
inline void set_lane(thread float& v, int, float to) { v = to; }
inline void set_lane(thread float4& v, int k, float to) { v[k] = to; }

// mode: 0 sum, 1 mean, 2 maximum. places: [bags, n] for the maximum, in columns.
template <typename T, int WIDTH>
kernel void embedding_bag(
    device const typename chunk<T, WIDTH>::stored* table [[buffer(0)]],
    device const long* indices [[buffer(1)]],
    device const long* starts [[buffer(2)]],
    device const T* factors [[buffer(3)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(4)]],
    device long* places [[buffer(5)]],
    device atomic_int* wrong [[buffer(6)]],
    constant long& bags [[buffer(7)]],
    constant long& rows [[buffer(8)]],
    constant long& n [[buffer(9)]],
    constant long& mode [[buffer(10)]],
    constant long& padding [[buffer(11)]],
    constant long& has_factors [[buffer(12)]],
    uint2 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const long column = at.x;
  const long bag = at.y;
  if (column >= n) {
    return;
  }
  wide sum = wide(0.0f);
  vec<int, 4> place = vec<int, 4>(-1);
  long used = 0;
  for (long i = starts[bag]; i < starts[bag + 1]; ++i) {
    const long row = indices[i];
    if (row < 0 || row >= rows) {
      atomic_fetch_max_explicit(wrong, int(i) + 1, memory_order_relaxed);
      continue;
    }
    if (row == padding) {
      continue;
    }
    const wide v = wide(table[row * n + column]);
    if (mode == 2) {
      for (int k = 0; k < WIDTH; ++k) {
        if (place[k] < 0 || lane_of(v, k) > lane_of(sum, k)) {
          place[k] = int(i);
          set_lane(sum, k, lane_of(v, k));
        }
      }
    } else {
      sum += has_factors != 0 ? v * float(factors[i]) : v;
    }
    ++used;
  }
  if (mode == 1 && used > 0) {
    sum = sum / float(used);
  }
  y[bag * n + column] = stored(sum);
  if (mode == 2) {
    for (int k = 0; k < WIDTH; ++k) {
      places[(bag * n + column) * WIDTH + k] = place[k];
    }
  }
}

// order: places sorted by row; first[r] to first[r + 1] are those of row r. bag_of and used are of
// each place: its bag, and the number of indices that count in it.
template <typename T, int WIDTH>
kernel void embedding_bag_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const long* order [[buffer(1)]],
    device const long* first [[buffer(2)]],
    device const long* bag_of [[buffer(3)]],
    device const long* used [[buffer(4)]],
    device const T* factors [[buffer(5)]],
    device const long* places [[buffer(6)]],
    device typename chunk<T, WIDTH>::stored* dtable [[buffer(7)]],
    constant long& n [[buffer(8)]],
    constant long& mode [[buffer(9)]],
    constant long& padding [[buffer(10)]],
    constant long& has_factors [[buffer(11)]],
    constant long& by_freq [[buffer(12)]],
    uint2 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const long column = at.x;
  const long row = at.y;
  if (column >= n) {
    return;
  }
  wide sum = wide(0.0f);
  const long begin = first[row];
  const long end = row == padding ? begin : first[row + 1];
  for (long u = begin; u < end; ++u) {
    const long place = order[u];
    const long bag = bag_of[place];
    float factor = has_factors != 0 ? float(factors[place]) : 1.0f;
    factor = mode == 1 ? factor / float(used[place]) : factor;
    factor = by_freq != 0 ? factor / float(end - begin) : factor;
    wide g = wide(dy[bag * n + column]) * factor;
    if (mode == 2) {
      for (int k = 0; k < WIDTH; ++k) {
        if (places[(bag * n + column) * WIDTH + k] != place) {
          set_lane(g, k, 0.0f);
        }
      }
    }
    sum += g;
  }
  dtable[row * n + column] = stored(sum);
}

// dfactor[i] = dot(dy[bag of i], table[index i]); one simdgroup per index.
template <typename T, int WIDTH>
kernel void embedding_bag_factor(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* table [[buffer(1)]],
    device const long* indices [[buffer(2)]],
    device const long* bag_of [[buffer(3)]],
    device const long* first [[buffer(4)]],
    device T* dfactor [[buffer(5)]],
    constant long& count [[buffer(6)]],
    constant long& n [[buffer(7)]],
    constant long& padding [[buffer(8)]],
    constant long& by_freq [[buffer(9)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  typedef typename chunk<T, WIDTH>::wide wide;
  const long i = thread_index / 32;
  if (i >= count) {
    return;
  }
  const long row = indices[i];
  float sum = 0.0f;
  for (long j = lane; j < n; j += 32) {
    sum += total(wide(dy[bag_of[i] * n + j]) * wide(table[row * n + j]));
  }
  sum = simd_sum(sum);
  sum = by_freq != 0 ? sum / float(first[row + 1] - first[row]) : sum;
  if (lane == 0) {
    dfactor[i] = T(row == padding ? 0.0f : sum);
  }
}

#define INSTANTIATE(function, T, WIDTH)                          \
  template [[host_name(#function "_" #T "_" #WIDTH)]] [[kernel]] \
  decltype(function<T, WIDTH>) function<T, WIDTH>;

#define INSTANTIATE_ALL(T)                  \
  INSTANTIATE(embedding_bag, T, 1)          \
  INSTANTIATE(embedding_bag, T, 4)          \
  INSTANTIATE(embedding_bag_backward, T, 1) \
  INSTANTIATE(embedding_bag_backward, T, 4) \
  INSTANTIATE(embedding_bag_factor, T, 1)   \
  INSTANTIATE(embedding_bag_factor, T, 4)

INSTANTIATE_ALL(float)
INSTANTIATE_ALL(half)
INSTANTIATE_ALL(bfloat)
