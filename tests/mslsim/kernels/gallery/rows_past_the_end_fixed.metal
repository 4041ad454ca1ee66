#include <metal_stdlib>
using namespace metal;

// Each simdgroup has four rows, and only what is written is guarded.
kernel void matrix_vector(device const float* w [[buffer(0)]], device const float* x [[buffer(1)]],
                          device float* y [[buffer(2)]], constant uint& rows [[buffer(3)]],
                          uint g [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]]) {
  for (uint r = 4 * g; r < min(4 * g + 4, rows); ++r) {
    const float sum = simd_sum(w[r * 32 + lane] * x[lane]);
    if (lane == 0 && r < rows) y[r] = sum;
  }
}
