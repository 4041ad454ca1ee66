# SPDX-License-Identifier: MIT
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration

SUM, MEAN, MAX = 0, 1, 2
# the first bag is empty, and so is one in the middle
OFFSETS = torch.tensor([0, 0, 7, 7, 40])


def _distinct(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table without ties or zeros: autograd shares the gradient of a maximum among equals."""
    columns = [torch.randperm(rows) - rows // 2 + 0.5 for _ in range(n)]
    return torch.stack(columns, 1).to(device, dtype)


@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_matches_reference(backend: Backend, mode: int) -> None:
    for dtype in backend.dtypes:
        # rows read four values at a time with bags of any size, and one at a time with equal ones
        for n, bag_size in ((36, 0), (7, 6)):
            table = _distinct(50, n, dtype, backend.device)
            indices = torch.randperm(48, device=backend.device)
            if mode != MAX:
                # many times the same row
                indices = indices % 20
            weights = backend.randn(48, dtype=dtype) if mode == SUM else None
            offsets = None if bag_size else OFFSETS.to(backend.device)
            args = (table, indices, offsets, weights, bag_size, mode, 3, False, False, False)
            check_op(backend, "embedding_bag", args, reduces_over=48)


def test_rows_used_often_are_scaled_down(backend: Backend) -> None:
    indices = torch.tensor([1, 2, 1, 1, 5, 2], device=backend.device)
    table = backend.randn(6, 8)
    for mode in (SUM, MEAN):
        y = table.clone().requires_grad_()
        metalcore.embedding_bag(
            indices.view(2, 3),
            y,
            mode=["sum", "mean"][mode],
            scale_grad_by_freq=True,
            padding_idx=5,
        ).sum().backward()
        expected = torch.zeros_like(table)
        counts = torch.tensor([0, 3, 2, 0, 0, 0])
        for i, row in enumerate(indices.tolist()):
            share = [1.0, 1 / 3 if i < 3 else 1 / 2][mode]
            if row != 5:
                expected[row] += share / counts[row]
        torch.testing.assert_close(y.grad, expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_equals_torch(backend: Backend, mode: str) -> None:
    table, indices = backend.randn(30, 12), torch.randint(30, (50,), device=backend.device)
    offsets = torch.tensor([0, 0, 7, 45, 50], device=backend.device)
    for padding in (None, 3, -1):
        for last in (False, True):
            weights = backend.randn(50) if mode == "sum" else None
            leaves, found = [], []
            for function in (metalcore.embedding_bag, F.embedding_bag):
                leaf = table.clone().requires_grad_()
                factor = None if weights is None else weights.clone().requires_grad_()
                y = function(
                    indices,
                    leaf,
                    offsets,
                    mode=mode,
                    padding_idx=padding,
                    include_last_offset=last,
                    per_sample_weights=factor,
                )
                y.square().sum().backward()
                leaves.append([leaf.grad, *([] if factor is None else [factor.grad])])
                found.append(y)
            torch.testing.assert_close(found[0], found[1])
            torch.testing.assert_close(leaves[0], leaves[1])


def test_sparse_gradients(backend: Backend) -> None:
    indices = torch.randint(20, (4, 5), device=backend.device)
    for mode in ("sum", "mean"):
        dense, sparse = (backend.randn(20, 8).requires_grad_() for _ in range(2))
        for table, is_sparse in ((dense, False), (sparse, True)):
            y = metalcore.embedding_bag(indices, table, mode=mode, sparse=is_sparse, padding_idx=2)
            y.backward(torch.ones_like(y))
        assert sparse.grad.is_sparse
        torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)


def test_rows_are_renormalised_in_place() -> None:
    indices = torch.randint(10, (4, 5))
    a, b = torch.randn(10, 8) * 3, torch.empty(10, 8)
    b.copy_(a)
    y = metalcore.embedding_bag(indices, a, max_norm=1.0, norm_type=1.0)
    torch.testing.assert_close(y, F.embedding_bag(indices, b, max_norm=1.0, norm_type=1.0))
    torch.testing.assert_close(a, b)


def test_an_index_out_of_range_is_named_and_nothing_is_written(backend: Backend) -> None:
    table = backend.randn(10, 8)
    before = table.clone()
    for wrong in (10, -1, 2**63 - 1, -(2**63)):
        indices = torch.tensor([[1, 2], [wrong, 3]], device=backend.device)
        for settings in ({}, {"max_norm": 0.1}):
            with pytest.raises((IndexError, RuntimeError), match=f"index {wrong} .* 10 rows"):
                metalcore.embedding_bag(indices, table, **settings)
    assert torch.equal(table, before)


def test_offsets_out_of_range_are_refused(backend: Backend) -> None:
    table, indices = backend.randn(10, 8), torch.zeros(6, dtype=torch.int64, device=backend.device)
    for wrong in ([1, 4], [0, 7], [0, 5, 3], [0, -1]):
        offsets = torch.tensor(wrong, device=backend.device)
        for last in (False, True):
            with pytest.raises((ValueError, RuntimeError), match=r"embedding_bag: offsets? "):
                metalcore.embedding_bag(indices, table, offsets, include_last_offset=last)


def test_indices_after_the_last_bag_count_for_nothing(backend: Backend) -> None:
    table = backend.randn(10, 8).requires_grad_()
    factors = backend.randn(6).requires_grad_()
    indices = torch.tensor([1, 2, 3, 3, 9, 9], device=backend.device)
    offsets = torch.tensor([0, 1, 4], device=backend.device)
    y = metalcore.embedding_bag(
        *(indices, table, offsets),
        mode="sum",
        per_sample_weights=factors,
        include_last_offset=True,
    )
    y.sum().backward()
    torch.testing.assert_close(y[1], (table[indices[1:4]] * factors[1:4, None]).sum(0))
    assert table.grad.any(1).nonzero()[:, 0].tolist() == [1, 2, 3]
    assert factors.grad.nonzero()[:, 0].tolist() == [0, 1, 2, 3]


def test_empty_inputs(backend: Backend) -> None:
    table = backend.randn(10, 8)
    none = torch.zeros(0, dtype=torch.int64, device=backend.device)
    assert torch.equal(metalcore.embedding_bag(none.view(3, 0), table), table.new_zeros(3, 8))
    assert metalcore.embedding_bag(none.view(0, 3), table).shape == (0, 8)
    offsets = torch.zeros(2, dtype=torch.int64, device=backend.device)
    leaf = table.requires_grad_()
    y = metalcore.embedding_bag(none, leaf, offsets, mode="max")
    assert torch.equal(y, y.new_zeros(2, 8))
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_indices_of_no_bag() -> None:
    table, indices, none = torch.randn(6, 4), torch.arange(5), torch.zeros(0, dtype=torch.int64)
    for mode, weights in ((SUM, torch.randn(5)), (MEAN, None), (MAX, None)):
        args = (table, indices, none, weights, 0, mode, -1, False, False, False)
        check_op(Backend("cpu"), "embedding_bag", args, reduces_over=1, differentiable=False)
        y, places = torch.ops.metalcore.embedding_bag(*args)
        rest = (table, indices, none, weights, places, *args[4:9], weights is not None)
        backward = "embedding_bag_backward"
        check_op(Backend("cpu"), backward, (y, *rest), reduces_over=1, differentiable=False)


def test_registration() -> None:
    table, indices = torch.randn(6, 4), torch.tensor([0, 1, 5, 3, 3, 2])
    offsets, weights = torch.tensor([0, 2]), torch.randn(6)
    for mode, factors in ((SUM, weights), (MEAN, None)):
        args = (table, indices, offsets, factors, 0, mode, 3, False, False, False)
        check_registration("embedding_bag", args)


def test_compiles() -> None:
    table, indices = torch.randn(20, 8), torch.randint(20, (4, 5))
    compiled = torch.compile(
        lambda i, w: metalcore.embedding_bag(i, w * 2), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(indices, table), F.embedding_bag(indices, table * 2))


def test_does_not_depend_on_threads() -> None:
    before, found = torch.get_num_threads(), []
    table, indices = torch.randn(500, 64), torch.randint(500, (600, 20))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        leaf = table.clone().requires_grad_()
        metalcore.embedding_bag(indices, leaf).square().sum().backward()
        found.append(leaf.grad)
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_module_is_a_drop_in_for_torch() -> None:
    theirs = torch.nn.EmbeddingBag(10, 4, mode="sum", padding_idx=2)
    ours = metalcore.MetalEmbeddingBag(10, 4, mode="sum", padding_idx=2)
    ours.load_state_dict(theirs.state_dict())
    indices = torch.randint(10, (3, 4))
    with metalcore.trace() as t:
        torch.testing.assert_close(ours(indices), theirs(indices))
    assert {p.split(":")[0] for p in t.paths["embedding_bag"]} == {"cpu"}
    assert str(ours) == str(theirs)
    assert metalcore.MetalEmbeddingBag is metalcore.nn.EmbeddingBag


table8, pair = torch.randn(10, 8), torch.zeros(2, 2, dtype=torch.int64)
BAD: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: metalcore.embedding_bag(pair, table8, mode="median"),
        ValueError,
        "embedding_bag: mode must be sum, mean or max, got median",
    ),
    (
        lambda: metalcore.embedding_bag(pair, table8, torch.zeros(1)),
        ValueError,
        "embedding_bag: offsets go with an input of one dimension, got two",
    ),
    (
        lambda: metalcore.embedding_bag(pair[0], table8),
        ValueError,
        "embedding_bag: offsets must have one dimension, got None",
    ),
    (
        lambda: metalcore.embedding_bag(pair, table8, per_sample_weights=torch.ones(2, 2)),
        ValueError,
        "embedding_bag: per_sample_weights goes with mode='sum', got 'mean'",
    ),
    (
        lambda: metalcore.embedding_bag(pair, table8, mode="max", sparse=True),
        ValueError,
        "embedding_bag: mode='max' goes without scale_grad_by_freq and sparse",
    ),
    (
        lambda: metalcore.embedding_bag(pair[0], table8, torch.tensor([0, 3])),
        RuntimeError,
        "embedding_bag: offset 3 is past the 2 indices",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_bad_input_is_named(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
