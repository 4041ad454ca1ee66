# SPDX-License-Identifier: MIT
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from metalcore._route import Route
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import dtypes, layouts

NONE, MEAN, SUM = 0, 1, 2

CASES = [
    # rows, classes, smoothing, z_loss, softcap, reduction, why
    (5, 100, 0.1, 1e-3, 20.0, MEAN, "everything at once"),
    (3, 7, 0.0, 0.0, 0.0, NONE, "rows shorter than a register"),
    (4, 5001, 0.1, 0.0, 0.0, SUM, "pieces of a row, odd"),
    (2, 16411, 0.0, 1e-2, 5.0, NONE, "a row that is long in float32, odd"),
    (2, 32800, 0.1, 0.0, 0.0, MEAN, "a row that is long in half types"),
    (1, 57409, 0.0, 0.0, 0.0, SUM, "a row too long to keep, odd"),
    (2, 57408, 0.0, 0.0, 0.0, MEAN, "a row too long to keep"),
    (70, 33, 0.0, 0.0, 0.0, MEAN, "many rows"),
    (0, 10, 0.0, 0.0, 0.0, SUM, "no rows"),
]


def _targets(backend: Backend, rows: int, classes: int) -> Tensor:
    target = torch.randint(0, classes, (rows,))
    target[1::3] = -100
    return target.to(backend.device)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[Any, ...]) -> None:
    rows, classes, smoothing, z_loss, softcap, reduction, _ = case
    for dtype in backend.dtypes:
        logits = (3 * backend.randn(rows, classes)).to(dtype)
        target = _targets(backend, rows, classes)
        how = (-100, smoothing, z_loss, softcap, reduction)
        # the second derivative adds up products of probabilities twice
        check_op(
            backend,
            "cross_entropy",
            (logits, target, None, None, *how, True),
            reduces_over=classes,
            gradient_reduces_over=16 * classes,
        )
        weight = backend.randn(classes).abs().to(dtype)
        args = (logits, target, weight, None, *how)
        check_op(
            backend, "cross_entropy", (*args, True), reduces_over=classes, differentiable=False
        )
        _check_in_place(backend, args)


def _check_in_place(backend: Backend, args: tuple[Any, ...]) -> None:
    logits = args[0].clone()
    loss, dlogits = Op.all["cross_entropy"](*args, True)
    found, lse = Op.all["cross_entropy_"](logits, *args[1:])
    torch.testing.assert_close(found, loss, equal_nan=True)
    assert error(logits, dlogits) <= tolerance("cross_entropy", logits.dtype, logits.shape[-1])
    assert lse.shape == args[1].shape
    assert (lse[args[1] == -100] == 0).all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("size", [(40,), (6, 40), (2, 40, 3, 2)], ids=str)
def test_equals_torch(backend: Backend, size: tuple[int, ...], reduction: str) -> None:
    target = torch.randint(0, 40, size[:1][: len(size) - 1] + size[2:])
    if target.dim():
        target.view(-1)[1] = 7
    for weight in (None, torch.rand(40)):
        options: dict[str, Any] = {"ignore_index": 7, "label_smoothing": 0.2}
        x = backend.randn(*size).requires_grad_()
        truth = x.detach().cpu().double().requires_grad_()
        w = None if weight is None else weight.to(backend.device)
        loss = metalcore.cross_entropy(x, target.to(x.device), w, reduction=reduction, **options)
        expected = F.cross_entropy(
            truth,
            target,
            None if weight is None else weight.double(),
            reduction=reduction,
            **options,
        )
        assert loss.shape == expected.shape
        seed = torch.rand(expected.shape)
        (dx,) = torch.autograd.grad(loss, x, seed.to(x.device))
        (expected_dx,) = torch.autograd.grad(expected, truth, seed.double())
        allowed = tolerance("cross_entropy", torch.float32, 40)
        assert error(loss, expected) <= allowed
        assert error(dx, expected_dx) <= allowed


@given(st.data(), dtypes, st.sampled_from([5, 130]))
def test_any_layout(data: st.DataObject, dtype: torch.dtype, classes: int) -> None:
    x = data.draw(layouts(torch.randn(6, classes).to(dtype)))
    target = data.draw(layouts(torch.randint(0, classes, (6,))))
    loss, _ = Op.all["cross_entropy"](x, target, None, None, -100, 0.1, 0.0, 0.0, MEAN, True)
    truth = F.cross_entropy(x.double(), target, label_smoothing=0.1)
    assert error(loss, truth) <= tolerance("cross_entropy", dtype, classes)


def test_only_what_torch_has_may_be_left_to_torch() -> None:
    x, target = torch.randn(2, 10), torch.tensor([1, 2])
    with Route.all["cross_entropy"].forced(to_torch=True), metalcore.trace() as t:
        metalcore.cross_entropy(x, target, label_smoothing=0.1)
        metalcore.cross_entropy(x, target, softcap=5.0)
        metalcore.cross_entropy(x, target, z_loss=0.1)
    assert [r.path.split(":")[0] for r in t.records] == ["torch", "cpu", "cpu"]


