# SPDX-License-Identifier: MIT
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._measure import peak_bytes
from metalcore.ops.train import _chunks
from tests.backends import Backend
from tests.train.products import in_blocks

OP = "linear_cross_entropy"


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens per chunk."""

    def pairs(hidden: Tensor, weight: Tensor) -> list[slice]:
        return [slice(i, min(i + 2, len(hidden))) for i in range(0, len(hidden), 2)]

    monkeypatch.setattr(_chunks, "chunks", pairs)


def _inputs(backend: Backend, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = backend.randn(7, 12, dtype=dtype), backend.randn(33, 12, dtype=dtype)
    target = torch.randint(0, 33, (7,), device=backend.device)
    target[3] = -100
    return hidden, weight, backend.randn(33, dtype=dtype), target


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any
) -> Tensor:
    """What the op means, from logits that are held."""
    logits = F.linear(hidden, weight, bias)
    softcap, z_loss = options.pop("softcap", None), options.pop("z_loss", 0.0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, reduction="none", **options)
    return loss + z_loss * torch.where(target == -100, 0, logits.logsumexp(-1).square())


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}], ids=str
)
def test_equals_the_plain_composition(
    backend: Backend, reduction: str, options: dict[str, Any]
) -> None:
    for dtype in backend.dtypes:
        hidden, weight, bias, target = _inputs(backend, dtype)
        for b in (None, bias):
            leaves = [x.clone().requires_grad_() for x in (hidden, weight, b) if x is not None]
            doubles = [x.detach().cpu().double().requires_grad_() for x in leaves]
            loss = metalcore.linear_cross_entropy(
                *leaves[:2], target, *leaves[2:], reduction=reduction, **options
            )
            whole = (*doubles, None)[:3]
            truth = _plain(*whole, target.cpu(), **options)
            truth = {"none": truth, "sum": truth.sum(), "mean": truth.sum() / 6}[reduction]
            seed = torch.rand(truth.shape).to(dtype)
            grads = torch.autograd.grad(loss, leaves, seed.to(loss.device))
            expected = torch.autograd.grad(truth, doubles, seed.double())
            assert loss.dtype == dtype
            allowed = tolerance(OP, dtype, 33)
            assert error(loss, truth) <= allowed
            for found, true in zip(grads, expected, strict=True):
                assert found.dtype == dtype
                assert error(found, true) <= allowed


@pytest.mark.usefixtures("_short_chunks")
def test_half_precision_is_multiplied_in_blocks(
    device: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks(monkeypatch)
    test_equals_the_plain_composition(device, "mean", {})


@pytest.mark.usefixtures("_short_chunks")
def test_the_kernels_of_the_device_compute_it(backend: Backend) -> None:
    hidden, weight, _, target = _inputs(backend, torch.float32)
    with metalcore.trace() as t:
        metalcore.linear_cross_entropy(hidden, weight.requires_grad_(), target)
    # six of seven tokens count, and a GPU does not look
    assert [r.op for r in t.records] == ["cross_entropy_"] * (4 if backend.name == "mps" else 3)
    assert {r.path.split(":")[0] for r in t.records} == {backend.path}


@pytest.mark.usefixtures("_short_chunks")
def test_a_second_backward_pass_computes_again() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = metalcore.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, 4, 5]))
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    for before, now, again in zip(kept, first, second, strict=True):
        assert torch.equal(before, now)
        torch.testing.assert_close(now, 3 * again)


def test_only_what_is_wanted_is_computed() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    target = torch.tensor([1, 2, 3, 4, 5])
    (dhidden,) = torch.autograd.grad(metalcore.linear_cross_entropy(hidden, weight, target), hidden)
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, target), hidden)
    torch.testing.assert_close(dhidden, expected)
    with torch.no_grad():
        assert not metalcore.linear_cross_entropy(hidden, weight, target).requires_grad


def test_tied_weights_get_both_gradients() -> None:
    tokens, target = torch.tensor([1, 3, 5]), torch.tensor([2, 4, 6])
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    loss = metalcore.linear_cross_entropy(F.embedding(tokens, weight), weight, target)
    expected = F.cross_entropy(F.embedding(tokens, weight) @ weight.T, target)
    (found,), (truth,) = (torch.autograd.grad(x, weight) for x in (loss, expected))
    torch.testing.assert_close(found, truth)


def test_leading_dimensions_and_no_tokens() -> None:
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = torch.randint(0, 9, (2, 3))
    loss = metalcore.linear_cross_entropy(hidden, weight, target, reduction="none")
    assert loss.shape == (2, 3)
    assert metalcore.linear_cross_entropy(hidden[:0], weight, target[:0]).isnan()
    none = metalcore.linear_cross_entropy(hidden[:0], weight, target[:0], reduction="sum")
    none.backward()
    assert weight.grad is not None
    assert (weight.grad == 0).all()


@pytest.mark.usefixtures("_short_chunks")
def test_autocast_multiplies_in_half_precision() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = torch.tensor([1, 2, 3, 4, 5])
    with torch.autocast("cpu", torch.bfloat16):
        loss = metalcore.linear_cross_entropy(hidden, weight, target)
        expected = F.cross_entropy(F.linear(hidden, weight), target)
    assert loss.dtype == expected.dtype == torch.float32
    assert error(loss, expected.double()) <= tolerance(OP, torch.bfloat16, 4)
    grads = torch.autograd.grad(loss, (hidden, weight))
    truths = torch.autograd.grad(expected, (hidden, weight))
    for found, truth in zip(grads, truths, strict=True):
        assert found.dtype == torch.float32
        assert error(found, truth.double()) <= tolerance(OP, torch.bfloat16, 4)


@pytest.mark.usefixtures("_short_chunks")
def test_compiles_without_graph_breaks(device: Backend) -> None:
    hidden, weight, bias, target = _inputs(device, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return metalcore.linear_cross_entropy(hidden * 2, weight, target, bias)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), loss(*leaves))
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves))


def test_tokens_that_do_not_count_cost_nothing() -> None:
    hidden, weight = torch.randn(40, 8), torch.randn(30, 8)
    target = torch.randint(0, 30, (40,))
    target[:25] = -100
    for reduction in ("mean", "sum"):
        results = []
        for loss in (metalcore.linear_cross_entropy, _torch_loss):
            leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
            with metalcore.trace() as t:
                y = loss(*leaves, target, reduction=reduction)
                results.append([y, *torch.autograd.grad(y, leaves)])
            if t.records:
                assert t.records[0].shape == (15, 30)
        for a, b in zip(*results, strict=True):
            assert error(a, b) <= tolerance("linear_cross_entropy", torch.float32, 40)


def _torch_loss(hidden: Tensor, weight: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)


def test_chunks_cover_all_tokens_and_keep_to_the_policy() -> None:
    weight = torch.empty(128256, 1)
    parts = list(_chunks.chunks(torch.empty(2048, 1), weight))
    assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, 2048)
    longest = max(p.stop - p.start for p in parts)
    assert longest * 128256 * 4 <= _chunks._sizes["cpu"]["chunk_mib"] << 20
    assert parts[0].stop == longest


def test_memory_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_chunks._sizes["cpu"], "chunk_mib", 2)
    hidden = torch.randn(1000, 16, requires_grad=True)
    weight = torch.randn(16000, 16, requires_grad=True)
    target = torch.randint(16000, (1000,))

    def ours() -> None:
        metalcore.linear_cross_entropy(hidden, weight, target).backward()

    def plain() -> None:
        F.cross_entropy(F.linear(hidden, weight), target).backward()

    assert peak_bytes(ours, "cpu") <= 0.15 * peak_bytes(plain, "cpu")


h4, w9, t3 = torch.randn(3, 4), torch.randn(9, 4), torch.tensor([1, 2, 3])
BAD = [
    (
        lambda: metalcore.linear_cross_entropy(h4, w9[:, :3], t3),
        ValueError,
        "hidden must be [..., H] and weight [classes, H]; got hidden [3, 4] and weight [9, 3]",
    ),
    (
        lambda: metalcore.linear_cross_entropy(h4, w9.double(), t3),
        TypeError,
        "all of these must have one dtype, got hidden float32 and weight float64; "
        "convert with .to()",
    ),
    (
        lambda: metalcore.linear_cross_entropy(h4, w9, t3[:2]),
        ValueError,
        "target must have the shape [3], got [2]",
    ),
    (
        lambda: metalcore.linear_cross_entropy(h4, w9, t3, torch.randn(8)),
        ValueError,
        "bias must have the shape [9], got [8]",
    ),
    (
        lambda: metalcore.linear_cross_entropy(h4, w9, t3.float()),
        TypeError,
        "target must be class indices (int64), got float32; for class probabilities use "
        "torch.nn.functional.cross_entropy",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == f"linear_cross_entropy: {message}"


def test_wrong_targets_raise() -> None:
    with pytest.raises(IndexError, match="targets must be from 0 to 8"):
        metalcore.linear_cross_entropy(h4, w9, t3 + 7)


def test_small_float16_gradients_survive_until_the_loss_is_scaled() -> None:
    hidden, weight = torch.randn(2048, 16).half(), (torch.randn(3000, 16) * 0.1).half()
    target, scale = torch.randint(0, 3000, (2048,)), 2.0**14
    grads = []
    for dtype, function in ((torch.float16, metalcore.linear_cross_entropy), (torch.float64, None)):
        x, w = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        loss = F.cross_entropy(x @ w.T, target) if function is None else function(x, w, target)
        (loss.to(dtype if dtype == torch.float64 else torch.float32) * scale).backward()
        grads.append((x.grad, w.grad))
    for found, truth in zip(*grads, strict=True):
        assert error(found, truth) <= tolerance(OP, torch.float16, 4)
    # classes that are no target have probabilities alone, which are small
    absent = torch.ones(3000, dtype=torch.bool)
    absent[target] = False
    found, truth = (g[1][absent].double() for g in grads)
    assert float((found - truth).norm() / truth.norm()) < 0.01
