// SPDX-License-Identifier: MIT
// y[b] = sum, mean or maximum over the indices i of bag b of w_i table[i]
// dtable[r] = sum over the places where r is used of factor dy[bag of the place]
//
// Forward: one thread per bag and WIDTH columns. Backward: one thread per row and WIDTH columns,
// over the places that use the row, which come sorted, so that there are no atomics on floats and
// one order of the sum. n is counted in chunks of WIDTH columns. MODE: 0 sum, 1 mean, 2 maximum.
// An index outside of the table is not read, and the largest such place + 1 is left in wrong[0].
// Bags stay within the indices, and wrong[1] tells of an offset that does not.

#include "chunk.h"
#include "sorted.h"

inline float lane_of(float v, int) { return v; }
inline float lane_of(float4 v, int k) { return v[k]; }
inline void set_lane(thread float& v, int, float to) { v = to; }
inline void set_lane(thread float4& v, int k, float to) { v[k] = to; }

// The places of a bag: from start(bag) to start(bag + 1).
template <bool OFFSETS>
struct bag_starts {
  device const long* offsets;
  uint given;
  uint count;
  uint bag_size;

  uint start(uint bag) const thread {
    if (!OFFSETS) {
      return bag * bag_size;
    }
    return bag < given ? uint(min(max(offsets[bag], long(0)), long(count))) : count;
  }

  // whether it ends before it begins or past the indices, or is the first and leaves some out
  bool is_wrong(uint bag) const thread {
    if (!OFFSETS) {
      return false;
    }
    const long begin = offsets[bag];
    const long end = bag + 1 < given ? offsets[bag + 1] : long(count);
    return end < begin || end > long(count) || (bag == 0 && begin != 0);
  }
};

// places: [bags, n] for the maximum, in columns.
template <typename T, int WIDTH, int MODE, bool OFFSETS, bool FACTORS>
[[max_total_threads_per_threadgroup(512)]] kernel void embedding_bag(
    device const typename chunk<T, WIDTH>::stored* table [[buffer(0)]],
    device const long* indices [[buffer(1)]],
    device const T* factors [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(3)]],
    device long* places [[buffer(4)]],
    device atomic_int* wrong [[buffer(5)]],
    constant uint& rows [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    constant long& padding [[buffer(8)]],
    device const long* offsets [[buffer(9)]],
    constant uint& given [[buffer(10)]],
    constant uint& count [[buffer(11)]],
    constant uint& bag_size [[buffer(12)]],
    uint2 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const uint column = at.x;
  const uint bag = at.y;
  const bag_starts<OFFSETS> bags = {offsets, given, count, bag_size};
  if (column == 0 && bags.is_wrong(bag)) {
    atomic_fetch_max_explicit(wrong + 1, 1, memory_order_relaxed);
  }
  table += column;
  wide sum = wide(0.0f);
  vec<int, 4> place = vec<int, 4>(-1);
  uint used = 0;
  const uint last = bags.start(bag + 1);
  for (uint i = bags.start(bag); i < last; ++i) {
    const long row = indices[i];
    if (row < 0 || row >= long(rows)) {
      atomic_fetch_max_explicit(wrong, int(i) + 1, memory_order_relaxed);
      continue;
    }
    if (row == padding) {
      continue;
    }
    const wide v = wide(table[ulong(uint(row)) * n]);
    if (MODE == 2) {
      for (int k = 0; k < WIDTH; ++k) {
        if (place[k] < 0 || lane_of(v, k) > lane_of(sum, k)) {
          place[k] = int(i);
          set_lane(sum, k, lane_of(v, k));
        }
      }
    } else {
      sum += FACTORS ? v * float(factors[i]) : v;
    }
    ++used;
  }
  if (MODE == 1 && used > 0) {
    sum *= 1.0f / float(used);
  }
  const ulong to = ulong(bag) * n + column;
  y[to] = stored(sum);
  if (MODE == 2) {
    for (int k = 0; k < WIDTH; ++k) {
      places[to * WIDTH + k] = place[k];
    }
  }
}

// Of each place its bag and its row; outside of all bags it has a row that the table lacks.
template <bool OFFSETS>
[[max_total_threads_per_threadgroup(512)]] kernel void embedding_bag_places(
    device const long* indices [[buffer(0)]],
    device long* bag_of [[buffer(1)]],
    device long* row_of [[buffer(2)]],
    constant uint& bags [[buffer(3)]],
    constant uint& rows [[buffer(4)]],
    device const long* offsets [[buffer(5)]],
    constant uint& given [[buffer(6)]],
    constant uint& count [[buffer(7)]],
    constant uint& bag_size [[buffer(8)]],
    uint i [[thread_position_in_grid]]) {
  if (i >= count) {
    return;
  }
  // one that is before the first bag is past the last
  const uint bag = OFFSETS ? count_below(offsets, given, long(i) + 1) - 1 : i / bag_size;
  const bool is_inside = bag < bags;
  bag_of[i] = is_inside ? bag : 0;
  row_of[i] = is_inside ? indices[i] : long(rows);
}

