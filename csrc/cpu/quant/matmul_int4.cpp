// SPDX-License-Identifier: MIT
// x W^T for W of 4 or 8 bits in groups, its gradient dy W, and the tiles of W, on the CPU.
//   W[n, k] = scale[n, g] q + bias[n, g], or scale[n, g] (q - middle); g = k / group

#include "../common/text.h"
#include "packed_matmul.h"

namespace metalcore::cpu {
namespace {

using namespace quant;

template <int bits>
struct Weight {
  Tensor packed, scale;
  std::optional<Tensor> bias;
  int64_t N, K, group, groups;

  int64_t row_bytes() const { return packed.size(1); }
  int quant(const uint8_t* row, int64_t k) const {
    return bits == 8 ? row[k] : row[k / 2] >> 4 * (k % 2) & 15;
  }
};

template <int bits>
Weight<bits> weight_of(const char* op, const Tensor& packed, const Tensor& scale,
                       const std::optional<Tensor>& bias, int64_t group, int64_t K) {
  STD_TORCH_CHECK(group > 0 && group <= 256 && group % 32 == 0, op,
                  ": group_size must be a multiple of 32 up to 256");
  expect_bytes(op, packed);
  STD_TORCH_CHECK(K >= 0 && K < int64_t(1) << 40, op, ": columns must not be negative");
  const int64_t groups = (K + group - 1) / group;
  STD_TORCH_CHECK(packed.dim() == 2 && packed.size(1) == (K * bits + 7) / 8, op,
                  ": packed must have ", bits, " bits for each of ", K, " columns");
  const int64_t N = packed.size(0);
  expect_float(op, scale);
  STD_TORCH_CHECK(scale.dim() == 2 && scale.size(0) == N && scale.size(1) == groups, op,
                  ": scale must be [N, groups]");
  Weight<bits> w{dense(packed), dense(scale), std::nullopt, N, K, group, groups};
  if (bias) {
    STD_TORCH_CHECK(bias->scalar_type() == scale.scalar_type() && same_sizes(*bias, scale), op,
                    ": bias must have the shape and dtype of scale");
    w.bias = dense(*bias);
  }
  return w;
}

// Values of a row in C, from scales in S.
template <int bits, typename S>
auto filler(const Weight<bits>& w) {
  const S* scale = data<S>(w.scale);
  const S* bias = w.bias ? data<S>(*w.bias) : nullptr;
  const uint8_t* from = bytes(w.packed);
  return [=, &w](int64_t row, int64_t begin, int64_t end, auto* to) {
    using C = std::remove_reference_t<decltype(*to)>;
    using A = std::conditional_t<std::is_same_v<C, double>, double, float>;
    const uint8_t* quants = from + row * w.row_bytes();
    for (int64_t k = begin; k < end;) {
      const int64_t g = k / w.group, last = std::min(end, (g + 1) * w.group);
      const A s = A(scale[row * w.groups + g]);
      const A b = bias ? A(bias[row * w.groups + g]) : -A(1 << (bits - 1)) * s;
      for (; k < last; ++k) to[k - begin] = C(A(w.quant(quants, k)) * s + b);
    }
  };
}

template <int bits>
GroupTile<bits> format_of(const Weight<bits>& w) {
  const ScalarType dtype = w.scale.scalar_type();
  return {w.group, dtype == ScalarType::Double ? ScalarType::Float : dtype, w.bias.has_value()};
}

// Scales in what a tile keeps of them.
template <int bits>
Weight<bits> as_kept(const Weight<bits>& w) {
  Weight<bits> kept = w;
  if (w.scale.scalar_type() == ScalarType::Double) {
    kept.scale = to_dtype(w.scale, ScalarType::Float);
    if (w.bias) kept.bias = to_dtype(*w.bias, ScalarType::Float);
  }
  return kept;
}

template <int bits>
void pack_into(const Weight<bits>& w, const GroupTile<bits>& f, int64_t tile, uint8_t* to) {
  const int64_t first = tile * kRows, rows = std::min(kRows, w.N - first);
  const int64_t size = block_tile_bytes(f), width = f.scale_bytes();
  if (rows < kRows) std::fill_n(to, w.groups * size, uint8_t(0));
  const auto scale = static_cast<const uint8_t*>(w.scale.const_data_ptr());
  const auto bias = w.bias ? static_cast<const uint8_t*>(w.bias->const_data_ptr()) : nullptr;
  for (int64_t g = 0; g < w.groups; ++g, to += size) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = ((first + r) * w.groups + g) * width;
      std::memcpy(to + width * r, scale + at, width);
      if (bias) std::memcpy(to + width * (kRows + r), bias + at, width);
      const uint8_t* row = bytes(w.packed) + (first + r) * w.row_bytes();
      for (int p = 0; p < f.parts(); ++p) {
        uint8_t q[32];
        for (int i = 0; i < 32; ++i) {
          const int64_t k = g * w.group + 32 * p + i;
          q[i] = k < w.K ? uint8_t(w.quant(row, k)) : 0;
        }
        put_row_quants<bits>(q, r, to + kRows * (f.header() + p * quant_bytes(bits)));
      }
    }
  }
}

