// SPDX-License-Identifier: MIT
// Attention of a few queries, as in generation: the head's elements stand in the lanes.
//
// A task reads a part of the keys and values once, in order, for all queries of the heads that
// share them. Parts are merged in order: (largest, sum, result) of each.
#pragma once

#include <memory>

#include "scores.h"

namespace metalcore::cpu::tiles {

// Keys of a part, and of a step in it, for which scores are kept.
constexpr int64_t kPart = 512, kStepKeys = 64;

// Registers of sums, for kRows queries and so many Pairs of a value.
#if defined(__AVX512F__) || defined(__aarch64__)
template <int Rows>
constexpr int kPairs = Rows == 4 ? 2 : 4;
#else
template <int Rows>
constexpr int kPairs = Rows == 4 ? 1 : 2;
#endif

template <typename T>
struct FewQueries {
  using A = Acc<T>;
  static constexpr int64_t L = kLanes<A>;

  const Problem<A>& problem;
  Heads<const T> q, k, v;
  Heads<T> out;
  A* lse;
  int64_t width, value_width;  // head sizes in whole Pairs

  // Queries of a task: all of a sequence, of all heads that share a key.
  int64_t rows(const Sequence& s) const { return problem.sizes.group() * s.queries; }

  // What a part gives for a row: the largest score, the sum, and the result before its division.
  int64_t row_values() const { return 2 * L + value_width; }

  struct Task {
    Sequence sequence;
    int64_t key_head;
    Keys keys;
    A* results;  // [rows][row_values]
  };

  struct Row {
    int64_t head, query;
  };

  Row row(const Task& t, int64_t r) const {
    return {t.key_head * problem.sizes.group() + r / t.sequence.queries, r % t.sequence.queries};
  }