// first[r]: how many places have a row before r. One thread per row, and one more.
[[max_total_threads_per_threadgroup(512)]] kernel void embedding_bag_rows(
    device const long* sorted [[buffer(0)]],
    device long* first [[buffer(1)]],
    constant uint& rows [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    uint row [[thread_position_in_grid]]) {
  if (row <= rows) {
    first[row] = count_below(sorted, count, row);
  }
}

// used[b]: how many indices count in bag b. One thread per bag.
template <bool OFFSETS>
[[max_total_threads_per_threadgroup(512)]] kernel void embedding_bag_used(
    device const long* indices [[buffer(0)]],
    device long* used [[buffer(1)]],
    constant uint& bags [[buffer(2)]],
    constant long& padding [[buffer(3)]],
    device const long* offsets [[buffer(4)]],
    constant uint& given [[buffer(5)]],
    constant uint& count [[buffer(6)]],
    constant uint& bag_size [[buffer(7)]],
    uint bag [[thread_position_in_grid]]) {
  if (bag >= bags) {
    return;
  }
  const bag_starts<OFFSETS> all = {offsets, given, count, bag_size};
  const uint last = all.start(bag + 1);
  uint counted = 0;
  for (uint i = all.start(bag); i < last; ++i) {
    counted += indices[i] != padding;
  }
  used[bag] = counted;
}

// order: places sorted by row; first[r] to first[r + 1] are those of row r.
template <typename T, int WIDTH, int MODE, bool FACTORS, bool BY_FREQ>
[[max_total_threads_per_threadgroup(512)]] kernel void embedding_bag_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const long* order [[buffer(1)]],
    device const long* first [[buffer(2)]],
    device const long* bag_of [[buffer(3)]],
    device const long* used [[buffer(4)]],
    device const T* factors [[buffer(5)]],
    device const long* places [[buffer(6)]],
    device typename chunk<T, WIDTH>::stored* dtable [[buffer(7)]],
    constant uint& n [[buffer(8)]],
    constant long& padding [[buffer(9)]],
    uint2 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const uint column = at.x;
  const uint row = at.y;
  dy += column;
  wide sum = wide(0.0f);
  const uint begin = uint(first[row]);
  const uint end = long(row) == padding ? begin : uint(first[row + 1]);
  const float rate = BY_FREQ ? 1.0f / float(end - begin) : 1.0f;
  for (uint u = begin; u < end; ++u) {
    const uint place = uint(order[u]);
    const uint bag = uint(bag_of[place]);
    float factor = FACTORS ? float(factors[place]) * rate : rate;
    factor = MODE == 1 ? factor / float(used[bag]) : factor;
    wide g = wide(dy[ulong(bag) * n]) * factor;
    if (MODE == 2) {
      for (int k = 0; k < WIDTH; ++k) {
        if (places[(ulong(bag) * n + column) * WIDTH + k] != long(place)) {
          set_lane(g, k, 0.0f);
        }
      }
    }
    sum += g;
  }
  dtable[ulong(row) * n + column] = stored(sum);
}

// dfactor[i] = dot(dy[bag of i], table[row of i]); one simdgroup per index.
template <typename T, int WIDTH, bool BY_FREQ>
[[max_total_threads_per_threadgroup(512)]] kernel void embedding_bag_factor(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* table [[buffer(1)]],
    device const long* row_of [[buffer(2)]],
    device const long* bag_of [[buffer(3)]],
    device const long* first [[buffer(4)]],
    device T* dfactor [[buffer(5)]],
    constant uint& count [[buffer(6)]],
    constant uint& rows [[buffer(7)]],
    constant uint& n [[buffer(8)]],
    constant long& padding [[buffer(9)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  typedef typename chunk<T, WIDTH>::wide wide;
  const uint i = thread_index / 32;
  if (i >= count) {
    return;
  }
  const long row = row_of[i];
  const bool counts = row >= 0 && row < long(rows) && row != padding;
  dy += ulong(uint(bag_of[i])) * n;
  table += ulong(counts ? uint(row) : 0) * n;
  float sum = 0.0f;
  for (uint j = lane; counts && j < n; j += 32) {
    sum += total(wide(dy[j]) * wide(table[j]));
  }
  sum = simd_sum(sum);
  if (BY_FREQ && counts) {
    sum = sum / float(first[row + 1] - first[row]);
  }
  if (lane == 0) {
    dfactor[i] = T(sum);
  }
}
