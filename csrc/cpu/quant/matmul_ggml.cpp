// SPDX-License-Identifier: MIT
// x W^T for W in ggml's blocks, its gradient dy W, and the tiles of W, on the CPU.

#include "../common/text.h"
#include "packed_matmul.h"

namespace metalcore::cpu {
namespace {

using namespace quant;

struct Weight {
  Tensor blocks;
  int64_t N, K, row_bytes, row_blocks;
};

Weight weight_of(const char* op, const Tensor& blocks_in, int64_t type) {
  const Tensor blocks = expect_blocks(op, blocks_in, type);
  expect_matrix(op, blocks);
  const int64_t row = blocks.size(1), count = row / block_bytes(type);
  return {blocks, blocks.size(0), count * block_values(type), row, count};
}

void expect_last(const char* op, const Tensor& x, int64_t length) {
  expect_rows(op, x);
  STD_TORCH_CHECK(x.size(x.dim() - 1) == length, op, ": rows must have ", length, " values");
}

template <int64_t type>
auto filler(const Weight& w) {
  const uint8_t* from = bytes(w.blocks);
  return [from, row_bytes = w.row_bytes](int64_t row, int64_t begin, int64_t end, auto* to) {
    constexpr int64_t n = block_values(type);
    row_floats<type>(from + row * row_bytes + begin / n * block_bytes(type), (end - begin) / n, to);
  };
}

template <int64_t type>
void pack_into(const Weight& w, int64_t tile, uint8_t* to) {
  const int64_t first = tile * kRows, rows = std::min(kRows, w.N - first);
  pack_tile<type>(bytes(w.blocks) + first * w.row_bytes, rows, w.row_blocks, to);
}

Tensor pack_ggml(const Tensor& blocks, int64_t type) {
  const char* op = "pack_ggml";
  const Weight w = weight_of(op, blocks, type);
  Tensor tiles;
  metalcore_variant = "tiles";
  dispatch_type(op, type, [&](auto known) {
    constexpr int64_t kType = decltype(known)::value;
    const int64_t size = block_tile_bytes(GgmlTile<kType>());
    const int64_t sizes[] = {tile_count(w.N), w.row_blocks, size};
    tiles = empty(sizes, 3, ScalarType::Byte);
    uint8_t* to = mutable_bytes(tiles);
    parallel_for(0, sizes[0], grain_rows(kRows * w.K), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) pack_into<kType>(w, t, to + t * w.row_blocks * size);
    });
  });
  return tiles;
}

Tensor matmul_ggml(const Tensor& x_in, const Tensor& blocks, std::optional<Tensor> tiles,
                   int64_t type, StringHandle activation_in) {
  const char* op = "matmul_ggml";
  const std::string activation = taken(activation_in);
  const Weight w = weight_of(op, blocks, type);
  expect_last(op, x_in, w.K);
  const Tensor x = dense(x_in);
  const int64_t M = rows_of(x);
  const int count = activation_bytes(op, activation, x.scalar_type(), M);
  Tensor y = empty_with_last(x, w.N, x.scalar_type());
  dispatch_type(op, type, [&](auto known) {
    constexpr int64_t kType = decltype(known)::value;
    const GgmlTile<kType> format;
    std::optional<Tensor> kept;
    if (tiles) kept = expect_tiles(op, *tiles, w.N, w.row_blocks, block_tile_bytes(format));
    if (!count) {
      metalcore_variant = "dense";
      return dense_product(x, y, M, w.N, w.K, filler<kType>(w));
    }
    metalcore_variant = variant_of(count, !takes_bytes(count), kept.has_value());
    dispatch_narrow(x.scalar_type(), [&](auto element) {
      using T = decltype(element);
      multiply_packed(
          format, data<T>(x), M, w.K, w.N, w.row_blocks, count, kept ? bytes(*kept) : nullptr,
          [&](int64_t t, uint8_t* to) { pack_into<kType>(w, t, to); }, mutable_data<T>(y));
    });
  });
  return y;
}

Tensor matmul_ggml_backward(const Tensor& dy, const Tensor& blocks, int64_t type) {
  const char* op = "matmul_ggml_backward";
  const Weight w = weight_of(op, blocks, type);
  expect_last(op, dy, w.N);
  Tensor dx = empty_with_last(dy, w.K, dy.scalar_type());
  metalcore_variant = "dense";
  dispatch_type(op, type, [&](auto known) {
    constexpr int64_t kType = decltype(known)::value;
    dense_gradient(dy, dx, rows_of(dy), w.N, w.K, block_values(kType), filler<kType>(w));
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("pack_ggml", kernel<&pack_ggml>);
  m.impl("matmul_ggml", kernel<&matmul_ggml>);
  m.impl("matmul_ggml_backward", kernel<&matmul_ggml_backward>);
}

}  // namespace metalcore::cpu
