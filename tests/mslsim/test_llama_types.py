# SPDX-License-Identifier: MIT
"""llama.cpp's kernels for every type of quantized weights, against the `gguf` package, and others
of its kernels against numpy: built together, run under all checks."""

import re
from functools import cache

import numpy as np
import pytest

import mslsim
from tests.mslsim.llama_source import folder, text
from tests.mslsim.test_llama_source import OPTIONS, RELEASE, defined, normal

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

# Where a block has its scales in half.
SCALES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_K": [80, 82],
    "q3_K": [108], "q4_K": [0, 2], "q5_K": [0, 2], "q6_K": [208], "iq4_nl": [0], "iq4_xs": [0],
    "iq2_xxs": [0], "iq2_xs": [0], "iq2_s": [0], "iq3_xxs": [0], "iq3_s": [0], "iq1_s": [0],
}  # fmt: skip
COLUMNS = 256
HEAD = 64
PRODUCTS = ["q4_0", "q8_0", "q4_K", "q6_K"]
GLU = {
    "reglu": lambda a, b: np.maximum(a, 0) * b,
    "swiglu": lambda a, b: a / (1 + np.exp(-a)) * b,
    "geglu_quick": lambda a, b: a / (1 + np.exp(-1.702 * a)) * b,
    "geglu": lambda a, b: 0.5 * a * (1 + np.tanh(0.7978845608 * a * (1 + 0.044715 * a * a))) * b,
}
KERNELS = [
    *(f"kernel_{kind}_{name}{tail}" for name in SCALES
      for kind, tail in (("get_rows", ""), ("mul_mv", "_f32"))),
    *(f"kernel_mul_mm_{name}_f32" for name in PRODUCTS),
    *(f"kernel_{name}_f32" for name in (*GLU, "norm", "soft_max", "rope_norm", "rope_neox")),
    *(f"kernel_flash_attn_ext_{name}_dk64_dv64" for name in ("f16", "q8_0")),
]  # fmt: skip


def constants():
    product, matrix, rope = defined("FC_MUL_MV"), defined("FC_MUL_MM"), defined("FC_ROPE")
    found = {product: 2, product + 2: 1, product + 3: 1, product + 4: 1}
    found |= {matrix: False, matrix + 1: True, **{matrix + i: 1 for i in range(2, 6)}}
    attention = defined("FC_FLASH_ATTN_EXT")
    found |= {attention + i: False for i in (0, 1, 2, 3, 4, 10)}
    found |= {attention + 20: HEAD, attention + 21: HEAD, attention + 22: 4}
    return found | {rope: False}


@cache
def library(tensors=False):
    options = {**OPTIONS, "constants": constants(), "include": [str(folder(RELEASE))]}
    kernels = KERNELS
    if tensors:
        options["defines"] = {**OPTIONS["defines"], "GGML_METAL_HAS_TENSOR": 1}
        options["version"] = 400
        kernels = [f"kernel_mul_mm_{name}_f32" for name in PRODUCTS]
    return mslsim.compile_shader(text(RELEASE), on_finding="collect", kernels=kernels, **options)


def report_of(kernel, *args, grid, group, shared=0, tensors=False):
    return library(tensors)[kernel](
        *args,
        threads=tuple(g * n for g, n in zip(grid, group, strict=True)),
        group_size=group,
        threadgroup_memory={0: shared} if shared else None,
    )


def run(kernel, *args, **launch):
    report = report_of(kernel, *args, **launch)
    assert report.ok, str(report)


