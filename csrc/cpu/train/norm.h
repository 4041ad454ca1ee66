// SPDX-License-Identifier: MIT
// What kernels of rows share: the scale of a norm, and the last pass over a row.
#pragma once

#include <cmath>
#include <vector>

#include "../common/tensor.h"

namespace metalcore::cpu {

using simd::Acc;

// offset + weight (`none` where there is no weight), [n], in the order of Pairs of T.
template <typename T>
class Scale {
 public:
  Scale(const std::optional<Tensor>& weight, double offset, int64_t n, const char* op,
        Acc<T> none = 1) {
    if (!weight) {
      copy_.assign(padded(n), none);
      return;
    }
    const Tensor w = dense(*weight);
    STD_TORCH_CHECK(w.dim() == 1 && w.numel() == n, op,
                    ": weights must have as many values as a row of x");
    if (std::is_same_v<T, Acc<T>> && w.scalar_type() == dtype_of<T>() && offset == 0) {
      keep_ = w;
      values_ = data<Acc<T>>(w);
      return;
    }
    copy_.resize(padded(n));
    dispatch_float(w.scalar_type(), op, [&](auto type) {
      using W = decltype(type);
      const W* from = data<W>(w);
      if constexpr (std::is_same_v<W, T>) {
        simd::for_each_pair<T>(n, [&](int64_t i, auto elements) {
          simd::store(copy_.data() + i, simd::load(from + i, elements) + splat(offset));
        });
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const Acc<T> v = Acc<T>(from[i]) + Acc<T>(offset);
          // a plain NaN: simd::store to bfloat16 wants no payload
          copy_[i / kStep * kStep + simd::slot<T>(i % kStep)] = v == v ? v : Acc<T>(NAN);
        }
      }
    });
  }

  const Acc<T>* get() const { return keep_ ? values_ : copy_.data(); }

 private:
  static constexpr int64_t kStep = simd::kStep<T>;
  static int64_t padded(int64_t n) { return (n + kStep - 1) / kStep * kStep; }
  static simd::Pair<Acc<T>> splat(double v) {
    const simd::Vec<Acc<T>> lanes = simd::Vec<Acc<T>>{} + Acc<T>(v);
    return {lanes, lanes};
  }

  std::optional<Tensor> keep_;
  const Acc<T>* values_ = nullptr;
  std::vector<Acc<T>> copy_;
};

// The scale of the elements of a Pair of T. Copies are whole Pairs; only natural order ends early.
template <typename T, typename Elements>
simd::Pair<Acc<T>> load_scale(const Acc<T>* scale, Elements elements) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return simd::load(scale, elements);
  } else {
    return simd::load(scale);
  }
}

template <typename A>
A reciprocal_rms(A sum_of_squares, int64_t n, A eps) {
  return 1 / std::sqrt(sum_of_squares / A(n) + eps);
}

// Calls body(i, elements, put) along a row, where put(p, v) stores: past the caches if `streams`.
template <typename T, typename Body>
void write_row(int64_t n, bool streams, Body body) {
  if (streams) {
    const auto put = [](T* p, auto v) { simd::stream(p, v); };
    for (int64_t i = 0; i < n; i += simd::kStep<T>) body(i, simd::All{}, put);
  } else {
    simd::for_each_pair<T>(n, [&](int64_t i, auto elements) {
      body(i, elements, [&](T* p, auto v) { simd::store(p, v, elements); });
    });
  }
}

// Whether rows of n of an output should go past the caches.
template <typename T>
bool streams_past_cache(const Tensor& y, int64_t n) {
  return streams_past_cache(data<T>(y), y.numel(), n);
}

// y = x * rstd * scale, [n]
template <typename T>
void scale_row(const T* x, Acc<T> rstd, const Acc<T>* scale, int64_t n, T* y, bool streams) {
  write_row<T>(n, streams, [&](int64_t i, auto elements, auto put) {
    // the next row: memory would idle during this pass. 1.2x for bfloat16 1024 x 4096
    __builtin_prefetch(x + n + i);
    put(y + i, simd::load(x + i, elements) * rstd * load_scale<T>(scale + i, elements));
  });
}

// v, with `value` in the places past the first few.
template <typename T>
simd::Pair<Acc<T>> fill_rest(simd::Pair<Acc<T>> v, simd::First first, Acc<T> value) {
  Acc<T> values[simd::kStep<T>];
  simd::store(values, v);
  for (int64_t i = first.count; i < simd::kStep<T>; ++i) values[simd::slot<T>(i)] = value;
  return simd::load(values);
}

template <typename T>
simd::Pair<Acc<T>> fill_rest(simd::Pair<Acc<T>> v, simd::All, Acc<T>) {
  return v;
}

// Blocks of rows that each sum the gradients of weights on their own. Fixed by the shape, never by
// the number of threads, so that the result is the same for any number of them.
struct RowBlocks {
  int64_t rows, count, rows_each;

  explicit RowBlocks(int64_t rows) : rows(rows) {
    constexpr int64_t kRowsEach = 8, kMost = 64;
    count = std::clamp((rows + kRowsEach - 1) / kRowsEach, int64_t(1), kMost);
    rows_each = (rows + count - 1) / count;
  }

  int64_t first(int64_t block) const { return block * rows_each; }
  int64_t last(int64_t block) const { return std::min(rows, (block + 1) * rows_each); }
};

// out[i] = sum over blocks, in order, of partial[block * step + i]; partial is in the order of T.
template <typename T>
void sum_blocks(Acc<T>* partial, int64_t blocks, int64_t step, Tensor& out) {
  const int64_t n = out.numel(), kStep = simd::kStep<T>, width = (n + kStep - 1) / kStep * kStep;
  parallel_for(0, width, kGrainElements / blocks, [&](int64_t begin, int64_t end) {
    for (int64_t b = 1; b < blocks; ++b) {
      const Acc<T>* block = partial + b * step;
      for (int64_t i = begin; i < end; ++i) partial[i] += block[i];
    }
  });
  dispatch_float(out.scalar_type(), "norm", [&](auto type) {
    using W = decltype(type);
    W* values = mutable_data<W>(out);
    for (int64_t i = 0; i < n; ++i) {
      values[i] = static_cast<W>(partial[i / kStep * kStep + simd::slot<T>(i % kStep)]);
    }
  });
}

// An accumulation-type tensor of x's leading dimensions, one value per row.
inline Tensor empty_per_row(const Tensor& x) {
  return empty(x.sizes().data(), x.dim() - 1, accumulate_dtype(x.scalar_type()));
}

}  // namespace metalcore::cpu
