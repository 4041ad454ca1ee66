# SPDX-License-Identifier: MIT
"""Tensors of Metal 4 and their products, in kernels of our own and in those of mlx."""

import numpy as np
import pytest

import mslsim

HEAD = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
PRODUCT = """
kernel void product(device ELEMENT* left [[buffer(0)]], device ELEMENT* right [[buffer(1)]],
                    device RESULT* out [[buffer(2)]], constant int* mnk [[buffer(3)]],
                    uint2 g [[threadgroup_position_in_grid]]) {
  using in_t = tensor<device ELEMENT, dextents<int32_t, 2>, tensor_inline>;
  const int m = mnk[0], n = mnk[1], k = mnk[2];
  in_t a(left, LEFT ? dextents<int32_t, 2>(m, k) : dextents<int32_t, 2>(k, m));
  in_t b(right, RIGHT ? dextents<int32_t, 2>(k, n) : dextents<int32_t, 2>(n, k));
  auto c = tensor(out, dextents<int32_t, 2>(n, m), array<int32_t, 2>{1, n});
  constexpr auto d = matmul2d_descriptor(32, 16, static_cast<int>(dynamic_extent), LEFT, RIGHT,
                                         false, matmul2d_descriptor::mode::MODE);
  matmul2d<d, execution_simdgroups<2>> op;
  const int row = g.y * 32, column = g.x * 16;
  auto mine_a = LEFT ? a.slice(row, 0) : a.slice(0, row);
  auto mine_b = RIGHT ? b.slice(0, column) : b.slice(column, 0);
  auto mine_c = c.slice(column, row);
  RUN
}
"""
IN_MEMORY = "op.run(mine_a, mine_b, mine_c);"
IN_REGISTERS = """
  auto t = op.get_destination_cooperative_tensor<decltype(mine_a), decltype(mine_b), float>();
  for (auto it = t.begin(); it != t.end(); ++it) *it = 1;
  op.run(mine_a, mine_b, t);
  for (ushort i = 0; i < t.get_capacity(); ++i) {
    if (!t.is_valid_element(i)) continue;
    auto at = t.get_multidimensional_index(i);
    t[i] += 100 * (row + at[1]) + column + at[0];
  }
  t.store(mine_c);
"""
NUMPY = {"half": np.float16, "float": np.float32, "char": np.int8}


def product(
    body, m, n, k, element="half", result="float", left=False, right=False, mode="multiply"
):
    words = {"ELEMENT": element, "RESULT": result, "LEFT": str(left).lower(),
             "RIGHT": str(right).lower(), "MODE": mode, "RUN": body}  # fmt: skip
    text = PRODUCT
    for word, value in words.items():
        text = text.replace(word, value)
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((m, k)) * (20 if element == "char" else 1)).astype(NUMPY[element])
    b = (rng.standard_normal((k, n)) * (20 if element == "char" else 1)).astype(NUMPY[element])
    c = np.ones((m, n), np.int32 if result == "int" else np.float32)
    given = [np.ascontiguousarray(x.T) if t else x for x, t in ((a, left), (b, right))]
    grid = (-(-n // 16) * 64, -(-m // 32))
    sizes = np.array([m, n, k], np.int32)
    report = mslsim.run(HEAD + text, "product", [*given, c, sizes], grid, (64, 1), version=400)
    assert report.ok, str(report)
    return c, a.astype(np.float64) @ b.astype(np.float64)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_products_in_memory(left, right):
    c, exact = product(IN_MEMORY, 50, 40, 33, left=left, right=right)
    np.testing.assert_allclose(c, exact, rtol=1e-5, atol=1e-4)


def test_products_are_added():
    c, exact = product(IN_MEMORY, 32, 16, 20, mode="multiply_accumulate")
    np.testing.assert_allclose(c, exact + 1, rtol=1e-5, atol=1e-4)


def test_products_of_integers():
    c, exact = product(IN_MEMORY, 40, 20, 30, element="char", result="int")
    np.testing.assert_array_equal(c, exact)


@pytest.mark.parametrize("mode", ["multiply", "multiply_accumulate"])
def test_products_in_registers(mode):
    c, exact = product(IN_REGISTERS, 50, 40, 33, mode=mode)
    places = 100 * np.arange(50)[:, None] + np.arange(40)
    added = mode == "multiply_accumulate"
    np.testing.assert_allclose(c, exact + places + added, rtol=1e-5, atol=1e-3)


def test_operands_in_registers():
    """16 x 32 x 16 from the registers of one simdgroup, the right one as it is in memory."""
    text = (
        HEAD
        + """
kernel void product(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                    device float* c [[buffer(2)]]) {
  constexpr auto d = matmul2d_descriptor(16, 32, 16, false, true, true,
                                         matmul2d_descriptor::mode::multiply);
  matmul2d<d, execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();
  auto right = op.get_right_input_cooperative_tensor<half, half, float>();
  auto out = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  for (short i = 0; i < 8; ++i) {
    auto at = left.get_multidimensional_index(i);
    left[i] = a[at[1] * 16 + at[0]];
  }
  right.load(tensor(b, dextents<int, 2>(16, 32)));
  op.run(left, right, out);
  out.store(tensor(c, dextents<int, 2>(32, 16)));
}"""
    )
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((16, 16), (32, 16)))
    c = np.zeros((16, 32), np.float32)
    report = mslsim.run(text, "product", [a, b, c], 32, 32, version=400)
    assert report.ok, str(report)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.T.astype(np.float64), atol=1e-4)


