# SPDX-License-Identifier: MIT
"""Blocks of ggml from floats [rows, 4096], and back."""

from functools import partial

import torch
from torch import Tensor

from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import dequantize_ggml, quantize_ggml, quantize_meaning

from ..harness import Bench, nbytes


def _inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, 4096, dtype=dtype),)


def _quantized(type: str, weight: Tensor) -> Tensor:
    # values, because bytes have no tolerance
    return dequantize_ggml(quantize_ggml(weight, type), type)


def _truth(type: str, weight: Tensor) -> Tensor:
    return dequantize_ggml(quantize_meaning(weight, FORMATS[type].id), type)


BENCHES = tuple(
    Bench(
        op="quant/quantize_ggml",
        kind=type,
        run=partial(_quantized, type),
        peers={},
        inputs=_inputs,
        sweep=({"rows": 256},),
        dtypes=(torch.float32,),
        truth=partial(_truth, type),
        reduces_over=lambda weight: 1,
        bytes_moved=nbytes,
    )
    for type in ("q4_0", "q8_0", "q4_K", "q6_K")
)
