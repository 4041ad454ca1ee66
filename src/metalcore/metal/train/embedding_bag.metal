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
  long given;
  long count;
  long bag_size;

  long start(long bag) const thread {
    if (!OFFSETS) {
      return bag * bag_size;
    }
    return bag < given ? min(max(offsets[bag], long(0)), count) : count;
  }

  // whether it ends before it begins or past the indices, or is the first and leaves some out
  bool is_wrong(long bag) const thread {
    if (!OFFSETS) {
      return false;
    }
    const long begin = offsets[bag];
    const long end = bag + 1 < given ? offsets[bag + 1] : count;
    return end < begin || end > count || (bag == 0 && begin != 0);
  }
};

// places: [bags, n] for the maximum, in columns.
template <typename T, int WIDTH, int MODE, bool OFFSETS, bool FACTORS>
[[max_total_threads_per_threadgroup(1024)]] kernel void embedding_bag(
    device const typename chunk<T, WIDTH>::stored* table [[buffer(0)]],
    device const long* indices [[buffer(1)]],
    device const T* factors [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(3)]],
    device long* places [[buffer(4)]],
    device atomic_int* wrong [[buffer(5)]],
    constant long& rows [[buffer(6)]],
    constant long& n [[buffer(7)]],
    constant long& padding [[buffer(8)]],
    device const long* offsets [[buffer(9)]],
    constant long& given [[buffer(10)]],
    constant long& count [[buffer(11)]],
    constant long& bag_size [[buffer(12)]],
    uint2 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const long column = at.x;
  const long bag = at.y;
  if (column >= n) {
    return;
  }
  const bag_starts<OFFSETS> bags = {offsets, given, count, bag_size};
  if (column == 0 && bags.is_wrong(bag)) {
    atomic_fetch_max_explicit(wrong + 1, 1, memory_order_relaxed);
  }
  wide sum = wide(0.0f);
  vec<int, 4> place = vec<int, 4>(-1);
  long used = 0;
  const long last = bags.start(bag + 1);
  for (long i = bags.start(bag); i < last; ++i) {
    const long row = indices[i];
    if (row < 0 || row >= rows) {
      atomic_fetch_max_explicit(wrong, int(i) + 1, memory_order_relaxed);
      continue;
    }
    if (row == padding) {
      continue;
    }
    const wide v = wide(table[row * n + column]);
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
    sum = sum / float(used);
  }
  y[bag * n + column] = stored(sum);
  if (MODE == 2) {
    for (int k = 0; k < WIDTH; ++k) {
      places[(bag * n + column) * WIDTH + k] = place[k];
    }
  }
}

// Of each place its bag and its row; outside of all bags it has a row that the table lacks.
template <bool OFFSETS>
[[max_total_threads_per_threadgroup(1024)]] kernel void embedding_bag_places(
    device const long* indices [[buffer(0)]],
    device long* bag_of [[buffer(1)]],
    device long* row_of [[buffer(2)]],
    constant long& bags [[buffer(3)]],
    constant long& rows [[buffer(4)]],
    device const long* offsets [[buffer(5)]],
    constant long& given [[buffer(6)]],
    constant long& count [[buffer(7)]],
    constant long& bag_size [[buffer(8)]],
    uint i [[thread_position_in_grid]]) {
  if (i >= count) {
    return;
  }
  const long bag =
      OFFSETS ? count_below(offsets, given, long(i) + 1) - 1 : long(i / uint(bag_size));
  const bool is_inside = bag >= 0 && bag < bags;
  bag_of[i] = is_inside ? bag : 0;
  row_of[i] = is_inside ? indices[i] : rows;
}

// first[r]: how many places have a row before r. One thread per row, and one more.
[[max_total_threads_per_threadgroup(1024)]] kernel void embedding_bag_rows(
    device const long* sorted [[buffer(0)]],
    device long* first [[buffer(1)]],
    constant long& rows [[buffer(2)]],
    constant long& count [[buffer(3)]],
    uint row [[thread_position_in_grid]]) {
  if (row <= rows) {
    first[row] = count_below(sorted, count, row);
  }
}

// used[b]: how many indices count in bag b. One thread per bag.
template <bool OFFSETS>
[[max_total_threads_per_threadgroup(1024)]] kernel void embedding_bag_used(
    device const long* indices [[buffer(0)]],
    device long* used [[buffer(1)]],
    constant long& bags [[buffer(2)]],
    constant long& padding [[buffer(3)]],
    device const long* offsets [[buffer(4)]],
    constant long& given [[buffer(5)]],
    constant long& count [[buffer(6)]],
    constant long& bag_size [[buffer(7)]],
    uint bag [[thread_position_in_grid]]) {
  if (bag >= bags) {
    return;
  }
  const bag_starts<OFFSETS> all = {offsets, given, count, bag_size};
  const long last = all.start(bag + 1);
  long counted = 0;
  for (long i = all.start(bag); i < last; ++i) {
    counted += indices[i] != padding;
  }
  used[bag] = counted;
}

// order: places sorted by row; first[r] to first[r + 1] are those of row r.
template <typename T, int WIDTH, int MODE, bool FACTORS, bool BY_FREQ>
[[max_total_threads_per_threadgroup(1024)]] kernel void embedding_bag_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const long* order [[buffer(1)]],
    device const long* first [[buffer(2)]],
    device const long* bag_of [[buffer(3)]],
    device const long* used [[buffer(4)]],
    device const T* factors [[buffer(5)]],
    device const long* places [[buffer(6)]],
    device typename chunk<T, WIDTH>::stored* dtable [[buffer(7)]],
    constant long& n [[buffer(8)]],
    constant long& padding [[buffer(9)]],
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
    float factor = FACTORS ? float(factors[place]) : 1.0f;
    factor = MODE == 1 ? factor / float(used[bag]) : factor;
    factor = BY_FREQ ? factor / float(end - begin) : factor;
    wide g = wide(dy[bag * n + column]) * factor;
    if (MODE == 2) {
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

// dfactor[i] = dot(dy[bag of i], table[row of i]); one simdgroup per index.
template <typename T, int WIDTH, bool BY_FREQ>
[[max_total_threads_per_threadgroup(1024)]] kernel void embedding_bag_factor(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* table [[buffer(1)]],
    device const long* row_of [[buffer(2)]],
    device const long* bag_of [[buffer(3)]],
    device const long* first [[buffer(4)]],
    device T* dfactor [[buffer(5)]],
    constant long& count [[buffer(6)]],
    constant long& rows [[buffer(7)]],
    constant long& n [[buffer(8)]],
    constant long& padding [[buffer(9)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  typedef typename chunk<T, WIDTH>::wide wide;
  const long i = thread_index / 32;
  if (i >= count) {
    return;
  }
  const long row = row_of[i];
  const bool counts = row >= 0 && row < rows && row != padding;
  float sum = 0.0f;
  for (long j = lane; counts && j < n; j += 32) {
    sum += total(wide(dy[bag_of[i] * n + j]) * wide(table[row * n + j]));
  }
  sum = simd_sum(sum);
  if (BY_FREQ && counts) {
    sum = sum / float(first[row + 1] - first[row]);
  }
  if (lane == 0) {
    dfactor[i] = T(sum);
  }
}
