# SPDX-License-Identifier: MIT
from typing import Any

import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration

CASES = [
    # outer, size, count, inner
    ((3, 20, 9, 7), "small"),
    ((1, 5, 300, 40), "many values meet in a place"),
    ((4, 6, 3, 1), "along the last dimension"),
    ((2, 3, 4, 130), "more columns than a tile"),
    ((0, 3, 4, 2), "nothing outside"),
    ((2, 3, 0, 2), "nothing picked"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, int, int, int]) -> None:
    outer, n, count, inner = size
    for dtype in backend.dtypes:
        x = backend.randn(outer, n, inner, dtype=dtype)
        src = backend.randn(outer, count, inner, dtype=dtype)
        index = torch.randint(n, (outer, count, inner), device=backend.device)
        rows = torch.randint(n, (count,), device=backend.device)
        check_op(backend, "gather", (x, index), reduces_over=max(1, count))
        check_op(backend, "index_select", (x, rows), reduces_over=max(1, count))
        check_op(backend, "scatter_add", (x, index, src), reduces_over=max(1, count))


def test_equals_torch_along_every_dimension(backend: Backend) -> None:
    x, src = backend.randn(4, 5, 6), backend.randn(4, 5, 6)
    for dim in (0, 1, 2, -1):
        index = torch.randint(4, (3, 4, 2), device=backend.device)
        rows = torch.randint(4, (7,), device=backend.device)
        pairs = [
            (metalcore.gather(x, dim, index), torch.gather(x, dim, index)),
            (metalcore.index_select(x, dim, rows), torch.index_select(x, dim, rows)),
            (metalcore.scatter_add(x, dim, index, src), torch.scatter_add(x, dim, index, src)),
        ]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)


def test_an_index_out_of_range_is_named(backend: Backend) -> None:
    x, src = backend.randn(4, 5), backend.randn(4, 5)
    for wrong in (5, -1):
        index = torch.tensor([[0, 1, wrong]], device=backend.device)
        calls = [
            lambda i=index: metalcore.gather(x, 1, i),
            lambda i=index: metalcore.index_select(x, 1, i[0]),
            lambda i=index: metalcore.scatter_add(x, 1, i, src),
        ]
        for call in calls:
            # on a CPU the text is torch's
            text = f"index {wrong} .* of 5" if backend.name != "cpu" else "(?i)index|indices"
            with pytest.raises((IndexError, RuntimeError), match=text):
                call()


def test_registration() -> None:
    x, src, index = torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randint(4, (2, 5, 3))
    check_registration("gather", (x, index))
    check_registration("index_select", (x, index[0, :, 0]))
    check_registration("scatter_add", (x, index, src))


def test_compiles_and_maps() -> None:
    x, index = torch.randn(3, 4, 5), torch.randint(5, (3, 4, 2))

    def pick(x: Any, index: Any) -> Any:
        return metalcore.gather(x * 2, -1, index)

    compiled = torch.compile(pick, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index), pick(x, index))
    torch.testing.assert_close(torch.func.vmap(pick)(x, index), pick(x, index))


def test_sums_do_not_depend_on_threads_and_are_rounded_once() -> None:
    before, found = torch.get_num_threads(), []
    index, src = torch.randint(30, (2000, 100)), torch.randn(2000, 100).bfloat16()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(metalcore.scatter_add(torch.zeros(30, 100).bfloat16(), 0, index, src))
    torch.set_num_threads(before)
    exact = torch.zeros(30, 100).scatter_add(0, index, src.float())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert error(found[0], exact) <= tolerance("gather", torch.bfloat16, 2000)


x45 = torch.randn(4, 5)
BAD: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: metalcore.gather(x45, 1, torch.zeros(4, 2)),
        TypeError,
        "gather: index must be int64, got torch.float32; convert it with .long()",
    ),
    (
        lambda: metalcore.gather(x45, 1, torch.zeros(5, 2, dtype=torch.int64)),
        ValueError,
        "gather: index must have the dimensions of input and be no larger outside of dim 1; "
        "got index [5, 2] and input [4, 5]",
    ),
    (
        lambda: metalcore.index_select(x45, 0, torch.zeros(2, 2, dtype=torch.int64)),
        ValueError,
        "index_select: index must have one dimension, got [2, 2]",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_bad_input_is_named(call: Any, kind: type[Exception], message: str) -> None:
    with metalcore.simulate(), pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_integers_are_moved_by_torch() -> None:
    x, index = torch.arange(20).view(4, 5), torch.zeros(4, 2, dtype=torch.int64)
    assert torch.equal(metalcore.gather(x, 1, index), x.gather(1, index))
    assert torch.equal(metalcore.index_select(x, 1, index[0]), x[:, [0, 0]])
    assert torch.equal(metalcore.scatter_add(x, 1, index, x), x.scatter_add(1, index, x))
