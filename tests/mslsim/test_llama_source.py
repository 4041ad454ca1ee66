# SPDX-License-Identifier: MIT
"""llama.cpp's Metal source as it is shipped: every kernel compiles, and these run on data."""

import re
from functools import cache

import numpy as np
import pytest

import mslsim
from tests.mslsim.llama_source import folder, text

# The last release with all kernels in one file.
RELEASE = "llama-cpp-python==0.3.35"
OPTIONS = {"name": "ggml-metal.metal", "defines": {"GGML_METAL_HAS_BF16": 1}}
QK = 32


@cache
def defined(name):
    """A number that the header defines."""
    header = (folder(RELEASE) / "ggml-metal-impl.h").read_text()
    return int(re.search(rf"#define {name}\s+(\d+)", header)[1])


@cache
def library():
    unary, product = defined("FC_UNARY"), defined("FC_MUL_MV")
    constants = {unary: defined("OP_UNARY_NUM_SILU"), unary + 1: False}
    constants |= {product: 2, product + 2: 1, product + 3: 1, product + 4: 1}
    include = [str(folder(RELEASE))]
    return mslsim.compile_shader(
        text(RELEASE), constants=constants, include=include, on_finding="collect", **OPTIONS
    )


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_every_kernel_compiles():
    include = [str(folder(RELEASE))]
    assert mslsim.lint(text(RELEASE), include=include, **OPTIONS) == []
    assert len(dir(library())) > 600


def run(kernel, *args, groups, group=32, shared=0):
    threads = (groups * group, 1, 1)
    memory = {0: shared} if shared else None
    return library()[kernel](
        *args, threads=threads, group_size=(group, 1, 1), threadgroup_memory=memory
    )


def test_rms_norm_and_its_weight():
    x, w, y = normal(3, 96), normal(96), np.zeros((3, 96), np.float32)
    row = x.strides[0]
    arguments = {"ne00": 96, "ne00_t": 24, "nb1": row, "eps": 1e-5, "nef1": [1] * 3,
                 "nef2": [1] * 3, "nef3": [1] * 3, "nbf1": [row, row, row]}  # fmt: skip
    report = run("kernel_rms_norm_mul_f32_4", arguments, x, w, w, y, groups=3, group=64, shared=128)
    assert report.ok, str(report)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(y, wanted, rtol=1e-5)


def test_sum_of_rows():
    x, y = normal(4, 100), np.zeros(4, np.float32)
    arguments = {"ne00": 100, "nb01": 400, "nb1": 4}
    report = run("kernel_sum_rows_f32_f32", arguments, x, y, groups=4, group=64, shared=128)
    assert report.ok, str(report)
    np.testing.assert_allclose(y, x.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-5)


def test_silu():
    x, y = normal(2, 50), np.zeros((2, 50), np.float32)
    arguments = {"ne01": 2, "ne0": 50, "nb01": 200, "nb1": 200}
    report = run("kernel_unary_f32_f32", arguments, x, y, groups=2, group=64)
    assert report.ok, str(report)
    np.testing.assert_allclose(y, x / (1 + np.exp(-x.astype(np.float64))), rtol=1e-5)


def test_argsort():
    x, y = normal(2, 60), np.zeros((2, 60), np.int32)
    arguments = {"ne00": 60, "ne01": 2, "nb01": 240, "ne0": 60, "ne1": 2, "ne2": 1, "top_k": 60}
    report = run("kernel_argsort_f32_i32_asc", arguments, x, y, groups=2, group=64, shared=256)
    assert report.ok, str(report)
    np.testing.assert_array_equal(y, x.argsort(1))


def quantized(kind, rows, columns):
    """Blocks of llama.cpp's 4 or 8-bit format, and what they stand for."""
    rng = np.random.default_rng(1)
    scale = rng.uniform(0.5, 2, (rows, columns // QK, 1)).astype(np.float16)
    if kind == "q8_0":
        numbers = rng.integers(-128, 128, (rows, columns // QK, QK), np.int8)
        packed = numbers.view(np.uint8)
    else:
        nibbles = rng.integers(0, 16, (rows, columns // QK, QK), np.uint8)
        packed = nibbles[..., : QK // 2] | nibbles[..., QK // 2 :] << 4
        numbers = nibbles.astype(np.int8) - 8
    blocks = np.concatenate([scale.view(np.uint8), packed], axis=2)
    return blocks.reshape(rows, -1), (scale.astype(np.float64) * numbers).reshape(rows, columns)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_rows_of_a_quantized_matrix(kind):
    blocks, values = quantized(kind, 5, 64)
    at, y = np.array([3, 0, 4], np.int32), np.zeros((3, 64), np.float32)
    arguments = {"ne00t": 4, "ne00": 64, "nb01": blocks.strides[0], "ne10": 3, "nb10": 4,
                 "nb1": y.strides[0]}  # fmt: skip
    report = run(f"kernel_get_rows_{kind}", arguments, blocks, at, y, groups=3)
    assert report.ok, str(report)
    np.testing.assert_allclose(y, values[at], rtol=1e-6)


def product(kind, rows):
    blocks, values = quantized(kind, rows, 64)
    x, y = normal(64), np.zeros(rows, np.float32)
    arguments = {"ne00": 64, "ne01": rows, "ne02": 1, "nb01": blocks.strides[0], "ne10": 64,
                 "ne11": 1, "ne12": 1, "nb11": 256, "ne0": rows, "ne1": 1}  # fmt: skip
    per_group = defined(f"N_R0_{kind.upper()}") * (2 if kind == "q4_0" else 1)
    groups = -(-rows // per_group)
    report = run(
        f"kernel_mul_mv_{kind}_f32", arguments, blocks, x, y, groups=groups, group=64, shared=2048
    )
    np.testing.assert_allclose(y, values @ x.astype(np.float64), rtol=1e-5, atol=1e-3)
    return report


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_products_with_a_quantized_matrix(kind):
    report = product(kind, 16)
    assert report.ok, str(report)


def test_ragged_rows_are_read_past_the_end():
    """A known slip of llama.cpp, hidden by the slack of its buffers: only writes are guarded."""
    report = product("q4_0", 13)
    assert {f.kind for f in report.findings} == {"bounds"}
    assert all("of src0 [[buffer(1)]]" in f.message for f in report.findings)
