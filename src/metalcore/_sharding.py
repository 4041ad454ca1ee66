# SPDX-License-Identifier: MIT
"""How an op meets DTensors: of which dimensions a process may have a part.

An op says what its dimensions are, a letter each, for its tensors and for its results:

    Op("rms_norm(Tensor x, Tensor? weight, ...) -> (Tensor y, Tensor rstd)",
       sharding="*N, N -> *N, *")

Of a small letter each process may have a part; of a capital one the op needs the whole, and what is
sharded there is gathered. `*` are all dimensions before the letters that follow, and there may be
parts of each. A result that lacks the letter that is split is a sum over the processes (Partial). A
tensor of fewer dimensions lacks the first letters; one of size 1 where others have more is
repeated. Where a letter has several sizes (heads of queries and of keys), all are split, if all can
be divided evenly. Tensors in lists are gathered.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore._check import refuse, shape
from metalcore._trace import tensors

Rule = str | Callable[..., str]
"""The letters, or a function of the op's arguments that tells them."""


class _Split(NamedTuple):
    """What the processes have parts of."""

    letters: list[str | None]
    """For each dimension of the mesh the letter that it splits, or None."""
    sizes: dict[str, set[int]]
    """All sizes of each letter but 1."""
    ranks: dict[str, int]
    """In how many parts a letter is."""

    def whole(self, letter: str, part: int) -> int:
        """The size of a result's dimension of which this process has `part`."""
        sizes = self.sizes[letter]
        return part * self.ranks[letter] if len(sizes) > 1 else max(sizes, default=1)


_modules, _NAME = sys.modules, "torch.distributed.tensor"


def are_sharded(args: Iterable[Any]) -> bool:
    """Whether DTensors are among the arguments, also in lists."""
    # without them nobody has loaded their module, which takes as long as all of metalcore
    return _NAME in _modules and any(is_dtensor(x) for x in tensors(args))


def is_dtensor(x: Any) -> bool:
    return type(x).__name__ == "DTensor"


