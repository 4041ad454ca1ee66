# SPDX-License-Identifier: MIT
"""A trace is proof: every CPU kernel says which of its variants ran, on every path of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import _native
from metalcore._op import Op
from metalcore._trace import tensors
from metalcore._where import map_tensors
from tests.backends import FLOATS

# sizes that become zero, where these are not that of the first tensor: places, bags, sequences
PLACES_AND_BAGS = {
    "embedding_bag": {100, 4},
    "embedding_bag_backward": {100, 4},
    "paged_attention": {2},
    # one of their examples is a single entry of packed sequences
    "mlstm_chunkwise": {2},
    "mlstm_chunkwise_backward": {2},
}


def _calls(op: Op) -> Iterator[list[Any]]:
    """Arguments of every example in every dtype, and the same without rows, matrices or bags."""
    for sample in op.samples:
        for dtype in FLOATS:
            args = list(sample(dtype).args)
            yield args
            first = {len(x) for x in tensors(args[:1])}
            sizes = PLACES_AND_BAGS.get(op.name, first)

            def without_rows(x: Tensor, sizes: set[int] = sizes) -> Tensor:
                return x[:0] if x.dim() and len(x) in sizes else x

            yield [map_tensors(without_rows, a) for a in args]


@pytest.mark.parametrize("op", list(Op.all.values()), ids=lambda op: op.name)
def test_every_kernel_names_its_own_variant_whatever_ran_before(op: Op) -> None:
    matrices, rows = torch.eye(4).expand(2, 4, 4), torch.ones(2, 8)
    for args in _calls(op):
        found = []
        for before in (
            lambda: torch.ops.metalcore.svd(matrices, False),
            lambda: torch.ops.metalcore.softmax(rows, None, 1.0, False),
        ):
            with metalcore.trace() as t:
                before()
                op(*(map_tensors(Tensor.clone, a) for a in args))
            assert [r.path for r in t.records] == [f"cpu:{_native.isa}"] * 2
            found.append([r.variant for r in t.records])
        (after_svd, first), (after_softmax, second) = found
        assert after_svd != after_softmax
        assert first == second != "", f"{op.name} of {[a.shape for a in tensors(args)]}"


def test_a_call_that_fails_leaves_no_variant_of_another_op() -> None:
    torch.ops.metalcore.softmax(torch.ones(2, 8), None, 1.0, False)
    assert _native.last_variant() == "rows"
    with pytest.raises(RuntimeError, match="softmax: x must have rows"):
        torch.ops.metalcore.softmax(torch.ones(()), None, 1.0, False)
    assert _native.last_variant() == ""
