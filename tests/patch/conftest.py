# SPDX-License-Identifier: MIT
"""After each test, torch is what it was."""

from collections.abc import Iterator

import pytest
from torch import Tensor

import metalcore
from tests.patch.forced import ORIGINALS, found


@pytest.fixture(autouse=True)
def _torch_is_itself_again() -> Iterator[None]:
    yield
    metalcore.unpatch_comfy()
    metalcore.disable_pytorch_overrides()
    assert all(a is b for a, b in zip(found(), ORIGINALS, strict=True))
    assert "softmax" not in vars(Tensor)
