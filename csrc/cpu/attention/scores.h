// SPDX-License-Identifier: MIT
// Scores of a panel of queries (lanes) and a tile of keys (rows), as softmax sees them:
//   S = softcap * tanh(scale * q.k / softcap) - slope * |key - position| + mask,  -inf where hidden
#pragma once

#include "../common/dots.h"
#include "problem.h"

namespace metalcore::cpu::tiles {

// How much of a tile a mask hides, or what it adds.
enum class Cover { kNothing, kAll, kSome };

template <typename M, typename A>
A added(M m) {
  if constexpr (std::is_same_v<M, bool>) {
    return m ? A(0) : kHidden<A>;
  } else {
    return A(m);
  }
}

// What `count` rows of a mask do to the keys. Where that is something, it is in added[key][lane].
template <typename M, typename A>
Cover cover(const M* mask, int64_t row, int64_t column, int64_t count, int64_t keys, A* bias) {
  constexpr int64_t W = kWidth<A>;
  const int64_t rows = row == 0 ? 1 : count;
  bool adds = false, shows = false;
  for (int64_t i = 0; i < rows; ++i) {
    const M* m = mask + i * row;
    if (column == 1) {
      for (int64_t k = 0; k < keys; ++k) {
        adds |= added<M, A>(m[k]) != 0;
        shows |= added<M, A>(m[k]) != kHidden<A>;
      }
    } else {
      for (int64_t k = 0; k < keys; ++k) {
        adds |= added<M, A>(m[k * column]) != 0;
        shows |= added<M, A>(m[k * column]) != kHidden<A>;
      }
    }
  }
  if (!adds) return Cover::kNothing;
  if (!shows) return Cover::kAll;
  for (int64_t i = 0; i < W; ++i) {
    const M* m = mask + std::min(i, count - 1) * row;
    for (int64_t k = 0; k < keys; ++k) bias[k * W + i] = added<M, A>(m[k * column]);
  }
  return Cover::kSome;
}

template <typename A>
Cover cover(const Mask& mask, const Sequence& s, const Panel& p, Keys keys, A* bias) {
  if (mask.values == nullptr) return Cover::kNothing;
  const int64_t start = s.batch * mask.batch + p.head * mask.head +
                        (s.first_query + p.first) * mask.row +
                        (s.first_key + keys.begin) * mask.column;
  const auto run = [&](auto type) {
    using M = decltype(type);
    return cover<M, A>(static_cast<const M*>(mask.values) + start, mask.row, mask.column, p.count,
                       keys.count(), bias);
  };
  if (mask.dtype == ScalarType::Bool) return run(bool());
  return dispatch_float(mask.dtype, "attention", run);
}

// Calls change(x, key, register) for each register of scores.
template <typename A, typename Change>
inline void change_scores(A* scores, int64_t keys, Change change) {
  for (int64_t k = 0; k < keys; ++k) {
#pragma GCC unroll 4
    for (int j = 0; j < product::kVectors; ++j) {
      A* at = scores + k * kWidth<A> + j * kLanes<A>;
      const Vec<A> x = change(simd::load_as<Vec<A>>(at), k, j);
      std::memcpy(at, &x, sizeof(x));
    }
  }
}

template <typename A>
inline void scale_panel(A scale, A* panel, int64_t rows) {
  change_scores(panel, rows, [&](Vec<A> x, int64_t, int) { return x * scale; });
}

// The number of each lane of register j.
template <typename A>
inline Vec<A> lane_numbers(int j) {
  Vec<A> lanes;
  for (int64_t i = 0; i < kLanes<A>; ++i) lanes[i] = A(j * kLanes<A> + i);
  return lanes;
}

template <typename A>
inline Vec<A> hidden() {
  return Vec<A>{} + kHidden<A>;
}

// Soft cap of the scores; `slopes`, unless null, gets its derivative.
template <typename A>
inline void cap_scores(A cap, A* scores, int64_t keys, A* slopes) {
  change_scores(scores, keys, [&](Vec<A> x, int64_t k, int j) {
    const simd::Tanh<Vec<A>> t(x / cap);
    if (slopes) std::memcpy(slopes + k * kWidth<A> + j * kLanes<A>, &t.slope, sizeof(t.slope));
    return t.value * cap;
  });
}

// Scores of a tile of keys, from scale * q.k, of which `mask` hides some or none. Says whether some
// may be hidden.
template <typename A>
Cover finish_scores(const Problem<A>& problem, const Sequence& s, const Panel& p, Keys keys,
                    Cover mask, A* scores, const A* bias, A* slopes) {
  constexpr int64_t W = kWidth<A>, L = kLanes<A>;
  const int64_t count = keys.count();
  if (problem.softcap) cap_scores(*problem.softcap, scores, count, slopes);
  // the position of lane 0, counted from the first key
  const int64_t from = p.first + s.offset() - keys.begin;
  if (const A slope = problem.slope(s, p.head); slope != 0) {
    change_scores(scores, count, [&](Vec<A> x, int64_t k, int j) {
      return x - simd::magnitude(lane_numbers<A>(j) + A(from - k)) * slope;
    });
  }
  if (mask == Cover::kSome) {
    change_scores(scores, count, [&](Vec<A> x, int64_t k, int j) {
      const auto b = simd::load_as<Vec<A>>(bias + k * W + j * L);
      return b == kHidden<A> ? b : x + b;
    });
  }
  if (problem.sees_all(s, p, keys)) return mask;
  change_scores(scores, count, [&](Vec<A> x, int64_t k, int j) {
    // lane l stands at from + l: it sees key k from k - right to k + left
    const A least = A(std::max<int64_t>(-1, k - problem.right - from));
    const A most = A(std::min<int64_t>(W, k + problem.left - from));
    const Vec<A> lane = lane_numbers<A>(j);
    return ((lane < least) | (lane > most)) ? hidden<A>() : x;
  });
  return Cover::kSome;
}

// Whether all rows of a tile are finite.
template <typename A>
bool are_finite(product::Broadcast<A> rows, int64_t count, int64_t n) {
  simd::Pair<A> off = {};
  for (int64_t r = 0; r < count; ++r) {
    simd::for_each_pair<A>(n, [&](int64_t i, auto elements) {
      const auto x = simd::load(rows.values + r * rows.row + i, elements);
      off += x - x;
    });
  }
  const Vec<A> both = off.first + off.second;
  return !lanes::any(both != 0);
}

// C += rows^T weights, [n][lanes]. Where `shares` has the sign bit, the pair is hidden and adds
// nothing, whatever the row holds: 0 * NaN is NaN. For tiles that are not finite.
template <typename A>
void multiply_visible(int64_t n, product::Broadcast<A> rows, const A* weights, const A* shares,
                      A* c, int64_t keys) {
  constexpr int64_t W = kWidth<A>, L = kLanes<A>;
  for (int64_t k = 0; k < keys; ++k) {
    for (int64_t d = 0; d < n; ++d) {
      const A x = rows.values[k * rows.row + d];
      for (int64_t j = 0; j < W; j += L) {
        const auto share = simd::load_as<Vec<A>>(shares + k * W + j);
        const auto weight = simd::load_as<Vec<A>>(weights + k * W + j);
        auto sum = simd::load_as<Vec<A>>(c + d * W + j);
        sum = (simd::bits_as<simd::IntOf<Vec<A>>>(share) < 0) ? sum : sum + weight * x;
        std::memcpy(c + d * W + j, &sum, sizeof(sum));
      }
    }
  }
}

// C += rows^T weights, where `rows` are keys or values, and some pairs may be hidden.
template <typename A>
void multiply_keys(int64_t n, product::Broadcast<A> rows, const A* weights, const A* shares, A* c,
                   int64_t keys, Cover hidden) {
  constexpr int64_t W = kWidth<A>;
  if (hidden == Cover::kSome && !are_finite(rows, keys, n)) {
    return multiply_visible(n, rows, weights, shares, c, keys);
  }
  product::multiply<A>(n, {rows.values, 1, rows.row}, {weights, W}, {c, W}, keys, true);
}

// Whether products of rows of `size` elements are by dots: of bfloat16, in whole words.
template <typename T>
bool takes_dots([[maybe_unused]] int64_t size) {
#if defined(MC_DOTS)
  return std::is_same_v<T, simd::BFloat16> && size % 2 == 0 && product::has_dots();
#else
  return false;
#endif
}

// C += row^T weights of those values of a row that are not finite, which products by dots leave
// out, for the queries that see it.
template <typename T, typename A>
void add_special(const T* row, int64_t n, const A* weights, const A* shares, A* c) {
  for (int64_t d = 0; d < n; ++d) {
    const A x = A(row[d]);
    if (std::isfinite(x)) continue;
    for (int64_t l = 0; l < kWidth<A>; ++l) {
      if (!std::signbit(shares[l])) c[d * kWidth<A> + l] += weights[l] * x;
    }
  }
}

// What softmax has seen of the keys: the largest score and the sum of exp(score - largest).
template <typename A>
struct Softmax {
  A* largest;  // [lanes], -inf at first
  A* sum;
};

// The next keys: scores become exp(score - largest), with the sign bit where they are hidden.
// `factors` are what earlier results are to be multiplied by; says whether any is not 1.
template <bool kHides, typename A>
bool softmax_keys(A* scores, int64_t keys, Softmax<A> seen, A* factors) {
  constexpr int64_t W = kWidth<A>, L = kLanes<A>;
  constexpr int V = product::kVectors;
  bool grew = false;
  Vec<A> base[V], sum[V];
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) base[j] = simd::load_as<Vec<A>>(seen.largest + j * L);
  for (int64_t k = 0; k < keys; ++k) {
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      base[j] = simd::larger(simd::load_as<Vec<A>>(scores + k * W + j * L), base[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) {
    const auto before = simd::load_as<Vec<A>>(seen.largest + j * L);
    grew = grew || lanes::any(base[j] != before);
    std::memcpy(seen.largest + j * L, &base[j], sizeof(base[j]));
    // -inf - -inf is NaN
    base[j] = base[j] == kHidden<A> ? Vec<A>{} : base[j];
    const Vec<A> factor = simd::exp(before - base[j]);
    std::memcpy(factors + j * L, &factor, sizeof(factor));
    sum[j] = simd::load_as<Vec<A>>(seen.sum + j * L) * factor;
  }
  for (int64_t k = 0; k < keys; ++k) {
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      A* at = scores + k * W + j * L;
      const auto x = simd::load_as<Vec<A>>(at);
      Vec<A> share = simd::exp(x - base[j]);
      if constexpr (kHides) share = x == kHidden<A> ? -(Vec<A>{}) : share;
      std::memcpy(at, &share, sizeof(share));
      sum[j] += share;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) std::memcpy(seen.sum + j * L, &sum[j], sizeof(sum[j]));
  return grew;
}

}  // namespace metalcore::cpu::tiles
