# SPDX-License-Identifier: MIT
"""Seeds, strictness, NaN-filled memory, and the backends every op is tested on."""

import os

os.environ["METALCORE_STRICT"] = "1"

from collections.abc import Iterator  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.backends import BACKENDS, Backend  # noqa: E402

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=40, print_blob=True
)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Same numbers each run; memory that an op leaves unwritten reads as NaN, also in C++."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with request.param as on:
        yield on
