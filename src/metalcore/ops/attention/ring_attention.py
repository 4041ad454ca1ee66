# SPDX-License-Identifier: MIT
"""Attention of sequences that are split over processes: keys and values go round in a ring.

A process has some of the queries, keys and values. It attends to its own keys, hands them on to the
next process while those of the one before arrive, and so on until it has seen all. Parts of a
softmax are merged by their log(sum(exp(scores))):

    out = sum(exp(lse_i - lse) out_i),  lse = log(sum(exp(lse_i)))

In the backward pass keys and values go round once more, and their gradients with them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect, expect_float, refuse, shape
from metalcore._op import accumulate
from metalcore._sharding import is_dtensor
from metalcore.ops.attention._arguments import as_heads, as_scale
from metalcore.ops.attention.attention import backward, forward


class _Ring(NamedTuple):
    """The processes in a circle, and where their sequences are."""

    group: Any
    rank: int
    ranks: int
    causal: bool
    scale: float

    def of(self, step: int) -> int:
        """Whose keys are here after so many steps."""
        return (self.rank - step) % self.ranks

    def pass_on(self, tensors: list[Tensor]) -> list[Tensor]:
        """Give them to the next process, and take those of the one before."""
        if self.ranks == 1:
            return tensors
        dist = torch.distributed
        taken = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        after, before = (
            dist.get_global_rank(self.group, (self.rank + i) % self.ranks) for i in (1, -1)
        )
        moves = [dist.P2POp(dist.isend, x.contiguous(), after, self.group) for x in tensors]
        moves += [dist.P2POp(dist.irecv, x, before, self.group) for x in taken]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        return taken


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention where each process has a part of the sequence: no process holds all keys.

    Args:
        q: the queries of this process, [B, H, T, D]; or a DTensor that is sharded along T.
        k, v: its keys and values, [B, Hk, T, D] and [B, Hk, T, Dv]; all processes have as many.
        group: the processes, in the order of their parts; all, where none is given. DTensors have
            their own.
        causal: a query sees no keys after its own position in the whole sequence.
        scale: of the products, D^-0.5 if it is None.

    Returns:
        [B, H, T, Dv] for the queries of this process, with gradients; a DTensor for DTensors.

    Example:
        >>> y = metalcore.ring_attention(q, k, v, causal=True)
    """
    op = "ring_attention"
    if is_dtensor(q):
        return _of_dtensors(op, q, k, v, causal, scale)
    expect(torch.distributed.is_initialized(), op, "torch.distributed must be initialized")
    expect_float(op, q=q, k=k, v=v)
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] != k.shape[2]:
        refuse(op, f"q, k and v must be [B, H, T, D] of one T; got {shape(q)} and {shape(k)}")
    q, k, v = as_heads(op, q, k, v, are_packed=False)
    world = torch.distributed.group.WORLD if group is None else group
    rank, ranks = (f(world) for f in (torch.distributed.get_rank, torch.distributed.get_world_size))
    ring = _Ring(world, rank, ranks, causal, as_scale(scale, q))
    out: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return out


def _of_dtensors(op: str, q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Tensor:
    from torch.distributed.tensor import DTensor

    mesh, places = q.device_mesh, q.placements
    dims = [i for i, place in enumerate(places) if place.is_shard(2)]
    alike = all(is_dtensor(x) and x.placements == places for x in (k, v))
    if len(dims) != 1 or not alike or q.shape[2] % mesh.size(dims[0]):
        found = f"got {[getattr(x, 'placements', None) for x in (q, k, v)]}"
        refuse(op, f"DTensors must all be sharded along T, evenly, by one mesh dimension; {found}")
    parts = (x.to_local() for x in (q, k, v))
    group = mesh.get_group(dims[0])
    out = ring_attention(*parts, group=group, causal=causal, scale=scale)
    return DTensor.from_local(out, mesh, places, run_check=False)


class _RingAttention(torch.autograd.Function):
    """On what this process has. It is no op: processes meet in it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        own = [k, v]
        out = lse = None
        for step in range(ring.ranks):
            if _sees(ring, step):
                part, weight = forward(q, *own, *_how(ring, step))
                out, lse = _merged(out, lse, accumulate(part), weight)
            if step + 1 < ring.ranks:
                own = ring.pass_on(own)
        assert out is not None
        rounded = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, rounded, lse)
        return rounded

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        dq = torch.zeros_like(accumulate(q))
        # gradients travel with what they are of, and are at home after a whole round
        own = [k, v, torch.zeros_like(accumulate(k)), torch.zeros_like(accumulate(v))]
        for step in range(ring.ranks):
            if _sees(ring, step):
                grads = backward(dout, None, out, lse, q, *own[:2], *_how(ring, step))
                dq += grads[0]
                own[2] = own[2] + grads[1]
                own[3] = own[3] + grads[2]
            own = ring.pass_on(own)
        return dq.to(q.dtype), own[2].to(k.dtype), own[3].to(v.dtype), None


def _how(ring: _Ring, step: int) -> tuple[Any, ...]:
    """Masks and numbers as the op takes them. Of its own keys a query sees none after it."""
    return *(None,) * 5, ring.scale, None, None, 0 if ring.causal and step == 0 else None


def _sees(ring: _Ring, step: int) -> bool:
    """Whether queries here see any of the keys that are here now."""
    return not ring.causal or ring.of(step) <= ring.rank


def _merged(
    out: Tensor | None, lse: Tensor | None, part: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    if out is None or lse is None:
        return part, weight
    total = torch.logaddexp(lse, weight)
    # neither has seen a key: zeros stay zeros
    both = torch.where(total == -torch.inf, 0.0, total)
    share, other = (torch.exp(x - both)[..., None] for x in (lse, weight))
    return out * share + part * other, total
