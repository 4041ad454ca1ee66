# SPDX-License-Identifier: MIT
"""How MLX and torch launch their Metal kernels for the jobs that `beside` compares.

Nothing of theirs is here: texts come from the headers of the installed wheels, or from checkouts of
their sources, and sizes of launches are as their host code computes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metalcore.metal.program import MSL_TYPE

_SIMD = 32
_LARGEST = 1024
_EPS = np.float32(1e-6)
_MLX_KERNELS = "mlx/backend/metal/kernels"
_TORCH_KERNELS = "aten/src/ATen/native/mps/kernels"


class Missing(Exception):
    """A kernel whose text is not on this machine."""


@dataclass(frozen=True)
class Peer:
    """One launch. `kernel` is the expression of a template's instance."""

    text: str
    kernel: str
    args: tuple[Any, ...]
    threads: Sequence[int]
    group: Sequence[int]
    include: tuple[str, ...]
    constants: dict[int, bool | int] = field(default_factory=dict)

    @property
    def source(self) -> str:
        instance = f'template [[host_name("peer")]] [[kernel]] decltype({self.kernel})'
        return f"{self.text}\n{instance} {self.kernel};\n"


@dataclass(frozen=True)
class Sources:
    """Where texts are: a folder with checkouts named `mlx` and `pytorch`, or only the wheels."""

    checkouts: Path | None = None

    def mlx(self, *files: str) -> tuple[str, tuple[str, ...]]:
        """The text of headers or of a kernel file, and the folders it includes from."""
        wheel = _package("mlx") / "include"
        if not (wheel / _MLX_KERNELS).is_dir():
            raise Missing("the mlx wheel here has no Metal headers")
        if files[0].endswith(".metal"):
            return self._checkout("mlx", f"{_MLX_KERNELS}/{files[0]}"), (str(wheel),)
        lines = ["#include <metal_stdlib>", "using namespace metal;"]
        lines += [f'#include "{_MLX_KERNELS}/{name}"' for name in ("utils.h", *files)]
        return "\n".join(lines), (str(wheel),)

    def torch(self, file: str) -> tuple[str, tuple[str, ...]]:
        """The same for a kernel file of torch."""
        text = self._checkout("pytorch", f"{_TORCH_KERNELS}/{file}")
        return text, (str(Path(torch.__file__).parent / "include"),)

    def _checkout(self, name: str, file: str) -> str:
        path = self.checkouts / name / file if self.checkouts else None
        if path is None or not path.is_file():
            raise Missing(f"{name}: {file} is in no wheel; it needs a checkout")
        return path.read_text()


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Missing(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _row_group(n: int, reads: int) -> int:
    """Threads for a row of n, `reads` values each, in whole simdgroups."""
    return -(-n // (reads * _SIMD)) * _SIMD


def _u32(n: int) -> Any:
    return np.uint32(n)


def mlx_softmax(at: Sources, x: Tensor) -> list[Peer]:
    rows, n = x.shape
    looped = n > 4096
    group = _LARGEST if looped else _row_group(n, 4)
    name = f"softmax_{'looped' if looped else 'single_row'}<{MSL_TYPE[x.dtype]}, float>"
    args = (x, torch.empty_like(x), np.int32(n))
    text, include = at.mlx("softmax.h")
    return [Peer(text, name, args, [rows * group], [group], include)]


def mlx_cross_entropy(at: Sources, x: Tensor, target: Tensor) -> list[Peer]:
    """Loss and gradient are two launches, of the largest group."""
    rows, n = x.shape
    loss, cotangent = torch.empty(rows), torch.ones(rows)
    targets, size = target.int(), np.int32(n)
    text, include = at.mlx("cross_entropy.h")
    launch = ([rows * _LARGEST], [_LARGEST], include)
    kind = MSL_TYPE[x.dtype]
    return [
        Peer(text, f"cross_entropy<{kind}>", (x, targets, loss, size), *launch),
        Peer(
            text,
            f"cross_entropy_vjp<{kind}>",
            (x, targets, loss, cotangent, torch.empty_like(x), size),
            *launch,
        ),
    ]


def mlx_rms_norm(at: Sources, x: Tensor, weight: Tensor) -> list[Peer]:
    rows, n = x.shape
    group = _row_group(n, 4)
    text, include = at.mlx("rms_norm.metal")
    args = (x, weight, torch.empty_like(x), _EPS, _u32(n), _u32(1))
    name = f"rms_single_row<{MSL_TYPE[x.dtype]}>"
    return [Peer(text, name, args, [rows * group], [group], include, {20: True, 21: False})]


def mlx_rms_norm_backward(at: Sources, x: Tensor, weight: Tensor) -> list[Peer]:
    """A row of dweight for each row of x, which a second launch adds up."""
    rows, n = x.shape
    group = _row_group(n, 4)
    text, include = at.mlx("rms_norm.metal")
    dx, dweight = torch.empty_like(x), torch.empty_like(x)
    args = (x, weight, torch.randn_like(x), dx, dweight, _EPS, _u32(n), _u32(1))
    name = f"vjp_rms_single_row<{MSL_TYPE[x.dtype]}>"
    peer = Peer(text, name, args, [rows * group], [group], include, {20: True, 21: False})
    return [peer, _mlx_sum_of_rows(at, dweight)]


def mlx_layer_norm(at: Sources, x: Tensor, weight: Tensor, bias: Tensor) -> list[Peer]:
    rows, n = x.shape
    group = _row_group(n, 8)
    text, include = at.mlx("layer_norm.metal")
    args = (x, weight, bias, torch.empty_like(x), _EPS, _u32(n), _u32(1), _u32(1))
    name = f"layer_norm_single_row<{MSL_TYPE[x.dtype]}>"
    return [Peer(text, name, args, [rows * group], [group], include, {20: True})]


def mlx_layer_norm_backward(at: Sources, x: Tensor, weight: Tensor, bias: Tensor) -> list[Peer]:
    """A row of dweight for each row of x; two launches more add up its rows, and those of dy."""
    rows, n = x.shape
    group = _row_group(n, 8)
    text, include = at.mlx("layer_norm.metal")
    dy, dx, dweight = torch.randn_like(x), torch.empty_like(x), torch.zeros_like(x)
    args = (x, weight, dy, dx, dweight, _EPS, _u32(n), _u32(1))
    name = f"vjp_layer_norm_single_row<{MSL_TYPE[x.dtype]}>"
    peer = Peer(text, name, args, [rows * group], [group], include, {20: True})
    return [_mlx_sum_of_rows(at, dy), peer, _mlx_sum_of_rows(at, dweight)]


def _mlx_sum_of_rows(at: Sources, x: Tensor) -> Peer:
    """One pass over the columns, 32 to a group of 256 threads."""
    rows, n = x.shape
    text, include = at.mlx("atomic.h", "reduction/ops.h", "reduction/reduce_col.h")
    kept = (np.zeros(1, np.int32), np.zeros(1, np.int64), np.int32(0))
    summed = (np.array([rows], np.int32), np.array([n], np.int64), np.int32(1))
    sizes = (np.uint64(rows), np.int64(n), *kept, *summed, np.uint64(1), np.int64(0))
    kind = MSL_TYPE[x.dtype]
    name = f"col_reduce_looped<{kind}, {kind}, Sum<{kind}>, uint, 1, 32, 32>"
    args = (x, x.new_empty(n), *sizes)
    return Peer(text, name, args, [256 * -(-n // 32)], [256], include)


def mlx_rope(at: Sources, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Peer]:
    """Queries and keys are two launches, which compute the angles."""
    text, include = at.mlx("rope.metal")
    launches = []
    for x in (q, k):
        batch, heads, length, size = x.shape
        strides = np.array([length * size, size, 1], np.int64)
        offset = np.zeros(1, np.int32)
        one, base = np.float32(1), np.float32(np.log2(10000.0))
        args = (x, torch.empty_like(x), offset, one, strides, strides, np.int64(0))
        grid = (size // 2, length, batch * -(-heads // 4))
        launches.append(
            Peer(
                text,
                f"rope<{MSL_TYPE[x.dtype]}, int32_t>",
                (*args, np.int32(heads), None, None, base),
                grid,
                _mlx_block(grid),
                include,
                {1: True, 2: False, 3: False},
            )
        )
    return launches


def mlx_attention(at: Sources, q: Tensor, k: Tensor, v: Tensor) -> list[Peer]:
    """32 queries by 16 keys for heads of 128, by 4 simdgroups."""
    batch, heads, length, size = q.shape
    rows, keys = 32, 16
    per_head = [heads * length * size, length * size, size]
    few = [k.shape[1] * length * size, length * size, size]
    blocks = (length // rows, length // keys)
    sizes = np.array(
        [batch, heads, size, length, length, heads // k.shape[1], 0, *blocks, *blocks, 0, 0, 0],
        np.int32,
    )
    sizes[6:7].view(np.float32)[0] = size**-0.5
    strides = np.array([*per_head, *few, *few, *per_head], np.int64)
    params = np.concatenate([sizes.view(np.uint8), strides.view(np.uint8)])
    text, include = at.mlx("steel/attn/kernels/steel_attention.h")
    name = f"attention<{MSL_TYPE[q.dtype]}, {rows}, {keys}, {size}, {size}, 4, 1, bool, float>"
    args = (q, k, v, torch.empty_like(q), params, None, None, None, None)
    constants = {200: True, 201: True, 300: False, 301: True, 302: False, 303: False}
    threads = [32 * blocks[0], 4 * heads, batch]
    return [Peer(text, name, args, threads, [32, 4, 1], include, constants)]


def mlx_attention_decode(at: Sources, q: Tensor, k: Tensor, v: Tensor) -> list[Peer]:
    """A threadgroup for each head of q, in one pass."""
    batch, heads, _, size = q.shape
    length = k.shape[2]
    strides = (np.uint64(length * size), np.uint64(size)) * 2
    text, include = at.mlx("sdpa_vector.h")
    sizes = (np.int32(heads // k.shape[1]), np.int32(length), *strides, np.float32(size**-0.5))
    args = (q, k, v, torch.empty_like(q), *sizes, *(None,) * 7)
    constants = {20: False, 21: False, 22: False, 23: False, 24: False, 25: False, 26: 1}
    name = f"sdpa_vector<{MSL_TYPE[q.dtype]}, {size}, {size}>"
    return [Peer(text, name, args, [_LARGEST * batch * heads], [_LARGEST], include, constants)]


def mlx_matmul_int4(
    at: Sources, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor
) -> list[Peer]:
    """One row of x by simdgroups of 4 rows of W, more by tiles of 32 x 32."""
    (M, K), N = x.shape, packed.shape[0]
    group = K // scale.shape[1]
    words = packed.numpy().view(np.uint32)
    text, include = at.mlx("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
    none = (np.int32(0), np.zeros(1, np.int32), np.zeros(1, np.int64))
    weight, y = (words, scale, bias, x, x.new_empty(M, N)), MSL_TYPE[x.dtype]
    rest = (*none, *none, np.zeros(1, np.int64), np.zeros(1, np.int64))
    if M == 1:
        name = f"affine_qmv_fast<{y}, {group}, 4, false>"
        args = (*weight, np.int32(K), np.int32(N), *rest)
        return [Peer(text, name, args, [32, N // 4, 1], [32, 2, 1], include)]
    name = f"affine_qmm_t<{y}, {group}, 4, true, false>"
    args = (*weight, np.int32(K), np.int32(N), np.int32(M), *rest)
    threads = [N, 2 * -(-M // 32), 2]
    return [Peer(text, name, args, threads, [32, 2, 2], include)]


def _mlx_block(grid: tuple[int, int, int]) -> list[int]:
    """Powers of two, raised in turns up to 1024 threads."""
    block, threads = [1, 1, 1], 1
    while True:
        before = threads
        for i in range(3):
            if threads < _LARGEST and grid[i] >= 2 * block[i]:
                block[i], threads = 2 * block[i], 2 * threads
        if threads == before:
            return block


def torch_rms_norm(at: Sources, x: Tensor, weight: Tensor) -> list[Peer]:
    rows, n = x.shape
    group = _row_group(n, 4)
    text, include = at.torch("RMSNorm.metal")
    args = (x, weight, torch.empty_like(x), _EPS, _u32(n), _u32(1))
    name = f"rms_single_row<{MSL_TYPE[x.dtype]}>"
    return [Peer(text, name, args, [rows * group], [group], include)]


def torch_layer_norm(at: Sources, x: Tensor, weight: Tensor, bias: Tensor) -> list[Peer]:
    rows, n = x.shape
    group = _row_group(n, 4)
    text, include = at.torch("LayerNorm.metal")
    moments = (x.new_empty(rows), x.new_empty(rows))
    options = (_u32(n), _EPS, np.int32(1), np.int32(1))
    args = (x, torch.empty_like(x), *moments, *options, weight, bias)
    name = f"layer_norm_single_row<{MSL_TYPE[x.dtype]}, uint>"
    return [Peer(text, name, args, [rows * group], [group], include)]


def torch_silu(at: Sources, x: Tensor) -> list[Peer]:
    return _torch_unary(at, x, "silu_functor")


def torch_gelu(at: Sources, x: Tensor) -> list[Peer]:
    return _torch_unary(at, x, "gelu_functor")


def torch_gelu_tanh(at: Sources, x: Tensor) -> list[Peer]:
    return _torch_unary(at, x, "gelu_tanh_functor")


def _torch_unary(at: Sources, x: Tensor, functor: str) -> list[Peer]:
    """Four values a thread."""
    text, include = at.torch("ActivationKernel.metal")
    name = f"c10::metal::unary_dense<{MSL_TYPE[x.dtype]}, {functor}>"
    args = (torch.empty_like(x), x, _u32(x.numel()))
    return [Peer(text, name, args, [x.numel() // 4], [_LARGEST], include)]


Launches = Callable[..., list[Peer]]
