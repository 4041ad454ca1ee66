// SPDX-License-Identifier: MIT
// Rows of a table in ggml's blocks: y[i] = the values of row indices[i].

#include "formats.h"

namespace metalcore::cpu {
namespace {

using namespace quant;

Tensor embedding_ggml(const Tensor& indices_in, const Tensor& blocks_in, int64_t type,
                      ScalarType dtype) {
  const char* op = "embedding_ggml";
  const Tensor blocks = expect_blocks(op, blocks_in, type), indices = dense(indices_in);
  expect_matrix(op, blocks);
  STD_TORCH_CHECK(is_float(dtype), op, ": the dtype must be floating");
  const int64_t rows = blocks.size(0), row_bytes = blocks.size(1), count = indices.numel();
  const int64_t* at = data<int64_t>(indices);
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(at[i] >= 0 && at[i] < rows, op, ": index ", at[i],
                    " is out of range for a table of ", rows, " rows");
  }
  const int64_t K = row_bytes / block_bytes(type) * block_values(type);
  std::vector<int64_t> sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(K);
  Tensor y = empty(sizes.data(), int64_t(sizes.size()), dtype);
  metalcore_variant = "rows";
  dispatch_type(op, type, [&](auto known) {
    dispatch_float(dtype, op, [&](auto element) {
      using T = decltype(element);
      T* const to = mutable_data<T>(y);
      const uint8_t* from = bytes(blocks);
      parallel_for(0, count, grain_rows(K), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          row_floats<decltype(known)::value>(from + at[i] * row_bytes, K / block_values(type),
                                             to + i * K);
        }
      });
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("embedding_ggml", kernel<&embedding_ggml>);
}

}  // namespace metalcore::cpu
