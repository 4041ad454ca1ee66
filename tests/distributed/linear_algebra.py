# SPDX-License-Identifier: MIT
"""One tall matrix whose rows are split over processes, and sums without error over all of them."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.distributed.launch import check


def _full(x: Any) -> Tensor:
    return x.full_tensor().detach() if hasattr(x, "full_tensor") else x.detach()


def _rows(x: Tensor) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(x, mesh, [Shard(0)])


@check
def tsqr_of_a_million_rows() -> list[float]:
    """Bit for bit what one process finds, orthonormal and without a residual."""
    A = torch.randn(1_000_000, 32)
    part = _rows(A)
    Q, R = metalcore.tsqr(part)
    one_Q, one_R = metalcore.tsqr(A)
    start = 1_000_000 // dist.get_world_size() * dist.get_rank()
    local = Q.to_local()
    assert torch.equal(local, one_Q[start : start + len(local)])
    assert torch.equal(R.to_local(), one_R)
    gram = torch.zeros(32, 32, dtype=torch.float64)
    for block in one_Q.split(100_000):
        gram += block.double().mT @ block.double()
    residual = (local.double() @ one_R.double() - part.to_local().double()).norm() / A.norm()
    found = [float((gram - torch.eye(32)).norm()), float(residual)]
    assert max(found) <= 1e-6 * 32**0.5, found
    return found


@check
def tall_matrices() -> float:
    """Uneven rows, gradients, and what is built on tsqr: orthogonalize, lstsq, svd."""
    A, B = torch.randn(203, 6), torch.randn(203, 2)
    part = _rows(A).requires_grad_()
    whole = A.clone().requires_grad_()
    worst = 0.0
    seeds = torch.randn(203, 6), torch.randn(6, 6)
    grads = []
    for given in (whole, part):
        Q, R = metalcore.tsqr(given)
        q, r = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (Q, R))
        # signs of rows of R, and of columns of Q, depend on the tree
        sign = torch.where(r.detach().diagonal() < 0, -1.0, 1.0)
        total = (q * sign * seeds[0]).sum() + (r * sign[:, None] * seeds[1]).sum()
        grads.append(_full(torch.autograd.grad(total, [given])[0]))
    worst = max(worst, error(grads[1], grads[0]))
    Q = metalcore.orthogonalize(part.detach())
    assert Q.placements == (Shard(0),)
    worst = max(worst, error(_full(Q).mT @ _full(Q), torch.eye(6)))
    U, S, V = metalcore.svd(part.detach())
    worst = max(worst, error(_full(S), metalcore.svdvals(A)))
    worst = max(worst, error(_full(U) * _full(S) @ _full(V).mT, A))
    for b in (B, B[:, 0]):
        true = metalcore.lstsq(A, b)
        found = metalcore.lstsq(part.detach(), _rows(b))
        for x, y in zip(found, true, strict=True):
            assert _full(x).shape == y.shape
            worst = max(worst, error(_full(x), y))
    assert worst <= 4 * tolerance("qr", torch.float32, 203), worst
    return worst


@check
def batches_need_no_communication() -> int:
    """A batch that is sharded: each process decomposes its own."""
    from torch.distributed.tensor.debug import CommDebugMode

    spd = torch.randn(6, 9, 9)
    spd = spd @ spd.mT + torch.eye(9)
    part = _rows(spd)
    names = ("cholesky", "eigh", "svd", "inv")
    # a check has to know of the matrices of all
    calls = [partial(getattr(metalcore, name), check=False) for name in names]
    calls += [metalcore.qr, metalcore.pinv, metalcore.polar, metalcore.det]
    with CommDebugMode() as traffic:
        for function in calls:
            outputs = function(part)
            for x in outputs if isinstance(outputs, tuple) else (outputs,):
                assert x.placements == (Shard(0),), function
    assert traffic.get_total_counts() == 0
    return len(calls)


@check
def exact_sums() -> None:
    x = torch.randn(10_001, dtype=torch.float64) * torch.logspace(-30, 30, 10_001).double()
    one = metalcore.precise.Accumulator().add(x)
    shared = metalcore.precise.Accumulator().add(_rows(x))
    assert shared.count == one.count
    assert torch.equal(shared.state_dict()["limbs"], one.state_dict()["limbs"])
    local = metalcore.precise.Accumulator().add(_rows(x).to_local()).all_reduce()
    assert torch.equal(local.sum(torch.float64), one.sum(torch.float64))
    rows = distribute_tensor(x.view(73, 137), _rows(x).device_mesh, [Replicate()])
    by_row = metalcore.precise.Accumulator((73,)).add(rows, dim=1)
    assert torch.equal(
        by_row.sum(), metalcore.precise.sum(x.view(73, 137), 1, level="exact").float()
    )
