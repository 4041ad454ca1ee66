# SPDX-License-Identifier: MIT
"""Losses whose classes are split over processes, as tensor parallelism splits an output layer.

A process has the logits of its own classes. Three numbers per token cross the wire, and a fourth
with label smoothing: the largest of the processes' log(sum(exp(logits))), then sums of
exp(own - largest) and of the target's logit. The gradient is local.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore._check import refuse
from metalcore._op import accumulate, accumulate_dtype
from metalcore._sharding import is_dtensor
from metalcore.ops.train.cross_entropy import REDUCTIONS, forward, in_place


class Numbers(NamedTuple):
    """What a loss is made of, as the op of cross_entropy takes it."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: int


class Classes(NamedTuple):
    """Those that this process has."""

    group: Any
    """The processes that have the others; None where this one has all."""
    first: int
    all: int
    """How many there are in all processes."""


class Places(NamedTuple):
    """Where the tensors of a loss are, by dimension of the mesh."""

    mesh: Any
    input: list[Any]
    target: list[Any]
    of_sum: list[Any]
    """Of a loss that is added up over tokens."""
    token_groups: list[Any]
    """The processes that have other tokens."""
    class_dim: int | None
    """Of the mesh, that splits classes."""


def places_of(x: Any, class_dim: int, weight: Any = None) -> Places:
    """`x` has logits, whose classes are dimension `class_dim`; or hidden states there, and classes
    are the rows of `weight`. The target has the dimensions of x without that one."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = (x if is_dtensor(x) else weight).device_mesh
    found = Places(mesh, [], [], [], [], None)
    splits_classes = None
    for dim in range(mesh.ndim):
        place: Any = x.placements[dim] if is_dtensor(x) else Replicate()
        of_weight: Any = weight.placements[dim] if is_dtensor(weight) else Replicate()
        is_of_classes = place.is_shard(class_dim) if weight is None else of_weight.is_shard(0)
        is_of_tokens = type(place) is Shard and not place.is_shard(class_dim)
        if is_of_classes and splits_classes is None and not is_of_tokens:
            splits_classes = dim
            found.input.append(Shard(class_dim) if weight is None else Replicate())
            found.target.append(Replicate())
            found.of_sum.append(Replicate())
        elif is_of_tokens:
            at = place.dim - (place.dim > class_dim)
            found.input.append(place)
            found.target.append(Shard(at))
            found.of_sum.append(Partial())
            found.token_groups.append(mesh.get_group(dim))
        else:
            for places in (found.input, found.target, found.of_sum):
                places.append(Replicate())
    return found._replace(class_dim=splits_classes)


def classes_of(places: Places, count: int) -> Classes:
    """Of `count` classes those of this process."""
    if places.class_dim is None:
        return Classes(None, 0, count)
    mesh, dim = places.mesh, places.class_dim
    # as torch.chunk splits
    size = -(-count // mesh.size(dim))
    return Classes(mesh.get_group(dim), min(count, size * mesh.get_local_rank(dim)), count)


def moved(x: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """x at `placements`; a plain tensor is the same in all processes."""
    from torch.distributed.tensor import DTensor, Replicate

    if not is_dtensor(x):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif x.device_mesh != mesh:
        refuse("cross_entropy", "DTensors must be of one mesh; redistribute them")
    return x if list(x.placements) == list(placements) else x.redistribute(mesh, placements)


def local_operands(hidden: Any, weight: Any, bias: Any, places: Places) -> tuple[Any, Any, Any]:
    """Hidden states, and the weight and bias of the classes that are here. A process has a part of
    the gradient of what others have too."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dims = range(places.mesh.ndim)
    of_weight = [Shard(0) if d == places.class_dim else Replicate() for d in dims]
    grad_of_weight = [
        Shard(0) if d == places.class_dim else Partial() if p.is_shard() else Replicate()
        for d, p in zip(dims, places.input, strict=True)
    ]
    grad_of_hidden = [
        Partial() if d == places.class_dim else p for d, p in zip(dims, places.input, strict=True)
    ]
    x = moved(hidden, places.mesh, places.input).to_local(grad_placements=grad_of_hidden)
    w, b = (
        None
        if t is None
        else moved(t, places.mesh, of_weight).to_local(grad_placements=grad_of_weight)
        for t in (weight, bias)
    )
    return x, w, b


