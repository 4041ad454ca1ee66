// SPDX-License-Identifier: MIT
// y = x W^T for packed weights: which way a call goes, and threads over tiles.
#pragma once

#include <string>

#include "../common/policy.h"
#include "dense.h"
#include "tile_product.h"

namespace metalcore::cpu::quant {

inline const Knob few_rows("matmul_ggml", "int16_up_to", 8);
inline const Knob dense_from("matmul_ggml", "dense_from", 192);

// Bytes per activation; 0 is for torch's product of dequantized weights.
inline int activation_bytes(const char* op, const std::string& activation, ScalarType dtype,
                            int64_t M) {
  const bool is_auto = activation == "auto", is_float = activation == "float";
  STD_TORCH_CHECK(is_auto || is_float || activation == "int8" || activation == "int16", op,
                  ": activation must be auto, int8, int16 or float");
  if (dtype == ScalarType::Double) return 0;
  if (is_auto) return M <= few_rows || dtype == ScalarType::Float ? 2 : 1;
  if (is_float) return M < dense_from ? 3 : 0;
  return activation == "int8" ? 1 : 2;
}

inline const char* variant_of(int count, bool are_words, bool has_tiles) {
  static const char* const names[2][2][3] = {
      {{"int8_bytes_unpacked", "int16_bytes_unpacked", "float_bytes_unpacked"},
       {"int8_bytes", "int16_bytes", "float_bytes"}},
      {{"int8_words_unpacked", "int16_words_unpacked", "float_words_unpacked"},
       {"int8_words", "int16_words", "float_words"}}};
  return names[are_words][has_tiles][count - 1];
}

inline int64_t tile_count(int64_t N) { return (N + kRows - 1) / kRows; }

// Rows of x that are multiplied with a tile before the next one: what of them stays in the cache,
// and more where each tile is made for them.
constexpr int64_t kRowsAtOnce = 64, kRowsOfMade = 256;

// y [M, N] from x [M, K] and tiles of `blocks` blocks. pack(tile, to) makes one where there are
// none.
template <typename T, typename Format, typename Pack>
void multiply_packed(const Format& f, const T* x, int64_t M, int64_t K, int64_t N, int64_t blocks,
                     int count, const uint8_t* tiles, Pack pack, T* y) {
  const int64_t size = blocks * block_tile_bytes(f);
  const Activations a(M, blocks * f.parts(), count, /*are_words=*/!takes_bytes(count));
  parallel_for(0, M, grain_rows(K), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) put_row(x + m * K, K, a, m);
  });
  parallel_for(0, tile_count(N), grain_rows(kRows * K), [&](int64_t begin, int64_t end) {
    std::unique_ptr<uint8_t[]> packed(tiles ? nullptr : new uint8_t[size]);
    const int64_t most = std::min(M, tiles ? kRowsAtOnce : kRowsOfMade);
    std::unique_ptr<float[]> sums(new float[most * kRows]);
    for (int64_t first = 0; first < M; first += most) {
      const int64_t rows = std::min(most, M - first);
      for (int64_t t = begin; t < end; ++t) {
        if (!tiles) pack(t, packed.get());
        const uint8_t* tile = tiles ? tiles + t * size : packed.get();
        multiply_tile(Work<Format>{f, tile, blocks, a, first, sums.get()}, rows);
        const int64_t columns = std::min(kRows, N - t * kRows);
        for (int64_t m = 0; m < rows; ++m) {
          T* const to = y + (first + m) * N + t * kRows;
          for (int64_t i = 0; i < columns; ++i) to[i] = T(sums[m * kRows + i]);
        }
      }
    }
  });
}

// Tiles, dense, where they are [tiles, blocks, bytes of 16 blocks].
inline Tensor expect_tiles(const char* op, const Tensor& tiles, int64_t N, int64_t blocks,
                           int64_t size) {
  expect_bytes(op, tiles);
  STD_TORCH_CHECK(tiles.dim() == 3 && tiles.size(0) == tile_count(N) && tiles.size(1) == blocks &&
                      tiles.size(2) == size,
                  op, ": tiles must be those of the weight");
  return dense(tiles);
}

// Calls body(T()) for what is multiplied with tiles.
template <typename Body>
void dispatch_narrow(ScalarType dtype, Body body) {
  if (dtype == ScalarType::Half) return body(simd::Half());
  if (dtype == ScalarType::BFloat16) return body(simd::BFloat16());
  body(float());
}

}  // namespace metalcore::cpu::quant
