# SPDX-License-Identifier: MIT
"""Argument checks. The only place where error text is built.

A message names the op, what is required, what came and, if there is one, the way out.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

import torch
from torch import Tensor

from metalcore import _native, _torch

LinAlgError = _torch.LinAlgError
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LAPACK_TYPES = (torch.float32, torch.float64)
# by its own name: to look it up takes as long as the question
_STRIDED = torch.strided


def shape(x: Tensor | None) -> str:
    """`x`'s shape as error messages print it."""
    if x is not None and torch.compiler.is_compiling():
        # sizes may be symbols, which a compiler cannot print
        return f"of {x.dim()} dimensions"
    return "None" if x is None else str(list(x.shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one_of(names: Iterable[str], got: Sequence[str]) -> str:
    """The end of a message about unknown names: what is meant by them, or else all there are."""
    known = list(names)
    close = [match for name in got for match in get_close_matches(name, known, 3, 0.8)]
    wrong = ", ".join(got)
    if close:
        return f"got {wrong}; did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"got {wrong}; there are {', '.join(known)}"


def expect(condition: bool, op: str, message: str) -> None:
    """Raise `ValueError: <op>: <message>` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def refuse(op: str, message: str) -> NoReturn:
    """Raise `ValueError: <op>: <message>`: for messages that are only worth writing if needed."""
    raise ValueError(f"{op}: {message}")


def expect_tensors(op: str, **values: Tensor) -> None:
    """Each must be a tensor, and dense."""
    for name, x in values.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
        if x.layout is not _STRIDED:
            layout = str(x.layout).removeprefix("torch.")
            raise TypeError(
                f"{op}: {name} must be dense, got {layout}; convert it with {name}.to_dense()"
            )


def expect_float(op: str, **tensors: Tensor) -> None:
    """Each must be a dense tensor of a floating type that metalcore computes in."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.layout is not _STRIDED:
            expect_tensors(op, **{name: x})
        if x.dtype not in FLOATS:
            raise TypeError(
                f"{op}: {name} must be float32, float64, float16 or bfloat16, "
                f"got {dtype_name(x.dtype)}; convert it with {name}.float()"
            )


def expect_float_or_none(op: str, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            expect_float(op, **{name: x})


def expect_same_device(op: str, **tensors: Tensor | None) -> None:
    """All tensors must be on one device."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        first = first or (name, x.device)
        if x.device != first[1]:
            found = f"{first[0]} on {first[1]} and {name} on {x.device}"
            raise ValueError(
                f"{op}: tensors must be on one device, got {found}; move them with .to()"
            )


def expect_same_dtype(op: str, **tensors: Tensor) -> None:
    if len({x.dtype for x in tensors.values()}) > 1:
        found = " and ".join(f"{name} {dtype_name(x.dtype)}" for name, x in tensors.items())
        raise TypeError(f"{op}: all of these must have one dtype, got {found}; convert with .to()")


def expect_sum_of_rows(op: str, x: Tensor, residual: Tensor, **weights: Tensor | None) -> None:
    """x and residual are [..., n] of one dtype, each weight is [n]."""
    expect_float(op, x=x, residual=residual)
    expect_float_or_none(op, **weights)
    expect_rank(op, x, 1)
    expect_same_device(op, x=x, residual=residual, **weights)
    expect_same_dtype(op, x=x, residual=residual)
    expect_shape(op, "residual", residual, x.shape)
    for name, w in weights.items():
        expect_shape(op, name, w, x.shape[-1:])


def expect_shape(op: str, name: str, x: Tensor | None, size: Sequence[int]) -> None:
    if x is not None and x.shape != size and list(x.shape) != list(size):
        raise ValueError(f"{op}: {name} must have the shape {list(size)}, got {shape(x)}")


def expect_broadcast(op: str, **tensors: Tensor) -> None:
    """The shapes must broadcast together."""
    try:
        torch.broadcast_shapes(*(x.shape for x in tensors.values()))
    except RuntimeError:
        found = " and ".join(f"{name} {shape(x)}" for name, x in tensors.items())
        raise ValueError(f"{op}: shapes must broadcast together, got {found}") from None


def expect_broadcast_to(op: str, name: str, x: Tensor, like: Tensor) -> None:
    """`x` must broadcast to the shape of `like`."""
    pairs = zip(reversed(x.shape), reversed(like.shape), strict=False)
    if x.dim() > like.dim() or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"{op}: {name} must broadcast to the shape of x; "
            f"got x {shape(like)} and {name} {shape(x)}"
        )


def expect_dim(op: str, x: Tensor, dim: int, *, last: bool = False) -> None:
    """`dim` must be a dimension of `x`, and where `last` is set the last one."""
    rank = max(1, x.dim())
    if not -rank <= dim < rank:
        raise ValueError(f"{op}: dim must be a dimension of x, got {dim} for x {shape(x)}")
    if last and dim not in (-1, rank - 1):
        raise ValueError(f"{op}: dim must be the last one with causal=True, got {dim}")


def expect_rank(op: str, x: Tensor, at_least: int) -> None:
    if x.dim() < at_least:
        dimensions = "one dimension" if at_least == 1 else f"{at_least} dimensions"
        raise ValueError(f"{op}: x must have at least {dimensions}, got {shape(x)}")


def expect_matrix(op: str, name: str, x: Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"{op}: {name} must be matrices [..., M, N], got {shape(x)}")


def expect_square(op: str, name: str, x: Tensor) -> None:
    if x.dim() < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{op}: {name} must be square matrices [..., N, N], got {shape(x)}")


def expect_systems(
    op: str, A: Tensor, B: Tensor, name: str = "A", given: Tensor | None = None
) -> None:
    """B must have as many rows as A [..., M, N], and batches that broadcast with those of A. A is
    called `name`. Where vectors are taken too, the caller gave B as `given`."""
    if A.shape[:-1] == B.shape[:-1]:
        return
    rows_match = B.dim() >= 2 and A.shape[-2] == B.shape[-2]
    pairs = zip(reversed(A.shape[:-2]), reversed(B.shape[:-2]), strict=False)
    if not (rows_match and all(a == b or 1 in (a, b) for a, b in pairs)):
        m = A.shape[-2]
        vectors = "" if given is None else f" or [..., {m}]"
        raise ValueError(
            f"{op}: B must be [..., {m}, K]{vectors} with batch dimensions that broadcast with "
            f"those of {name}; got {name} {shape(A)} and B {shape(B if given is None else given)}"
        )


def expect_factored(op: str, info: Tensor, api: str, way_out: str) -> None:
    """Every matrix of the batch must have info 0.

    torch makes the check, because compilers and function transforms know it: `api` is its name for
    the function, such as `linalg.cholesky`. It takes 3 us, so plain calls look first.
    """
    if is_clear(info):
        return
    try:
        _torch.check_linalg_errors(info, api, is_matrix=info.dim() == 0)
    except LinAlgError as error:
        explain(op, error, way_out)


def is_eager() -> bool:
    """Whether a call computes what it is told: compilers and function transforms only record it."""
    return not (torch.compiler.is_compiling() or _torch.is_transformed())


def are_transformed() -> bool:
    """Whether function transforms or forward mode, which want torch's own functions, are at work.

    Compilers record what is asked of them, and apply transforms to that.
    """
    return not torch.compiler.is_compiling() and (
        _torch.is_transformed() or _torch.has_dual_level()
    )


def may_be_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a derivative of a call with these tensors may be asked for: a gradient is recorded,
    or compilers, function transforms or forward mode are at work."""
    if not is_eager() or _torch.has_dual_level():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_clear(info: Tensor) -> bool:
    """Whether `info` is known to be zero. Compilers and function transforms cannot know; of tensors
    without data nothing is wrong."""
    return info.is_meta or (type(info) is Tensor and is_eager() and not _native.any_nonzero(info))


def explain(op: str, error: RuntimeError, way_out: str) -> NoReturn:
    """Raise torch's `error` as one of `op`, with what to do about it."""
    reason = str(error).partition(": ")[2]
    raise LinAlgError(f"{op}: {reason} {way_out}") from None


def expect_suffix(op: str, x: Tensor, name: str, size: Sequence[int]) -> None:
    """The last dimensions of `x` must be `size`, the shape of `name`."""
    rank = len(size)
    if not 0 < rank <= x.dim() or x.shape[-rank:] != torch.Size(size):
        which = "dimension" if rank == 1 else f"{rank} dimensions"
        raise ValueError(
            f"{op}: {name} must match the last {which} of x; "
            f"got x {shape(x)} and {name} {list(size)}"
        )


def expect_one_of(op: str, name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(allowed)}, got {value!r}")


def expect_positive(op: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{op}: {name} must be greater than 0, got {value}")


def refuse_index(op: str, index: int, what: str) -> NoReturn:
    raise IndexError(f"{op}: index {index} is out of range for {what}")


def refuse_gradient(op: str, way_out: str = "call it under torch.no_grad()") -> NoReturn:
    raise RuntimeError(f"{op}: has no gradient; {way_out}")


def refuse_tangents(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise where a derivative in forward mode, or one of torch.func, is asked for that `op` does
    not have."""
    if not are_transformed():
        return
    for t in tensors:
        if t is not None and (t.requires_grad or _torch.has_tangent(t)):
            raise RuntimeError(f"{op}: has no gradient; call it outside of the function transform")


def forbid_reference(op: str, x: Tensor) -> NoReturn:
    raise RuntimeError(
        f"{op}: no {x.device.type} kernel for {dtype_name(x.dtype)} runs here, and "
        "METALCORE_STRICT=1 forbids the reference; `metalcore doctor` tells what is missing"
    )
