# SPDX-License-Identifier: MIT
"""One server for the tests that only ask."""

from collections.abc import Iterator

import openai
import pytest
import torch

from metalcore.serve.app import Service
from tests.serve.serving import client, served


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Service, str]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with served() as made:
        yield made
    torch.set_num_threads(before)


@pytest.fixture
def address(server: tuple[Service, str]) -> str:
    return server[1]


@pytest.fixture
def ask(address: str) -> Iterator[openai.OpenAI]:
    with client(address) as made:
        yield made
