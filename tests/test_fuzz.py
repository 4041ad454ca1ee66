# SPDX-License-Identifier: MIT
"""Kernels on sizes, dtypes and layouts that nobody chose, against what their ops mean.

`make test` tries a few hundred; `pytest tests/test_fuzz.py --hypothesis-profile=long` goes on.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metalcore._op import Op
from metalcore._where import map_tensors
from tests.backends import FLOATS
from tests.raw_calls import flaw
from tests.strategies import layouts

FAMILIES = sorted({op.story.split("/")[0] for op in Op.all.values()})
SIZES = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 31, 33, 63, 65, 70]))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of(family: str) -> None:
    names = sorted(name for name, op in Op.all.items() if op.story.startswith(f"{family}/"))

    @given(st.data())
    def every_call_is_right_or_refused(data: st.DataObject) -> None:
        op = Op.all[data.draw(st.sampled_from(names))]
        dtype = data.draw(st.sampled_from(FLOATS))
        example = data.draw(st.sampled_from(op.samples))(dtype)
        torch.manual_seed(data.draw(st.integers(0, 2**16)))
        sizes: dict[int, int] = {}

        def vary(x: Tensor) -> Tensor:
            if x.dim() == 0:
                return x
            shape = [
                sizes[n] if n in sizes else sizes.setdefault(n, data.draw(SIZES)) for n in x.shape
            ]
            return data.draw(layouts(_like(x, shape)))

        args = [map_tensors(vary, a) for a in example.args]
        found = flaw(op, "", args, max([example.reduces_over, *sizes.values()]) ** 2)
        assert not found, f"{op.name} of {_shapes(args)}: {found}"

    every_call_is_right_or_refused()


def _like(x: Tensor, shape: list[int]) -> Tensor:
    """Values as in `x`, none negative if none is, and one if it is one: a limit at random would be
    as large as what it divides. Of square matrices, positive definite ones."""
    if not x.is_floating_point():
        most = int(x.max()) + 1 if x.numel() else 1
        return torch.randint(most, shape, dtype=x.dtype) if x.dtype != torch.uint8 else x
    if x.numel() > 1 and (x == x.flatten()[0]).all():
        return x.new_full(shape, x.flatten()[0].item())
    y = torch.randn(shape)
    if (x >= 0).all():
        y = y.abs()
    if len(shape) >= 2 and shape[-1] == shape[-2]:
        y = y @ y.mT / max(1, shape[-1]) + torch.eye(shape[-1])
    return y.to(x.dtype)


def _shapes(args: list[Any]) -> list[Any]:
    return [(list(a.shape), a.stride()) if isinstance(a, Tensor) else a for a in args]
