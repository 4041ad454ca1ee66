# SPDX-License-Identifier: MIT
"""`metalcore serve` as a process: it starts, is killed, starts again, and ends when it is told."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

from metalcore.cli import app
from metalcore.gguf.save import save_gguf
from tests.gguf import tiny
from tests.serve.serving import ENDLESS, client, tokenizer

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "3+4"}],
    "model": "chatty",
    "temperature": 0,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_gguf(tiny.trained(), tmp_path / "chatty.gguf", "q8_0", tokenizer=tokenizer())
    return tmp_path / "chatty.gguf"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def process(model: Path, port: int, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "metalcore", "serve", str(model), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "METALCORE_STRICT": "1"}
    with subprocess.Popen(
        [*command, *words], stderr=subprocess.PIPE, text=True, env=environment
    ) as made:
        try:
            yield made
        finally:
            made.kill()


def first_line(made: "subprocess.Popen[str]") -> str:
    assert made.stderr is not None
    return made.stderr.readline()


def stream_until_it_ends(ask: openai.OpenAI, end: Callable[[], None]) -> None:
    """Stream one answer after the other; `end` comes in between."""
    timer = threading.Timer(0.3, end)
    with pytest.raises((openai.APIError, httpx2.TransportError)):
        stream_forever(ask, timer)


def stream_forever(ask: openai.OpenAI, timer: threading.Timer) -> None:
    while True:
        stream = ask.chat.completions.create(stream=True, max_tokens=50, **ASKED, **ENDLESS)
        for _ in stream:
            if timer.ident is None:
                timer.start()


def test_killed_in_a_stream_it_starts_again_and_ends_when_told(model: Path) -> None:
    port = free_port()
    with client(f"http://127.0.0.1:{port}") as ask:
        with process(model, port) as made:
            assert f"chatty at http://127.0.0.1:{port}/v1" in first_line(made)
            stream_until_it_ends(ask, made.kill)
        with process(model, port, "--threads", "1") as made:
            first_line(made)
            found = ask.chat.completions.create(**ASKED)
            assert found.choices[0].message.content == "7"
            stream_until_it_ends(ask, made.terminate)
            assert made.wait(30) == 0
            assert made.stderr is not None
            said = made.stderr.read()
    assert said.split() == ["Ctrl-C", "ends", "it", "stopped"]


def serve(*words: Any) -> str:
    found = CliRunner().invoke(app, ["serve", *map(str, words)])
    assert found.exit_code in (1, 2)
    assert "Traceback" not in found.output
    return " ".join(found.output.replace("\u2502", " ").split())


def test_what_is_wrong_is_said_in_a_line(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port chooses another" in serve(model, "--port", port)
    assert "give a --token" in serve(model, "--host", "0.0.0.0")
    assert "a token is letters" in serve(model, "--token", "")
    assert "cache must be one of" in serve(model, "--cache", "int3", "--port", 0)
    assert "context must be from 2 to 64" in serve(model, "--context", 100, "--port", 0)
    (tmp_path / "bad.gguf").write_bytes(b"PK" + bytes(50))
    assert "no GGUF file" in serve(tmp_path / "bad.gguf", "--port", 0)
    assert "does not exist" in serve(tmp_path / "none.gguf")


def test_help_explains() -> None:
    said = CliRunner().invoke(app, ["serve", "--help"]).output
    for word in ("OpenAI", "curl", "--token", "--rows", "429", "127.0.0.1", "Ctrl-C"):
        assert word in said
