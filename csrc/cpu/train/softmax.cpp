// SPDX-License-Identifier: MIT
// Softmax on the CPU. Rows are independent, so each thread takes a block of them.
//   y = exp(v - max(v)) / sum(exp(v - max(v))),  v = scale * x + mask
//   dx = scale * y * (dy - sum(dy * y))

#include "../common/math.h"
#include "norm.h"

namespace metalcore::cpu {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

template <typename T, typename Term>
Acc<T> max_over(int64_t n, Term term) {
  const auto none = simd::splat<simd::Vec<Acc<T>>>(Acc<T>(kNone));
  simd::Pair<Acc<T>> most = {none, none};
  simd::for_each_pair<T>(n, [&](int64_t i, auto elements) {
    const auto v = term(i, elements);
    most = {simd::larger(v.first, most.first), simd::larger(v.second, most.second)};
  });
  const auto lanes = simd::larger(most.first, most.second);
  Acc<T> found = lanes[0];
  for (int64_t lane = 1; lane < simd::kLanes<Acc<T>>; ++lane) found = std::max(found, lanes[lane]);
  return found;
}

// The softmax of a row of n. `kept` holds whole Pairs; `mask` may be null. A NaN reaches the sum,
// whatever the maximum makes of it.
template <typename T>
void softmax_row(const T* x, const T* mask, Acc<T> scale, int64_t n, Acc<T>* kept, T* y,
                 bool streams) {
  using A = Acc<T>;
  const auto logits = [&](int64_t i, auto elements) {
    auto v = simd::load(x + i, elements) * scale;
    if (mask) v += simd::load(mask + i, elements);
    return fill_rest<T>(v, elements, Acc<T>(kNone));
  };
  const A most = max_over<T>(n, logits);
  const A sum = simd::sum_over<T>(n, [&](int64_t i, auto elements) {
    const auto v = logits(i, elements) - most;
    const simd::Pair<A> e = {simd::exp(v.first), simd::exp(v.second)};
    simd::store(kept + i, e);
    return e;
  });
  const T* next = x + n;
  const A share = 1 / sum;
  write_row<T>(n, streams, [=](int64_t i, auto, auto put) {
    __builtin_prefetch(next + i);
    put(y + i, simd::load(kept + i) * share);
  });
}

// Where the row of a mask [..., n] starts that meets row r of x: its leading dimensions broadcast.
class MaskRows {
 public:
  MaskRows(const Tensor& mask, const Tensor& x) {
    const int64_t skipped = x.dim() - mask.dim();
    STD_TORCH_CHECK(skipped >= 0 && mask.dim() > 0 && mask.size(-1) == x.size(-1) &&
                        mask.scalar_type() == x.scalar_type(),
                    "softmax: mask must have the dtype of x and its last dimension");
    int64_t step = x.size(-1);
    for (int64_t d = mask.dim() - 2; d >= 0; --d) {
      const int64_t size = x.size(d + skipped);
      STD_TORCH_CHECK(mask.size(d) == size || mask.size(d) == 1,
                      "softmax: mask must broadcast to the shape of x");
      sizes_.push_back(size);
      steps_.push_back(mask.size(d) == 1 ? 0 : step);
      step *= mask.size(d);
    }
  }

  int64_t start(int64_t r) const {
    int64_t offset = 0;
    for (size_t d = 0; d < sizes_.size(); ++d) {
      offset += r % sizes_[d] * steps_[d];
      r /= sizes_[d];
    }
    return offset;
  }

 private:
  std::vector<int64_t> sizes_, steps_;  // last dimension first
};

Tensor softmax(const Tensor& x_in, std::optional<Tensor> mask_in, double scale, bool causal) {
  const Tensor x = dense(x_in);
  expect_rows("softmax", x);
  STD_TORCH_CHECK(x.dim() > int64_t(causal), "softmax: causal x must be [..., rows, columns]");
  const int64_t n = x.size(-1), rows = n == 0 ? 0 : x.numel() / n;
  const int64_t block = causal ? x.size(-2) : 1;
  std::optional<Tensor> mask;
  std::optional<MaskRows> mask_rows;
  if (mask_in) {
    mask = dense(*mask_in);
    mask_rows.emplace(*mask, x);
  }
  Tensor y = cpu::empty_like(x);
  dispatch_float(x.scalar_type(), "softmax", [&](auto type) {
    using T = decltype(type);
    const T* xp = data<T>(x);
    T* yp = mutable_data<T>(y);
    const T* mp = mask ? data<T>(*mask) : nullptr;
    const bool streams = !causal && streams_past_cache<T>(y, n);
    metalcore_variant = streams ? "rows_streamed" : "rows";
    parallel_for(0, rows, grain_rows(n), [&](int64_t begin, int64_t end) {
      std::vector<Acc<T>> kept((n + simd::kStep<T> - 1) / simd::kStep<T> * simd::kStep<T>);
      for (int64_t r = begin; r < end; ++r) {
        const T* m = mp ? mp + mask_rows->start(r) : nullptr;
        const int64_t count = causal ? std::min(n, r % block + 1) : n;
        softmax_row<T>(xp + r * n, m, Acc<T>(scale), count, kept.data(), yp + r * n, streams);
        std::fill(yp + r * n + count, yp + r * n + n, T(0.0f));
      }
      simd::end_stream();
    });
  });
  return y;
}

Tensor softmax_backward(const Tensor& dy_in, const Tensor& y_in, double scale) {
  const Tensor dy = dense(dy_in), y = dense(y_in);
  expect_rows("softmax_backward", y);
  expect_like("softmax_backward", "dy", dy, y);
  const int64_t n = y.size(-1), rows = n == 0 ? 0 : y.numel() / n;
  Tensor dx = cpu::empty_like(y);
  dispatch_float(y.scalar_type(), "softmax_backward", [&](auto type) {
    using T = decltype(type);
    const bool streams = streams_past_cache<T>(dx, n);
    metalcore_variant = streams ? "rows_streamed" : "rows";
    const T *dyp = data<T>(dy), *yp = data<T>(y);
    T* dxp = mutable_data<T>(dx);
    parallel_for(0, rows, grain_rows(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T *d = dyp + r * n, *p = yp + r * n;
        T* out = dxp + r * n;
        const Acc<T> dot = simd::sum_over<T>(n, [&](int64_t i, auto elements) {
          return simd::load(d + i, elements) * simd::load(p + i, elements);
        });
        // by value: after a store, what is outside is read again
        const T *d_next = d + n, *p_next = p + n;
        const Acc<T> factor(scale);
        write_row<T>(n, streams, [=](int64_t i, auto elements, auto put) {
          __builtin_prefetch(d_next + i);
          __builtin_prefetch(p_next + i);
          const auto pulled = simd::load(d + i, elements) - dot;
          put(out + i, simd::load(p + i, elements) * pulled * factor);
        });
      }
      simd::end_stream();
    });
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("softmax", kernel<&softmax>);
  m.impl("softmax_backward", kernel<&softmax_backward>);
}

}  // namespace metalcore::cpu
