# SPDX-License-Identifier: MIT
"""Where the headers of the mlx wheel are, and how a kernel of theirs is run."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import mslsim

MLX = find_spec("mlx")
ROOTS = [Path(p) / "include" for p in (MLX.submodule_search_locations or ())] if MLX else []
ROOT = next((r for r in ROOTS if (r / "mlx/backend/metal/kernels").is_dir()), None)
if ROOT is None:
    pytest.skip("the mlx headers are not installed", allow_module_level=True)
KERNELS = "mlx/backend/metal/kernels"
SOURCES = ROOT / KERNELS

# What a header expects its includer to have included before it.
BEFORE = {
    "steel/gemm/kernels": ["steel/gemm/gemm.h", "steel/gemm/gemm_nax.h"],
    "steel/conv": ["steel/conv/conv.h"],
    "quantized.h": ["steel/gemm/gemm.h"],
    "fp_quantized.h": ["steel/gemm/gemm.h"],
    "quantized_nax.h": ["steel/gemm/gemm_nax.h", "quantized_utils.h"],
    "fp_quantized_nax.h": ["steel/gemm/gemm_nax.h", "quantized_utils.h"],
    "searchsorted.h": ["sort.h"],
    "indexing/scatter": ["atomic.h"],
    "reduction/reduce": ["atomic.h", "reduction/ops.h"],
    "reduction/ops.h": ["atomic.h"],
    "reduce.h": ["atomic.h", "reduction/ops.h"],
    "reduce_utils.h": ["atomic.h"],
}
# They need Metal 4's tensor operations.
NEEDS_TENSORS = "nax"


def text(*headers: str, instantiate: tuple[str, ...] = ()) -> str:
    lines = ["#include <metal_stdlib>", "using namespace metal;"]
    lines += [f'#include "{KERNELS}/{h}"' for h in ("utils.h", *headers)]
    lines += [
        f'template [[host_name("k{i}")]] [[kernel]] decltype({e}) {e};'
        for i, e in enumerate(instantiate)
    ]
    return "\n".join(lines) + "\n"


def run(headers, kernel, args, threads, group, **options):
    if isinstance(headers, str):
        headers = (headers,)
    source = text(*headers, instantiate=(kernel,))
    report = mslsim.run(source, "k0", args, threads, group, include=[str(ROOT)], **options)
    assert report.ok, str(report)
    return report


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def to_bfloat(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat(b):
    return (b.astype(np.uint32) << 16).view(np.float32)


def i32(n):
    return np.int32(n)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
