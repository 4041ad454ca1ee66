# SPDX-License-Identifier: MIT
"""Launches of rope."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, metal_kernel, round_up

FILE = "train/rope.metal"


@metal_kernel("rope")
def plan(
    policy: Values,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads_dim: int,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
) -> Planned | None:
    if q.dtype not in MSL_TYPE:
        return None
    q_out = _empty_laid_out_as(q, heads_dim)
    k_out = q.new_empty(0) if k is None else _empty_laid_out_as(k, heads_dim)
    batches, length = q.shape[0], q.shape[3 - heads_dim]
    q_heads, heads = q.shape[heads_dim], q.shape[heads_dim]
    heads += 0 if k is None else k.shape[heads_dim]
    if q_out.numel() + k_out.numel() == 0:
        return [], (q_out, k_out)

    cos, sin = (_table(t, q.dtype, interleaved, rotary_dim) for t in (cos, sin))
    k = q if k is None else k
    together = [int(_together(x, heads_dim)) for x in (q, k)]
    q, k = _dense_rows(q), _dense_rows(k)
    strides = [[x.stride(d) for d in (0, heads_dim, 3 - heads_dim)] for x in (q, k)]
    sizes = (q.shape[-1], rotary_dim // 2, cos.shape[-1])
    numbers = (*sizes, *strides[0], *strides[1], *(x.storage_offset() for x in (q, k, cos, sin)))
    width = 4 if all(n % 4 == 0 for n in numbers) else 1
    size, half, row = (n // width for n in sizes)
    q_strides, k_strides = ([n // width for n in s] for s in strides)

    entries = cos if positions is None else positions
    per_batch = entries.dim() == (3 if positions is None else 2) and entries.shape[0] > 1
    picked = q.new_empty(1, dtype=torch.int64) if positions is None else positions
    run = min(heads, policy["heads_per_thread"])
    units = size if interleaved else size - half
    across = min(round_up(units, 4), policy["threads"])
    group = (across, min(length, policy["threads"] // across), 1)
    launch = Launch(
        FILE,
        "rope",
        f"{MSL_TYPE[q.dtype]}_{MSL_TYPE[cos.dtype]}_{width}_"
        + ("interleaved" if interleaved else "split"),
        (
            *(_memory(q), _memory(k), cos, sin, picked.contiguous()),
            *(_memory(q_out), _memory(q_out if k_out.numel() == 0 else k_out)),
            *(length, q_heads, heads, run, size, half),
            *(*q_strides, together[0], *k_strides, together[1]),
            *(int(positions is not None), length if per_batch else 0, cos.numel() // cos.shape[-1]),
            *(row, int(inverse)),
        ),
        threads=(round_up(units, group[0]), round_up(length, group[1]), batches * -(-heads // run)),
        group=group,
    )
    return [launch], (q_out, k_out)


def _together(x: Tensor, heads_dim: int) -> bool:
    """Whether the heads of a position are closer in memory than the positions of a head."""
    return x.stride(heads_dim) < x.stride(3 - heads_dim)


def _empty_laid_out_as(x: Tensor, heads_dim: int) -> Tensor:
    size = list(x.shape)
    if _together(x, heads_dim) == (heads_dim == 2):
        return x.new_empty(size)
    size[1], size[2] = size[2], size[1]
    return x.new_empty(size).transpose(1, 2)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _memory(x: Tensor) -> Tensor:
    """The memory that `x` spans, as a kernel takes it."""
    if x.numel() == 0:
        return x.new_empty(4)
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,))


def _table(t: Tensor, dtype: torch.dtype, interleaved: bool, rotary_dim: int) -> Tensor:
    """Cosines or sines as kernels take them: in q's dtype or float32, interleaved ones whole."""
    if interleaved and t.shape[-1] < rotary_dim:
        t = t.repeat_interleave(2, -1)
    return t.contiguous() if t.dtype == dtype else t.float().contiguous()
