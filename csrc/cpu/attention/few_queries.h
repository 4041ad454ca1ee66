// SPDX-License-Identifier: MIT
// Attention of a few queries, as in generation: the head's elements stand in the lanes.
//
// A task reads a part of the keys and values once, from a few runs in turns (key_products.h), for
// all queries of the heads that share them; of all heads together where these lie side by side.
// Parts are merged in order: (largest, sum, result) of each. Keys and values are of T, or codes S
// of 8 bits.
#pragma once

#include "cache.h"
#include "key_products.h"
#include "scores.h"

namespace metalcore::cpu::tiles {

// Keys of a part.
constexpr int64_t kPart = 512;

// Tasks to have before one takes several heads, so that threads find work.
constexpr int64_t kManyTasks = 16;

// Pairs of a value whose sums for two queries are in registers: of a usual head, all where there
// are 32 registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPairs = 4;
#else
constexpr int kPairs = 2;
#endif

template <typename T, typename S>
struct FewQueries {
  using A = Acc<T>;
  static constexpr int64_t L = kLanes<A>;

  const Problem<A>& problem;
  Heads<const T> q;
  const Cache<S>& cache;
  Heads<T> out;
  A* lse;                      // null where nobody asks
  int64_t width, value_width;  // head sizes in whole Pairs

  // Queries of a head of keys: all of a sequence, of all heads that share it.
  int64_t rows(const Sequence& s) const { return problem.sizes.group() * s.queries; }

  // What a part gives for a row: the largest score, the sum, and the result before its division.
  int64_t row_values() const { return 2 * L + value_width; }

  struct Task {
    Sequence sequence;
    int64_t first_head, heads;
    Keys keys;
    A* results;  // [heads][rows][row_values]
  };

  struct Row {
    int64_t head, query;
  };

  Row row(const Sequence& s, int64_t key_head, int64_t r) const {
    return {key_head * problem.sizes.group() + r / s.queries, r % s.queries};
  }

  // A step of a task for one head: its keys and values, and scores of up to 4 rows.
  struct Step {
    const Sequence& sequence;
    int64_t key_head;
    Keys keys;
    const Offsets& at;
    A *scores, *weights;

    int64_t count() const { return keys.count(); }
  };

