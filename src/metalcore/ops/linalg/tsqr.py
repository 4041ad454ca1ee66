# SPDX-License-Identifier: MIT
"""QR of a tall matrix by a tree: of blocks of its rows, then of pairs of their R.

Blocks and pairs depend on the size alone. A process that has whole blocks computes their part of
the tree; the R of the processes, N x N each, are all that they exchange. So the result is the same,
bit for bit, for every number of processes that halves the tree evenly, and for one.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect_float, refuse, shape
from metalcore._op import accumulate
from metalcore._sharding import is_dtensor
from metalcore.ops.linalg.qr import qr
from metalcore.ops.linalg.trsm import trsm

_MOST_BLOCKS = 64


class _Pair(NamedTuple):
    """Of two matrices, one above the other: their Q, and the rows of the first."""

    Q: Tensor
    first: int


class _Rows(NamedTuple):
    """Which rows of all this process has."""

    group: Any
    ranks: int
    start: int
    all: int


def tsqr(A: Tensor) -> tuple[Tensor, Tensor]:
    """QR decomposition of a tall matrix, whose rows may be split over processes.

    Args:
        A: [M, N] with M >= N; a DTensor that is sharded along its rows stays so. The result is bit
            for bit that of one process where M can be divided by the number of processes, and this
            is a power of two, up to 64 and to M / (4 N).

    Returns:
        Q [M, N], orthonormal whatever the rank of A, placed as A is, and R [N, N], replicated. Both
        have gradients.

    Example:
        >>> Q, R = metalcore.tsqr(torch.randn(100_000, 16))
    """
    expect_float("tsqr", A=A)
    if A.dim() != 2 or A.shape[0] < A.shape[1]:
        refuse("tsqr", f"A must be [M, N] with M >= N, got {shape(A)}; use qr")
    wide = accumulate(A)
    if not is_dtensor(wide):
        Q, R = _Tsqr.apply(wide, _Rows(None, 1, 0, A.shape[0]))  # type: ignore[no-untyped-call]
        return Q.to(A.dtype), R.to(A.dtype)
    local, rows, placements = _by_rows(wide)
    Q, R = _Tsqr.apply(local, rows)  # type: ignore[no-untyped-call]
    return _wrapped(Q.to(A.dtype), R.to(A.dtype), wide, placements)


def is_split_by_rows(A: Any) -> bool:
    """Whether processes have different rows of one tall matrix."""
    if not is_dtensor(A) or A.dim() != 2 or A.shape[0] < A.shape[1]:
        return False
    return any(place.is_shard(0) for place in A.placements)


def _by_rows(A: Any) -> tuple[Tensor, _Rows, list[Any]]:
    """The rows that this process has, along one dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = A.device_mesh
    dim = next((i for i, place in enumerate(A.placements) if place.is_shard(0)), None)
    places: list[Any] = [Shard(0) if i == dim else Replicate() for i in range(mesh.ndim)]
    if list(A.placements) != places:
        A = A.redistribute(mesh, places)
    if dim is None:
        return A.to_local(), _Rows(None, 1, 0, A.shape[0]), places
    each = -(-A.shape[0] // mesh.size(dim))
    start = min(A.shape[0], each * mesh.get_local_rank(dim))
    return A.to_local(), _Rows(mesh.get_group(dim), mesh.size(dim), start, A.shape[0]), places


def _wrapped(Q: Tensor, R: Tensor, A: Any, places: list[Any]) -> tuple[Tensor, Tensor]:
    from torch.distributed.tensor import DTensor, Replicate

    mesh, everywhere = A.device_mesh, [Replicate()] * A.device_mesh.ndim
    size = {"shape": A.shape, "stride": (A.shape[1], 1)}
    whole: Any = DTensor.from_local(Q, mesh, places, run_check=False, **size)
    return whole, DTensor.from_local(R, mesh, everywhere, run_check=False)


def _blocks(rows: _Rows, n: int, count: int) -> list[int]:
    """How many rows each block has that is in the `count` rows of this process."""
    blocks = 1
    while 2 * blocks <= _MOST_BLOCKS and rows.all >= 2 * blocks * 4 * max(1, n):
        blocks *= 2
    edges = [i * rows.all // blocks for i in range(blocks + 1)]
    inside = [e for e in edges if rows.start < e < rows.start + count]
    cuts = [rows.start, *inside, rows.start + count]
    return [b - a for a, b in itertools.pairwise(cuts)]


def _up(parts: list[Tensor]) -> tuple[list[list[_Pair | None]], Tensor]:
    """The Q of each level of pairs, and the R of all. One without a partner goes up as it is."""
    levels: list[list[_Pair | None]] = []
    while len(parts) > 1:
        pairs: list[_Pair | None] = []
        above = []
        for first, second in zip(parts[::2], parts[1::2], strict=False):
            Q, R = qr(torch.cat([first, second]))
            pairs.append(_Pair(Q, first.shape[0]))
            above.append(R)
        if len(parts) % 2:
            pairs.append(None)
            above.append(parts[-1])
        levels.append(pairs)
        parts = above
    return levels, parts[0]


def _down(levels: list[list[_Pair | None]], top: Tensor) -> list[Tensor]:
    """What each Q at the foot of the tree is to be multiplied by."""
    tops = [top]
    for pairs in reversed(levels):
        below = []
        for pair, above in zip(pairs, tops, strict=True):
            if pair is None:
                below.append(above)
            else:
                both = pair.Q @ above
                below += [both[: pair.first], both[pair.first :]]
        tops = below
    return tops


class _Tsqr(torch.autograd.Function):
    """On the rows of this process. It is no op: processes meet in it."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        n = A.shape[1]
        found = [qr(block) for block in A.split(_blocks(rows, n, A.shape[0]))]
        levels, R = _up([r for _, r in found])
        top = torch.eye(R.shape[0], n, dtype=A.dtype, device=A.device)
        if rows.group is not None:
            R, top = _meet(R, n, rows)
        tops = _down(levels, top)
        Q = torch.cat([q @ t for (q, _), t in zip(found, tops, strict=True)])
        ctx.rows = rows
        ctx.save_for_backward(Q, R)
        return Q, R

    @staticmethod
    def backward(ctx: Any, dQ: Tensor, dR: Tensor) -> tuple[Tensor, None]:
        # (dQ + Q sym(M)) R^-T with M = triu(dR R^T - Q^T dQ), sym(M) = M + M^T - diag(M)
        Q, R = ctx.saved_tensors
        inner = Q.mT @ dQ
        if ctx.rows.group is not None:
            torch.distributed.all_reduce(inner, group=ctx.rows.group)
        M = (dR @ R.mT - inner).triu()
        sides = dQ + Q @ (M + M.triu(1).mT)
        return trsm(R, sides.mT, lower=False).mT, None


def _meet(R: Tensor, n: int, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The R of all processes, and what the Q of this one's is to be multiplied by."""
    own = R.shape[0]
    filled = torch.nn.functional.pad(R, (0, 0, 0, n - own)).contiguous()
    everyone = [torch.empty_like(filled) for _ in range(rows.ranks)]
    torch.distributed.all_gather(everyone, filled, group=rows.group)
    levels, whole = _up(everyone)
    tops = _down(levels, torch.eye(n, dtype=R.dtype, device=R.device))
    return whole, tops[torch.distributed.get_rank(rows.group)][:own]
