# SPDX-License-Identifier: MIT
"""The language and the library: what a kernel computes, against numpy."""

import numpy as np
import pytest

import mslsim

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def evaluate(body, *inputs, out, threads=32, before="", checks="none", group=None):
    """Runs `body`, which sees `i`, inputs a, b, c and writes o[i]."""
    msl = {"f4": "float", "f2": "half", "i4": "int", "u4": "uint", "u2": "ushort", "i8": "long",
           "u8": "ulong", "u1": "uchar", "i1": "char", "i2": "short"}  # fmt: skip
    names = "abc"
    parameters = "".join(
        f"device const {msl[x.dtype.str[1:]]}* {names[k]} [[buffer({k})]], "
        for k, x in enumerate(inputs)
    )
    source = (
        f"{HEAD}{before}\nkernel void k({parameters}device {msl[out.dtype.str[1:]]}* o"
        f" [[buffer({len(inputs)})]], uint i [[thread_position_in_grid]]) {{ {body} }}\n"
    )
    library = mslsim.compile_shader(source, checks)
    library.k(*inputs, out, threads=threads, group_size=group or threads)
    return out


def floats(n=32, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def test_swizzles_read_and_write():
    out = evaluate(
        "float4 v = float4(1, 2, 3, 4); v.xy = v.yx; v.zw += v.ww; v.x *= 10; v.rgb = v.bgr;"
        " float2 h = v.wz; float3 t(h, v.y); o[i] = i < 4 ? v[i] : i < 7 ? t[i - 4] : v.xxyy[3];",
        out=np.zeros(8, np.float32), threads=8,
    )  # fmt: skip
    assert out.tolist() == [7, 1, 20, 8, 8, 20, 1, 1]


def test_vector_arithmetic_and_comparison():
    out = evaluate(
        "int4 v = int4(1, 2, 3, 4) * 2 - 1; bool4 b = v > 3; v = select(v, -v, b);"
        " v <<= 1; v.w |= 1; o[i] = any(b) && !all(b) ? v[i] : 0;",
        out=np.zeros(4, np.int32), threads=4,
    )  # fmt: skip
    assert out.tolist() == [2, 6, -10, -13]


def test_packed_vectors_have_no_padding():
    before = "struct S { packed_float3 p; float w; };"
    out = evaluate(
        "S s; s.p = packed_float3(float3(1, 2, 3)); s.w = 4; float3 q = s.p;"
        " o[i] = i == 0 ? sizeof(S) : i == 1 ? sizeof(float3) : q.z + s.p.x;",
        out=np.zeros(3, np.float32), threads=3, before=before,
    )  # fmt: skip
    assert out.tolist() == [16, 16, 4]


def test_matrices():
    out = evaluate(
        "float2x2 m = float2x2(float2(1, 2), float2(3, 4)); float2 v = m * float2(1, 1);"
        " float2 u = float2(1, 1) * m;"
        " o[i] = i < 2 ? v[i] : i < 4 ? u[i - 2] : transpose(m)[0][1];",
        out=np.zeros(5, np.float32), threads=5,
    )  # fmt: skip
    assert out.tolist() == [4, 6, 3, 7, 3]


def test_literals_are_float():
    out = evaluate(
        "o[i] = sizeof(1.0) + 10 * sizeof(1.0h) + 100 * sizeof(.5e1) + 1000 * sizeof(1.5bf);",
        out=np.zeros(1, np.int32), threads=1,
    )  # fmt: skip
    assert out[0] == 2424


def test_half_rounds_after_every_operation():
    a, b = floats(1000).astype(np.float16), floats(1000, 1).astype(np.float16)
    out = evaluate("o[i] = a[i] * b[i] + a[i];", a, b, out=np.zeros(1000, np.float16), threads=1000)
    fused = (a.astype(np.float64) * b + a).astype(np.float16)
    separate = (a * b + a).astype(np.float16)
    assert ((out == fused) | (out == separate)).all()


def test_bfloat_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    x = torch.randn(1000) * torch.logspace(-40, 38, 1000)
    x[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    source = (
        HEAD
        + """
    kernel void k(device const float* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
                  device bfloat4* z [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      y[i] = bfloat(x[i]);
      if (i < 250) z[i] = bfloat4(((device const float4*)x)[i]);
    }"""
    )
    y, z = (torch.empty(1000, dtype=torch.bfloat16) for _ in range(2))
    mslsim.compile_shader(source, "none").k(x, y, z, threads=1000, group_size=100)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(z, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name, numpy_name",
    [("exp", "exp"), ("log2", "log2"), ("tanh", "tanh"), ("rsqrt", None), ("floor", "floor"),
     ("rint", "rint"), ("precise::sin", "sin"), ("fast::cos", "cos"), ("asinh", "arcsinh")],
)  # fmt: skip
def test_math(name, numpy_name):
    x = np.abs(floats(100)) + 0.5
    out = evaluate(f"o[i] = {name}(a[i]);", x, out=np.zeros(100, np.float32), threads=100)
    exact = getattr(np, numpy_name)(x) if numpy_name else 1 / np.sqrt(x)
    np.testing.assert_allclose(out, exact, rtol=1e-6)


def test_integer_functions():
    x = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    out = evaluate(
        "o[i] = popcount(a[i]) + clz(a[i] >> 3) + ctz(a[i] | 16) + reverse_bits(reverse_bits(a[i]))"
        " + mulhi(a[i], a[i]) + rotate(a[i], 5u) + extract_bits(a[i], 4, 8) + as_type<uint>(1.0f);",
        x, out=np.zeros(64, np.uint32), threads=64,
    )  # fmt: skip

    def expected(v):
        v = int(v)
        parts = (
            bin(v).count("1") + (32 - (v >> 3).bit_length()) + ((v | 16) & -(v | 16)).bit_length()
        )
        rotated = ((v << 5) | (v >> 27)) & 0xFFFFFFFF
        total = parts - 1 + v + (v * v >> 32) + rotated + (v >> 4 & 255) + 0x3F800000
        return total & 0xFFFFFFFF

    assert out.tolist() == [expected(v) for v in x]


COLLECTIVES = {
    "simd_sum(a[i])": lambda x: np.full(32, x.sum()),
    "simd_max(a[i])": lambda x: np.full(32, x.max()),
    "simd_prefix_inclusive_sum(a[i])": np.cumsum,
    "simd_prefix_exclusive_sum(a[i])": lambda x: np.cumsum(x) - x,
    "simd_shuffle_xor(a[i], 5)": lambda x: x[np.arange(32) ^ 5],
    "simd_shuffle_rotate_down(a[i], 3)": lambda x: np.roll(x, -3),
    "simd_shuffle_and_fill_up(a[i], -1, 2)": None,
    "simd_broadcast(a[i], 7)": lambda x: np.full(32, x[7]),
    "simd_broadcast_first(a[i])": lambda x: np.full(32, x[0]),
    "quad_sum(a[i])": lambda x: np.repeat(x.reshape(8, 4).sum(1), 4),
    "quad_broadcast(a[i], 2)": lambda x: np.repeat(x.reshape(8, 4)[:, 2], 4),
    "quad_shuffle_xor(a[i], 1)": lambda x: x[np.arange(32) ^ 1],
    "int(simd_ballot(a[i] % 2 == 0).operator ulong() & 0xffff)": None,
    "simd_any(a[i] == a[0]) ? 1 : 0": lambda x: np.ones(32),
    "simd_all(i < 31) ? 1 : 0": lambda x: np.zeros(32),
}


@pytest.mark.parametrize("expression", COLLECTIVES)
@pytest.mark.parametrize("checks", ["none", "all"])
def test_collectives(expression, checks):
    x = np.random.default_rng(0).integers(0, 1000, 32).astype(np.int32)
    out = evaluate(f"o[i] = {expression};", x, out=np.zeros(32, np.int32), checks=checks)
    if "fill_up" in expression:
        # The fill comes in at the low lanes, shifted by the same distance.
        expected = np.concatenate([[-1, -1], x[:-2]])
    elif "ballot" in expression:
        expected = np.full(32, sum(1 << k for k in range(16) if x[k] % 2 == 0))
    else:
        expected = COLLECTIVES[expression](x)
    np.testing.assert_array_equal(out, expected)


def test_a_loop_of_varying_length_reconverges():
    body = "float v = 0; for (uint k = 0; k <= i % 4; ++k) v += simd_sum(1.0f); o[i] = v;"
    out = evaluate(body, out=np.zeros(32, np.float32))
    assert out[:4].tolist() == [32, 56, 72, 80]


@pytest.mark.parametrize("name", ["float", "half", "bfloat"])
def test_simdgroup_matrix(name):
    x = np.random.default_rng(0).integers(-3, 4, (2, 8, 8)).astype(np.float32)
    before = f"""
    kernel void run(device const float* a [[buffer(0)]], device float* o [[buffer(1)]]) {{
      threadgroup {name} s[128];
      uint l = msl_lane();
      for (uint k = l; k < 128; k += 32) s[k] = {name}(a[k]);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<{name}, 8, 8> p, q;
      simdgroup_float8x8 r = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
      simdgroup_load(p, s, 8);
      simdgroup_load(q, s + 64, 8, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(r, p, q, r);
      simdgroup_store(r, o, 8);
    }}"""
    out = np.zeros((8, 8), np.float32)
    mslsim.compile_shader(HEAD + before).run(x, out, threads=32, group_size=32)
    np.testing.assert_array_equal(out, x[0] @ x[1].T + 1)


@pytest.mark.parametrize("checks", ["none", "all"])
def test_atomics(checks):
    source = (
        HEAD
        + """
    kernel void k(device atomic_int* i32 [[buffer(0)]], device atomic_float* f [[buffer(1)]],
                  device atomic_ulong* u64 [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      atomic_fetch_add_explicit(&i32[0], 1, memory_order_relaxed);
      atomic_fetch_max_explicit(&i32[1], int(i), memory_order_relaxed);
      atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
      atomic_max_explicit(u64, ulong(i) << 40, memory_order_relaxed);
      int expected = 0;
      atomic_compare_exchange_weak_explicit(&i32[2], &expected, 7, memory_order_relaxed,
                                            memory_order_relaxed);
    }"""
    )
    i, f, u = np.zeros(3, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    mslsim.compile_shader(source, checks).k(i, f, u, threads=1000, group_size=100)
    assert i.tolist() == [1000, 999, 7]
    assert (f[0], u[0]) == (500, 999 << 40)


def test_positions():
    source = (
        HEAD
        + """
    kernel void k(device uint* o [[buffer(0)]], uint3 g [[thread_position_in_grid]],
                  ushort3 t [[thread_position_in_threadgroup]], uint3 n [[threads_per_grid]],
                  uint3 group [[threadgroup_position_in_grid]],
                  ushort lane [[thread_index_in_simdgroup]],
                  ushort warp [[simdgroup_index_in_threadgroup]],
                  uint i [[thread_index_in_threadgroup]]) {
      uint at = (g.z * n.y + g.y) * n.x + g.x;
      o[at] = (i == warp * 32 + lane) && (g.x == group.x * 8 + t.x) && (g.z == group.z * 2 + t.z)
              && (i == (t.z * 4 + t.y) * 8 + t.x) ? at + 1 : 0;
    }"""
    )
    out = np.zeros((4, 8, 16), np.uint32)
    mslsim.compile_shader(source, "none").k(out, threads=(16, 8, 4), group_size=(8, 4, 2))
    np.testing.assert_array_equal(out.ravel(), np.arange(out.size) + 1)


def test_both_spellings_of_an_instantiation():
    source = (
        HEAD
        + """
    template <typename T, int N>
    kernel void fill(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = T(N); }
    template [[host_name("fill_a")]] kernel void fill<float, 3>(device float* o, uint i);
    template [[host_name("fill_" "b")]] [[kernel]] decltype(fill<int, 4>) fill<int, 4>;
    namespace inner { kernel void fill_c(device float* o [[buffer(0)]]) { o[0] = 5; } }
    """
    )
    library = mslsim.compile_shader(source, "none")
    assert dir(library) == ["fill_a", "fill_b", "fill_c"]
    a, b, c = np.zeros(2, np.float32), np.zeros(2, np.int32), np.zeros(1, np.float32)
    library.fill_a(a)
    library.fill_b(b)
    library.fill_c(c)
    assert (a.tolist(), b.tolist(), c.tolist()) == ([3, 3], [4, 4], [5])


def test_the_contract_pragma():
    x = np.array([1 + 2.0**-12], np.float32)
    body = "#pragma METAL fp contract(off)\n const float p = a[0] * a[0]; o[i] = a[0] * a[0] - p;\n"
    source = HEAD + (
        "kernel void k(device const float* a [[buffer(0)]], device float* o [[buffer(1)]],"
        f" uint i [[thread_position_in_grid]]) {{\n{body}}}\n"
    )
    out = np.ones(1, np.float32)
    mslsim.compile_shader(source, "none").k(x, out, threads=1, group_size=1)
    assert out[0] == 0


def test_matrix_divided_by_a_scalar():
    out = evaluate(
        "float2x2 m = float2x2(float2(2, 4), float2(6, 8)) / 2.0f; o[i] = m[i / 2][i % 2];",
        out=np.zeros(4, np.float32), threads=4,
    )  # fmt: skip
    assert out.tolist() == [1, 2, 3, 4]


def test_high_halves_and_means_of_integers():
    out = evaluate(
        "ulong big = 0xfffffffffffffffful; o[0] = mulhi(big, big); o[1] = ulong(mulhi(-3l, 5l));"
        " o[2] = hadd(big, 3ul); o[3] = rhadd(big, 4ul); o[4] = ulong(mulhi(int(1 << 30), -8));"
        " o[5] = mulhi(uint(0xffffffff), 16u); o[6] = ulong(hadd(-3, 2)); o[7] = mulhi(uchar(255),"
        " uchar(255));",
        out=np.zeros(8, np.uint64), threads=1,
    )  # fmt: skip
    signed = out.view(np.int64).tolist()
    assert out[:1].tolist() == [2**64 - 2] and signed[1] == -1
    assert out[2:4].tolist() == [2**63 + 1, 2**63 + 2]
    assert signed[4:] == [-2, 15, -1, 254]


def test_instance_by_a_name_for_its_type():
    source = HEAD + (
        "namespace n { template <typename T> kernel void scale(device T* x [[buffer(0)]], uint i"
        " [[thread_position_in_grid]]) { x[i] *= 2; } }\n"
        "typedef decltype(n::scale<float>) scale_t;\n"
        'template [[host_name("twice")]] kernel scale_t n::scale<float>;\n'
    )
    x = np.arange(4, dtype=np.float32)
    mslsim.compile_shader(source).twice(x, threads=4, group_size=4)
    assert x.tolist() == [0, 2, 4, 6]


def test_a_constant_may_be_called_forward():
    before = "constant bool forward [[function_constant(1)]];"
    out = evaluate("o[i] = forward ? 1 : 2;", out=np.zeros(4, np.float32), threads=4, before=before)
    assert out.tolist() == [2, 2, 2, 2]


def test_macros_count_how_often_a_loop_is_unrolled(tmp_path):
    (tmp_path / "size.h").write_text("#define SIZE 8\n#define HALF(n) ((n) / TWO)\n#define TWO 2\n")
    source = (
        '#include "size.h"\n'
        + HEAD
        + (
            "template <int N> void add(device float* x) {\n"
            "#pragma unroll (HALF(SIZE))\n"
            "  for (int i = 0; i < N; ++i) x[i] += SIZE;\n}\n"
            "kernel void k(device float* x [[buffer(0)]]) { add<4>(x); }\n"
        )
    )
    x = np.zeros(4, np.float32)
    library = mslsim.compile_shader(source, include=[str(tmp_path)])
    library.k(x, threads=1, group_size=1)
    assert x.tolist() == [8, 8, 8, 8]
