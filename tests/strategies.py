# SPDX-License-Identifier: MIT
"""hypothesis strategies: tensors of any shape, stride, storage offset and dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.backends import FLOATS

# Around the widths of registers, simdgroups and threadgroups, never only powers of two.
SIZES = st.one_of(
    st.integers(0, 5), st.sampled_from([7, 15, 16, 17, 31, 32, 33, 63, 65, 127, 130, 257])
)
# One of some options, by hypothesis or at random.
Pick = Callable[[Sequence[Any]], Any]

dtypes = st.sampled_from(FLOATS)


def shapes(min_rank: int = 1, max_rank: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(SIZES, min_size=min_rank, max_size=max_rank).map(_within(5000))


def _within(limit: int):  # type: ignore[no-untyped-def]
    def shrink(sizes: list[int]) -> tuple[int, ...]:
        while torch.Size(sizes).numel() > limit:
            sizes[sizes.index(max(sizes))] //= 2
        return tuple(sizes)

    return shrink


@st.composite
def layouts(draw: st.DrawFn, x: Tensor) -> Tensor:
    """The values of `x` in some other layout: permuted, strided, offset, or as they are."""
    return laid_out(picker(draw), x)


def picker(draw: st.DrawFn) -> Pick:
    """Choices that hypothesis makes."""
    return lambda options: draw(st.sampled_from(options))


def laid_out(pick: Pick, x: Tensor) -> Tensor:
    """The values of `x` in a layout that is picked."""
    left = list(range(x.dim()))
    order = [left.pop(pick(range(len(left)))) for _ in range(x.dim())]
    step, offset = pick(range(1, 4)), pick(range(4))
    permuted = x.permute(*order)
    storage = torch.zeros(permuted.numel() * step + offset, dtype=x.dtype)
    view = storage[offset:][::step][: permuted.numel()].view(permuted.shape)
    view.copy_(permuted)
    inverse = [order.index(i) for i in range(x.dim())]
    return view.permute(*inverse)
