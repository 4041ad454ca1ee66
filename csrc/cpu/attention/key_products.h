// SPDX-License-Identifier: MIT
// q.k of a few queries and keys: the head's elements stand in the lanes, and are added up across
// them at the end.
//
// Rows of keys are read whole, from a few runs in turns: a processor fetches several streams ahead
// faster than one.
#pragma once

#include "eight_bit.h"

namespace metalcore::cpu::tiles {

using simd::Acc;
using simd::Vec;

// Runs of keys, or of values, that are read in turns.
constexpr int kRuns = 4;

// Elements of all queries that are multiplied before the next row of keys: those of a usual head.
constexpr int64_t kHeadElements = 128;

// Calls body(i) for `count` keys, from all runs in turns.
template <typename Body>
inline void for_each_in_runs(int64_t count, const Body& body) {
  const int64_t apart = count / kRuns;
  for (int64_t i = 0; i < apart; ++i) {
#pragma GCC unroll 4
    for (int run = 0; run < kRuns; ++run) body(i + run * apart);
  }
  for (int64_t i = kRuns * apart; i < count; ++i) body(i);
}

namespace detail {

// Halves what is left to add: `count` registers at distances of `step` become half as many.
template <int Block, int Run, typename A>
inline void fold_round(Vec<A>* r, int count, int step) {
  constexpr auto all = std::make_integer_sequence<int, simd::kLanes<A>>();
#pragma GCC unroll 8
  for (int i = 0; i < count / 2; ++i) {
    const Vec<A> a = r[i * step], b = r[(i + count / 2) * step];
    r[i * step] = lanes::detail::interleave<Block, Run, false>(a, b, all) +
                  lanes::detail::interleave<Block, Run, true>(a, b, all);
  }
}

}  // namespace detail

// The sum of each of as many registers as a register has lanes: that of register i in lane i. First
// inside 16-byte chunks, then the chunks, as lanes::transpose() does, with half of the registers
// after each round.
template <typename A>
inline Vec<A> sums_of_registers(Vec<A>* r) {
  constexpr int kLanes = int(simd::kLanes<A>), kChunk = 16 / sizeof(A), kChunks = kLanes / kChunk;
#pragma GCC unroll 4
  for (int g = 0; g < kChunks; ++g) {
#pragma GCC unroll 4
    for (int count = kChunk; count > 1; count /= 2) {
      detail::fold_round<kChunk, 1, A>(r + g * kChunk, count, 1);
    }
  }
#pragma GCC unroll 4
  for (int count = kChunks; count > 1; count /= 2) {
    detail::fold_round<kLanes, kChunk, A>(r, count, kChunk);
  }
  return r[0];
}

// Products of `Rows` queries, `width` apart, and as many keys as fill a register with them.
template <int Rows, typename T, typename S>
struct KeyProducts {
  using A = Acc<T>;
  static constexpr int kLanes = int(simd::kLanes<A>);
  static constexpr int kKeys = kLanes / Rows;
  // of each run
  static constexpr int kStreams = std::min(kRuns, kKeys), kEach = kKeys / kStreams;
  // doubles beside codes are converted one by one: no use in code for many at once
  static constexpr int kPairs = kIsCode<S> && !std::is_same_v<A, float>
                                    ? 1
                                    : std::max(1, int(kHeadElements / simd::kStep<T>) / Rows);

  const S* keys[kKeys];  // [run][kEach]
  const A* queries;
  int64_t width, n;
  Vec<A> sums[kLanes] = {};  // [query][key]

  template <int Pairs, typename Elements>
  [[gnu::always_inline]] void add(int64_t d, Elements elements) {
#pragma GCC unroll 16
    for (int x = 0; x < kKeys; ++x) {
      const int key = x % kStreams * kEach + x / kStreams;
#pragma GCC unroll 16
      for (int p = 0; p < Pairs; ++p) {
        const int64_t at = d + p * simd::kStep<T>;
        const auto values = load_stored<A>(keys[key] + at, elements);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const A* query = queries + r * width + at;
          sums[r * kKeys + key] += values.first * simd::load_as<Vec<A>>(query);
          sums[r * kKeys + key] += values.second * simd::load_as<Vec<A>>(query + kLanes);
        }
      }
    }
  }

  // From element d on: so many Pairs of a key at once, then half as many, to the row's end.
  template <int Pairs>
  [[gnu::always_inline]] void add_from(int64_t d) {
    constexpr int64_t kWide = Pairs * simd::kStep<T>;
    for (; d + kWide <= n; d += kWide) add<Pairs>(d, simd::All{});
    if constexpr (Pairs > 1) {
      add_from<Pairs / 2>(d);
    } else if (d < n) {
      add<1>(d, simd::First{n - d});
    }
  }

  // [query][run][kEach]
  [[gnu::always_inline]] Vec<A> operator()() {
    add_from<kPairs>(0);
    return sums_of_registers<A>(sums);
  }
};

}  // namespace metalcore::cpu::tiles