def test_a_lane_that_is_missing_is_found():
    text = (
        HEAD
        + """
kernel void product(device half* a [[buffer(0)]], device float* c [[buffer(1)]],
                    uint t [[thread_position_in_threadgroup]]) {
  constexpr auto d = matmul2d_descriptor(16, 16, 16);
  matmul2d<d, execution_simdgroup> op;
  auto in = tensor(a, dextents<int, 2>(16, 16));
  auto out = tensor(c, dextents<int, 2>(16, 16));
  if (t < 20) op.run(in, in, out);
}"""
    )
    args = [np.ones((16, 16), np.float16), np.zeros((16, 16), np.float32)]
    report = mslsim.run(text, "product", args, 32, 32, version=400)
    assert {(f.kind, f.line) for f in report.findings} == {("lane", 13)}


def test_a_tensor_that_is_too_long_is_found():
    text = (
        HEAD
        + """
kernel void product(device half* a [[buffer(0)]], device float* c [[buffer(1)]]) {
  constexpr auto d = matmul2d_descriptor(16, 16, 16);
  matmul2d<d, execution_simdgroup> op;
  auto in = tensor(a, dextents<int, 2>(16, 17));
  op.run(in.slice(0, 1), in, tensor(c, dextents<int, 2>(16, 16)));
}"""
    )
    args = [np.ones((16, 16), np.float16), np.zeros((16, 16), np.float32)]
    report = mslsim.run(text, "product", args, 32, 32, version=400)
    assert {f.kind for f in report.findings} == {"bounds"}
    assert "of a [[buffer(0)]] of 512 bytes" in report.findings[0].message


def test_names_are_free_where_the_header_is_not_included():
    text = """#include <metal_stdlib>
using namespace metal;
struct tensor { float x; };
struct extents { int n; };
kernel void own(device float* x [[buffer(0)]]) { tensor t{2}; extents e{1}; x[0] = t.x + e.n; }"""
    x = np.zeros(1, np.float32)
    mslsim.compile_shader(text).own(x, threads=1)
    assert x[0] == 3


