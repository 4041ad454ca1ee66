# SPDX-License-Identifier: MIT
"""A tiny model behind a server of this process, and numbers of its own for the engine."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import torch
from torch import Tensor

from metalcore.patch.accelerate import accelerate
from metalcore.serve.app import Service
from metalcore.serve.server import Settings, make_service, server
from tests.gguf import tiny

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
# the token that ends an answer never comes
ENDLESS: dict[str, Any] = {"logit_bias": {"1": -100}}


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


@contextmanager
def served(settings: Settings = Settings()) -> Iterator[tuple[Service, str]]:  # noqa: B008
    """A server of the tiny model, and its address."""
    import copy

    model = copy.deepcopy(tiny.trained())
    accelerate(model)
    service = make_service(model, tokenizer(), settings, "tiny")
    with listening(service) as address:
        yield service, address


@contextmanager
def listening(service: Service) -> Iterator[str]:
    made = server(service)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=made.run, kwargs={"sockets": [sock]})
        thread.start()
        until(lambda: made.started)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            made.stop()
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def client(address: str, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60) as made:
        yield made


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Numbers:
    """A model whose next token is the sum of all before it, plus one, modulo the vocabulary."""

    def __init__(self, capacity: int = 2, vocabulary: int = 50) -> None:
        self.vocabulary = vocabulary
        self.unused = list(range(capacity))
        self.texts: dict[int, list[int]] = {}
        self.unread: dict[int, list[int]] = {}
        # what was computed: ("read", tokens) and ("step", rows)
        self.calls: list[tuple[str, int]] = []
        self.wrong: Callable[[list[int]], bool] = lambda text: False
        self.may_step = threading.Event()
        self.may_step.set()

    @property
    def count_free(self) -> int:
        return len(self.unused)

    def begin(self, prompt: Sequence[int]) -> int:
        row = self.unused.pop()
        self.texts[row], self.unread[row] = [], list(prompt)
        return row

    def advance(self, row: int, n: int) -> bool:
        part, self.unread[row] = self.unread[row][:n], self.unread[row][n:]
        self.texts[row] += part
        self.calls.append(("read", len(part)))
        self._expect_right(row)
        return not self.unread[row]

    def logits(self, row: int) -> Tensor:
        return torch.eye(self.vocabulary)[(sum(self.texts[row]) + 1) % self.vocabulary]

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        assert self.may_step.wait(30)
        self.calls.append(("step", len(tokens)))
        for row, token in tokens.items():
            self.texts[row].append(token)
            self._expect_right(row)
        return {row: self.logits(row) for row in tokens}

    def free(self, row: int) -> None:
        del self.texts[row], self.unread[row]
        self.unused.append(row)

    def _expect_right(self, row: int) -> None:
        if self.wrong(self.texts[row]):
            raise RuntimeError("the numbers are wrong")


def goes_on(prompt: Sequence[int], count: int, vocabulary: int = 50) -> list[int]:
    """What `Numbers` writes after a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append((sum(text) + 1) % vocabulary)
    return text[len(prompt) :]


class Words:
    """A tokenizer of numbers."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(f"{token} " for token in tokens)
