# SPDX-License-Identifier: MIT
"""Parameters of which other processes have parts: DTensors, or those that a group is told for.

Everything takes plain tensors too, which are their own whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._sharding import is_dtensor
from metalcore.ops.train import adamw_step

# Far apart: the random numbers of two shards have nothing in common.
_BETWEEN_SEEDS = 0x9E3779B1


def part(x: Any) -> Tensor:
    """What this process has of x; to write to it is to write to x."""
    if not is_dtensor(x):
        return x  # type: ignore[no-any-return]
    with torch.no_grad():
        found: Tensor = x.to_local()
        return found


def whole(local: Tensor, like: Any) -> Tensor:
    """The DTensor that `local` is a part of, placed as `like` is."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    size = {"shape": like.shape, "stride": like.stride()}
    made: Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, **size
    )
    return made


def placed(x: Any, like: Any) -> Tensor:
    """x where `like` is. A plain x is the same in all processes."""
    if not is_dtensor(like):
        return gathered(x)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    if not is_dtensor(x):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if x.placements != like.placements:
        x = x.redistribute(mesh, like.placements)
    return x  # type: ignore[no-any-return]


def gathered(x: Any) -> Tensor:
    """The plain tensor that all processes have together."""
    if not is_dtensor(x):
        return x  # type: ignore[no-any-return]
    found: Tensor = x.full_tensor()
    return found


def local(p: Tensor, grad: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A parameter, its gradient and its state in this process."""
    if not is_dtensor(p):
        return p, grad, state
    return part(p), part(placed(grad, p)), {name: part(value) for name, value in state.items()}


def _split_dims(x: Any) -> tuple[int, ...]:
    """The dimensions of the mesh along which processes have different values."""
    return tuple(i for i, place in enumerate(x.placements) if not place.is_replicate())


def number(p: Any, process_group: Any) -> int:
    """What to add to a seed, so that shards get different numbers and copies of one the same."""
    place = 0
    if is_dtensor(p):
        for i in _split_dims(p):
            place = place * p.device_mesh.size(i) + p.device_mesh.get_local_rank(i)
    elif process_group is not None:
        place = torch.distributed.get_rank(process_group)
    return place * _BETWEEN_SEEDS


def norm(grads: Sequence[Tensor], process_group: Any = None) -> Tensor:
    """The norm over all gradients, all shards of them, and all processes of the group.

    Several devices meet on the first one's.
    """
    alike = list(_alike(placed_whole(g) for g in grads))
    norms = [adamw_step.norm([part(g) for g in some]) for _, some in alike]
    groups = [*(group for group, _ in alike), [] if process_group is None else [process_group]]
    if len(norms) == 1 and not any(groups):
        found: Tensor = norms[0]
        return found
    device = norms[0].device if norms else torch.device("cpu")
    # squares of large numbers are too large for float32
    kind = torch.float64 if device.type == "cpu" else torch.float32
    squares = [n.to(device, kind).square() for n in norms]
    for square, over in zip(squares, groups, strict=False):
        _reduce(square, over)
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=kind)
    _reduce(total, groups[-1])
    return total.sqrt().to(norms[0].dtype if norms else torch.float32)


def placed_whole(grad: Any) -> Tensor:
    """A gradient without sums that are left to do."""
    if not is_dtensor(grad) or not any(place.is_partial() for place in grad.placements):
        return grad  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate

    places = [Replicate() if place.is_partial() else place for place in grad.placements]
    moved: Tensor = grad.redistribute(grad.device_mesh, places)
    return moved


def _alike(grads: Iterable[Any]) -> Iterator[tuple[list[Any], list[Tensor]]]:
    """Gradients of one device that are split in the same way, and over which processes."""
    found: dict[Any, list[Tensor]] = {}
    for g in grads:
        how = (g.device_mesh, _split_dims(g)) if is_dtensor(g) else None
        found.setdefault((g.device, how), []).append(g)
    for (_, how), alike in found.items():
        yield [] if how is None else [how[0].get_group(i) for i in how[1]], alike


def _reduce(x: Tensor, groups: Iterable[Any], op: Any = None) -> None:
    for group in groups:
        torch.distributed.all_reduce(x, op or torch.distributed.ReduceOp.SUM, group)


def is_anywhere(found: Any, grads: Iterable[Tensor], process_group: Any) -> bool:
    """Whether any process has found an infinite gradient."""
    mark = part(found).detach().clone()
    groups = [group for groups, _ in _alike(g for g in grads if is_dtensor(g)) for group in groups]
    groups += [] if process_group is None else [process_group]
    if groups:
        _reduce(mark, groups, torch.distributed.ReduceOp.MAX)
    return bool(mark.item() != 0)
