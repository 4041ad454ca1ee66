# SPDX-License-Identifier: MIT
"""Rotary position embedding: y[j] = x[j] * cos[j] + sign(j) * x[partner(j)] * sin[j].

The partner of j is half the rotary dimension away (split-half), or its neighbour (interleaved); the
sign is - for the first of the two. What lies past the rotary dimension is passed through.
"""

from typing import Any

import torch
from torch import Tensor

from metalcore._autograd import pull_back
from metalcore._check import (
    dtype_name,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_tensors,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate, accumulate_dtype


def _letters(q: Any, k: Any, cos: Any, sin: Any, positions: Any, heads_dim: int, *_: Any) -> str:
    rows, table = ("bhsD", "bshD")[heads_dim - 1], "bsR" if positions is None else "PR"
    return f"{rows}, {rows}, {table}, {table}, bs -> {rows}, {rows}"


_rope = Op(
    "rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, int heads_dim,"
    " int rotary_dim, bool interleaved, bool inverse) -> (Tensor q_out, Tensor k_out)",
    sharding=_letters,
)


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, as transformers' function of this name does.

    Views made by `transpose` are read as they are, and the results lie in memory as q and k do.

    Args:
        q, k: [..., H, S, D], or [..., S, H, D] with `unsqueeze_dim=2`; the numbers of heads may
            differ.
        cos, sin: [S, R] or [B, S, R], of the dtype of q or another; R is the rotary dimension or
            half of it.
        position_ids: [S] or [B, S]: the rows of cos and sin [positions, R] to use. A position
            outside of them is an IndexError on the CPU, and gives NaN on a GPU.
        unsqueeze_dim: where the heads are: 1 before the positions, 2 after them.
        interleaved: rotate neighbours (GPT-J) rather than the two halves (Llama).
        rotary_dim: how many of the D values are rotated; default all.

    Returns:
        q and k, rotated, in their dtype.

    Example:
        >>> cos, sin = metalcore.RotaryEmbedding(64)(seq_len=10)
        >>> q, k = torch.randn(2, 8, 10, 64), torch.randn(2, 2, 10, 64)
        >>> q, k = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    """
    op = "apply_rotary_pos_emb"
    expect_tensors(op, q=q, k=k, cos=cos, sin=sin)
    if rotary_dim is None:
        rotary_dim = q.shape[-1]
    _expect(op, q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)
    args = (cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, False)
    if q.dim() == 4:
        q_out, k_out = _rope(q, k, *args)
        return q_out, k_out
    cos, sin, position_ids = _batch(cos, 3), _batch(sin, 3), _batch(position_ids, 2)
    q_out, k_out = _rope(_batch(q, 4), _batch(k, 4), cos, sin, position_ids, *args[3:])
    return q_out.view(q.shape), k_out.view(k.shape)


def apply_rotary_pos_emb_single(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Tensor:
    """`apply_rotary_pos_emb` for one tensor.

    Args:
        x: [..., H, S, D], or [..., S, H, D] with `unsqueeze_dim=2`.
        cos, sin, position_ids, unsqueeze_dim, interleaved, rotary_dim: as there.

    Returns:
        x, rotated, in its dtype.

    Example:
        >>> q = metalcore.apply_rotary_pos_emb_single(q, cos, sin)
    """
    if rotary_dim is None:
        rotary_dim = x.shape[-1]
    _expect(
        "apply_rotary_pos_emb_single", x, None, cos, sin, position_ids, unsqueeze_dim, rotary_dim
    )
    batched = x if x.dim() == 4 else _batch(x, 4)
    if x.dim() != 4:
        cos, sin, position_ids = _batch(cos, 3), _batch(sin, 3), _batch(position_ids, 2)
    y: Tensor = _rope(
        batched, None, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, False
    )[0]
    return y if x.dim() == 4 else y.view(x.shape)


def rotate_back(op: str, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of q and k [B, S, H, D] from those of what they were rotated to, for `op`."""
    size = dq.shape[-1]
    _expect(op, dq, dk, cos, sin, None, 2, size)
    q_out, k_out = _rope(dq, dk, cos, sin, None, 2, size, False, True)
    return q_out, k_out


def _batch(x: Any, rank: int) -> Any:
    """`x` with all leading dimensions in one, so that it has `rank`; tables without stay so."""
    if x is None or (rank < 4 and x.dim() < rank):
        return x
    return x.unsqueeze(0) if x.dim() < rank else x.flatten(0, x.dim() - rank)


def _expect(
    op: str,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    unsqueeze_dim: int,
    rotary_dim: int,
) -> None:
    expect_float(op, q=q, cos=cos, sin=sin)
    expect_float_or_none(op, k=k)
    expect_same_device(op, q=q, k=k, cos=cos, sin=sin, position_ids=position_ids)
    expect_same_dtype(op, cos=cos, sin=sin)
    if unsqueeze_dim not in (1, 2):
        refuse(op, f"unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    if q.dim() < 3:
        refuse(op, f"q must be [..., H, S, D] or [..., S, H, D], got {shape(q)}")
    positions = q.shape[-2] if unsqueeze_dim == 1 else q.shape[-3]
    if k is not None:
        expect_same_dtype(op, q=q, k=k)
        heads = -3 if unsqueeze_dim == 1 else -2
        wanted = [*q.shape]
        wanted[heads] = k.shape[heads] if k.dim() == q.dim() else -1
        if list(k.shape) != wanted:
            refuse(
                op,
                f"k must have the shape of q but for the heads; got q {shape(q)} and k {shape(k)}",
            )
    if not (0 < rotary_dim <= q.shape[-1] and rotary_dim % 2 == 0):
        refuse(
            op,
            f"rotary_dim must be even and at most the head size {q.shape[-1]}, got {rotary_dim}",
        )
    if not (
        cos.shape == sin.shape and cos.dim() >= 2 and cos.shape[-1] in (rotary_dim, rotary_dim // 2)
    ):
        refuse(
            op,
            f"cos and sin must both be [..., S, {rotary_dim}] or [..., S, {rotary_dim // 2}]; "
            f"got {shape(cos)} and {shape(sin)}; pass rotary_dim if fewer values are rotated",
        )
    _expect_positions(op, q, cos, position_ids, positions)


def _expect_positions(
    op: str, q: Tensor, cos: Tensor, position_ids: Tensor | None, positions: int
) -> None:
    """Who says which row belongs to a position: the rows themselves, or position_ids."""
    batches = ([positions], [1, positions], [*q.shape[:-3], positions])
    if position_ids is None:
        if list(cos.shape[:-1]) not in batches:
            refuse(
                op,
                f"cos and sin must have a row for each of the {positions} positions of "
                f"q {shape(q)}, got {shape(cos)}",
            )
        return
    if position_ids.dtype != torch.int64:
        raise TypeError(
            f"{op}: position_ids must be int64, got {dtype_name(position_ids.dtype)}; "
            "convert with .long()"
        )
    if not (cos.dim() == 2 and list(position_ids.shape) in batches):
        refuse(
            op,
            f"position_ids must be [{positions}] or {list(batches[2])} and pick rows of cos and "
            f"sin [positions, ...]; got position_ids {shape(position_ids)} and cos {shape(cos)}",
        )


@_rope.reference
def _(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads_dim: int,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    if cos.shape[-1] < rotary_dim:
        cos, sin = (
            t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)
        )

    def partner(x: Tensor) -> Tensor:
        if interleaved:
            return x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        return x.roll(rotary_dim // 2, -1)

    first = torch.arange(rotary_dim, device=q.device)
    first = first % 2 == 0 if interleaved else first < rotary_dim // 2
    cos, sin = (t.to(accumulate_dtype(q)).unsqueeze(heads_dim - 4) for t in (cos, sin))
    sin = torch.where(first, -sin, sin)
    if inverse:
        sin = partner(sin)

    def rotate(x: Tensor) -> Tensor:
        a = accumulate(x)
        turned, rest = a[..., :rotary_dim], a[..., rotary_dim:]
        y = torch.cat((turned * cos + partner(turned) * sin, rest), -1).to(x.dtype)
        return _laid_out_as(x, y, heads_dim)

    return rotate(q), q.new_empty(0) if k is None else rotate(k)


def _laid_out_as(x: Tensor, y: Tensor, heads_dim: int) -> Tensor:
    """`y` without gaps, with the heads of a position together if `x` has them so."""
    together = bool(x.stride(heads_dim) < x.stride(3 - heads_dim))
    if together == (heads_dim == 2):
        return y.contiguous()
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@_rope.example
def _(dtype: torch.dtype) -> Example:
    q, k = torch.randn(2, 6, 9, 40).to(dtype), torch.randn(2, 2, 9, 40).to(dtype)
    angle = torch.rand(9, 16)
    return Example(
        (q, k, angle.cos().to(dtype), angle.sin().to(dtype), None, 1, 32, False, False),
        reduces_over=2,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, positions, *ctx.how = inputs
    ctx.set_materialize_grads(False)
    ctx.has_k = k is not None
    learned = any(ctx.needs_input_grad[2:4])
    ctx.save_for_backward(cos, sin, positions, *((q, k) if learned else (None, None)))


@_rope.gradient(save=_save)
def _(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin, positions, q, k = ctx.saved_tensors
    *where, inverse = ctx.how
    dk = dk if ctx.has_k else None
    turned: list[Tensor | None] = [None, None]
    if dq is not None and dk is not None:
        turned = list(_rope(dq, dk, cos, sin, positions, *where, not inverse))
    else:
        turned = [
            None if d is None else _rope(d, None, cos, sin, positions, *where, not inverse)[0]
            for d in (dq, dk)
        ]
    dcos, dsin = None, None
    if any(ctx.needs_input_grad[2:4]) and not (dq is None and dk is None):
        dcos, dsin = _gradient_of_tables((q, k, cos, sin, positions, *ctx.how), dq, dk)
    return *turned, dcos, dsin, None, None, None, None, None


def _gradient_of_tables(
    args: tuple[Any, ...], dq: Tensor | None, dk: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of cos and sin, by differentiating the reference."""
    q, k, cos, sin, *rest = args
    return pull_back(lambda *tables: _rope.meaning(q, k, *tables, *rest), (cos, sin), (dq, dk))
