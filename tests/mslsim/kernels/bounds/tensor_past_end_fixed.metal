#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;

using namespace mpp::tensor_ops;

kernel void square(device half* x [[buffer(0)]], device float* y [[buffer(1)]]) {
  constexpr auto d = matmul2d_descriptor(16, 16, 16);
  auto in = tensor(x, dextents<int, 2>(16, 16));
  matmul2d<d, execution_simdgroup> product;
  product.run(in.slice(0, 0), in, tensor(y, dextents<int, 2>(16, 16)));
}
