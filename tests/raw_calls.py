# SPDX-License-Identifier: MIT
"""Calls of kernels past the public functions, with one argument broken each time.

    python -m tests.raw_calls rms_norm softmax

A kernel may refuse a call, and then leaves its arguments as they were; or it answers what the
meaning of the op answers. Each call is announced before it is made, so that whoever started this
program knows which one ended it. Prints a line for each answer that is neither.
"""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from metalcore._where import map_tensors

# Of which one may by chance not move a result that another one does.
_DIRECTIONS = 8
REFUSALS = (RuntimeError, ValueError, IndexError, NotImplementedError)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        for sample in Op.all[name].samples:
            torch.manual_seed(0)
            for what, args in broken(sample(torch.float32).args):
                print(f"call {name} {what}", flush=True)
                found = flaw(Op.all[name], what, args, 8 * sample(torch.float32).reduces_over)
                if found:
                    print(f"wrong {name} {what}: {found}", flush=True)
    print("end", flush=True)


def broken(args: tuple[Any, ...]) -> Iterator[tuple[str, list[Any]]]:
    """Each way to break one argument: its name, and all arguments with it."""
    for i, a in enumerate(args):
        for what, b in _values(a):
            yield f"argument {i} {what}", [*args[:i], b, *args[i + 1 :]]


def _values(a: Any) -> Iterator[tuple[str, Any]]:
    match a:
        case Tensor():
            yield from _tensors(a)
        case list() | tuple():
            yield "without its last", a[:-1]
            yield "with its last twice", [*a, *a[-1:]]
            for what, b in _tensors(a[0]) if a else ():
                yield f"first {what}", [b, *a[1:]]
        case bool():
            yield "turned", not a
        case int():
            yield from ((f"= {value}", value) for value in (a + 97, -1, 0, 1, 2**40))
        case str():
            yield "= junk", "junk"
        case None:
            yield "= 3 values", torch.ones(3)


def _tensors(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "of one rank more", x[None].clone()
    if x.dim():
        yield "of one rank more behind", x[..., None].clone()
        yield "of one rank less", x.flatten(0, 1).clone() if x.dim() > 1 else x[:1].sum()
    for d in range(x.dim()):
        # other values: columns that are the same leave factors undetermined
        more = torch.rand_like(x) if d >= x.dim() - 2 and x.is_floating_point() else x
        yield f"twice as long in {d}", torch.cat([x, more], d)
        yield f"shorter in {d}", x.narrow(d, 0, max(0, x.shape[d] - 1)).clone()
        yield f"empty in {d}", x.narrow(d, 0, 0).clone()
    for dtype in (torch.float64, torch.float16, torch.int64, torch.int8, torch.bool):
        if dtype != x.dtype:
            yield f"of {dtype}", x.to(dtype)
    for dtype in (torch.complex64, torch.complex128):
        yield f"of {dtype}", x.to(dtype) * (1 + 1j)


def _copy(args: list[Any]) -> list[Any]:
    return [map_tensors(Tensor.clone, a) for a in args]


def flaw(op: Op, what: str, args: list[Any], reduces_over: int) -> str | None:
    """What is wrong with the kernel's answer to a call: "" for nothing, None where it refuses."""
    given = _copy(args)
    try:
        outputs = getattr(torch.ops.metalcore_kernels, op.name)(*given)
    except REFUSALS:
        before, after = (list(metalcore._trace.tensors(a)) for a in (args, given))
        same = all(
            torch.equal(a, b) for a, b in zip(before, after, strict=True) if not a.isnan().any()
        )
        return None if same else "refused, with arguments changed"
    found = op.results(outputs, given)
    if "complex" in what:
        return "complex values are taken"
    try:
        own = _copy(args)
        expected = op.results(op.meaning(*own), own)
        truth = _truth(op, args, 0.0)
    except REFUSALS as refusal:
        return f"taken, though its meaning says: {str(refusal).splitlines()[0]}"
    allowed = tolerance(op.name, lowest(args), reduces_over)
    for i, (a, b, c) in enumerate(zip(found, expected, truth, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {list(a.shape)} in place of {b.dtype} {list(b.shape)}"
        if _is_near(a, c, allowed):
            continue
        if a.is_floating_point():  # what no value of the dtype can be is infinite
            most = torch.finfo(a.dtype).max
            a, b, c = (x.clamp(-most, most) for x in (a, b, c))
        # bytes are made of the dtype that was given
        off = error(a, c if a.is_floating_point() else b)
        if off <= allowed or error(a, b) <= allowed or _is_finest(a, c):
            continue
        if not off <= allowed * _sensitivity(op, args, i):
            return f"values that are {off:.1e} off"
    return ""


def _is_near(a: Tensor, truth: Tensor, allowed: float) -> bool:
    """What `error` says of finite values, for less."""
    if not a.is_floating_point() or not a.numel():
        return False
    # an infinite truth is not near: inf < inf is false
    return bool((a - truth).abs().max() < allowed * truth.abs().max())


def _is_finest(a: Tensor, truth: Tensor) -> bool:
    """Whether results in `a.dtype` cannot be nearer: below its normal numbers steps are even."""
    info = torch.finfo(a.dtype) if a.is_floating_point() else None
    return info is not None and bool(((a - truth).abs() <= info.smallest_normal * info.eps).all())


def _truth(op: Op, args: list[Any], moved_by: float) -> list[Tensor]:
    """What the op means in float64, of arguments that are each moved by a share of themselves."""

    def widen(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        wide = x.double()
        return wide * (1 + moved_by * torch.randn_like(wide).sign()) if moved_by else wide

    wide = [map_tensors(widen, a) for a in args]
    return op.results(op.meaning(*wide), wide)


def _sensitivity(op: Op, args: list[Any], i: int) -> float:
    """By how many times a last place of the arguments result `i` moves with them, in the direction
    that moves it most: no algorithm that rounds can be nearer to the truth."""
    place, truth = torch.finfo(lowest(args)).eps, _truth(op, args, 0.0)[i]
    return max(error(_truth(op, args, place)[i], truth) for _ in range(_DIRECTIONS)) / place


def lowest(args: list[Any]) -> torch.dtype:
    """The dtype of least precision among the arguments."""
    dtypes = {x.dtype for x in metalcore._trace.tensors(args) if x.is_floating_point()}
    return max(dtypes or {torch.float32}, key=lambda d: torch.finfo(d).eps)


if __name__ == "__main__":
    main(sys.argv[1:])
