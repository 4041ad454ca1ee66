# SPDX-License-Identifier: MIT
"""Every op on DTensors: replicated, and each tensor sharded along each of its dimensions."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from metalcore._where import map_tensors
from tests.distributed.launch import check


def placements_of(args: tuple[Any, ...]) -> Iterator[dict[int, int]]:
    """None sharded, and each tensor along each dimension that has more than one row."""
    yield {}
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            yield from ({i: d} for d in range(a.dim()) if a.shape[d] > 1)


def results(op: Op, args: list[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """All that the op determines, and the gradients of its inputs."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    outputs = map_tensors(_full, op(*args))
    found = op.results(outputs, [map_tensors(_full, a) for a in args])
    ends = [o for o in found if o.requires_grad]
    grads: list[Tensor | None] = []
    if ends and leaves:
        total = torch.stack([(o.double() * _weights(o)).sum() for o in ends]).sum()
        grads = [
            None if g is None else _full(g)
            for g in torch.autograd.grad(total, leaves, allow_unused=True)
        ]
    return [f.detach() for f in found], grads


def _weights(o: Tensor) -> Tensor:
    return torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _distributed(args: tuple[Any, ...], mesh: DeviceMesh, sharded: dict[int, int]) -> list[Any]:
    def moved(a: Any, place: Placement) -> Any:
        return map_tensors(lambda x: distribute_tensor(x.detach().clone(), mesh, [place]), a)

    return [
        moved(a, Shard(sharded[i]) if i in sharded else Replicate()) for i, a in enumerate(args)
    ]


@check
def all_ops() -> int:
    """Values and gradients of one process, wherever the tensors are. Returns how many cases."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cases, wrong = 0, []
    for name, op in Op.all.items():
        for number, sample in enumerate(op.samples):
            torch.manual_seed(number)
            args, over = sample(torch.float32)
            leaves = [
                i
                for i, a in enumerate(args)
                if op.is_differentiable and isinstance(a, Tensor) and a.is_floating_point()
            ]
            whole = [map_tensors(Tensor.clone, a) for a in args]
            values, grads = results(op, _with_gradients(whole, leaves))
            # some get none, such as the weights of classes
            leaves = [i for i, g in zip(leaves, grads, strict=True) if g is not None]
            truth = [*values, *(g for g in grads if g is not None)]
            allowed = 2 * tolerance(name, torch.float32, over)
            for sharded in placements_of(args):
                cases += 1
                given = _distributed(args, mesh, sharded)
                where = f"{name}, example {number}, sharded {sharded}"
                try:
                    values, grads = results(op, _with_gradients(given, leaves))
                except Exception as e:
                    wrong.append(f"{where}: {type(e).__name__}: {e}")
                    continue
                for i, (a, b) in enumerate(zip([*values, *grads], truth, strict=True)):
                    off = error(a, b) if b.is_floating_point() else float(not torch.equal(a, b))
                    if off > allowed:
                        wrong.append(f"{where}: result {i} is off by {off:.2g}")
    assert not wrong, "\n".join(wrong)
    return cases


def _with_gradients(args: list[Any], leaves: list[int]) -> list[Any]:
    return [a.requires_grad_() if i in leaves else a for i, a in enumerate(args)]
