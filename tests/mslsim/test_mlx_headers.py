# SPDX-License-Identifier: MIT
"""Every kernel header of the mlx wheel is read, strictly."""

import pytest

import mslsim
from tests.mslsim.mlx_source import BEFORE, NEEDS_TENSORS, ROOT, SOURCES, text


def headers() -> list[str]:
    return sorted(str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.h"))


@pytest.mark.parametrize("header", headers())
def test_the_header_is_accepted(header):
    before = [h for key, need in BEFORE.items() if header.startswith(key) for h in need]
    version = 400 if NEEDS_TENSORS in header else 320
    mslsim.compile_shader(text(*before, header), "none", include=[str(ROOT)], version=version)
