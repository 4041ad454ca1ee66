# SPDX-License-Identifier: MIT
"""4 bits in groups of 64 from floats [rows, 4096], and back."""

import torch
from torch import Tensor

from metalcore.ops.quant.quantize_int4 import dequantize_int4, quantize_int4

from ..harness import Bench, nbytes


def _there_and_back(weight: Tensor) -> Tensor:
    return dequantize_int4(quantize_int4(weight))


BENCHES = (
    Bench(
        op="quant/quantize_int4",
        run=_there_and_back,
        peers={},
        inputs=lambda rows, dtype: (torch.randn(rows, 4096, dtype=dtype),),
        sweep=({"rows": 256},),
        dtypes=(torch.float32,),
        truth=lambda weight: _there_and_back(weight.float()),
        reduces_over=lambda weight: 1,
        bytes_moved=nbytes,
    ),
)
