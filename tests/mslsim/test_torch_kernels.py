# SPDX-License-Identifier: MIT
"""Kernels and functions from the headers of the torch wheel, compared with torch on the CPU."""

from pathlib import Path

import numpy as np
import pytest

import mslsim

torch = pytest.importorskip("torch")
ROOT = Path(torch.__file__).parent / "include"
HEADERS = sorted(
    str(p.relative_to(ROOT))
    for folder in ("c10/metal", "ATen/native/mps/kernels")
    for p in (ROOT / folder).glob("*.h")
)
if not HEADERS:
    pytest.skip("this torch has no Metal headers", allow_module_level=True)


def source(*headers, body=""):
    lines = ["#include <metal_stdlib>", "using namespace metal;"]
    return "\n".join([*lines, *(f"#include <{h}>" for h in headers), body])


def compile_shader(*headers, body="", checks="all"):
    return mslsim.compile_shader(source(*headers, body=body), checks, include=[str(ROOT)])


@pytest.mark.parametrize("header", HEADERS)
def test_the_header_is_accepted(header):
    compile_shader(header, checks="none")


FUNCTOR = """
struct {op}_functor {{
  template <typename T>
  inline T operator()(const T x) {{ return T({expression}); }}
}};
REGISTER_UNARY_OP({op}, {dtype}, {dtype});
"""
MSL = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}


def unary(op, dtype=torch.float32, expression="::c10::metal::{op}(x)"):
    body = FUNCTOR.format(op=op, dtype=MSL[dtype], expression=expression.format(op=op))
    return compile_shader("c10/metal/special_math.h", "c10/metal/indexing.h", body=body), MSL[dtype]


SPECIAL = {
    "erf": torch.erf,
    "erfinv": lambda x: torch.erfinv(x / 4),
    "digamma": torch.digamma,
    "i0": torch.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "log_gamma": torch.lgamma,
    "sinc": torch.sinc,
    "entr": torch.special.entr,
    "bessel_j0_forward": torch.special.bessel_j0,
    "modified_bessel_k0_forward": torch.special.modified_bessel_k0,
}


@pytest.mark.parametrize("op", SPECIAL)
def test_special_function_dense(op):
    expression = "::c10::metal::erfinv(x / 4)" if op == "erfinv" else "::c10::metal::{op}(x)"
    library, name = unary(op, expression=expression)
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 3 + 0.1
    y = torch.empty_like(x)
    kernel = library[f"{op}_dense_{name}_{name}"]
    kernel(y, x, np.uint32(1000), threads=250, group_size=250)
    torch.testing.assert_close(y, SPECIAL[op](x.double()).float(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", MSL)
def test_unary_dense_scalar_in_each_type(dtype):
    library, name = unary("erf", dtype)
    x = torch.randn(77).to(dtype)
    y = torch.empty_like(x)
    library[f"erf_dense_scalar_{name}_{name}"](y, x, threads=77, group_size=32)
    torch.testing.assert_close(y, torch.erf(x), rtol=1e-2, atol=1e-2)


def test_unary_strided():
    library, name = unary("erf")
    x = torch.randn(8, 12).t()[::2]
    y = torch.empty(x.shape)
    sizes = np.array(x.shape[::-1], np.int64)
    strides = [np.array([s * 4 for s in t.stride()[::-1]], np.int64) for t in (x, y)]
    library[f"erf_strided_{name}_{name}"](
        y, x, sizes, *strides, np.uint32(2), threads=(8, 6), group_size=(8, 4)
    )
    torch.testing.assert_close(y, torch.erf(x))


REDUCE = """
kernel void {name}(device const {T}* x [[buffer(0)]], device {T}* out [[buffer(1)]],
                   uint t [[thread_position_in_threadgroup]],
                   uint n [[threads_per_threadgroup]], uint g [[threadgroup_position_in_grid]]) {{
  threadgroup {T} scratch[32];
  const {T} r = ::c10::metal::threadgroup_{name}(scratch, x[g * n + t], t, n);
  if (t == 0) out[g] = r;
}}
"""


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_threadgroup_reduction(name, threads):
    library = compile_shader(
        "c10/metal/reduction_utils.h", body=REDUCE.format(name=name, T="float")
    )
    x = torch.rand(3, threads) + 0.5
    y = torch.zeros(3)
    library[name](x, y, threads=3 * threads, group_size=threads)
    exact = {"sum": x.sum(1), "prod": x.prod(1), "max": x.amax(1), "min": x.amin(1)}[name]
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=0)


def test_simd_sum_of_long():
    body = """
    kernel void total(device long* x [[buffer(0)]], uint t [[thread_position_in_grid]]) {
      x[t] = ::c10::metal::simd_sum(x[t]);
    }"""
    library = compile_shader("c10/metal/reduction_utils.h", body=body)
    x = torch.arange(32) * 2**40
    total = x.sum()
    library.total(x, threads=32, group_size=32)
    assert (x == total).all()


def test_philox_is_uniform_and_repeatable():
    body = """
    kernel void draw(device float* out [[buffer(0)]], constant long& seed [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
      out[i] = ::c10::metal::rand(seed, long(i));
    }"""
    library = compile_shader("c10/metal/random.h", body=body)
    a, b, c = (torch.zeros(4096) for _ in range(3))
    for out, seed in ((a, 5), (b, 5), (c, 6)):
        library.draw(out, seed, threads=4096, group_size=256)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.02


def test_atomic_add_of_half():
    body = """
    kernel void add(device ::c10::metal::AtomicType_t<half>* out [[buffer(0)]],
                    uint i [[thread_position_in_grid]]) {
      ::c10::metal::AtomicType<half>::atomic_add(out, i % 4, half(1));
    }"""
    library = compile_shader("c10/metal/atomic.h", body=body)
    out = torch.zeros(4, dtype=torch.float16)
    library.add(out, threads=64, group_size=32)
    assert out.tolist() == [16.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_block(dtype, descending):
    name = {torch.float32: "float", torch.int32: "int"}[dtype]
    body = (
        f'template [[host_name("sort")]] kernel void sort_block<{name}, 64, 4, true>('
        f"const device {name}*, device {name}*, device long*, constant int&, constant long2&,"
        " constant bool&, uint3, uint3);"
    )
    library = compile_shader(
        "c10/metal/common.h", "c10/metal/utils.h", "ATen/native/mps/kernels/SortMerge.h", body=body
    )
    x = (torch.randn(2, 200) * 100).to(dtype)
    values, indices = torch.empty_like(x), torch.empty(2, 200, dtype=torch.int64)
    strides = np.array([1, 200], np.int64).tobytes()
    library.sort(
        x, values, indices, np.int32(200), strides, descending, threads=(64, 2), group_size=(64, 1)
    )
    expected = x.sort(dim=1, descending=descending, stable=True)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)
