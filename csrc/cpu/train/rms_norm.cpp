// SPDX-License-Identifier: MIT
// RMSNorm on the CPU. Rows are independent, so each thread takes a block of them.
//   y = x * rstd * scale,  rstd = 1 / sqrt(mean(x^2) + eps),  scale = weight_offset + weight
//   dx = rstd * (dy * scale - x * rstd^2 * mean(dy * scale * x)) + dsum,  dweight = sum(dy * x * rstd)

#include "rms_norm.h"

#include <tuple>

namespace metalcore::cpu {
namespace {

using simd::Acc;

// Blocks of rows that each sum dweight on their own. Fixed by the shape, never by the number of
// threads, so that the result is the same for any number of them.
constexpr int64_t kRowsPerBlock = 8;
constexpr int64_t kMaxBlocks = 64;

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_in, std::optional<Tensor> weight, double eps,
                                    double weight_offset) {
  const Tensor x = dense(x_in);
  const int64_t n = x.size(-1);
  Tensor y = cpu::empty_like(x), rstd = empty_per_row(x);

  dispatch_float(x.scalar_type(), "rms_norm", [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Scale<A> scale(weight, weight_offset, n, "rms_norm");
    const T* xp = data<T>(x);
    T* yp = mutable_data<T>(y);
    A* rp = mutable_data<A>(rstd);
    parallel_for(0, rstd.numel(), grain_rows(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = xp + r * n;
        const A sum = simd::sum_over<A>(n, [&](int64_t i, auto lanes) {
          const auto v = simd::load(row + i, lanes);
          return v * v;
        });
        rp[r] = reciprocal_rms(sum, n, A(eps));
        scale_row(row, rp[r], scale.get(), n, yp + r * n);
      }
    });
  });
  metalcore_variant = "rows";
  return {y, rstd};
}

template <typename T, typename A = Acc<T>>
void rms_norm_backward_row(const T* dy, const T* x, const A* scale, A rstd, const T* dsum,
                           int64_t n, T* dx, A* dweight) {
  const A dot = simd::sum_over<A>(n, [&](int64_t i, auto lanes) {
    return simd::load(dy + i, lanes) * simd::load(scale + i, lanes) * simd::load(x + i, lanes);
  });
  const A pull = dot * rstd * rstd / A(n);
  simd::for_each_register<A>(n, [&](int64_t i, auto lanes) {
    const auto g = simd::load(dy + i, lanes), v = simd::load(x + i, lanes);
    auto d = (g * simd::load(scale + i, lanes) - v * pull) * rstd;
    if (dsum) d += simd::load(dsum + i, lanes);
    simd::store(dx + i, d, lanes);
    if (dweight) {
      simd::store(dweight + i, simd::load(dweight + i, lanes) + g * (v * rstd), lanes);
    }
  });
}

// dweight[i] = sum over blocks, in order, of partial[block, i]
template <typename A>
void sum_blocks(const A* partial, int64_t blocks, int64_t n, Tensor& dweight) {
  dispatch_float(dweight.scalar_type(), "rms_norm_backward", [&](auto type) {
    using W = decltype(type);
    W* out = mutable_data<W>(dweight);
    const int64_t lanes_at_once = simd::kLanes<A>;
    const int64_t groups = (n + lanes_at_once - 1) / lanes_at_once;
    const int64_t grain = grain_rows(blocks * lanes_at_once);
    parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * lanes_at_once; i < std::min(n, end * lanes_at_once); ++i) {
        A sum = 0;
        for (int64_t b = 0; b < blocks; ++b) sum += partial[b * n + i];
        out[i] = static_cast<W>(sum);
      }
    });
  });
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy_in, const Tensor& x_in,
                                             std::optional<Tensor> weight, const Tensor& rstd_in,
                                             double weight_offset, std::optional<Tensor> dsum_in,
                                             bool need_dweight) {
  const Tensor dy = dense(dy_in), x = dense(x_in), rstd = dense(rstd_in);
  std::optional<Tensor> dsum;
  if (dsum_in) dsum = dense(*dsum_in);
  const int64_t n = x.size(-1), rows = rstd.numel();
  const int64_t blocks =
      std::clamp((rows + kRowsPerBlock - 1) / kRowsPerBlock, int64_t(1), kMaxBlocks);
  const int64_t rows_per_block = (rows + blocks - 1) / blocks;
  const bool sums = weight && need_dweight;

  Tensor dx = cpu::empty_like(x);
  Tensor dweight = sums ? cpu::empty_like(*weight) : new_empty(dy, {0});
  dispatch_float(x.scalar_type(), "rms_norm_backward", [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Scale<A> scale(weight, weight_offset, n, "rms_norm_backward");
    std::vector<A> partial(sums ? blocks * n : 0);
    const T* dyp = data<T>(dy);
    const T* xp = data<T>(x);
    const T* sp = dsum ? data<T>(*dsum) : nullptr;
    const A* rp = data<A>(rstd);
    T* dxp = mutable_data<T>(dx);
    const int64_t grain = grain_rows(n * rows_per_block);
    parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        A* sum = sums ? partial.data() + b * n : nullptr;
        const int64_t last = std::min(rows, (b + 1) * rows_per_block);
        for (int64_t r = b * rows_per_block; r < last; ++r) {
          rms_norm_backward_row(dyp + r * n, xp + r * n, scale.get(), rp[r],
                                sp ? sp + r * n : nullptr, n, dxp + r * n, sum);
        }
      }
    });
    if (sums) sum_blocks(partial.data(), blocks, n, dweight);
  });
  metalcore_variant = "blocks";
  return {dx, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace metalcore::cpu