def weights(name, rows):
    """Random blocks with scales of moderate size, and what they stand for."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    size, length = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (rows, COLUMNS // size, length), np.uint8)
    for at in SCALES[name]:
        scale = rng.uniform(0.01, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    return blocks, quants.dequantize(blocks, kind).reshape(rows, COLUMNS).astype(np.float64)


@pytest.mark.parametrize("name", SCALES)
def test_rows(name):
    blocks, values = weights(name, 5)
    at, y = np.array([3, 0, 4], np.int32), np.zeros((3, COLUMNS), np.float32)
    arguments = {"ne00t": COLUMNS // 16, "ne00": COLUMNS, "nb01": blocks.strides[0], "ne10": 3,
                 "nb10": 4, "nb1": y.strides[0]}  # fmt: skip
    run(f"kernel_get_rows_{name}", arguments, blocks, at, y, grid=(3, 1, 1), group=(32, 1, 1))
    np.testing.assert_allclose(y, values[at], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCALES)
def test_products_with_a_vector(name):
    # rows of whole groups: it reads others past the end, which is told of q4_0 elsewhere
    rows = 16
    blocks, values = weights(name, rows)
    x, y = normal(COLUMNS), np.zeros(rows, np.float32)
    length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][1]
    arguments = {"ne00": COLUMNS, "ne01": rows, "ne02": 1, "nb00": length,
                 "nb01": blocks.strides[0], "ne10": COLUMNS, "ne11": 1, "ne12": 1,
                 "nb11": 4 * COLUMNS, "ne0": rows, "ne1": 1, "r2": 1, "r3": 1}  # fmt: skip
    per_group = defined(f"N_R0_{name.upper()}") * (1 if name == "q8_0" else 2)
    kernel = f"kernel_mul_mv_{name}_f32"
    grid = (rows // per_group, 1, 1)
    run(kernel, arguments, blocks, x, y, grid=grid, group=(32, 2, 1), shared=8192)
    np.testing.assert_allclose(y, values @ x, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("tensors", [False, True], ids=["simdgroup matrices", "tensors"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_matrix(name, tensors):
    m, n = 70, 40
    blocks, values = weights(name, m)
    x, y = normal(n, COLUMNS), np.zeros((n, m), np.float32)
    arguments = {"ne00": COLUMNS, "ne02": 1, "nb01": blocks.strides[0], "ne12": 1, "nb10": 4,
                 "nb11": 4 * COLUMNS, "ne0": m, "ne1": n, "r2": 1, "r3": 1}  # fmt: skip
    across, down = (128, 64) if tensors else (32, 64)
    grid, group = (-(-n // across), -(-m // down), 1), (128, 1, 1)
    kernel = f"kernel_mul_mm_{name}_f32"
    run(kernel, arguments, blocks, x, y, grid=grid, group=group, shared=8192, tensors=tensors)
    exact = x.astype(np.float64) @ values.T
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-3 * np.abs(exact).max())


@pytest.mark.parametrize("name", GLU)
def test_gated_products(name):
    a, b, y = normal(2, 50), normal(2, 50) * 2, np.zeros((2, 50), np.float32)
    arguments = {"ne00": 50, "nb01": 200, "ne10": 50, "nb11": 200, "ne0": 50, "nb1": 200}
    run(f"kernel_{name}_f32", arguments, a, b, y, grid=(2, 1, 1), group=(32, 1, 1))
    exact = GLU[name](a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-5)


def test_layer_norm():
    x, y = normal(3, 96), np.zeros((3, 96), np.float32)
    arguments = {"ne00": 96, "ne00_t": 96, "nb1": 384, "eps": 1e-5, "nef1": [1] * 3,
                 "nef2": [1] * 3, "nef3": [1] * 3, "nbf1": [384] * 3}  # fmt: skip
    run("kernel_norm_f32", arguments, x, x, x, y, grid=(3, 1, 1), group=(64, 1, 1), shared=128)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-5)


def test_softmax():
    x, mask = normal(3, 70), normal(3, 70)
    y = np.zeros((3, 70), np.float32)
    arguments = {"ne00": 70, "ne01": 3, "ne02": 1, "nb01": 280, "ne11": 3, "ne12": 1, "ne13": 1,
                 "nb11": 280, "nb1": 280, "scale": 0.5}  # fmt: skip
    run("kernel_soft_max_f32", arguments, x, mask, x, y, grid=(3, 1, 1), group=(32, 1, 1),
        shared=128)  # fmt: skip
    e = np.exp(0.5 * x.astype(np.float64) + mask)
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-4)


@pytest.mark.parametrize("name", ["norm", "neox"])
def test_rotary_embedding(name):
    tokens, heads, length = 3, 2, 32
    x, y = normal(tokens, heads, length), np.zeros((tokens, heads, length), np.float32)
    positions = np.array([0, 5, 17], np.int32)
    strides = {"nb00": 4, "nb01": 4 * length, "nb02": 4 * length * heads}
    arguments = {"ne00": length, "ne01": heads, "ne02": tokens, "ne03": 1, **strides, "ne0": length,
                 "nb0": 4, "nb1": 4 * length, "nb2": 4 * length * heads, "n_dims": length,
                 "n_ctx_orig": 4096, "freq_base": 10000.0, "freq_scale": 1.0, "attn_factor": 1.0,
                 "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
    run(f"kernel_rope_{name}_f32", arguments, x, positions, x, y, grid=(heads, tokens, 1),
        group=(32, 1, 1))  # fmt: skip
    angle = positions[:, None, None] * 10000.0 ** (-np.arange(0, length, 2) / length)
    wide = x.astype(np.float64)
    first, second = (wide[..., ::2], wide[..., 1::2]) if name == "norm" else np.split(wide, 2, -1)
    turned = (first * np.cos(angle) - second * np.sin(angle),
              first * np.sin(angle) + second * np.cos(angle))  # fmt: skip
    exact = np.stack(turned, -1).reshape(x.shape) if name == "norm" else np.concatenate(turned, -1)
    np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-4)


def attention(name, keys, values, exact):
    """The report of two heads of queries over the same keys, whose result is checked."""
    tokens, heads, length = 10, 2, len(exact[0])
    q, y = normal(heads, tokens, HEAD), np.zeros((tokens, heads, HEAD), np.float32)
    row = keys.strides[0]
    inner = {"nb11": row, "nb12": row * length, "nb21": row, "nb22": row * length}
    arguments = {"ne01": tokens, "ne02": heads, "ne03": 1, "nb01": 4 * HEAD,
                 "nb02": 4 * HEAD * tokens, "ne11": length, "ne_12_2": 1, "ne_12_3": 1,
                 "ns10": HEAD, "ns20": HEAD, **inner, "ne31": 1, "ne32": 1, "ne33": 1,
                 "ne1": heads, "ne2": tokens, "ne3": 1, "scale": 0.125}  # fmt: skip
    none = np.zeros(16, np.uint8)
    report = report_of(
        f"kernel_flash_attn_ext_{name}_dk64_dv64", arguments, q, keys, values, none, none, none,
        none, y, grid=(-(-tokens // 8), heads, 1), group=(32, 4, 1), shared=11264,
    )  # fmt: skip
    weights = np.exp(q.astype(np.float64) @ exact[0].T / 8)
    wanted = weights @ exact[1] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(y, wanted.swapaxes(0, 1), atol=2e-3)
    return report


def test_attention():
    keys, values = (normal(2, 128, HEAD) / 2).astype(np.float16)
    report = attention("f16", keys, values, (keys.astype(np.float64), values.astype(np.float64)))
    assert report.ok, str(report)


def test_attention_with_8_bits_overwrites_what_lanes_may_still_read():
    """A known slip of llama.cpp: its tile is written in the next turn without a barrier."""
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = [quants.quantize(x, kind) for x in normal(2, 128, HEAD) / 2]
    report = attention("q8_0", *blocks, [quants.dequantize(b, kind) for b in blocks])
    lines = text(RELEASE).splitlines()
    written = set()
    for finding in report.findings:
        assert finding.kind == "race" and "next turn of the loop" in finding.message
        assert "simdgroup_load(m" in lines[finding.line - 1]
        line = int(re.search(r"write by thread \d+ at ggml-metal.metal:(\d+)", str(finding))[1])
        written.add(lines[line - 1].strip())
    assert written == {"sk4x4[4*ty + tx] = tmp;", "sv4x4[4*ty + tx] = tmp;"}
