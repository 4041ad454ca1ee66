// SPDX-License-Identifier: MIT
// Attention of a few queries in two phases: parts of the keys, then the merge of each row.
#pragma once

#include <memory>

#include "few_queries.h"

namespace metalcore::cpu::tiles {

// Parts of the keys of each sequence, and where what they give goes.
template <typename T, typename S>
struct Parts {
  using A = Acc<T>;

  std::vector<typename FewQueries<T, S>::Task> tasks;
  std::vector<int64_t> firsts;  // the first task of each group that is merged, and the end
  std::unique_ptr<A[]> results;

  Parts(const FewQueries<T, S>& few, const std::vector<Sequence>& sequences) {
    const Problem<A>& problem = few.problem;
    std::vector<int64_t> offsets;
    int64_t values = 0;
    const int64_t key_heads = problem.sizes.key_heads, each = few.heads_each();
    for (const Sequence& s : sequences) {
      for (int64_t h = 0; h < key_heads; h += each) {
        const int64_t heads = std::min(each, key_heads - h);
        firsts.push_back(int64_t(tasks.size()));
        // those keys that some query may see
        const Keys seen = problem.range(s, {0, 0, s.queries});
        int64_t begin = seen.begin;
        do {
          tasks.push_back({s, h, heads, {begin, std::min(begin + kPart, seen.end)}, nullptr});
          offsets.push_back(values);
          values += heads * few.rows(s) * few.row_values();
          begin += kPart;
        } while (begin < seen.end);
      }
    }
    firsts.push_back(int64_t(tasks.size()));
    results = std::make_unique_for_overwrite<A[]>(std::max<int64_t>(1, values));
    for (size_t t = 0; t < tasks.size(); ++t) tasks[t].results = results.get() + offsets[t];
  }

  int64_t groups() const { return int64_t(firsts.size()) - 1; }

  void merge(const FewQueries<T, S>& few, int64_t g) const {
    const auto& first = tasks[firsts[g]];
    Pieces<A> pieces(few.value_width);
    A* const sums = pieces.take(few.value_width);
    const int64_t rows = few.rows(first.sequence), parts = firsts[g + 1] - firsts[g];
    for (int64_t h = 0; h < first.heads; ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        few.merge(first, h, r, parts, first.heads * rows * few.row_values(), sums);
      }
    }
  }
};

// All sequences: parts of keys on all threads, then the merge of each row.
template <typename T, typename S>
void attend_few(const FewQueries<T, S>& few, bool worth_threads) {
  const Parts<T, S> parts(few, few.problem.sequences);
  for_each_task(int64_t(parts.tasks.size()), worth_threads,
                [&](int64_t t) { few(parts.tasks[t]); });
  for_each_task(parts.groups(), worth_threads, [&](int64_t g) { parts.merge(few, g); });
}

template <typename T, typename S>
void attend_parts(const Problem<Acc<T>>& problem, const Tensor& q, const Cache<S>& cache,
                  const Tensor& out, const Tensor& lse) {
  const Sizes& s = problem.sizes;
  metalcore_variant = "few_queries";
  attend_few(FewQueries<T, S>{problem, Heads<const T>(q), cache, Heads<T>(out),
                              mutable_data<Acc<T>>(lse), product::round_up(s.size, simd::kStep<T>),
                              product::round_up(s.value_size, simd::kStep<T>)},
             is_worth_threads(s));
}

}  // namespace metalcore::cpu::tiles
