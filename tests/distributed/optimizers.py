# SPDX-License-Identifier: MIT
"""What optimizers of all processes have to agree on: when to skip a step, and how to round."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import metalcore
from tests.distributed.launch import check

# of 1024 blocks: numbers of one block depend on each other
VALUES = 1024 * 128
Place = Callable[[Tensor], Tensor]


def _everywhere(x: Tensor) -> Tensor:
    """The same tensor of every process, one after the other."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return torch.stack(found)


def _rounded(place: Place, **how: Any) -> Tensor:
    """Which of a process's ones became smaller: half of them, in a step of half of what bfloat16
    can tell from one."""
    p = nn.Parameter(place(torch.ones(VALUES, dtype=torch.bfloat16)))
    p.grad = torch.ones_like(p)
    half = {"lr": 2.0**-9, "weight_decay": 0.0, "eps": 0.0}
    metalcore.MetalAdamW([p], **half, stochastic_rounding=True, **how).step()
    local = (p.to_local() if isinstance(p, DTensor) else p).detach()
    smaller = local < 1
    assert set(local.tolist()) == {1.0, 1 - 2.0**-8}
    assert 0.45 <= smaller.float().mean() <= 0.55
    return _everywhere(smaller.int())


def _are_the_same(found: Tensor) -> bool:
    return bool((found == found[0]).all())


def _have_nothing_in_common(found: Tensor) -> bool:
    """Whether any two processes agree in half of the values, as by chance."""
    n = len(found)
    alike = [(found[a] == found[b]).float().mean() for a in range(n) for b in range(a)]
    return all(0.45 <= x <= 0.55 for x in alike)


@check
def rounding_of_shards_and_copies() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(x: Tensor) -> Tensor:
        whole = torch.ones(VALUES * dist.get_world_size(), dtype=x.dtype)
        return distribute_tensor(whole, mesh, [Shard(0)])

    def copied(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Replicate()])

    assert _have_nothing_in_common(_rounded(sharded))
    assert _are_the_same(_rounded(copied))
    # plain tensors are copies, as DDP has them; with a group they are parts
    assert _are_the_same(_rounded(lambda x: x))
    assert _have_nothing_in_common(_rounded(lambda x: x, process_group=dist.group.WORLD))
    # another seed, other numbers
    assert not torch.equal(_rounded(sharded), _rounded(sharded, seed=1))
    assert torch.equal(_rounded(sharded), _rounded(sharded))
    return 6


@check
def rounding_of_copies_of_shards() -> int:
    """A mesh of two dimensions: four processes."""
    if dist.get_world_size() != 4:
        return 0
    mesh = init_device_mesh("cpu", (2, 2))

    def halves(x: Tensor) -> Tensor:
        whole = torch.ones(2 * VALUES, dtype=x.dtype)
        return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])

    found = _rounded(halves).view(2, 2, VALUES)
    assert _are_the_same(found)
    assert _have_nothing_in_common(found[0])
    return 1


def _skips(p: nn.Parameter, grad: Tensor, mine: Tensor, **how: Any) -> None:
    """A GradScaler and an infinite gradient in the last process: nobody steps, then all do."""
    optimizer = metalcore.MetalAdamW([p], lr=0.1, **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    before = mine.clone()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for is_infinite in (True, False):
        p.grad = grad * scaler.scale(torch.ones(()))
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if is_infinite and is_last:
            local[-1] = torch.inf
        seen = bool(local.isinf().any())
        assert seen == (is_infinite and is_last)
        scaler.step(optimizer)
        assert torch.equal(mine, before) == is_infinite
        assert float(optimizer.state[p]["step"]) == (not is_infinite)
        assert mine.isfinite().all()
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    # the first step of AdamW is of the size of lr, whatever the scale
    torch.testing.assert_close(mine, before * (1 - 0.1 * 0.01) - 0.1)


@check
def infinite_gradients_skip_the_step_everywhere() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.randn(4 * dist.get_world_size(), 3)
    p = nn.Parameter(distribute_tensor(rows, mesh, [Shard(0)]))
    _skips(p, distribute_tensor(torch.ones_like(rows), mesh, [Shard(0)]), p.to_local().detach())
    # parts that the optimizer is told of, as of ZeRO, FSDP1 and pipelines
    plain = nn.Parameter(torch.randn(5))
    _skips(plain, torch.ones(5), plain.detach(), process_group=dist.group.WORLD)
    return 2
