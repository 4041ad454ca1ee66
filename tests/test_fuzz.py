# SPDX-License-Identifier: MIT
"""Kernels on sizes, dtypes and layouts that nobody chose, against what their ops mean.

`make test` tries a few hundred; `python -m tests.fuzz` goes on.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import draw_call, families
from tests.strategies import picker


@pytest.mark.parametrize("family", sorted(families()))
def test_kernels_of(family: str) -> None:
    names = families()[family]

    @given(st.data())
    def every_call_is_right_or_refused(data: st.DataObject) -> None:
        call = draw_call(picker(data.draw), names)
        found = call.flaw()
        assert not found, f"{call}: {found}"

    every_call_is_right_or_refused()
