# SPDX-License-Identifier: MIT
"""check_op: one harness for every op. Tolerances come from metalcore._accuracy alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from metalcore._trace import tensors
from metalcore._where import map_tensors
from tests.backends import Backend


def check_op(
    backend: Backend,
    name: str,
    args: Sequence[Any],
    *,
    reduces_over: int,
    gradient_reduces_over: int | None = None,
    differentiable: bool = True,
) -> None:
    """Values and every gradient of op `name` against its reference in float64.

    The gradient of the reference is autograd's own, so our formula is checked by another one.
    Also: the kernel is reached, inputs stay as they are, views with strides give bitwise the same
    as contiguous inputs, and views with an odd storage offset are right too.
    """
    op = Op.all[name]
    inputs = [_leaf(a, differentiable) for a in args]
    truths = [_leaf(_double(a), differentiable) for a in args]
    dtype = next((t.dtype for t in tensors(args) if t.is_floating_point()), torch.float32)

    with metalcore.trace() as t:
        outputs = tuple(op.results(op(*inputs), inputs))
    assert {r.path.split(":")[0] for r in t.records} == {backend.path}, t
    assert all(r.variant for r in t.records) or backend.name != "cpu", t
    truth = op.results(op.meaning(*truths), truths)
    _compare("output", outputs, truth, name, dtype, reduces_over)
    for given, used, argument in zip(args, inputs, op.arguments, strict=True):
        if not argument.is_write:
            for a, b in zip(tensors([given]), tensors([used]), strict=True):
                assert torch.equal(a.nan_to_num(), b.detach().nan_to_num()), "input changed"

    strided = [map_tensors(_strided, a) for a in args]
    for a, b in zip(outputs, op.results(op(*strided), strided), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=0, equal_nan=True)
    # an odd offset forbids wide loads, so a GPU may add up in another order
    offset = [map_tensors(_offset, a) for a in args]
    again = op.results(op(*offset), offset)
    _compare("offset output", again, truth, name, dtype, reduces_over)

    if differentiable:
        over = gradient_reduces_over or reduces_over
        _check_gradients(op, inputs, outputs, truths, dtype, over)


def _check_gradients(
    op: Op,
    inputs: list[Any],
    outputs: tuple[Tensor, ...],
    truths: list[Any],
    dtype: torch.dtype,
    reduces_over: int,
) -> None:
    outputs = _differentiable(outputs)
    true_outputs = _differentiable(op.results(op.meaning(*truths), truths))
    seeds = [torch.randn_like(o, dtype=torch.float32).to(o.dtype) for o in outputs]
    wanted = [i for i, a in enumerate(inputs) if isinstance(a, Tensor) and a.requires_grad]
    given = [i for i, o in enumerate(true_outputs) if o.requires_grad]
    grads = torch.autograd.grad(
        [outputs[i] for i in given], [inputs[i] for i in wanted], [seeds[i] for i in given]
    )
    true_grads = torch.autograd.grad(
        [true_outputs[i] for i in given],
        [truths[i] for i in wanted],
        [_double(seeds[i]) for i in given],
    )
    for i, grad in zip(wanted, grads, strict=True):
        assert grad.dtype == inputs[i].dtype
    _compare("gradient", grads, true_grads, op.name, dtype, reduces_over)


def check_registration(name: str, args: Sequence[Any], *, differentiable: bool = True) -> None:
    """opcheck, and first and second derivatives against finite differences, in float64."""
    op = Op.all[name]
    doubles = [_leaf(_double(a), differentiable) for a in args]
    torch.library.opcheck(getattr(torch.ops.metalcore, name).default, tuple(doubles))
    kernel = getattr(torch.ops.metalcore_kernels, name).default
    plain = tuple(_leaf(_double(a), False) for a in args)
    torch.library.opcheck(kernel, plain, test_utils=("test_schema", "test_faketensor"))
    if differentiable:
        wanted = [i for i, a in enumerate(doubles) if isinstance(a, Tensor) and a.requires_grad]

        def of_tensors(*values: Tensor) -> Any:
            full = list(doubles)
            for i, value in zip(wanted, values, strict=True):
                full[i] = value
            return _differentiable(op.results(op(*full), full))

        leaves = tuple(doubles[i] for i in wanted)
        assert torch.autograd.gradcheck(of_tensors, leaves, check_forward_ad=True)
        # gradgradcheck mistakes an argument for the next one where results do not depend on it
        # their plain sum may depend on nothing: rows of softmax add up to 1
        total = sum((y * torch.rand_like(y)).sum() for y in of_tensors(*leaves))
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        wanted = [
            i for i, grad in zip(wanted, grads, strict=True) if grad is not None and grad.any()
        ]
        leaves = tuple(doubles[i] for i in wanted)
        assert torch.autograd.gradgradcheck(of_tensors, leaves, check_fwd_over_rev=True)


def _compare(
    what: str, found: Any, truth: Any, name: str, dtype: torch.dtype, reduces_over: int
) -> None:
    for i, (a, b) in enumerate(zip(found, truth, strict=True)):
        if not a.is_floating_point():
            assert torch.equal(a.cpu(), b.cpu()), f"{what} {i}: integers differ"
            continue
        # a result may be of a coarser dtype than the inputs: the gradient of a float32 weight
        allowed = max(tolerance(name, d, reduces_over) for d in (dtype, a.dtype))
        if dtype == torch.float64:
            allowed *= 2  # the truth is rounded as often as the result
        off = error(a, b)
        assert off <= allowed, f"{what} {i}: error {off:.3g} is over {allowed:.3g}"


def _differentiable(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(o for o in outputs if o.is_floating_point())


def _leaf(a: Any, requires_grad: bool) -> Any:
    return map_tensors(
        lambda x: x.detach().clone().requires_grad_(requires_grad and x.is_floating_point()), a
    )


def _double(a: Any) -> Any:
    def exact(x: Tensor) -> Tensor:
        x = x.detach().cpu()
        return x.double() if x.is_floating_point() else x

    return map_tensors(exact, a)


def _strided(a: Tensor) -> Tensor:
    """`a` with every second element of a larger tensor as its storage."""
    wide = a.new_zeros((*a.shape, 2))
    wide[..., 1] = a
    return wide[..., 1]


def _offset(a: Tensor) -> Tensor:
    """`a` as a contiguous view that starts one element into its storage."""
    flat = a.new_zeros(a.numel() + 1)
    flat[1:] = a.reshape(-1)
    return flat[1:].view(a.shape)
