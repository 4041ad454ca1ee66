# SPDX-License-Identifier: MIT
"""Kernels from the headers of the mlx wheel: nobody here wrote them, Apple's compiler takes them.

Each runs under all checks without a finding and agrees with numpy.
"""

from pathlib import Path

import numpy as np
import pytest

import mslsim
from tests.mslsim.mlx_source import ROOT, from_bfloat, i32, normal, run, softmax, text, to_bfloat


@pytest.mark.parametrize("n", [128, 1000, 61])
def test_softmax_single_row(n):
    x, y = normal(3, n), np.zeros((3, n), np.float32)
    group = max(32, (n + 127) // 128 * 32)
    run("softmax.h", "softmax_single_row<float>", (x, y, i32(n)), (3 * group,), (group,))
    np.testing.assert_allclose(y, softmax(x), rtol=1e-5, atol=1e-7)


def test_softmax_single_row_in_bfloat():
    x = normal(2, 256)
    bits, y = to_bfloat(x), np.zeros((2, 256), np.uint16)
    run("softmax.h", "softmax_single_row<bfloat, float>", (bits, y, i32(256)), (128,), (64,))
    np.testing.assert_allclose(from_bfloat(y), softmax(from_bfloat(bits)), rtol=1e-2)


def test_softmax_looped():
    x, y = normal(2, 5000), np.zeros((2, 5000), np.float32)
    run("softmax.h", "softmax_looped<float>", (x, y, i32(5000)), (2048,), (1024,))
    np.testing.assert_allclose(y, softmax(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kernel, group", [("logsumexp", 256), ("logsumexp_looped", 1024)])
def test_logsumexp(kernel, group):
    n = 1000 if kernel == "logsumexp" else 4500
    x, y = normal(3, n), np.zeros(3, np.float32)
    run("logsumexp.h", f"{kernel}<float>", (x, y, i32(n)), (3 * group,), (group,))
    np.testing.assert_allclose(y, np.log(np.exp(x).sum(-1)), rtol=1e-5)


def test_cross_entropy():
    x, t = normal(4, 777), np.array([3, 776, 0, 400], np.int32)
    y = np.zeros(4, np.float32)
    run("cross_entropy.h", "cross_entropy<float>", (x, t, y, i32(777)), (4 * 128,), (128,))
    expected = np.log(np.exp(x).sum(-1)) - x[np.arange(4), t]
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_dot():
    n = 5000
    a, b, y = normal(n), normal(n, seed=1), np.zeros(8, np.float32)
    run("dot.h", "dot_product<float, 32, 128, 4>", (a, b, y, i32(n)), (2 * 128,), (128,))
    np.testing.assert_allclose(y[:2].sum(), a @ b, rtol=1e-4)


def gemv_arguments(m, n, x, y, w):
    return (
        w,
        x,
        None,
        y,
        i32(n),
        i32(m),
        i32(w.shape[1]),
        np.float32(1),
        np.float32(0),
        i32(1),
        np.array([1], np.int32),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        None,
        i32(0),
    )


@pytest.mark.parametrize("m, n", [(64, 96), (37, 50)])
def test_gemv(m, n):
    w, x, y = normal(m, n), normal(n, seed=1), np.zeros(m, np.float32)
    blocks = -(-m // 4)
    run(
        "gemv.h",
        "gemv<float, 1, 1, 1, 32, 4, 4, false, false>",
        gemv_arguments(m, n, x, y, w),
        (32 * blocks, 1, 1),
        (32, 1, 1),
    )
    np.testing.assert_allclose(y, w @ x, rtol=1e-4, atol=1e-5)


def run_gemv_transposed(simdgroups):
    m, n = 48, 64
    w, x, y = normal(m, n), normal(m, seed=1), np.zeros(n, np.float32)
    source = text(
        "gemv.h", instantiate=(f"gemv_t<float, {simdgroups}, 1, 8, 4, 4, 4, false, false>",)
    )
    threads, group = (32 * -(-n // 16), 1, simdgroups), (32, 1, simdgroups)
    report = mslsim.run(
        source, "k0", gemv_arguments(n, m, x, y, w), threads, group, include=[str(ROOT)]
    )
    return report, y, x @ w


def test_gemv_transposed():
    report, y, expected = run_gemv_transposed(1)
    assert report.ok, str(report)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_a_barrier_in_a_branch_of_a_real_kernel_is_found():
    # With several simdgroups, only the threads of the first row reach the barrier.
    report, _, _ = run_gemv_transposed(4)
    assert [f.kind for f in report.findings] == ["divergence"]
    line = Path(report.findings[0].file).read_text().splitlines()[report.findings[0].line - 1]
    assert "threadgroup_barrier" in line


@pytest.mark.parametrize("name, dtype", [("float", "f4"), ("half", "f2"), ("bfloat", "u2")])
def test_steel_gemm(name, dtype):
    m, n, k = 70, 50, 40
    a, b = normal(m, k), normal(k, n, seed=1)
    if name == "bfloat":
        a, b = to_bfloat(a), to_bfloat(b)
        exact = from_bfloat(a).astype(np.float64) @ from_bfloat(b)
    else:
        a, b = a.astype(dtype), b.astype(dtype)
        exact = a.astype(np.float64) @ b.astype(np.float64)
    d = np.zeros((m, n), dtype)
    tiles_n, tiles_m = -(-n // 32), -(-m // 32)
    ints = np.array([m, n, k, k, n, n, tiles_n, tiles_m], np.int32).tobytes()
    strides = np.array([m * k, k * n, m * n], np.int64).tobytes()
    params = ints + strides + np.array([0, k // 16, 1, 0], np.int32).tobytes()
    run(
        ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"),
        f"gemm<{name}, 32, 32, 16, 2, 2, false, false, float>",
        (a, b, None, d, params),
        (32 * tiles_n, 2 * tiles_m, 2),
        (32, 2, 2),
        constants={10: False, 100: False, 110: False, 200: False, 201: False, 202: False},
    )
    got = from_bfloat(d) if name == "bfloat" else d
    tolerance = {"float": 1e-5, "half": 2e-2, "bfloat": 1e-1}[name]
    np.testing.assert_allclose(got.astype(np.float64), exact, atol=tolerance, rtol=tolerance)


def quantized(m, n, group=64):
    codes = np.random.default_rng(0).integers(0, 16, (m, n), dtype=np.uint32)
    scales, biases = normal(m, n // group, seed=1), normal(m, n // group, seed=2)
    packed = np.zeros((m, n // 8), np.uint32)
    for i in range(8):
        packed |= codes[:, i::8] << np.uint32(4 * i)
    dense = codes * np.repeat(scales, group, 1) + np.repeat(biases, group, 1)
    return packed, scales, biases, dense


@pytest.mark.parametrize("kernel, m, n", [("affine_qmv_fast", 16, 512), ("affine_qmv", 24, 576)])
def test_quantized_matvec(kernel, m, n):
    packed, scales, biases, dense = quantized(m, n)
    x, y = normal(n, seed=3), np.zeros(m, np.float32)
    none = np.zeros(1, np.int64)
    arguments = (
        packed,
        scales,
        biases,
        x,
        y,
        i32(n),
        i32(m),
        i32(0),
        np.zeros(1, np.int32),
        none,
        i32(0),
        np.zeros(1, np.int32),
        none,
        none,
        none,
    )
    run(
        ("steel/gemm/gemm.h", "quantized.h"),
        f"{kernel}<float, 64, 4, false>",
        arguments,
        (32, 2 * (m // 8), 1),
        (32, 2, 1),
    )
    np.testing.assert_allclose(y, dense @ x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n", [40, 100])
def test_sdpa_vector(n):
    heads, d = 2, 64
    q, k, v = normal(heads, d), normal(heads, n, d, seed=1), normal(heads, n, d, seed=2)
    out = np.zeros((heads, d), np.float32)
    u64 = np.uint64
    arguments = (
        q,
        k,
        v,
        out,
        i32(1),
        i32(n),
        u64(n * d),
        u64(d),
        u64(n * d),
        u64(d),
        np.float32(d**-0.5),
    )
    run("sdpa_vector.h", "sdpa_vector<float, 64>", arguments, (heads * 1024, 1, 1), (1024, 1, 1))
    weights = softmax(np.einsum("hd,hnd->hn", q, k) * d**-0.5)
    np.testing.assert_allclose(out, np.einsum("hn,hnd->hd", weights, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [512, 300])
def test_block_sort(n):
    x, y = normal(2, n), np.zeros((2, n), np.float32)
    arguments = (x, y, i32(n), i32(1), i32(1), i32(n), i32(n))
    run("sort.h", "block_sort<float, float, false, 128, 4>", arguments, (128, 2, 1), (128, 1, 1))
    np.testing.assert_array_equal(y, np.sort(x))


def test_block_argsort():
    x, y = normal(1, 250), np.zeros((1, 250), np.uint32)
    arguments = (x, y, i32(250), i32(1), i32(1), i32(250), i32(250))
    run("sort.h", "block_sort<float, uint, true, 64, 4>", arguments, (64, 1, 1), (64, 1, 1))
    np.testing.assert_array_equal(y, np.argsort(x))


@pytest.mark.parametrize(
    "inclusive, reverse", [("true", "false"), ("false", "false"), ("true", "true")]
)
def test_contiguous_scan(inclusive, reverse):
    # With fewer than 32 simdgroups the kernel reads, and ignores, sums that nobody wrote.
    n = 4096
    x, y = normal(2, n), np.zeros((2, n), np.float32)
    run(
        "scan.h",
        f"contiguous_scan<float, float, CumSum<float>, 4, {inclusive}, {reverse}>",
        (x, y, np.uint64(n)),
        (1024, 2, 1),
        (1024, 1, 1),
    )
    expected = np.cumsum(x[:, ::-1] if reverse == "true" else x, 1)
    if reverse == "true":
        expected = expected[:, ::-1]
    if inclusive == "false":
        expected = expected - x
    np.testing.assert_allclose(y, expected, atol=1e-3)


@pytest.mark.parametrize("op, numpy_op", [("Sum<float>", np.sum), ("Max<float>", np.max)])
def test_all_reduce(op, numpy_op):
    n = 3000
    x, y = normal(n), np.zeros(1, np.float32)
    run(
        ("atomic.h", "reduction/ops.h", "reduction/reduce_all.h"),
        f"all_reduce<float, float, {op}>",
        (x, y, np.uint64(n), np.uint64(n)),
        (256, 1, 1),
        (256, 1, 1),
    )
    np.testing.assert_allclose(y[0], numpy_op(x), rtol=1e-4)


def test_row_reduce():
    rows, n = 8, 900
    x, y = normal(rows, n), np.zeros(rows, np.float32)
    run(
        ("atomic.h", "reduction/ops.h", "reduction/reduce_row.h"),
        "row_reduce_simple<float, float, Sum<float>>",
        (x, y, np.uint64(n), np.int64(rows)),
        (256, 2, 1),
        (256, 1, 1),
    )
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n, radix", [(64, 4), (512, 16)])
def test_hadamard(n, radix):
    x, y = normal(3, n), np.zeros((3, n), np.float32)
    run(
        "hadamard.h",
        f"hadamard_n<float, {n}, {radix}, 2>",
        (x, y, np.float32(n**-0.5)),
        (n // radix, 3, 1),
        (n // radix, 1, 1),
    )
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    np.testing.assert_allclose(y, x @ h.T * n**-0.5, rtol=1e-4, atol=1e-5)


def test_fft():
    n = 64
    x = (normal(4, n) + 1j * normal(4, n, seed=1)).astype(np.complex64)
    y = np.zeros_like(x)
    # 64 = 8 * 8: two radix-8 steps, 8 elements per thread.
    constants = dict.fromkeys(range(23), 0) | {0: False, 1: True, 2: 8, 6: 2, 22: False}
    run(
        "fft.h",
        "fft<256, float2, float2>",
        (x, y, i32(n), i32(4)),
        (1, 4, 8),
        (1, 4, 8),
        constants=constants,
    )
    np.testing.assert_allclose(y, np.fft.fft(x), rtol=1e-3, atol=1e-3)


def test_gated_delta_update():
    b, t, hk, hv, dk, dv = 1, 5, 1, 2, 64, 8
    q, k = normal(b, t, hk, dk) * 0.1, normal(b, t, hk, dk, seed=1) * 0.1
    v, state = normal(b, t, hv, dv, seed=2), normal(b, hv, dv, dk, seed=3)
    g = np.random.default_rng(4).uniform(0.5, 1, (b, t, hv)).astype(np.float32)
    beta = np.random.default_rng(5).uniform(0, 1, (b, t, hv)).astype(np.float32)
    y, out = np.zeros_like(v), np.zeros_like(state)
    run(
        "gated_delta_update.h",
        f"gated_delta_seq<float, {dk}, {dv}, {hk}, {hv}, 4>",
        (q, k, v, state, g, beta, y, out, i32(t)),
        (32, dv, b * hv),
        (32, 4, 1),
        constants={200: False},
    )
    s, expected = state[0].astype(np.float64), np.zeros_like(v, np.float64)
    for i in range(t):
        for h in range(hv):
            s[h] *= g[0, i, h]
            delta = (v[0, i, h] - s[h] @ k[0, i, 0]) * beta[0, i, h]
            s[h] += np.outer(delta, k[0, i, 0])
            expected[0, i, h] = s[h] @ q[0, i, 0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[0], s, rtol=1e-4, atol=1e-5)


UNARY = {
    "Exp": np.exp,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Square": np.square,
    "Tanh": np.tanh,
    "Abs": np.abs,
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    x, y = normal(1000), np.zeros(1000, np.float32)
    run(
        ("unary_ops.h", "unary.h"),
        f"unary_v<float, float, {op}, 4>",
        (x, y, np.uint32(1000)),
        (250,),
        (64,),
    )
    np.testing.assert_allclose(y, UNARY[op](x), rtol=1e-5, atol=1e-6)


BINARY = {"Add": np.add, "Multiply": np.multiply, "Maximum": np.maximum, "LogAddExp": np.logaddexp}


@pytest.mark.parametrize("op", BINARY)
def test_binary(op):
    a, b, y = normal(999), normal(999, seed=1), np.zeros(999, np.float32)
    run(
        ("binary_ops.h", "binary.h"),
        f"binary_vv<float, float, {op}, 4>",
        (a, b, y, np.uint32(999)),
        (250,),
        (250,),
    )
    np.testing.assert_allclose(y, BINARY[op](a, b), rtol=1e-5, atol=1e-6)


def test_binary_of_strided_arrays():
    a, b = normal(20, 30), normal(30, 20, seed=1)
    y = np.zeros((20, 30), np.float32)
    strides = (np.array([30, 1], np.int64), np.array([1, 20], np.int64))
    run(
        ("binary_ops.h", "binary.h"),
        "binary_g_nd2<float, float, Subtract>",
        (a, b, y, *strides),
        (30, 20),
        (16, 16),
    )
    np.testing.assert_array_equal(y, a - b.T)


def test_copy_to_half():
    x, y = normal(500), np.zeros(500, np.float16)
    run("copy.h", "copy_v<float, half, 4>", (x, y, np.uint32(500)), (125,), (125,))
    np.testing.assert_array_equal(y, x.astype(np.float16))


def test_arange():
    y = np.zeros(100, np.float32)
    run("arange.h", "arange<float>", (np.float32(2), np.float32(0.5), y), (100,), (50,))
    np.testing.assert_array_equal(y, 2 + 0.5 * np.arange(100, dtype=np.float32))