def replicated(x: Tensor, like: Any) -> Tensor:
    """x, which all processes have, to meet `like`: a DTensor where that is one."""
    if not is_dtensor(like):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Sharding:
    """An op on DTensors: on what is local, of which the results are parts."""

    def __init__(
        self, op: str, rule: Rule, places: Sequence[int], written: Sequence[int], results: int
    ) -> None:
        """`places`: of the arguments that have letters; `written`: of those that are written to."""
        self.op, self.rule = op, rule
        self.places, self.written, self.results = places, written, results

    def letters(self, args: Sequence[Any]) -> tuple[dict[int, str], list[str]]:
        """Of each tensor that is there, and of each result."""
        text = self.rule(*args) if callable(self.rule) else self.rule
        before, _, after = text.partition("->")
        words = [w.strip() for w in before.split(",")] if text else [""] * len(self.places)
        found = {i: w for i, w in zip(self.places, words, strict=True) if args[i] is not None}
        return found, [w.strip() for w in after.split(",")] if text else [""] * self.results

    def compute(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """`function(*args)`, and its gradient, on local tensors."""
        letters, results = self.letters(args)
        mesh = _mesh_of(self.op, args)
        split = _choose(mesh, [(args[i], word) for i, word in letters.items()])
        given = list(args)
        for i, a in enumerate(args):
            if isinstance(a, Tensor):
                given[i] = _local(a, letters[i], split)
            elif isinstance(a, (list, tuple)):
                given[i] = [_local(x, "", split) if isinstance(x, Tensor) else x for x in a]
        outputs = function(*given)
        for i in self.written:
            if isinstance(args[i], Tensor):
                _write_back(args[i], given[i], letters[i], split)
            elif args[i] is not None:
                for x, y in zip(args[i], given[i], strict=True):
                    _write_back(x, y, "", split)
        if outputs is None:
            return None
        if isinstance(outputs, Tensor):
            return _whole(outputs, results[0], mesh, split)
        return tuple(_whole(o, w, mesh, split) for o, w in zip(outputs, results, strict=True))


def _mesh_of(op: str, args: Sequence[Any]) -> Any:
    meshes = []
    for a in args:
        for x in a if isinstance(a, (list, tuple)) else (a,):
            if is_dtensor(x):
                meshes.append(x.device_mesh)
            elif isinstance(x, Tensor) and x.dim():
                way_out = "distribute it too, or give all of them local (to_local)"
                refuse(op, f"got DTensors and a plain tensor {shape(x)}; {way_out}")
    if any(mesh != meshes[0] for mesh in meshes):
        refuse(op, "DTensors must be of one mesh; redistribute them")
    return meshes[0]


def _by_letter(word: str, x: Tensor) -> list[str]:
    """The letter of each dimension; those of a star are numbered from its end. What is absent is
    empty, in one dimension, and has none."""
    rank = x.dim()
    if rank < len(word) and x.numel() == 0:
        return ["?"] * rank
    if word.startswith("*"):
        count = rank - len(word) + 1
        return [f"*{count - i}" for i in range(count)] + list(word[1:])
    return list(word[len(word) - rank :].rjust(rank, "?"))


def _choose(mesh: Any, given: list[tuple[Tensor, str]]) -> _Split:
    """What to split: as the largest tensor is, where the op can."""
    sizes: dict[str, set[int]] = {}
    for x, word in given:
        for letter, size in zip(_by_letter(word, x), x.shape, strict=True):
            sizes.setdefault(letter, set()).update({size} - {1})
    split = _Split([], sizes, dict.fromkeys(sizes, 1))
    in_order = sorted(given, key=lambda pair: -pair[0].numel())
    for dim in range(mesh.ndim):
        wanted = (_letter_of(x, word, dim) for x, word in in_order)
        found = next((w for w in wanted if w and _can_split(w, mesh.size(dim), split)), None)
        split.letters.append(found)
        if found:
            split.ranks[found] *= mesh.size(dim)
    return split


def _letter_of(x: Any, word: str, dim: int) -> str | None:
    """What dimension `dim` of the mesh splits of x."""
    place = x.placements[dim] if is_dtensor(x) else None
    if place is None or not place.is_shard() or x.shape[place.dim] == 1:
        return None
    letter: str = _by_letter(word, x)[place.dim]
    return letter


def _can_split(letter: str, ranks: int, split: _Split) -> bool:
    sizes, count = split.sizes[letter], split.ranks[letter] * ranks
    even = len(sizes) == 1 or all(size % count == 0 for size in sizes)
    return even and (letter[0] == "*" or letter.islower())


def _placements(x: Tensor, word: str, split: _Split) -> list[Any]:
    """Where x must be: split where its letters are, unless it repeats there."""
    from torch.distributed.tensor import Replicate, Shard

    letters = _by_letter(word, x)
    split_dims = (letters.index(w) if w in letters else None for w in split.letters)
    return [Replicate() if d is None or x.shape[d] == 1 else Shard(d) for d in split_dims]


def _local(x: Any, word: str, split: _Split) -> Tensor:
    """This process's part. Where the op is split and x is not, its gradient is one of a sum."""
    from torch.distributed.tensor import Partial

    if not is_dtensor(x):
        return x  # type: ignore[no-any-return]
    placements = _placements(x, word, split)
    if list(x.placements) != placements:
        x = x.redistribute(x.device_mesh, placements)
    pairs = zip(placements, split.letters, strict=True)
    of_grad = [p if p.is_shard() or letter is None else Partial() for p, letter in pairs]
    local: Tensor = x.to_local(grad_placements=of_grad)
    return local


def _write_back(x: Any, local: Tensor, word: str, split: _Split) -> None:
    """What was written to a copy that was moved belongs to where it came from."""
    from torch.distributed.tensor import DTensor

    placements = _placements(x, word, split)
    if not is_dtensor(x) or list(x.placements) == placements:
        return
    size = {"shape": x.shape, "stride": x.stride()}
    moved = DTensor.from_local(local, x.device_mesh, placements, run_check=False, **size)
    x.to_local().copy_(moved.redistribute(x.device_mesh, x.placements).to_local())


def _whole(local: Tensor, word: str, mesh: Any, split: _Split) -> Tensor:
    """The DTensor that `local` is this process's part of."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import Placement

    letters = _by_letter(word, local)
    # what was not asked for is empty, in one dimension
    is_absent = not word.startswith("*") and local.dim() != len(word)
    size, placements = list(local.shape), list[Placement]()
    for letter in split.letters:
        if letter is None or is_absent:
            placements.append(Replicate())
        elif letter in letters:
            dim = letters.index(letter)
            size[dim] = split.whole(letter, local.shape[dim])
            placements.append(Shard(dim))
        else:
            placements.append(Partial())
    whole: Tensor = DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(size),
        stride=_strides(local, size),
    )
    return whole


def _strides(local: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Of a whole of this size, whose dimensions lie in memory in the order that the part's do."""
    order = sorted(range(local.dim()), key=lambda d: (-local.stride()[d], d))
    strides, step = [0] * local.dim(), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(1, size[d])
    return tuple(strides)
