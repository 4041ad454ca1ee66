# SPDX-License-Identifier: MIT
"""Large launches try other orders of threads in a second process, and compare both results."""

import numpy as np
import pytest

import mslsim

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
THREADS = 1 << 16


def run(body: str, x: np.ndarray, out: np.ndarray) -> mslsim.Report:
    source = f"""{HEAD}kernel void k(device const float* x, device atomic_uint* count,
        device float* out, uint i [[thread_position_in_grid]]) {{ {body} }}"""
    return mslsim.run(source, "k", [x, np.zeros(1, np.uint32), out], THREADS, 256)


ARRIVAL = "const uint at = atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);"


@pytest.mark.parametrize(
    "writes",
    [
        "out[at] = x[i];",
        # the same in all orders but the first one
        "if (at == 0) out[0] = i == 0;",
    ],
)
def test_order_of_arrival_is_found(writes):
    x = np.arange(THREADS, dtype=np.float32)
    report = run(f"{ARRIVAL} {writes}", x, np.zeros(THREADS, np.float32))
    assert [f.kind for f in report.findings] == ["schedule"]


def test_sums_may_differ_by_rounding():
    x = np.random.default_rng(0).standard_normal(THREADS).astype(np.float32)
    out = np.zeros(1, np.float32)
    body = "atomic_fetch_add_explicit((device atomic_float*)out, x[i], memory_order_relaxed);"
    assert run(body, x, out).ok
    np.testing.assert_allclose(out, x.astype(np.float64).sum(), atol=1e-2)