  // scores[r][key] = scale * q.k for `Rows` queries: as many dot products at once as a register has
  // lanes, which are then added up across lanes together.
  template <int Rows>
  void dot(const T* keys, const A* queries, int64_t count, A* scores) const {
    constexpr int kAtOnce = int(L) / Rows;
    const int64_t n = problem.sizes.size;
    for (int64_t at = 0; at < count; at += kAtOnce) {
      Vec<A> sums[L] = {};
      const auto add = [&](int64_t d, auto elements) {
#pragma GCC unroll 16
        for (int x = 0; x < kAtOnce; ++x) {
          // keys past the end are not read: the last one stands in
          const T* key = keys + std::min(at + x, count - 1) * k.row;
          const auto values = simd::load(key + d, elements);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) {
            const A* query = queries + r * width + d;
            sums[r * kAtOnce + x] += values.first * simd::load_as<Vec<A>>(query);
            sums[r * kAtOnce + x] += values.second * simd::load_as<Vec<A>>(query + L);
          }
        }
      };
      simd::for_each_pair<T>(n, add);
      lanes::transpose<A>(sums);
#pragma GCC unroll 4
      for (int step = 1; step < L; step *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i + step < L; i += 2 * step) sums[i] += sums[i + step];
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        std::memcpy(scores + r * kStepKeys + at,
                    reinterpret_cast<const char*>(&sums[0]) + r * kAtOnce * sizeof(A),
                    kAtOnce * sizeof(A));
      }
    }
  }

  // Scores of row r as softmax sees them; says whether some are hidden.
  bool finish_row(const Task& t, int64_t r, Keys keys, A* scores) const {
    const Row of = row(t, r);
    const Sequence& s = t.sequence;
    const int64_t position = of.query + s.offset(), count = keys.count();
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
    if (problem.mask.values) hides = add_mask(t, of, keys, scores);
    const int64_t first = position - problem.left - keys.begin;
    const int64_t last = position + problem.right - keys.begin;
    for (int64_t i = 0; i < std::min(first, count); ++i) scores[i] = kHidden<A>;
    for (int64_t i = std::max<int64_t>(0, last + 1); i < count; ++i) scores[i] = kHidden<A>;
    for (int64_t i = count; i < kStepKeys; ++i) scores[i] = kHidden<A>;
    return hides || first > 0 || last + 1 < count;
  }

  bool add_mask(const Task& t, Row of, Keys keys, A* scores) const {
    const Mask& mask = problem.mask;
    const int64_t start = t.sequence.batch * mask.batch + of.head * mask.head +
                          (t.sequence.first_query + of.query) * mask.row +
                          (t.sequence.first_key + keys.begin) * mask.column;
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

  // results[r] += sum over keys of shares[r][key] * values[key], a strip of Pairs at a time.
  template <int Rows, int Pairs, typename Elements>
  void add_strip(const T* values, const A* shares, int64_t count, A* results,
                 Elements elements) const {
    Vec<A> sums[Rows][2 * Pairs];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int x = 0; x < 2 * Pairs; ++x) {
        sums[r][x] = simd::load_as<Vec<A>>(results + r * row_values() + x * L);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) {
        const auto x = simd::load(values + i * v.row + p * simd::kStep<T>, elements);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          sums[r][2 * p] += x.first * shares[r * kStepKeys + i];
          sums[r][2 * p + 1] += x.second * shares[r * kStepKeys + i];
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int x = 0; x < 2 * Pairs; ++x) {
        std::memcpy(results + r * row_values() + x * L, &sums[r][x], sizeof(sums[r][x]));
      }
    }
  }

  template <int Rows>
  void add_values(const T* values, const A* shares, int64_t count, A* results) const {
    constexpr int64_t kWide = kPairs<Rows> * simd::kStep<T>;
    const int64_t n = problem.sizes.value_size;
    int64_t d = 0;
    for (; d + kWide <= n; d += kWide) {
      add_strip<Rows, kPairs<Rows>>(values + d, shares, count, results + d, simd::All{});
    }
    simd::for_each_pair<T>(n - d, [&](int64_t i, auto elements) {
      add_strip<Rows, 1>(values + d + i, shares, count, results + d + i, elements);
    });
  }

  // The same for values that are not finite: what is hidden adds nothing.
  void add_visible(const T* values, const A* shares, int64_t count, A* result) const {
    for (int64_t i = 0; i < count; ++i) {
      if (!std::signbit(shares[i])) add_values<1>(values + i * v.row, shares + i, 1, result);
    }
  }

  bool are_values_finite(const T* values, int64_t count) const {
    simd::Pair<A> off = {};
    for (int64_t i = 0; i < count; ++i) {
      simd::for_each_pair<T>(problem.sizes.value_size, [&](int64_t d, auto elements) {
        const auto x = simd::load(values + i * v.row + d, elements);
        off += x - x;
      });
    }
    return !lanes::any((off.first + off.second) != 0);
  }

  template <int Rows>
  void add_keys(const Task& t, int64_t first, Keys keys, const A* queries, A* scores) const {
    const Sequence& s = t.sequence;
    const T* from = v.at(s.batch, t.key_head, s.first_key + keys.begin);
    A* const results = t.results + first * row_values();
    dot<Rows>(k.at(s.batch, t.key_head, s.first_key + keys.begin), queries + first * width,
              keys.count(), scores);
    bool hides = false;
    for (int r = 0; r < Rows; ++r) {
      hides |= finish_row(t, first + r, keys, scores + r * kStepKeys);
      softmax_row(scores + r * kStepKeys, results + r * row_values());
    }
    if (hides && !are_values_finite(from, keys.count())) {
      for (int r = 0; r < Rows; ++r) {
        add_visible(from, scores + r * kStepKeys, keys.count(), results + r * row_values() + 2 * L);
      }
    } else {
      add_values<Rows>(from, scores, keys.count(), results + 2 * L);
    }
  }

  void operator()(const Task& t) const {
    const int64_t count = rows(t.sequence);
    Pieces<A> pieces(Pieces<A>::size(count * width) + Pieces<A>::size(4 * kStepKeys));
    A* const queries = pieces.take(count * width);
    A* const scores = pieces.take(4 * kStepKeys);
    for (int64_t r = 0; r < count; ++r) {
      const Row of = row(t, r);
      const T* from = q.at(t.sequence.batch, of.head, t.sequence.first_query + of.query);
      // in the order of T's Pairs, as keys are loaded
      simd::for_each_pair<T>(problem.sizes.size, [&](int64_t d, auto elements) {
        simd::store(queries + r * width + d, simd::load(from + d, elements) * problem.scale);
      });
      A* const result = t.results + r * row_values();
      std::fill_n(result, row_values(), A(0));
      result[0] = kHidden<A>;
    }
    for (int64_t begin = t.keys.begin; begin < t.keys.end; begin += kStepKeys) {
      const Keys keys{begin, std::min(begin + kStepKeys, t.keys.end)};
      int64_t r = 0;
      // no more at once than a register has lanes
      if constexpr (L >= 4) {
        for (; r + 4 <= count; r += 4) add_keys<4>(t, r, keys, queries, scores);
      }
      for (; r + 2 <= count; r += 2) add_keys<2>(t, r, keys, queries, scores);
      for (; r < count; ++r) add_keys<1>(t, r, keys, queries, scores);
    }
  }

  // The result of row r from those of all parts, `step` values apart.
  void merge(const Task& first, int64_t r, int64_t parts, int64_t step, A* sums) const {
    const Sizes& s = problem.sizes;
    const Row of = row(first, r);
    const A* from = first.results + r * row_values();
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
    lse[(first.sequence.batch * s.heads + of.head) * s.queries + query] = largest + std::log(total);
    const A share = total == 0 ? A(0) : 1 / total;
    T* const y = out.at(first.sequence.batch, of.head, query);
    simd::for_each_pair<T>(s.value_size, [&](int64_t d, auto elements) {
      simd::store(y + d, simd::load(sums + d) * share, elements);
    });
  }
};

