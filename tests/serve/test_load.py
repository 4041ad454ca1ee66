# SPDX-License-Identifier: MIT
"""Many clients at once, of whom some leave early: no errors, all rows back, memory flat."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from metalcore.patch import decode_rows
from metalcore.serve.app import Service
from tests.gguf import tiny
from tests.serve.serving import ENDLESS, until
from tests.serve.test_process import first_line, free_port, model, process

__all__ = ["model"]
CLIENTS = 8


class Load:
    """Clients that ask until a time has come."""

    def __init__(self, address: str, name: str, seconds: float) -> None:
        self.address, self.name = address, name
        self.end = time.monotonic() + seconds
        self.answers = self.left = self.tokens = 0

    async def run(self, clients: int = CLIENTS) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{self.address}/v1", api_key="x", max_retries=0, timeout=120
        ) as made:
            await asyncio.gather(*(self._client(made, random.Random(i)) for i in range(clients)))

    async def _client(self, made: openai.AsyncOpenAI, dice: random.Random) -> None:
        while time.monotonic() < self.end:
            question, answer = dice.choice(tiny.SUMS)
            is_sum = dice.random() < 0.5
            how: dict[str, Any] = {} if is_sum else {**ENDLESS, "max_tokens": dice.randint(1, 50)}
            patience = dice.randint(0, 20) if dice.random() < 0.2 else None
            messages: Any = [{"role": "user", "content": question.removesuffix("=")}]
            stream = await made.chat.completions.create(
                messages=messages, model=self.name, temperature=0, stream=True, **how
            )
            text = await self._read(stream, patience)
            if text is None:
                self.left += 1
                continue
            self.answers += 1
            assert text.startswith(answer[: how.get("max_tokens")])
            assert text == answer or not is_sum

    async def _read(self, stream: Any, patience: int | None) -> str | None:
        text, finish = "", None
        async with stream:
            async for part in stream:
                if patience is not None and len(text) >= patience:
                    return None
                text += part.choices[0].delta.content or ""
                self.tokens += 1
                finish = part.choices[0].finish_reason
        assert finish in ("stop", "length")
        return text


# the generators of a client that leaves, one in another, are closed in any order with the loop
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <async_gen:pytest.PytestUnraisableExceptionWarning"
)
def test_eight_clients_some_of_whom_leave(
    server: tuple[Service, str], caplog: pytest.LogCaptureFixture
) -> None:
    service, address = server
    load = Load(address, "tiny", 3)
    asyncio.run(load.run())
    assert load.answers > CLIENTS
    assert load.left
    until(lambda: service.engine.state["rows_free"] == 8)
    assert service.engine.state["failed"] == 0
    rows: Any = service.engine._rows
    assert isinstance(rows, decode_rows.Rows)  # by the model's tape
    assert rows.active == ()
    assert not caplog.records


@pytest.fixture
def running(model: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    with process(model, port) as made:
        first_line(made)
        yield f"http://127.0.0.1:{port}", made.pid
        made.kill()
        assert made.stderr is not None
        assert made.stderr.read().split() == ["Ctrl-C", "ends", "it"]


def memory(pid: int) -> int:
    """Bytes that a process has in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_eight_clients_for_five_minutes_in_flat_memory(running: tuple[str, int]) -> None:
    address, pid = running
    asyncio.run(Load(address, "chatty", 30).run())
    before = memory(pid)
    load = Load(address, "chatty", 300)
    asyncio.run(load.run())
    grown = memory(pid) - before
    print(
        f"{load.answers} answers, {load.left} left, {load.tokens} tokens, {grown / 1e6:.1f} MB more"
    )
    assert load.answers > 1000
    assert grown < 16e6