def test_a_large_gradient_is_written_whole() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(70, 32000).to(dtype).requires_grad_()
        target = torch.randint(0, 32000, (70,))
        with metalcore.trace() as t:
            loss = metalcore.cross_entropy(x, target)
        (dx,) = torch.autograd.grad(loss, x)
        truth = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(F.cross_entropy(truth, target), truth)
        assert error(dx, expected) <= tolerance("cross_entropy", dtype, 32000)
        assert t.records[0].variant == "rows_streamed"


def test_the_gradient_takes_the_memory_of_the_logits(backend: Backend) -> None:
    hidden, weight = backend.randn(6, 8).requires_grad_(), backend.randn(50, 8).requires_grad_()
    target = _targets(backend, 6, 50)
    for reduction in ("mean", "none"):
        found = []
        for inplace in (True, False):
            logits = hidden @ weight.T
            memory = logits.detach()
            loss = metalcore.cross_entropy(
                logits, target, reduction=reduction, inplace_backward=inplace
            )
            (dlogits,) = torch.autograd.grad(2 * loss.sum(), logits, retain_graph=True)
            assert (dlogits.data_ptr() == memory.data_ptr()) == inplace
            found.append(dlogits.clone())
        torch.testing.assert_close(found[0], found[1])


def test_in_place_works_once_and_only_where_a_gradient_is_recorded() -> None:
    x, target = torch.randn(4, 9), torch.tensor([1, 2, 3, 4])
    before = x.clone()
    metalcore.cross_entropy(x, target, inplace_backward=True)
    assert torch.equal(x, before)

    loss = metalcore.cross_entropy((x * 1.0).requires_grad_(), target, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="inplace_backward gives its gradient once"):
        loss.backward()

    leaf = x.clone().requires_grad_()
    squashed = torch.tanh(leaf)  # needs its result for its own gradient
    loss = metalcore.cross_entropy(squashed, target, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrong_targets_raise_and_write_nothing() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    before = x.detach().clone()
    for bad in (5, -1):
        target = torch.tensor([0, 1, bad])
        with pytest.raises(IndexError) as caught:
            metalcore.cross_entropy(x, target, inplace_backward=True)
        assert str(caught.value) == (
            f"cross_entropy: targets must be from 0 to 4 or ignore_index -100, got {bad} in row 2"
        )
        with pytest.raises(IndexError):
            F.cross_entropy(x, target)
    assert torch.equal(x, before)


def test_wrong_targets_are_nan_on_a_gpu() -> None:
    with metalcore.simulate():
        loss = metalcore.cross_entropy(torch.randn(3, 5), torch.tensor([0, 5, 1]), reduction="none")
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e4, -1e4])
def test_hard_values(backend: Backend, value: float) -> None:
    x = backend.randn(4, 5000)
    x[1, 13] = value
    x[2, :4500] = value
    x = x.requires_grad_()
    target = torch.tensor([1, 2, 4800, 4], device=x.device)
    loss = metalcore.cross_entropy(x, target, reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    truth = x.detach().cpu().double().requires_grad_()
    expected = F.cross_entropy(truth, target.cpu(), reduction="none")
    (expected_dx,) = torch.autograd.grad(expected.sum(), truth)
    assert error(loss, expected) <= tolerance("cross_entropy", torch.float32, 5000)
    assert error(dx, expected_dx) <= tolerance("cross_entropy", torch.float32, 5000)


def test_the_mean_of_nothing_is_nan_and_has_no_slope(backend: Backend) -> None:
    x = backend.randn(3, 6).requires_grad_()
    target = torch.full((3,), -100, device=x.device)
    loss = metalcore.cross_entropy(x, target)
    assert loss.isnan()
    loss.backward()
    assert x.grad is not None
    assert (x.grad == 0).all()
    assert metalcore.cross_entropy(x[:0], target[:0]).isnan()


def test_derivatives_and_registration() -> None:
    x, target = torch.randn(2, 3), torch.tensor([2, -100])
    weight, denominator = torch.rand(3), torch.tensor(7.0)
    how = (-100, 0.1, 1e-2, 3.0)
    check_registration("cross_entropy", (x, target, None, None, *how, MEAN, True))
    check_registration("cross_entropy", (x, target, None, None, *how, NONE, False))
    args = (x, target, weight, denominator, *how, MEAN)
    check_registration("cross_entropy_", args, differentiable=False)


def test_a_given_denominator_takes_the_place_of_the_count(backend: Backend) -> None:
    x, target = backend.randn(6, 5), _targets(backend, 6, 5)
    op = Op.all["cross_entropy"]
    how = (-100, 0.0, 0.0, 0.0)
    whole, dwhole = op(x, target, None, None, *how, MEAN, True)
    count = (target != -100).sum(dtype=torch.float32)
    parts = [op(x[i : i + 2], target[i : i + 2], None, count, *how, MEAN, True) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(p[0] for p in parts), whole)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), dwhole)


