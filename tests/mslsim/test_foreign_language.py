# SPDX-License-Identifier: MIT
"""What kernels of other projects write: each form compiles, strictly, and computes what it says."""

from functools import cache

import numpy as np
import pytest

import mslsim

SOURCE = """#include <metal_stdlib>
#include <simd/simd.h>
using namespace metal;
#define FC_BASE 400
constexpr constant int first = FC_BASE / 2;
constant short added [[function_constant(FC_BASE + 1)]];
constant int scaled [[function_constant(first)]];
constant bool forward [[function_constant(7)]];
struct pair { int a, b; };
extern "C" struct Shape { uint height; uint width; };
struct Shared { vector_float3 a; matrix_float2x2 m; simd_float4 q; };
struct U { union { float f; uint u; }; };
struct Spaces {
  float state;
  Spaces() thread = default;
  Spaces() threadgroup = default;
  Spaces() device = default;
  Spaces() constant = default;
  float twice() thread const { return 2 * state; }
  float twice() device const { return 2 * state; }
};
struct Mask { operator bool() const thread { return true; } };
struct Complex { float re, im; };
Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
thread Complex& operator+=(thread Complex& a, Complex b) { a.re += b.re; return a; }
struct V { float4 p [[position]]; float2 uv; };
vertex V vs(uint i [[vertex_id]], constant float4* p [[buffer(0)]]) { V v; v.p = p[i]; return v; }
fragment float4 fs(V in [[stage_in]]) { return float4(in.uv, 0, 1); }
namespace metal {
template <> struct _numeric_limits_impl<Complex> {
  static constexpr Complex max() { return {1.f, 2.f}; }
};
}
template <typename T> constexpr ushort elements() { return vec_elements<T>::value; }
template <typename T> constexpr constant bool travels = __is_valid_simdgroup_type<T>::value;
template <typename T, uint N> T last(vec<T, N> v) { return v[N - 1]; }
template <typename T, enable_if_t<is_floating_point_v<T>, bool> = true> T same(T a) { return a; }
template <typename T> float top() { return numeric_limits<T>::infinity().x; }
template <typename I> float stepped(vec<I, 2> v, I step) {
  v.x += step;
  return v.x + (v.xy + v.yx).y;
}
void store(device float* out, device long* indices, bool wanted) {
  *out = 1;
  if (wanted) {
    *indices = 2;
  }
}
float head(constant float* m) { return m[0]; }
void put(device float* p, uint i, float3 v) { p[i] = v.x; }

kernel void constants(device float* o [[buffer(0)]]) {
  o[0] = added; o[1] = scaled; o[2] = forward;
}
kernel void packed(device float* o [[buffer(0)]]) {
  const packed_char4 q = packed_char4(1, -2, 3, -4);
  const float4 v = float4(q);
  packed_float3 p = packed_float3(1, 2, 3);
  p += p; p = p * 2.f + 1; p.xy = p.yx;
  o[0] = v.y; o[1] = v.w; o[2] = p.x; o[3] = p.z; o[4] = length(packed_float3(2, 3, 6));
}
kernel void largest(device float* o [[buffer(0)]]) {
  o[0] = MAXHALF; o[1] = float(BFLT_EPSILON); o[2] = M_PI_BF;
  o[3] = numeric_limits<Complex>::max().im;
}
kernel void spaces(device float* o [[buffer(0)]]) { Spaces s; s.state = 4; o[0] = s.twice(); }
kernel void conditional_bfloat(device float* o [[buffer(0)]], device bfloat* x [[buffer(1)]]) {
  x[0] = x[0] < 0 ? 0 : x[0]; x[1] = x[1] < 0 ? 0 : x[1];
  Mask m;
  o[0] = x[0]; o[1] = x[1]; o[2] = bfloat(m); o[3] = int(x[1] * 3);
}
kernel void traits(device float* o [[buffer(0)]]) {
  o[0] = elements<float4>(); o[1] = travels<float> + travels<long>; o[2] = same(float2(5)).y;
  o[3] = top<float2>(); o[4] = last(float3(1, 2, 3)); o[5] = is_scalar_v<float2>;
}
template <int N> struct P { int n[N]; };
template <typename T, int N>
[[kernel]] void deduced(device T* x [[buffer(0)]], const constant P<N>* p [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) { x[i] += p->n[N - 1]; }
template <typename T>
[[kernel]] void deduced(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 7; }
template [[host_name("deduced_2")]] [[kernel]] void deduced(
    device float* x [[buffer(0)]], const constant P<2>* p [[buffer(1)]],
    uint i [[thread_position_in_grid]]);
template [[host_name("deduced_1")]] [[kernel]] void deduced<float>(device float*, uint);
kernel void coherent_memory(volatile coherent(system) device float* o [[buffer(0)]]) { o[0] = 3; }
kernel void short_list(device float* o [[buffer(0)]]) {
  uint4 v = {1, 2, 3}; float4 w = {float2(4, 5), 6}; pair p{8, 9};
  o[0] = v.z; o[1] = v.w; o[2] = w.z; o[3] = w.w; o[4] = p.b;
}
kernel void group_arrays(device float* o [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float blk[2][4][4];
  threadgroup float(&d)[4][4] = blk[1];
  threadgroup float (*rows)[4] = blk[0];
  if (t < 16) { d[t / 4][t % 4] = t; rows[t / 4][t % 4] = 0; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) o[t] = blk[1][t % 4][t / 4] + blk[0][0][0];
}
kernel void matrices(device float* o [[buffer(0)]]) {
  const float3x3 m = float3x3(1, 0, 0, 0, 2, 0, 0, 0, 3);
  const float2x2 n(1.f, 2.f, 3.f, 4.f);
  Shared s; s.m = n; s.a = float3(1); s.q = float4(2);
  o[0] = determinant(m); o[1] = determinant(s.m); o[2] = (m * s.a).z; o[3] = (n * n)[1][0];
}
kernel void plain_pointers(device float* o [[buffer(0)]], device long* y [[buffer(1)]],
                           constant float* view [[buffer(2)]], constant Shape& s [[buffer(3)]]) {
  store(o, y, true);
  put(
      o, 1,
      float3(o[0]) + float3(view[0], view[1], view[2]) * 2.f
  );
  o[2] = head(view); o[3] = y[0] + s.width;
}
kernel void asserted(device float* o [[buffer(0)]]) { assert(o[0] == 0 && "zero"); o[0] = 1; }
kernel void stepped_parts(device float* o [[buffer(0)]]) { o[0] = stepped<int>(int2(1, 2), 3); }
kernel void mixed_arguments(device float* o [[buffer(0)]]) {
  o[0] = dot(float4(1, 2, 3, 4), 1); o[1] = smoothstep(0.f, 2.f, float4(1)).x;
  o[2] = max(float2(1, 5), 3).x; o[3] = fma(2.0h, 3.0h, 1.0h);
}
kernel void abs(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] = abs(float(-int(i)) - 1);
}
kernel void cos(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] = cos(0.0f);
}
"""
RESULTS = {
    "constants": [12, 13, 1],
    "packed": [-2, -4, 9, 13, 7],
    "largest": [65504, 0.0078125, 3.140625, 2],
    "spaces": [8],
    "traits": [4, 1, 5, np.inf, 3, 0],
    "coherent_memory": [3],
    "short_list": [3, 0, 6, 0, 9],
    "group_arrays": [4 * (i % 4) + i // 4 for i in range(16)],
    "matrices": [6, -2, 3, 15],
    "asserted": [1],
    "stepped_parts": [10],
    "mixed_arguments": [10, 0.5, 3, 7],
    "abs": [1 + i for i in range(32)],
    "cos": [1] * 32,
}


@cache
def library():
    return mslsim.compile_shader(SOURCE, constants={401: 12, 200: 13, 7: True})


@pytest.mark.parametrize("kernel", RESULTS)
def test_a_form_of_the_language(kernel):
    out = np.zeros(32, np.float32)
    threads = 32 if len(RESULTS[kernel]) > 8 else 1
    library()[kernel](out, threads=threads, group_size=threads)
    assert out[: len(RESULTS[kernel])].tolist() == RESULTS[kernel]


def test_bfloat_beside_an_integer_in_a_condition():
    out, x = np.zeros(4, np.float32), np.array([0xBF80, 0x4040], np.uint16)
    library().conditional_bfloat(out, x, threads=1, group_size=1)
    assert out.tolist() == [0, 3, 1, 9]


def test_templates_that_deduce_their_arguments():
    x = np.zeros(3, np.float32)
    library().deduced_2(x, np.array([4, 5], np.int32), threads=3, group_size=3)
    assert x.tolist() == [5, 5, 5]
    library().deduced_1(x, threads=3, group_size=3)
    assert x.tolist() == [7, 7, 7]


def test_pointers_that_need_no_other_address_space():
    out, y = np.zeros(4, np.float32), np.zeros(1, np.int64)
    view, shape = np.array([3, 4, 5], np.float32), np.array([6, 7], np.uint32)
    library().plain_pointers(out, y, view, shape, threads=1, group_size=1)
    assert out.tolist() == [1, 7, 3, 9]


def test_an_assertion_that_does_not_hold():
    out = np.ones(1, np.float32)
    with pytest.raises(mslsim.KernelError, match="assertion does not hold for thread 0") as error:
        library().asserted(out, threads=1, group_size=1)
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "assert(" in text)
    assert [(f.kind, f.line) for f in error.value.findings] == [("assertion", line)]
