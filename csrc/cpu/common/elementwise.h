// SPDX-License-Identifier: MIT
// Elementwise kernels: one function of registers, applied to whole tensors.
#pragma once

#include <utility>

#include "math.h"
#include "tensor.h"

namespace metalcore::cpu {

// A contiguous input. One with a step of 0 is a single row that meets every row of the others.
template <typename T>
struct Input {
  const T* values;
  int64_t step;
};

// Elements of a task's inner loop, where there are no rows.
constexpr int64_t kRun = 4096;

template <typename T>
Input<T> whole(const Tensor& x) {
  return {data<T>(x), kRun};
}

// The distance between rows of x, if its last dimension has no gaps and all rows are equally far
// apart, as in a half of each row of a larger tensor; 0 otherwise.
inline int64_t row_step(const Tensor& x) {
  if (x.dim() < 2 || x.numel() == 0 || x.stride(-1) != 1) return 0;
  for (int64_t d = x.dim() - 2; d > 0; --d) {
    if (x.stride(d - 1) != x.size(d) * x.stride(d)) return 0;
  }
  return x.stride(-2);
}

// Tensors of one shape for map_elements: rows that lie apart are read where they are.
template <typename T, size_t N>
class Alike {
 public:
  explicit Alike(const Tensor (&tensors)[N]) : n_(tensors[0].dim() ? tensors[0].size(-1) : 1) {
    bool contiguous = true, rows = n_ >= kShortRow;
    for (const Tensor& x : tensors) {
      contiguous = contiguous && x.is_contiguous();
      rows = rows && row_step(x) >= n_;
    }
    const bool apart = rows && !contiguous;
    if (!apart) n_ = kRun;
    for (size_t k = 0; k < N; ++k) {
      kept_[k] = apart ? tensors[k] : dense(tensors[k]);
      in_[k] = {data<T>(kept_[k]), apart ? row_step(tensors[k]) : kRun};
    }
  }

  const Input<T> (&in() const)[N] { return in_; }
  int64_t n() const { return n_; }

 private:
  // Shorter rows are copied: a loop of its own for each costs more.
  static constexpr int64_t kShortRow = 64;
  int64_t n_;
  Tensor kept_[N];
  Input<T> in_[N];
};

// A bias [n] that meets every row of x [..., n].
template <typename T>
class Row {
 public:
  Row(const char* op, const Tensor& bias, const Tensor& x) : bias_(dense(bias)) {
    STD_TORCH_CHECK(x.dim() > 0 && bias_.dim() == 1 && bias_.numel() == x.size(-1) &&
                        bias_.scalar_type() == x.scalar_type(),
                    op, ": bias must have as many values as a row of x, and its dtype");
  }

  int64_t n() const { return bias_.numel(); }
  Input<T> row() const { return {data<T>(bias_), 0}; }
  Input<T> others(const Tensor& x) const { return {data<T>(x), n()}; }

 private:
  Tensor bias_;
};

namespace detail {

template <bool Streams, typename T, size_t... I, size_t... O, typename F, typename Elements>
inline void step(std::index_sequence<I...>, std::index_sequence<O...>, const T* const* in,
                 T* const* out, int64_t i, const F& f, Elements elements) {
  const simd::Pair<simd::Acc<T>> x[] = {simd::load(in[I] + i, elements)...};
  const auto first = f(x[I].first...), second = f(x[I].second...);
  const auto put = [&](T* p, simd::Pair<simd::Acc<T>> v) {
    if constexpr (Streams && std::is_same_v<Elements, simd::All>) {
      simd::stream(p, v);
    } else {
      simd::store(p, v, elements);
    }
  };
  (put(out[O] + i, {first[O], second[O]}), ...);
}

}  // namespace detail

// out[k] = result k of f(in...), element by element. f takes a register per input and returns an
// array of registers, one per output. `total` elements in rows of n, kRun where there are none.
template <typename T, size_t Ins, size_t Outs, typename F>
void map_elements(const Input<T> (&in)[Ins], T* const (&out)[Outs], int64_t total, int64_t n,
                  const F& f) {
  const int64_t rows = n == 0 ? 0 : (total + n - 1) / n;
  bool streams = true;
  for (T* p : out) streams = streams && streams_past_cache(p, total, n);
  metalcore_variant = streams ? "streamed" : "vector";
  const auto run = [&]<bool Streams>(std::bool_constant<Streams>, int64_t row) {
    const T* from[Ins];
    T* to[Outs];
    for (size_t k = 0; k < Ins; ++k) from[k] = in[k].values + row * in[k].step;
    for (size_t k = 0; k < Outs; ++k) to[k] = out[k] + row * n;
    simd::for_each_pair<T>(std::min(n, total - row * n), [&](int64_t i, auto elements) {
      detail::step<Streams, T>(std::make_index_sequence<Ins>(), std::make_index_sequence<Outs>(),
                               from, to, i, f, elements);
    });
  };
  parallel_for(0, rows, grain_rows(n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      streams ? run(std::true_type(), row) : run(std::false_type(), row);
    }
    simd::end_stream();
  });
}

}  // namespace metalcore::cpu