@pytest.mark.parametrize("options", [{}, {"softcap": 9.0, "inplace_backward": True}], ids=str)
def test_compiles_without_graph_breaks(device: Backend, options: dict[str, Any]) -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return metalcore.cross_entropy(x * 2, target, **options)

    x, target = device.randn(4, 33).requires_grad_(), _targets(device, 4, 33)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, target), loss(x, target))
    (dx,) = torch.autograd.grad(compiled(x, target), x)
    (expected,) = torch.autograd.grad(loss(x, target), x)
    torch.testing.assert_close(dx, expected)


def test_function_transforms(backend: Backend) -> None:
    x, target = backend.randn(3, 4, 30), torch.randint(0, 30, (3, 4), device=backend.device)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return metalcore.cross_entropy(x, target, softcap=4.0)

    mapped = torch.func.vmap(loss)(x, target)
    each = torch.stack([loss(a, t) for a, t in zip(x, target, strict=True)])
    torch.testing.assert_close(mapped, each)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        sum(loss(a, t) for a, t in zip(leaf, target, strict=True)), leaf
    )
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x, target), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 300], ids=["by torch", "by the kernel"])
def test_autocast_keeps_the_dtypes_of_torch(dtype: torch.dtype, rows: int) -> None:
    x, target = torch.randn(rows, 100).to(dtype), torch.randint(0, 100, (rows,))
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, expected = metalcore.cross_entropy(x, target), F.cross_entropy(x, target)
        assert loss.dtype == expected.dtype
        truth = F.cross_entropy(x.double(), target)
        assert error(loss, truth) <= tolerance("cross_entropy", loss.dtype, 100)


def test_the_result_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    x, target = torch.randn(333, 257), torch.randint(0, 257, (333,))
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(Op.all["cross_entropy"](x, target, None, None, -100, 0.1, 0.0, 0.0, 1, True))
    torch.set_num_threads(before)
    for loss, dx in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(dx, found[0][1])


x5, t2 = torch.randn(2, 5), torch.tensor([1, 2])
BAD = [
    (
        lambda: metalcore.cross_entropy(x5, torch.rand(2, 5)),
        TypeError,
        "target must be class indices (int64), got float32; for class probabilities use "
        "torch.nn.functional.cross_entropy",
    ),
    (
        lambda: metalcore.cross_entropy(x5, t2.int()),
        TypeError,
        "target must be int64, got int32; convert with .long()",
    ),
    (
        lambda: metalcore.cross_entropy(x5, t2[:1], softcap=1.0),
        ValueError,
        "target must have the shape [2], got [1]",
    ),
    (
        lambda: metalcore.cross_entropy(x5, t2, torch.rand(4), softcap=1.0),
        ValueError,
        "weight must have the shape [5], got [4]",
    ),
    (
        lambda: metalcore.cross_entropy(x5, t2, reduction="median"),
        ValueError,
        "reduction must be none, mean or sum, got median",
    ),
    (
        lambda: metalcore.cross_entropy(x5, t2, label_smoothing=2.0, z_loss=1.0),
        ValueError,
        "label_smoothing must be from 0 to 1, got 2.0",
    ),
    (
        lambda: metalcore.cross_entropy(x5, t2, softcap=-1.0),
        ValueError,
        "softcap must be greater than 0, got -1.0",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == f"cross_entropy: {message}"


@pytest.mark.parametrize("inplace", [False, True])
def test_small_float16_gradients_survive_until_the_loss_is_scaled(inplace: bool) -> None:
    x, target = (torch.randn(512, 4000) * 2).half(), torch.randint(0, 4000, (512,))
    target[::3] = -100
    # the largest power of two but one in float16, as which the loss and its gradient come
    weight, scale = torch.rand(4000), 2.0**14
    for w in (None, weight):
        logits = x.clone().requires_grad_()
        # a copy, because a leaf may not be overwritten
        loss = metalcore.cross_entropy(logits * 1, target, w, inplace_backward=inplace)
        (loss.float() * scale).backward()
        wide = x.double().requires_grad_()
        expected = F.cross_entropy(wide, target, None if w is None else w.double())
        (expected * scale).backward()
        assert error(loss, expected) <= tolerance("cross_entropy", torch.float16, 4000)
        assert error(logits.grad, wide.grad) <= tolerance("cross_entropy", torch.float16, 4000)
        seen = wide.grad.abs() > 2.0**-16
        assert (logits.grad != 0)[seen].all()
