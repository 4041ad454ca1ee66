// SPDX-License-Identifier: MIT
// Bags of rows of a table on the CPU.
//   y[b] = sum, mean or maximum over the indices i of bag b of w_i table[i]
//   dtable[r] = sum over the places where r is used of factor dy[bag of the place]
// Forward: each thread takes a run of bags. Backward: places are sorted by row, and each thread
// takes a run of rows, so that every sum has one order and every row is written once.

#include <atomic>
#include <memory>
#include <tuple>
#include <vector>

#include "../common/tensor.h"

namespace metalcore::cpu {
namespace {

using simd::Acc;

enum Mode : int64_t { kSum, kMean, kMax };

void expect_table(const char* op, const Tensor& weight, int64_t mode, bool weighted) {
  expect_float(op, weight);
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight must be [rows, n]");
  expect_choice(op, "mode", mode, 3);
  STD_TORCH_CHECK(mode == kSum || !weighted, op, ": only sums take per_sample_weights");
}

// Rows that are fetched ahead of use.
constexpr int64_t kRowsAhead = 16;

template <typename T>
void prefetch_row(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

// The indices and the places in them where bags begin and end, which are checked.
class Bags {
 public:
  Bags(const Tensor& indices, const std::optional<Tensor>& offsets, int64_t bag_size, bool last,
       int64_t rows, int64_t padding)
      : indices_(dense(indices)), rows_(rows), padding_(padding) {
    STD_TORCH_CHECK(indices_.scalar_type() == ScalarType::Long && indices_.dim() == 1,
                    "embedding_bag: input must be int64 [places]");
    index = data<int64_t>(indices_);
    places = indices_.numel();
    if (!offsets) {
      STD_TORCH_CHECK(bag_size > 0 && places % bag_size == 0,
                      "embedding_bag: without offsets bag_size must divide the indices");
      size_ = bag_size;
      count = places / bag_size;
      return;
    }
    offsets_ = dense(*offsets);
    STD_TORCH_CHECK(offsets_->scalar_type() == ScalarType::Long && offsets_->dim() == 1,
                    "embedding_bag: offsets must be int64 [bags]");
    begin_ = data<int64_t>(*offsets_);
    given_ = offsets_->numel();
    count = std::max<int64_t>(0, given_ - (last ? 1 : 0));
    STD_TORCH_CHECK(given_ == 0 || begin_[0] == 0, "embedding_bag: offsets must begin with 0, got ",
                    begin_[0]);
    for (int64_t b = 1; b < given_; ++b) {
      STD_TORCH_CHECK(begin_[b] >= begin_[b - 1], "embedding_bag: offsets must not fall, got ",
                      begin_[b], " after ", begin_[b - 1]);
    }
    STD_TORCH_CHECK(given_ == 0 || begin_[given_ - 1] <= places, "embedding_bag: offset ",
                    begin_[given_ - 1], " is past the ", places, " indices");
  }

  // Whether the indices at these places are rows of the table.
  bool are_rows(int64_t begin, int64_t end) const {
    uint64_t signs = 0;
    for (int64_t i = begin; i < end; ++i) {
      signs |= uint64_t(index[i]) | (uint64_t(rows_ - 1) - uint64_t(index[i]));
    }
    return int64_t(signs) >= 0;
  }
  void expect_rows() const {
    if (are_rows(0, places)) return;
    for (int64_t i = 0; i < places; ++i) {
      STD_TORCH_CHECK(are_rows(i, i + 1), "embedding_bag: index ", index[i],
                      " is out of range for a table of ", rows_, " rows");
    }
  }

  int64_t begin(int64_t bag) const { return size_ ? bag * size_ : begin_[bag]; }
  int64_t end(int64_t bag) const {
    if (size_) return (bag + 1) * size_;
    return bag + 1 < given_ ? begin_[bag + 1] : places;
  }
  bool counts(int64_t place) const { return index[place] != padding_; }
  int64_t used(int64_t bag) const {
    int64_t n = 0;
    for (int64_t i = begin(bag); i < end(bag); ++i) n += counts(i);
    return n;
  }

  const int64_t* index;
  int64_t places, count;

 private:
  Tensor indices_;
  std::optional<Tensor> offsets_;
  const int64_t* begin_ = nullptr;
  int64_t given_ = 0, size_ = 0, rows_, padding_;
};

// Factors of the rows, or null where there are none.
template <typename T>
struct Factors {
  std::optional<Tensor> keep;
  const T* values = nullptr;

  Factors(const std::optional<Tensor>& weights, const Bags& bags) {
    if (!weights) return;
    keep = dense(*weights);
    STD_TORCH_CHECK(
        keep->scalar_type() == dtype_of<T>() && keep->dim() == 1 && keep->numel() == bags.places,
        "embedding_bag: per_sample_weights must have the dtype of weight and the shape "
        "of input");
    values = data<T>(*keep);
  }
  Acc<T> operator[](int64_t place) const { return values ? Acc<T>(values[place]) : Acc<T>(1); }
};

// kPairs Pairs of columns of a bag, from column `first` on, kept in registers. Elements: of the
// last Pair.
template <typename T, int64_t kPairs, bool kWeighted, typename Elements>
void sum_columns(const Bags& bags, int64_t b, const T* table, int64_t n, int64_t first,
                 const Factors<T>& factors, bool mean, T* y, Elements elements) {
  using A = Acc<T>;
  simd::Pair<A> sums[kPairs] = {};
  int64_t used = 0;
  for (int64_t i = bags.begin(b), end = bags.end(b); i < end; ++i) {
    if (i + kRowsAhead < bags.places) {
      const T* ahead = table + bags.index[i + kRowsAhead] * n + first;
      for (int64_t k = 0; k < kPairs * simd::kStep<T>; k += 64 / int64_t(sizeof(T))) {
        __builtin_prefetch(ahead + k);
      }
    }
    if (!bags.counts(i)) continue;
    ++used;
    const T* row = table + bags.index[i] * n + first;
    const auto add = [&](int64_t k, auto which) {
      const auto v = simd::load(row + k * simd::kStep<T>, which);
      sums[k] += kWeighted ? v * factors[i] : v;
    };
    for (int64_t k = 0; k < kPairs - 1; ++k) add(k, simd::All{});
    add(kPairs - 1, elements);
  }
  const A scale = mean && used ? A(1) / A(used) : A(1);
  for (int64_t k = 0; k < kPairs - 1; ++k) {
    simd::store(y + first + k * simd::kStep<T>, sums[k] * scale);
  }
  simd::store(y + first + (kPairs - 1) * simd::kStep<T>, sums[kPairs - 1] * scale, elements);
}

template <typename T, bool kWeighted>
void sum_bag(const Bags& bags, int64_t b, const T* table, int64_t n, const Factors<T>& factors,
             bool mean, T* y) {
  constexpr int64_t kTile = 8 * simd::kStep<T>;
  int64_t first = 0;
  for (; first + kTile <= n; first += kTile) {
    sum_columns<T, 8, kWeighted>(bags, b, table, n, first, factors, mean, y, simd::All{});
  }
  simd::for_each_pair<T>(n - first, [&](int64_t i, auto elements) {
    sum_columns<T, 1, kWeighted>(bags, b, table, n, first + i, factors, mean, y, elements);
  });
}

// The largest values of a bag and where they are, while it is read.
template <typename T>
struct Largest {
  std::vector<Acc<T>> value;
  std::vector<int32_t> place;
};

template <typename T>
void max_bag(const Bags& bags, int64_t b, const T* table, int64_t n, Largest<T>& largest, T* y,
             int64_t* places) {
  Acc<T>* __restrict value = largest.value.data();
  int32_t* __restrict place = largest.place.data();
  bool any = false;
  for (int64_t i = bags.begin(b); i < bags.end(b); ++i) {
    if (i + kRowsAhead < bags.places) prefetch_row(table + bags.index[i + kRowsAhead] * n, n);
    if (!bags.counts(i)) continue;
    const T* __restrict row = table + bags.index[i] * n;
    const int32_t at = int32_t(i);
    if (!any) {
      for (int64_t j = 0; j < n; ++j) value[j] = Acc<T>(row[j]);
      std::fill_n(place, n, at);
      any = true;
      continue;
    }
    for (int64_t j = 0; j < n; ++j) {
      const Acc<T> v = Acc<T>(row[j]);
      place[j] = v > value[j] ? at : place[j];
      value[j] = v > value[j] ? v : value[j];
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    y[j] = any ? T(value[j]) : T(0);
    places[j] = any ? place[j] : -1;
  }
}

std::tuple<Tensor, Tensor> embedding_bag(const Tensor& weight_in, const Tensor& indices,
                                         std::optional<Tensor> offsets,
                                         std::optional<Tensor> per_sample_weights, int64_t bag_size,
                                         int64_t mode, int64_t padding, bool last, bool, bool) {
  expect_table("embedding_bag", weight_in, mode, per_sample_weights.has_value());
  const Tensor weight = dense(weight_in);
  const int64_t n = weight.size(1);
  const Bags bags(indices, offsets, bag_size, last, weight.size(0), padding);
  STD_TORCH_CHECK(mode != kMax || bags.places < INT32_MAX, "embedding_bag: too many indices");
  const int64_t sizes[] = {bags.count, n}, none = 0;
  Tensor y = empty(sizes, 2, weight.scalar_type());
  Tensor places =
      mode == kMax ? empty(sizes, 2, ScalarType::Long) : empty(&none, 1, ScalarType::Long);
  dispatch_float(weight.scalar_type(), "embedding_bag", [&](auto type) {
    using T = decltype(type);
    const Factors<T> factors(per_sample_weights, bags);
    const T* table = data<T>(weight);
    T* yp = mutable_data<T>(y);
    int64_t* pp = mutable_data<int64_t>(places);
    const int64_t work = n * std::max<int64_t>(1, bags.places / std::max<int64_t>(1, bags.count));
    // checked bag by bag: a pass of its own takes 3 % longer
    std::atomic<bool> wrong =
        !bags.are_rows(bags.count ? bags.end(bags.count - 1) : 0, bags.places);
    parallel_for(0, bags.count, grain_rows(work), [&](int64_t begin, int64_t end) {
      Largest<T> largest;
      if (mode == kMax) largest.value.resize(n), largest.place.resize(n);
      for (int64_t b = begin; b < end; ++b) {
        if (!bags.are_rows(bags.begin(b), bags.end(b))) {
          wrong = true;
        } else if (mode == kMax) {
          max_bag(bags, b, table, n, largest, yp + b * n, pp + b * n);
        } else {
          const auto sum = factors.values ? sum_bag<T, true> : sum_bag<T, false>;
          sum(bags, b, table, n, factors, mode == kMean, yp + b * n);
        }
      }
    });
    if (wrong) bags.expect_rows();
  });
  metalcore_variant = "bags";
  return {y, places};
}

// The places where each row is used, in order, and their bags; places that do not count are left
// out.
struct Uses {
  std::vector<int64_t> first;
  std::vector<int32_t> place, bag;
  std::vector<int32_t> used;

  Uses(const Bags& bags, int64_t rows) : first(rows + 1), used(bags.count) {
    for (int64_t b = 0; b < bags.count; ++b) {
      for (int64_t i = bags.begin(b); i < bags.end(b); ++i) {
        if (!bags.counts(i)) continue;
        ++first[bags.index[i] + 1];
        ++used[b];
      }
    }
    for (int64_t r = 0; r < rows; ++r) first[r + 1] += first[r];
    place.resize(first[rows]);
    bag.resize(first[rows]);
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t b = 0; b < bags.count; ++b) {
      for (int64_t i = bags.begin(b); i < bags.end(b); ++i) {
        if (!bags.counts(i)) continue;
        const int64_t at = next[bags.index[i]]++;
        place[at] = int32_t(i);
        bag[at] = int32_t(b);
      }
    }
  }
};

template <typename T>
void write_rows(const Uses& uses, const T* dy, const int64_t* places, int64_t n,
                const Factors<T>& factors, bool mean, bool by_freq, Tensor& dweight) {
  using A = Acc<T>;
  T* out = mutable_data<T>(dweight);
  const bool streams = streams_past_cache(out, dweight.numel(), n);
  parallel_for(0, dweight.size(0), grain_rows(n), [&](int64_t begin, int64_t end) {
    std::vector<A> sum(n + simd::kStep<T>);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = uses.first[r], last = uses.first[r + 1];
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t u = first; u < last; ++u) {
        const T* row = dy + uses.bag[u] * n;
        A factor = factors[uses.place[u]];
        if (mean) factor /= A(uses.used[uses.bag[u]]);
        if (by_freq) factor /= A(last - first);
        if (places) {
          const int64_t* __restrict chosen = places + uses.bag[u] * n;
          const T* __restrict from = row;
          A* __restrict to = sum.data();
          const int64_t place = uses.place[u];
          for (int64_t j = 0; j < n; ++j) to[j] += chosen[j] == place ? A(from[j]) * factor : A(0);
          continue;
        }
        simd::for_each_pair<T>(n, [&](int64_t j, auto elements) {
          simd::store(&sum[j], simd::load(&sum[j]) + simd::load(row + j, elements) * factor);
        });
      }
      T* to = out + r * n;
      if (places) {
        for (int64_t j = 0; j < n; ++j) to[j] = T(sum[j]);
        continue;
      }
      simd::for_each_pair<T>(n, [&](int64_t j, auto elements) {
        const auto v = simd::load(&sum[j]);
        if constexpr (std::is_same_v<decltype(elements), simd::All>) {
          if (streams) return simd::stream(to + j, v);
        }
        simd::store(to + j, v, elements);
      });
    }
    simd::end_stream();
  });
}

std::tuple<Tensor, Tensor> embedding_bag_backward(const Tensor& dy_in, const Tensor& weight_in,
                                                  const Tensor& indices,
                                                  std::optional<Tensor> offsets,
                                                  std::optional<Tensor> per_sample_weights,
                                                  const Tensor& places_in, int64_t bag_size,
                                                  int64_t mode, int64_t padding, bool last,
                                                  bool by_freq, bool need_per_sample) {
  expect_table("embedding_bag_backward", weight_in, mode, per_sample_weights.has_value());
  const Tensor dy = dense(dy_in), weight = dense(weight_in), places = dense(places_in);
  const int64_t n = weight.size(1);
  const Bags bags(indices, offsets, bag_size, last, weight.size(0), padding);
  STD_TORCH_CHECK(dy.scalar_type() == weight.scalar_type() && dy.dim() == 2 &&
                      dy.size(0) == bags.count && dy.size(1) == n &&
                      places.scalar_type() == ScalarType::Long &&
                      (mode != kMax || same_sizes(places, dy)),
                  "embedding_bag_backward: dy and places must be [bags, n]");
  STD_TORCH_CHECK(per_sample_weights || !need_per_sample,
                  "embedding_bag_backward: there are no per_sample_weights");
  STD_TORCH_CHECK(bags.places < INT32_MAX, "embedding_bag_backward: too many indices");
  bags.expect_rows();
  const int64_t none = 0;
  Tensor dweight = cpu::empty_like(weight);
  Tensor dper_sample = empty(need_per_sample ? &bags.places : &none, 1, dy.scalar_type());
  dispatch_float(weight.scalar_type(), "embedding_bag_backward", [&](auto type) {
    using T = decltype(type);
    const Factors<T> factors(per_sample_weights, bags);
    const T *table = data<T>(weight), *dyp = data<T>(dy);
    const Uses uses(bags, weight.size(0));
    write_rows(uses, dyp, mode == kMax ? data<int64_t>(places) : nullptr, n, factors, mode == kMean,
               by_freq, dweight);
    if (!need_per_sample) return;
    T* dp = mutable_data<T>(dper_sample);
    std::fill_n(dp, bags.places, T(0));
    const int64_t work = n * std::max<int64_t>(1, bags.places / std::max<int64_t>(1, bags.count));
    parallel_for(0, bags.count, grain_rows(work), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        for (int64_t i = bags.begin(b); i < bags.end(b); ++i) {
          if (!bags.counts(i)) continue;
          const T *row = table + bags.index[i] * n, *g = dyp + b * n;
          const int64_t r = bags.index[i];
          const Acc<T> share = by_freq ? Acc<T>(uses.first[r + 1] - uses.first[r]) : Acc<T>(1);
          dp[i] = T(simd::sum_over<T>(n,
                                      [&](int64_t j, auto elements) {
                                        return simd::load(row + j, elements) *
                                               simd::load(g + j, elements);
                                      }) /
                    share);
        }
      }
    });
  });
  metalcore_variant = "rows";
  return {dweight, dper_sample};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("embedding_bag", kernel<&embedding_bag>);
  m.impl("embedding_bag_backward", kernel<&embedding_bag_backward>);
}

}  // namespace metalcore::cpu
