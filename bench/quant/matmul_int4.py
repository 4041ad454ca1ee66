# SPDX-License-Identifier: MIT
"""x W^T for M rows of x and W [4096, 4096] in 4 or 8 bits, groups of 64, packed once."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from metalcore.ops.quant.matmul_int4 import matmul_int4, matmul_int8, pack_int4, pack_int8
from metalcore.ops.quant.quantize_int4 import (
    QuantizedInt4,
    QuantizedInt8,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
)

from ..harness import Bench, nbytes

_FORMS: dict[str, Any] = {
    "int4": (quantize_int4, dequantize_int4, pack_int4, matmul_int4, QuantizedInt4),
    "int8": (quantize_int8, dequantize_int8, pack_int8, matmul_int8, QuantizedInt8),
}


def _inputs(form: str, M: int, N: int, K: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    quantize, dequantize, pack, *_ = _FORMS[form]
    q = quantize(torch.randn(N, K, dtype=torch.float16))
    weight = dequantize(q, dtype)
    return torch.randn(M, K, dtype=dtype), q.packed, q.scale, q.bias, pack(q), weight


def _run(form: str, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor, *rest: Tensor) -> Any:
    *_, multiply, kind = _FORMS[form]
    return multiply(x, kind(packed, scale, bias, 64, x.shape[1]), tiles=rest[0])


def _torch(x: Tensor, *weight: Tensor) -> Tensor:
    return x @ weight[-1].mT


BENCHES = tuple(
    Bench(
        op="quant/matmul_int4",
        kind=form,
        run=partial(_run, form),
        peers={"torch": _torch},
        inputs=partial(_inputs, form),
        sweep=tuple({"M": m, "N": 4096, "K": 4096} for m in (1, 4, 16, 64, 256)),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x, *weight: x.shape[1],
        bytes_moved=lambda x, *weight: (
            nbytes(x, weight[3]) + len(x) * len(weight[-1]) * x.element_size()
        ),
        flops=lambda x, *weight: 2 * len(x) * weight[-1].numel(),
        plot_over="M",
    )
    for form in _FORMS
)