// All sequences: parts of keys on all threads, then the merge of each row.
template <typename T>
void attend_few(const FewQueries<T>& few, bool worth_threads) {
  using A = Acc<T>;
  const Problem<A>& problem = few.problem;
  std::vector<typename FewQueries<T>::Task> tasks;
  std::vector<int64_t> firsts, offsets;
  int64_t values = 0;
  for (const Sequence& s : problem.sequences) {
    for (int64_t h = 0; h < problem.sizes.key_heads; ++h) {
      firsts.push_back(int64_t(tasks.size()));
      // those keys that some query may see
      const Keys seen = problem.range(s, {0, 0, s.queries});
      int64_t begin = seen.begin;
      do {
        tasks.push_back({s, h, {begin, std::min(begin + kPart, seen.end)}, nullptr});
        offsets.push_back(values);
        values += few.rows(s) * few.row_values();
        begin += kPart;
      } while (begin < seen.end);
    }
  }
  firsts.push_back(int64_t(tasks.size()));
  const auto results = std::make_unique_for_overwrite<A[]>(std::max<int64_t>(1, values));
  for (size_t t = 0; t < tasks.size(); ++t) tasks[t].results = results.get() + offsets[t];
  for_each_task(int64_t(tasks.size()), worth_threads, [&](int64_t t) { few(tasks[t]); });
  for_each_task(int64_t(firsts.size()) - 1, worth_threads, [&](int64_t g) {
    const auto& first = tasks[firsts[g]];
    Pieces<A> pieces(few.value_width);
    A* const sums = pieces.take(few.value_width);
    const int64_t rows = few.rows(first.sequence);
    for (int64_t r = 0; r < rows; ++r) {
      few.merge(first, r, firsts[g + 1] - firsts[g], rows * few.row_values(), sums);
    }
  });
}

}  // namespace metalcore::cpu::tiles