@pytest.mark.parametrize("name", ["half", "float"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_that_mlx_has_for_neural_accelerators(name, transposed):
    mlx = pytest.importorskip("tests.mslsim.mlx_source")
    m, n, k = 70, 50, 80
    a, b = (mlx.normal(*s, seed=i).astype(NUMPY[name]) for i, s in enumerate([(m, k), (k, n)]))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    given = np.ascontiguousarray(b.T) if transposed else b
    d = np.zeros((m, n), NUMPY[name])
    tiles_n, tiles_m = -(-n // 64), -(-m // 64)
    row = k if transposed else n
    sizes = np.array([m, n, k, k, row, n, tiles_n, tiles_m], np.int32).tobytes()
    strides = np.array([m * k, k * n, m * n], np.int64).tobytes()
    params = sizes + strides + np.array([0, k // 64, 1, 0], np.int32).tobytes()
    flag = str(transposed).lower()
    mlx.run(
        ("steel/gemm/gemm.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_fused_nax.h"),
        f"gemm<{name}, 64, 64, 64, 2, 2, false, {flag}, float>",
        (a, given, None, d, params),
        (128 * tiles_n, tiles_m, 1),
        (128, 1, 1),
        version=400,
        constants={10: False, 100: False, 110: False, 200: False, 201: False, 202: False},
    )
    tolerance = 1e-5 if name == "float" else 2e-2
    np.testing.assert_allclose(d.astype(np.float64), exact, atol=tolerance, rtol=tolerance)


def normal(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float16)


HOST = """
kernel void product(tensor<device half, dextents<int32_t, 2>> a [[buffer(0)]],
                    tensor<device half, dextents<int32_t, 2>> b [[buffer(1)]],
                    tensor<device float, dextents<int32_t, 2>, tensor_handle> c [[buffer(2)]],
                    constant float& scale [[buffer(3)]], uint2 g [[threadgroup_position_in_grid]],
                    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr auto d = matmul2d_descriptor(16, 32, static_cast<int>(dynamic_extent));
  matmul2d<d, execution_simdgroup> op;
  auto mine = c.slice(g.x * 32, g.y * 16);
  auto rows = a.slice(0, g.y * 16);
  auto columns = b.slice(g.x * 32, 0);
  op.run(rows, columns, mine);
  simdgroup_barrier(mem_flags::mem_device);
  for (int i = lane; i < min(32, mine.get_extent(0)); i += 32) {
    for (int j = 0; j < min(16, mine.get_extent(1)); ++j) mine.at(i, j) *= scale;
  }
}
"""


@pytest.mark.parametrize("checks", ["none", "all"])
def test_the_host_passes_tensors(checks):
    m, n, k = 20, 40, 24
    a = normal(k, m).T  # strided
    b = normal(k, n)
    c = np.zeros((m, n), np.float32)
    out = c if checks == "none" else mslsim.uninitialized(c)
    report = mslsim.run(
        HEAD + HOST, "product", [a, b, out, 0.5], (64, 2, 1), (32, 1, 1), version=400, checks=checks
    )
    assert report.ok, str(report)
    exact = a.astype(np.float64) @ b.astype(np.float64) / 2
    np.testing.assert_allclose(c, exact, rtol=1e-3, atol=1e-3)


def test_wrong_tensors_of_the_host_are_told():
    library = mslsim.compile_shader(HEAD + HOST, version=400, on_finding="collect")
    a, b = normal(16, 16), normal(16, 32)
    launch = {"threads": (32, 1, 1), "group_size": (32, 1, 1)}
    with pytest.raises(TypeError, match="2 axes and elements of 4 bytes, got shape"):
        library.product(a, b, np.zeros(16, np.float32), 1.0, **launch)
    with pytest.raises(TypeError, match="is a tensor, which takes an array, got float"):
        library.product(1.0, b, np.zeros((16, 32), np.float32), 1.0, **launch)
    outside = HOST.replace("mine.at(i, j) *=", "mine.at(i, j + 16) =")
    library = mslsim.compile_shader(HEAD + outside, version=400, on_finding="collect")
    report = library.product(a, b, np.zeros((16, 32), np.float32), 1.0, **launch)
    (finding,) = report.findings
    assert finding.kind == "bounds" and "of c [[buffer(2)]]" in finding.message
