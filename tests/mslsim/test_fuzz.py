# SPDX-License-Identifier: MIT
"""Sources, launch files and arrays with pieces left out, doubled, moved and overwritten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mslsim.fuzz import KINDS, seeds


@st.composite
def _damaged(draw: st.DrawFn, kind: str) -> bytes:
    data = draw(st.sampled_from(seeds(kind)))
    for _ in range(draw(st.integers(1, 4))):
        a, b, c = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 3)))
        piece = draw(st.sampled_from([b"", data[a:b] * 2, data[b:c] + data[a:b]]) | st.binary())
        data = data[:a] + piece + data[c:]
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_read_is_read_or_refused(kind: str) -> None:
    @given(_damaged(kind))
    def read(data: bytes) -> None:
        KINDS[kind](data)

    read()
