// SPDX-License-Identifier: MIT
// Products of a few rows with matrices of a tape, 16 outputs at a time. Packed weights are
// multiplied by the code of `matmul_ggml` and `matmul_int4`, plain ones by dot products here.
#pragma once

#include "../quant/packed_matmul.h"
#include "tape.h"

namespace metalcore::cpu::decode {

// Outputs that are computed together.
constexpr int64_t kUnit = quant::kRows;

// What a node reads and writes; rows are so far apart.
struct Product {
  const Node* node;
  ScalarType dtype;  // of plain weights
  const void* weights;
  const float* bias;
  const float* x;
  int64_t x_row;
  const quant::Activations* activations;  // of x, for packed weights
  float* y;
  int64_t y_row;

  int64_t units() const { return (node->n + kUnit - 1) / kUnit; }
};

// sums[m][r] of `Rows` rows of weights with `Columns` rows of x.
template <typename T, int Rows, int Columns>
void dot_rows(const T* w, int64_t k, const float* x, int64_t x_row, float* sums) {
  simd::Pair<float> sum[Rows][Columns] = {};
  simd::for_each_pair<float>(k, [&](int64_t i, auto elements) {
    simd::Pair<float> values[Columns];
#pragma GCC unroll 4
    for (int m = 0; m < Columns; ++m) values[m] = simd::load(x + m * x_row + i, elements);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto weights = simd::load_in_order(w + r * k + i, elements);
#pragma GCC unroll 4
      for (int m = 0; m < Columns; ++m) {
        sum[r][m].first += weights.first * values[m].first;
        sum[r][m].second += weights.second * values[m].second;
      }
    }
  });
  for (int m = 0; m < Columns; ++m) {
    for (int r = 0; r < Rows; ++r) {
      const auto lanes = sum[r][m].first + sum[r][m].second;
      float total = 0;
      for (int64_t i = 0; i < simd::kLanes<float>; ++i) total += lanes[i];
      sums[m * kUnit + r] = total;
    }
  }
}

// sums [M][16] of a unit of plain weights.
template <typename T>
void multiply_plain(const Product& p, int64_t unit, int64_t M, float* sums) {
  const int64_t k = p.node->k, first = unit * kUnit, rows = std::min(kUnit, p.node->n - first);
  const T* const w = static_cast<const T*>(p.weights) + first * k;
  const auto columns = [&](int64_t m, auto count) {
    constexpr int C = decltype(count)::value;
    int64_t r = 0;
    const float* const x = p.x + m * p.x_row;
    for (; r + 4 <= rows; r += 4) dot_rows<T, 4, C>(w + r * k, k, x, p.x_row, sums + m * kUnit + r);
    for (; r < rows; ++r) dot_rows<T, 1, C>(w + r * k, k, x, p.x_row, sums + m * kUnit + r);
  };
  int64_t m = 0;
  for (; m + 4 <= M; m += 4) columns(m, std::integral_constant<int, 4>());
  for (; m + 2 <= M; m += 2) columns(m, std::integral_constant<int, 2>());
  for (; m < M; ++m) columns(m, std::integral_constant<int, 1>());
}

template <typename Format>
void multiply_tiles(const Product& p, const Format& f, int64_t unit, int64_t M, float* sums) {
  const int64_t blocks = (p.node->k + 32 * f.parts() - 1) / (32 * f.parts());
  const auto tile = static_cast<const uint8_t*>(p.weights) + unit * blocks * block_tile_bytes(f);
  multiply_tile(quant::Work<Format>{f, tile, blocks, *p.activations, 0, sums}, M);
}

// Calls body(format) for packed weights.
template <typename Body>
auto dispatch_format(const Node& node, Body body) {
  if (node.bits != 0) {
    STD_TORCH_CHECK((node.bits == 4 || node.bits == 8) && node.group > 0 && node.group <= 256 &&
                        node.group % 32 == 0,
                    kOp, ": groups of 32 to 256 values have 4 or 8 bits");
    STD_TORCH_CHECK(node.dtype >= 0 && node.dtype <= 2, kOp, ": no such dtype of scales");
    constexpr ScalarType dtypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
    if (node.bits == 4) {
      return body(quant::GroupTile<4>{node.group, dtypes[node.dtype], node.offsets != 0});
    }
    return body(quant::GroupTile<8>{node.group, dtypes[node.dtype], node.offsets != 0});
  }
  return quant::dispatch_type(
      kOp, node.type, [&](auto type) { return body(quant::GgmlTile<decltype(type)::value>()); });
}

// Bytes of packed weights, and parts of 32 values that they take of a row.
struct Packed {
  int64_t bytes, parts;
};

inline Packed packed_size(const Node& node) {
  return dispatch_format(node, [&](const auto& f) {
    const int64_t values = 32 * f.parts(), blocks = (node.k + values - 1) / values;
    return Packed{(node.n + kUnit - 1) / kUnit * blocks * block_tile_bytes(f), blocks * f.parts()};
  });
}

// y (+)= scale * (x W^T + bias), for outputs 16 unit .. 16 unit + 15. `sums` holds [M][16].
inline void multiply_unit(const Product& p, int64_t unit, int64_t M, float* sums) {
  const Node& node = *p.node;
  if (node.tiles >= 0) {
    dispatch_format(node, [&](const auto& f) { multiply_tiles(p, f, unit, M, sums); });
  } else if (p.dtype == ScalarType::Float) {
    multiply_plain<float>(p, unit, M, sums);
  } else if (p.dtype == ScalarType::Half) {
    multiply_plain<simd::Half>(p, unit, M, sums);
  } else {
    multiply_plain<simd::BFloat16>(p, unit, M, sums);
  }
  const int64_t first = unit * kUnit, count = std::min(kUnit, node.n - first);
  const float scale = float(node.scale);
  for (int64_t m = 0; m < M; ++m) {
    float* const y = p.y + m * p.y_row + first;
    const float* const found = sums + m * kUnit;
    for (int64_t i = 0; i < count; ++i) {
      float value = p.bias ? found[i] + p.bias[first + i] : found[i];
      value *= scale;
      y[i] = node.add ? y[i] + value : value;
    }
  }
}

}  // namespace metalcore::cpu::decode
