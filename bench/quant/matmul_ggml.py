# SPDX-License-Identifier: MIT
"""x W^T for M rows of x and W [4096, 4096] in ggml's blocks, packed once.

torch multiplies the same weights in the dtype of x; so does ours for more than 8 rows in bfloat16
with activations of 8 bits, and up to 8 rows with 16. Beside products of 4 bits by others ours has
activations of 8 bits, as they have.
"""

from functools import partial

import torch
from torch import Tensor

from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.matmul_ggml import matmul_ggml, pack_ggml
from metalcore.ops.quant.quantize_ggml import dequantize_ggml, quantize_ggml

from .. import four_bits
from ..harness import Bench, Built, Function, nbytes


def _inputs(type: str, M: int, N: int, K: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    blocks = quantize_ggml(torch.randn(N, K), type)
    weight = dequantize_ggml(blocks, type, dtype)
    return torch.randn(M, K, dtype=dtype), blocks, pack_ggml(blocks, type), weight


def _run(
    type: str, activation: str, x: Tensor, blocks: Tensor, tiles: Tensor, weight: Tensor
) -> Tensor:
    return matmul_ggml(x, blocks, type, activation=activation, tiles=tiles)


def _torch(x: Tensor, blocks: Tensor, tiles: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


def _peers(type: str, activation: str) -> dict[str, Function | Built]:
    peers: dict[str, Function | Built] = {"torch": _torch}
    if activation == "int8":
        peers["ggml"] = Built(partial(four_bits.ggml, FORMATS[type].id))
        if type == "q4_0":
            peers["torch int4"] = Built(four_bits.torch_int4)
            peers["onnxruntime"] = Built(four_bits.onnxruntime)
    return peers


def _bench(type: str, activation: str, dtypes: tuple[torch.dtype, ...]) -> Bench:
    return Bench(
        op="quant/matmul_ggml",
        kind=type if activation == "auto" else f"{type}, {activation}",
        run=partial(_run, type, activation),
        peers=_peers(type, activation),
        inputs=partial(_inputs, type),
        sweep=tuple({"M": m, "N": 4096, "K": 4096} for m in (1, 4, 16, 64, 256)),
        dtypes=dtypes,
        truth=_torch,
        reduces_over=lambda x, blocks, tiles, weight: x.shape[1],
        bytes_moved=lambda x, blocks, tiles, weight: (
            nbytes(x, tiles) + len(x) * len(weight) * x.element_size()
        ),
        flops=lambda x, blocks, tiles, weight: 2 * len(x) * weight.numel(),
        plot_over="M",
    )


BENCHES = (
    *(
        _bench(type, "auto", (torch.float32, torch.bfloat16))
        for type in ("q4_0", "q4_K", "q6_K", "q8_0")
    ),
    *(_bench(type, "int8", (torch.bfloat16,)) for type in ("q4_0", "q4_K")),
)