def weight_of_targets(
    target: Tensor, weight: Tensor | None, ignore_index: int, places: Places, dtype: torch.dtype
) -> Tensor:
    """The sum of the weights of all targets that count, over all processes."""
    counts = target != ignore_index
    own = counts.to(dtype) if weight is None else _picked(weight, target, counts).to(dtype)
    total = own.sum()
    for group in places.token_groups:
        torch.distributed.all_reduce(total, group=group)
    return total


def _picked(weight: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts, accumulate(weight.detach())[torch.where(counts, target, 0)], 0)


class Split:
    """The losses [n] of rows [n, C of this process], and the gradient of the logits."""

    def __init__(self, classes: Classes, weight: Tensor | None, numbers: Numbers) -> None:
        self.classes, self.weight, self.numbers = classes, weight, numbers

    def losses(self, logits: Tensor, target: Tensor, *, overwrite: bool) -> tuple[Tensor, "Rows"]:
        """`overwrite`: the memory of the logits is to become what `Rows.gradient` takes."""
        n = self.numbers
        kind = accumulate_dtype(logits)
        valid = target != n.ignore_index
        at = target - self.classes.first
        is_own = valid & (at >= 0) & (at < logits.shape[1])
        column = torch.where(is_own, at, 0)
        even = n.label_smoothing / max(1, self.classes.all)
        weight = None if self.weight is None else accumulate(self.weight.detach()).to(kind)
        mine = None if weight is None else weight[self.classes.first :][: logits.shape[1]]
        spread = None
        if even:
            capped = _capped(accumulate(logits), n.softcap)
            spread = capped.sum(1) if mine is None else capped @ mine
        if logits.shape[1]:
            picked = _capped(accumulate(logits.gather(1, column[:, None])[:, 0]), n.softcap)
            lse = self._local(logits, column, picked, overwrite)
        else:
            picked = logits.new_zeros(len(target), dtype=kind)
            lse = torch.full_like(picked, -torch.inf)
        own = torch.where(is_own, picked, 0)
        total, own, spread = self._over_processes(lse, own, spread)
        w = valid.to(kind) if weight is None else _picked(weight, target, valid)
        nll = (1 - n.label_smoothing) * w
        loss = nll * (total - own) + n.z_loss * w * total.square()
        mass = nll + 2 * n.z_loss * w * total
        if spread is not None:
            every = float(self.classes.all) if weight is None else weight.sum()
            loss = loss + even * (every * total - spread)
            mass = mass + even * every
        zero = loss.new_zeros(())
        rows = Rows(
            column,
            torch.where(valid, mass * torch.exp(lse - total), zero),
            torch.where(is_own, nll, zero),
            valid * even,
            picked,
            mine,
            n.softcap,
        )
        return torch.where(valid, loss, zero), rows

    def _local(self, logits: Tensor, column: Tensor, picked: Tensor, overwrite: bool) -> Tensor:
        """log(sum(exp(logits))) of the classes that are here, by the kernel of the loss."""
        args = (column, None, None, -100, 0.0, 0.0, self.numbers.softcap, REDUCTIONS["none"])
        if overwrite:
            found: Tensor = in_place(logits, *args)[1]
            return found
        losses: Tensor = forward(logits, *args, False)[0]
        return losses + picked

    def _over_processes(
        self, lse: Tensor, own: Tensor, spread: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.classes.group is None:
            return lse, own, spread
        dist, group = torch.distributed, self.classes.group
        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        sums = torch.stack([torch.exp(lse - top), own, *([] if spread is None else [spread])])
        dist.all_reduce(sums, group=group)
        return top + sums[0].log(), sums[1], None if spread is None else sums[2]


class Rows(NamedTuple):
    """What the gradient of the logits of each row is made of."""

    column: Tensor
    """Of the target, 0 if another process has it."""
    mass: Tensor
    """What the softmax over the classes that are here is times."""
    own: Tensor
    """What is taken from the logit of the target, where it is here."""
    even: Tensor
    picked: Tensor
    weight: Tensor | None
    softcap: float

    def gradient(self, softmax: Tensor, by: Tensor, logits: Tensor | None) -> Tensor:
        """In the memory of `softmax`, which is that of the classes that are here without 1 at
        `column`, as the kernel makes it; times `by`, [n] or a number. `logits` are needed for label
        smoothing with a softcap."""
        if softmax.shape[1] == 0:
            return softmax
        slope = _slope(self.picked, self.softcap)
        softmax.mul_((self.mass * by)[:, None].to(softmax.dtype))
        left = ((self.mass - self.own) * slope * by)[:, None].to(softmax.dtype)
        softmax.scatter_add_(1, self.column[:, None], left)
        if bool(self.even.any()):
            spread = (self.even * by)[:, None]
            if self.weight is not None:
                spread = spread * self.weight
            if self.softcap and logits is not None:
                spread = spread * _slope(_capped(accumulate(logits), self.softcap), self.softcap)
            softmax.sub_(spread)
        return softmax


def _capped(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x


def _slope(capped: Tensor, softcap: float) -> Tensor:
    return 1 - (capped / softcap).square() if softcap else torch.ones_like(capped)


class LossOfParts(torch.autograd.Function):
    """Losses [n] of logits [n, C of this process]; the gradient is made in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, split: Split) -> Tensor:
        losses, ctx.rows = split.losses(logits, target, overwrite=False)
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        rows: Rows = ctx.rows
        if logits.shape[1] == 0:
            return torch.zeros_like(logits), None, None
        args = (rows.column, None, None, -100, 0.0, 0.0, rows.softcap, REDUCTIONS["none"])
        softmax = forward(logits, *args, True)[1]
        return rows.gradient(softmax, dlosses, logits), None, None


def cross_entropy_of_parts(
    input: Any, target: Any, weight: Any, class_dim: int, numbers: Numbers
) -> Tensor:
    """The loss of logits whose classes are split over processes, a DTensor."""
    from torch.distributed.tensor import DTensor

    places = places_of(input, class_dim)
    mesh, count = places.mesh, input.shape[class_dim]
    local = moved(input, mesh, places.input).to_local()
    targets = moved(target, mesh, places.target).to_local()
    weights = weight.full_tensor() if is_dtensor(weight) else weight
    rows = local.movedim(class_dim, -1).reshape(-1, local.shape[class_dim])
    split = Split(classes_of(places, count), weights, numbers)
    losses: Tensor = LossOfParts.apply(rows, targets.reshape(-1), split)  # type: ignore[no-untyped-call]
    if numbers.reduction == REDUCTIONS["mean"]:
        flat = targets.reshape(-1)
        count = weight_of_targets(flat, weights, numbers.ignore_index, places, losses.dtype)
        losses = losses / count
    if numbers.reduction == REDUCTIONS["none"]:
        return of_tokens(losses.view(targets.shape).to(input.dtype), target, places)
    return DTensor.from_local(losses.sum().to(input.dtype), mesh, places.of_sum, run_check=False)


def of_tokens(losses: Tensor, target: Tensor, places: Places) -> Tensor:
    """The DTensor of one loss per token."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(target.shape, device="meta").stride()
    return DTensor.from_local(
        losses, places.mesh, places.target, run_check=False, shape=target.shape, stride=stride
    )
