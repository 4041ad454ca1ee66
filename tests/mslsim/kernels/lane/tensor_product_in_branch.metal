#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;

using namespace mpp::tensor_ops;

kernel void square(device half* x [[buffer(0)]], device float* y [[buffer(1)]],
                   uint t [[thread_position_in_threadgroup]]) {
  constexpr auto d = matmul2d_descriptor(16, 16, 16);
  auto in = tensor(x, dextents<int, 2>(16, 16));
  matmul2d<d, execution_simdgroup> product;
  if (t < 16) product.run(in, in, tensor(y, dextents<int, 2>(16, 16)));
}
