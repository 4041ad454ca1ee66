# SPDX-License-Identifier: MIT
"""4 and 8 bits in groups: errors of a step at most, any size, and MLX's own numbers."""

import numpy as np
import pytest
import torch

from metalcore.ops.quant.quantize_int4 import (
    QuantizedInt4,
    QuantizedInt8,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
)

STEM = "quantize_int4"
BITS = {4: (quantize_int4, dequantize_int4), 8: (quantize_int8, dequantize_int8)}
METHODS = [{}, {"symmetric": True}, {"method": "hqq"}, {"method": "mlx"}]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize(("K", "group"), [(256, 64), (100, 32), (33, 32), (1, 256), (0, 32)])
def test_values_are_within_a_step(bits: int, options: dict, K: int, group: int) -> None:
    quantize, dequantize = BITS[bits]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        weight = torch.randn(5, K).to(dtype)
        q = quantize(weight, group, **options)
        assert q.packed.shape == (5, -(-K * bits // 8))
        assert q.scale.shape == (5, -(-K // group))
        assert q.scale.dtype == (torch.float32 if dtype == torch.float64 else dtype)
        assert (q.bias is None) == bool(options.get("symmetric"))
        back = dequantize(q, torch.float32)
        assert back.shape == weight.shape
        # half a step, and what keeping the bias in the dtype of the weights moves
        step = q.scale.float().abs().repeat_interleave(group, 1)[:, :K]
        slack = 1.1 if options.get("method") in (None, "mlx") else 3
        moved = 2 * torch.finfo(q.scale.dtype).eps * (1 << bits) * step
        assert ((back - weight.float()).abs() <= slack * step + moved).all()


@pytest.mark.parametrize("bits", BITS)
def test_method_mlx_makes_the_numbers_of_mlx(bits: int) -> None:
    quantize = BITS[bits][0]
    weight = torch.randn(16, 256)
    weight[3, 64:128] = 0
    q = quantize(weight, 64, method="mlx")
    mx = pytest.importorskip("mlx.core")  # not on emulated machines
    words, scale, bias = mx.quantize(mx.array(weight.numpy()), group_size=64, bits=bits)
    assert np.array_equal(np.array(words).view(np.uint8), q.packed.numpy())
    assert np.array_equal(np.array(scale), q.scale.numpy())
    assert np.array_equal(np.array(bias), q.bias.numpy())


def test_hqq_is_closer_than_minmax_for_heavy_tails() -> None:
    weight = torch.distributions.StudentT(3.0).sample((64, 256))
    off = {
        method: (dequantize_int4(quantize_int4(weight, method=method)) - weight).abs().mean()
        for method in ("minmax", "hqq")
    }
    assert off["hqq"] < off["minmax"]


def test_a_symmetric_weight_keeps_its_largest_value() -> None:
    weight = torch.randn(4, 96)
    back = dequantize_int4(quantize_int4(weight, 32, symmetric=True))
    groups, kept = weight.view(4, 3, 32), back.view(4, 3, 32)
    at = groups.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(kept.gather(-1, at), groups.gather(-1, at))


def test_bad_input_is_named() -> None:
    weight = torch.randn(4, 64)
    bad = [
        (
            lambda: quantize_int4(weight, 48),
            "group_size must be a multiple of 32 up to 256, got 48",
        ),
        (lambda: quantize_int4(weight[0]), "weight must be [N, K], got [64]"),
        (lambda: quantize_int4(weight * torch.inf), "weights must be finite"),
        (
            lambda: quantize_int4(weight, symmetric=True, method="mlx"),
            "method 'mlx' has no symmetric form",
        ),
        (
            lambda: quantize_int4(weight, method="best"),
            "method must be one of minmax, hqq, mlx, got 'best'",
        ),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match="quantize_int4: ") as caught:
            call()
        assert str(caught.value) == f"quantize_int4: {message}"
    q = quantize_int8(weight)
    with pytest.raises(ValueError, match="packed must have 4 bits for 64 columns, got"):
        dequantize_int4(QuantizedInt4(*q))
    assert isinstance(q, QuantizedInt8)
