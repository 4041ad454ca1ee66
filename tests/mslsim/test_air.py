# SPDX-License-Identifier: MIT
"""Instructions without a name in Metal, as kernels for matrices declare them."""

import numpy as np
import pytest

import mslsim

SOURCE = """#include <metal_stdlib>
using namespace metal;
struct _simdgroup_event_t;
thread _simdgroup_event_t* copy_line(ulong, ulong, device void*, const threadgroup void*, ulong)
    __asm("air.simdgroup_async_copy_1d.p1i8.p3i8");
thread _simdgroup_event_t* copy_tile(ulong, ulong, threadgroup void*, ulong, ulong, ulong2,
    const device void*, ulong, ulong, ulong2, long2, int)
    __asm("air.simdgroup_async_copy_2d.p3i8.p1i8");
thread _simdgroup_event_t* copy_tile(ulong, ulong, device void*, ulong, ulong, ulong2,
    const threadgroup void*, ulong, ulong, ulong2, long2, int)
    __asm("air.simdgroup_async_copy_2d.p1i8.p3i8");
void wait_for(int, thread _simdgroup_event_t**) __asm("air.wait_simdgroup_events");

struct Event {
  thread _simdgroup_event_t* event;
  template <typename T> void load(threadgroup T* to, ushort2 to_tile, const device T* from,
                                  uint row, ushort2 from_tile, int clamps) thread {
    event = copy_tile(sizeof(T), alignof(T), reinterpret_cast<threadgroup void*>(to), 8, 1,
                      ulong2(to_tile), reinterpret_cast<const device void*>(from), row, 1,
                      ulong2(from_tile), long2(0), clamps);
  }
};
kernel void tiles(device const half* x [[buffer(0)]], device half* y [[buffer(1)]],
                  constant int& clamps [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half tile[64];
  Event events[1];
  events[0].load(tile, ushort2(8, 8), x, 10, ushort2(5, 3), clamps);
  wait_for(1, reinterpret_cast<thread _simdgroup_event_t**>(events));
  auto back = copy_line(sizeof(half), alignof(half), y, tile, 64);
  wait_for(1, &back);
}

template <typename T> struct Storage {
  typedef vec<T, 64> type;
  type t;
  thread vec<T, 2>* elements() thread { return reinterpret_cast<thread vec<T, 2>*>(&t); }
  template <typename U, typename V> void multiply(Storage<U> a, Storage<V> b, bool keeps) {
    if (!keeps) *elements() = vec<T, 2>(0);
    t = __metal_simdgroup_matrix_8x8_multiply_accumulate(a.t, b.t, t, typename Storage<T>::type());
  }
};
kernel void product(device const half* a [[buffer(0)]], device const float* b [[buffer(1)]],
                    device float* c [[buffer(2)]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  const uint at = row * 8 + column;
  Storage<half> l;
  Storage<float> r, sum;
  *l.elements() = half2(a[at], a[at + 1]);
  *r.elements() = float2(b[at], b[at + 1]);
  *sum.elements() = float2(1);
  sum.multiply(l, r, true);
  c[at] = (*sum.elements())[0];
  c[at + 1] = (*sum.elements())[1];
}
"""


@pytest.mark.parametrize("clamps", [0, 1])
def test_a_tile_is_copied_with_its_edges(clamps):
    x, y = np.arange(30, dtype=np.float16).reshape(3, 10), np.ones((8, 8), np.float16)
    report = mslsim.run(SOURCE, "tiles", [x, y, np.int32(clamps)], threads=32, group_size=32)
    assert report.ok, report
    pad = ((0, 5), (0, 3))
    wanted = np.pad(x[:, :5], pad, "edge") if clamps else np.pad(x[:, :5], pad)
    np.testing.assert_array_equal(y, wanted)


def test_products_of_matrices_in_vectors():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(8, 8)).astype(np.float16), random.normal(size=(8, 8))
    b, c = b.astype(np.float32), np.zeros((8, 8), np.float32)
    report = mslsim.run(SOURCE, "product", [a, b, c], threads=32, group_size=32)
    assert report.ok, report
    np.testing.assert_allclose(c, 1 + a.astype(np.float32) @ b, rtol=1e-5, atol=1e-5)


def test_other_assembly_is_refused():
    text = 'void f() __asm("air.something_else");\n'
    assert "assembly" in mslsim.lint(text + "kernel void k() { f(); }")[0].message