  // scores[r][key] = scale * q.k for `Rows` queries.
  template <int Rows>
  void dot(const Step& step, const A* queries) const {
    using Products = KeyProducts<Rows, T, S>;
    constexpr int kEach = Products::kEach;
    const S* const keys = cache.k.values + step.key_head * cache.k.head;
    // keys between the starts of two runs
    const int64_t apart = product::round_up(step.count(), Products::kKeys) / Products::kStreams;
    for (int64_t first = 0; first < apart; first += kEach) {
      Products products{{}, queries, width, problem.sizes.size};
      for (int x = 0; x < Products::kKeys; ++x) {
        products.keys[x] = keys + step.at.k[first + x / kEach * apart + x % kEach];
      }
      const Vec<A> found = products();
      const char* from = reinterpret_cast<const char*>(&found);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int run = 0; run < Products::kStreams; ++run, from += kEach * sizeof(A)) {
          A* const to = step.scores + r * kStepKeys + first + run * apart;
          std::memcpy(to, from, kEach * sizeof(A));
        }
      }
    }
  }

  // Scores of row r as softmax sees them; says whether some are hidden.
  bool finish_row(const Step& step, int64_t r, A* scores) const {
    const Sequence& s = step.sequence;
    const Row of = row(s, step.key_head, r);
    const Keys keys = step.keys;
    const int64_t position = of.query + s.offset(), count = keys.count();
    multiply_scales(cache.k_scale, step, step.at.k_scale, scores);
    if (problem.softcap) {
      const A cap = *problem.softcap;
      for (int64_t i = 0; i < kStepKeys; i += L) {
        const Vec<A> x = simd::Tanh<Vec<A>>(simd::load_as<Vec<A>>(scores + i) / cap).value * cap;
        std::memcpy(scores + i, &x, sizeof(x));
      }
    }
    if (const A slope = problem.slope(s, of.head); slope != 0) {
      for (int64_t i = 0; i < count; ++i) {
        scores[i] -= slope * A(std::abs(keys.begin + i - position));
      }
    }
    bool hides = false;
    if (problem.mask.values) hides = add_mask(s, of, keys, scores);
    const int64_t first = position - problem.left - keys.begin;
    const int64_t last = position + problem.right - keys.begin;
    for (int64_t i = 0; i < std::min(first, count); ++i) scores[i] = kHidden<A>;
    for (int64_t i = std::max<int64_t>(0, last + 1); i < count; ++i) scores[i] = kHidden<A>;
    for (int64_t i = count; i < kStepKeys; ++i) scores[i] = kHidden<A>;
    return hides || first > 0 || last + 1 < count;
  }

  // Numbers of a step's keys times the scales of their codes.
  static void multiply_scales([[maybe_unused]] const Stored<float>& scale,
                              [[maybe_unused]] const Step& step, [[maybe_unused]] const int64_t* at,
                              [[maybe_unused]] A* numbers) {
    if constexpr (kIsCode<S>) {
      if (scale.values == nullptr) return;
      const float* const from = scale.values + step.key_head * scale.head;
      for (int64_t i = 0; i < step.count(); ++i) numbers[i] *= A(from[at[i]]);
    }
  }

  bool add_mask(const Sequence& s, Row of, Keys keys, A* scores) const {
    const Mask& mask = problem.mask;
    const int64_t start = s.batch * mask.batch + of.head * mask.head +
                          (s.first_query + of.query) * mask.row +
                          (s.first_key + keys.begin) * mask.column;
    const auto run = [&](auto type) {
      using M = decltype(type);
      const M* m = static_cast<const M*>(mask.values) + start;
      bool hides = false;
      for (int64_t i = 0; i < keys.count(); ++i) {
        const A x = added<M, A>(m[i * mask.column]);
        hides |= x == kHidden<A>;
        scores[i] = x == kHidden<A> ? x : scores[i] + x;
      }
      return hides;
    };
    return mask.dtype == ScalarType::Bool ? run(bool())
                                          : dispatch_float(mask.dtype, "attention", run);
  }

  // Scores become exp(score - largest), -0 where hidden; results so far are scaled to that.
  void softmax_row(A* scores, A* result) const {
    Vec<A> most = simd::load_as<Vec<A>>(scores);
    for (int64_t i = L; i < kStepKeys; i += L) {
      most = simd::larger(simd::load_as<Vec<A>>(scores + i), most);
    }
    A largest = result[0];
    for (int64_t i = 0; i < L; ++i) largest = std::max(largest, most[i]);
    const A base = largest == kHidden<A> ? A(0) : largest, factor = std::exp(result[0] - base);
    Vec<A> sum = {};
    for (int64_t i = 0; i < kStepKeys; i += L) {
      const auto x = simd::load_as<Vec<A>>(scores + i);
      Vec<A> share = simd::exp(x - base);
      share = x == kHidden<A> ? -Vec<A>{} : share;
      std::memcpy(scores + i, &share, sizeof(share));
      sum += share;
    }
    A total = result[L] * factor;
    for (int64_t i = 0; i < L; ++i) total += sum[i];
    result[0] = largest;
    result[L] = total;
    if (factor == 1) return;
    for (int64_t d = 0; d < value_width; d += L) {
      const Vec<A> x = simd::load_as<Vec<A>>(result + 2 * L + d) * factor;
      std::memcpy(result + 2 * L + d, &x, sizeof(x));
    }
  }

  // results[r] += sum over keys of weights[r][key] * values[key], a strip of Pairs at a time.
  template <int Rows, int Pairs, typename Elements>
  void add_strip(const S* values, const int64_t* at, const A* weights, int64_t count, A* results,
                 Elements elements) const {
    Vec<A> sums[Rows][2 * Pairs];
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int x = 0; x < 2 * Pairs; ++x) {
        sums[r][x] = simd::load_as<Vec<A>>(results + r * row_values() + x * L);
      }
    }
    for_each_in_runs(count, [&](int64_t i) {
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) {
        const auto x = load_stored<A>(values + at[i] + p * simd::kStep<T>, elements);
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) {
          sums[r][2 * p] += x.first * weights[r * kStepKeys + i];
          sums[r][2 * p + 1] += x.second * weights[r * kStepKeys + i];
        }
      }
    });
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int x = 0; x < 2 * Pairs; ++x) {
        std::memcpy(results + r * row_values() + x * L, &sums[r][x], sizeof(sums[r][x]));
      }
    }
  }

  template <int Rows>
  void add_values(const S* values, const int64_t* at, const A* weights, int64_t count,
                  A* results) const {
    constexpr int64_t kWide = kPairs * simd::kStep<T>;
    const int64_t n = problem.sizes.value_size;
    int64_t d = 0;
    for (; d + kWide <= n; d += kWide) {
      add_strip<Rows, kPairs>(values + d, at, weights, count, results + d, simd::All{});
    }
    simd::for_each_pair<T>(n - d, [&](int64_t i, auto elements) {
      add_strip<Rows, 1>(values + d + i, at, weights, count, results + d + i, elements);
    });
  }

  // The same, in the same order, for values that are not finite: what is hidden adds nothing.
  void add_visible(const S* values, const int64_t* at, const A* shares, const A* weights,
                   int64_t count, A* result) const {
    for_each_in_runs(count, [&](int64_t i) {
      if (!std::signbit(shares[i])) add_values<1>(values, at + i, weights + i, 1, result);
    });
  }

  bool are_values_finite(const Step& step, const S* values) const {
    simd::Pair<A> off = {};
    for (int64_t i = 0; i < step.count(); ++i) {
      simd::for_each_pair<T>(problem.sizes.value_size, [&](int64_t d, auto elements) {
        const auto x = load_stored<A>(values + step.at.v[i] + d, elements);
        off += x - x;
      });
    }
    A scales = 0;
    if (kIsCode<S> && cache.v_scale.values) {
      const float* const from = cache.v_scale.values + step.key_head * cache.v_scale.head;
      for (int64_t i = 0; i < step.count(); ++i) {
        scales += A(from[step.at.v_scale[i]] - from[step.at.v_scale[i]]);
      }
    }
    return scales == 0 && !lanes::any((off.first + off.second) != 0);
  }

  // Adds a step to the results of `Rows` rows from `first` on.
  template <int Rows>
  void add_keys(const Step& step, int64_t first, const A* queries, A* results) const {
    const S* const values = cache.v.values + step.key_head * cache.v.head;
    const int64_t count = step.count();
    dot<Rows>(step, queries + first * width);
    results += first * row_values();
    bool hides = false;
    for (int r = 0; r < Rows; ++r) {
      hides |= finish_row(step, first + r, step.scores + r * kStepKeys);
      softmax_row(step.scores + r * kStepKeys, results + r * row_values());
    }
    const A* weights = step.scores;
    if (kIsCode<S> && cache.v_scale.values) {
      std::copy_n(step.scores, Rows * kStepKeys, step.weights);
      for (int r = 0; r < Rows; ++r) {
        multiply_scales(cache.v_scale, step, step.at.v_scale, step.weights + r * kStepKeys);
      }
      weights = step.weights;
    }
    if (hides && !are_values_finite(step, values)) {
      for (int r = 0; r < Rows; ++r) {
        add_visible(values, step.at.v, step.scores + r * kStepKeys, weights + r * kStepKeys, count,
                    results + r * row_values() + 2 * L);
      }
    } else {
      constexpr int kTogether = std::min(Rows, 2);
      for (int r = 0; r < Rows; r += kTogether) {
        add_values<kTogether>(values, step.at.v, weights + r * kStepKeys, count,
                              results + r * row_values() + 2 * L);
      }
    }
  }

  // Queries of a head of keys, scaled, in the order in which keys are loaded; empty results.
  void start(const Task& t, int64_t key_head, A* queries, A* results) const {
    const int64_t count = rows(t.sequence);
    for (int64_t r = 0; r < count; ++r) {
      const Row of = row(t.sequence, key_head, r);
      const T* from = q.at(t.sequence.batch, of.head, t.sequence.first_query + of.query);
      simd::for_each_pair<T>(problem.sizes.size, [&](int64_t d, auto elements) {
        simd::store(queries + r * width + d, load_beside<S>(from + d, elements) * problem.scale);
      });
      A* const result = results + r * row_values();
      std::fill_n(result, row_values(), A(0));
      result[0] = kHidden<A>;
    }
  }

  void operator()(const Task& t) const {
    const int64_t count = rows(t.sequence);
    Pieces<A> pieces(Pieces<A>::size(t.heads * count * width) + 2 * Pieces<A>::size(4 * kStepKeys));
    A* const all = pieces.take(t.heads * count * width);
    A* const scores = pieces.take(4 * kStepKeys);
    A* const weights = pieces.take(4 * kStepKeys);
    for (int64_t h = 0; h < t.heads; ++h) {
      start(t, t.first_head + h, all + h * count * width, t.results + h * count * row_values());
    }
    Offsets at;
    for (Keys left = t.keys; left.count() > 0;) {
      const Keys keys = cache.next(t.sequence, left, kStepKeys);
      left.begin = keys.end;
      if (keys.count() == 0) continue;
      at.set(cache, t.sequence, keys);
      for (int64_t h = 0; h < t.heads; ++h) {
        const Step step{t.sequence, t.first_head + h, keys, at, scores, weights};
        const A* const queries = all + h * count * width;
        A* const results = t.results + h * count * row_values();
        int64_t r = 0;
        // no more at once than a register has lanes
        if constexpr (L >= 4) {
          for (; r + 4 <= count; r += 4) add_keys<4>(step, r, queries, results);
        }
        for (; r + 2 <= count; r += 2) add_keys<2>(step, r, queries, results);
        for (; r < count; ++r) add_keys<1>(step, r, queries, results);
      }
    }
  }

  // The result of a head's row r from those of all parts, `step` values apart.
  void merge(const Task& first, int64_t h, int64_t r, int64_t parts, int64_t step, A* sums) const {
    const Sizes& s = problem.sizes;
    const Row of = row(first.sequence, first.first_head + h, r);
    const A* from = first.results + (h * rows(first.sequence) + r) * row_values();
    const bool has_sink = problem.sinks && problem.sinks[of.head] != kHidden<A>;
    A largest = has_sink ? problem.sinks[of.head] : kHidden<A>;
    for (int64_t p = 0; p < parts; ++p) largest = std::max(largest, from[p * step]);
    const A base = largest == kHidden<A> ? A(0) : largest;
    A total = has_sink ? std::exp(problem.sinks[of.head] - base) : A(0);
    std::fill_n(sums, value_width, A(0));
    for (int64_t p = 0; p < parts; ++p) {
      const A* part = from + p * step;
      const A factor = std::exp(part[0] - base);
      total += part[L] * factor;
      for (int64_t d = 0; d < value_width; ++d) sums[d] += part[2 * L + d] * factor;
    }
    const int64_t query = first.sequence.first_query + of.query;
    if (lse) {
      lse[(first.sequence.batch * s.heads + of.head) * s.queries + query] =
          largest + std::log(total);
    }
    const A share = total == 0 ? A(0) : 1 / total;
    T* const y = out.at(first.sequence.batch, of.head, query);
    simd::for_each_pair<T>(s.value_size, [&](int64_t d, auto elements) {
      store_beside<S>(y + d, simd::load(sums + d) * share, elements);
    });
  }

  // Heads of a task.
  int64_t heads_each() const {
    const int64_t heads = problem.sizes.key_heads;
    if (!cache.is_by_rows()) return 1;
    int64_t parts = 0;
    for (const Sequence& s : problem.sequences) {
      parts += std::max<int64_t>(1, problem.range(s, {0, 0, s.queries}).count() / kPart);
    }
    return std::clamp<int64_t>(heads * parts / kManyTasks, 1, std::max<int64_t>(1, heads));
  }
};

// Compiled in over_cache.cpp.
extern template struct FewQueries<float, float>;
extern template struct FewQueries<float, Int8>;

}  // namespace metalcore::cpu::tiles