template <int bits>
Tensor pack_int(const Tensor& packed, const Tensor& scale, std::optional<Tensor> bias,
                int64_t group, int64_t columns) {
  const char* op = bits == 4 ? "pack_int4" : "pack_int8";
  const Weight<bits> w = as_kept(weight_of<bits>(op, packed, scale, bias, group, columns));
  const GroupTile<bits> f = format_of(w);
  const int64_t sizes[] = {tile_count(w.N), w.groups, block_tile_bytes(f)};
  Tensor tiles = empty(sizes, 3, ScalarType::Byte);
  uint8_t* to = mutable_bytes(tiles);
  metalcore_variant = "tiles";
  parallel_for(0, sizes[0], grain_rows(kRows * w.K), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) pack_into(w, f, t, to + t * sizes[1] * sizes[2]);
  });
  return tiles;
}

template <int bits>
Tensor matmul_int(const Tensor& x_in, const Tensor& packed, const Tensor& scale,
                  std::optional<Tensor> bias, std::optional<Tensor> tiles, int64_t group,
                  StringHandle activation_in) {
  const char* op = bits == 4 ? "matmul_int4" : "matmul_int8";
  const std::string activation = taken(activation_in);
  expect_rows(op, x_in);
  const Tensor x = dense(x_in);
  const int64_t M = rows_of(x), K = x.size(x.dim() - 1);
  const Weight<bits> given = weight_of<bits>(op, packed, scale, bias, group, K);
  const Weight<bits> w = as_kept(given);
  const GroupTile<bits> f = format_of(w);
  std::optional<Tensor> kept;
  if (tiles) kept = expect_tiles(op, *tiles, w.N, w.groups, block_tile_bytes(f));
  const int count = activation_bytes(op, activation, x.scalar_type(), M);
  Tensor y = empty_with_last(x, w.N, x.scalar_type());
  if (!count) {
    metalcore_variant = "dense";
    dispatch_float(scale.scalar_type(), op, [&](auto type) {
      dense_product(x, y, M, w.N, K, filler<bits, decltype(type)>(given));
    });
    return y;
  }
  metalcore_variant = variant_of(count, !takes_bytes(count), kept.has_value());
  dispatch_narrow(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    multiply_packed(
        f, data<T>(x), M, K, w.N, w.groups, count, kept ? bytes(*kept) : nullptr,
        [&](int64_t t, uint8_t* to) { pack_into(w, f, t, to); }, mutable_data<T>(y));
  });
  return y;
}

template <int bits>
Tensor matmul_int_backward(const Tensor& dy, const Tensor& packed, const Tensor& scale,
                           std::optional<Tensor> bias, int64_t group, int64_t columns) {
  const char* op = bits == 4 ? "matmul_int4_backward" : "matmul_int8_backward";
  const Weight<bits> w = weight_of<bits>(op, packed, scale, bias, group, columns);
  expect_rows(op, dy);
  STD_TORCH_CHECK(dy.size(dy.dim() - 1) == w.N, op, ": dy must be [..., N]");
  Tensor dx = empty_with_last(dy, columns, dy.scalar_type());
  metalcore_variant = "dense";
  dispatch_float(scale.scalar_type(), op, [&](auto type) {
    dense_gradient(dy, dx, rows_of(dy), w.N, columns, 32, filler<bits, decltype(type)>(w));
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("pack_int4", kernel<&pack_int<4>>);
  m.impl("pack_int8", kernel<&pack_int<8>>);
  m.impl("matmul_int4", kernel<&matmul_int<4>>);
  m.impl("matmul_int8", kernel<&matmul_int<8>>);
  m.impl("matmul_int4_backward", kernel<&matmul_int_backward<4>>);
  m.impl("matmul_int8_backward", kernel<&matmul_int_backward<8>>);
}

}  // namespace metalcore::cpu
