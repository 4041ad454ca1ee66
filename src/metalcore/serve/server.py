# SPDX-License-Identifier: MIT
"""From a file to a listening server."""

import copy
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from rich.console import Console

from metalcore._check import expect, expect_one_of
from metalcore._optional import need
from metalcore.chat import Writer, quiet
from metalcore.patch.accelerate import accelerate
from metalcore.patch.decoder import decoder
from metalcore.serve.app import LOOPBACK, Service, application
from metalcore.serve.engine import Engine
from metalcore.serve.prompts import Prompts
from metalcore.serve.requests import Limits
from metalcore.serve.rows import ModelRows, Rows

_CACHES = {"auto": None, "int8": torch.int8}
# Without a word of the user no row becomes longer.
_LONGEST = 8192
# Answers end with the engine; then there is nothing to wait for but the last bytes.
_GRACE_SECONDS = 10


@dataclass(frozen=True)
class Settings:
    """How to serve; `metalcore serve --help` tells what each is for."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    is_open: bool = False
    rows: int = 8
    context: int | None = None
    waiting: int = 64
    cache: str = "auto"
    name: str | None = None
    adapter: Path | None = None
    tiles: Path | None = None
    verbose: bool = False
    device: str = "cpu"

    def check(self) -> None:
        expect_one_of("serve", "cache", self.cache, list(_CACHES))
        is_sent = self.token is None or (self.token.isascii() and self.token.isprintable())
        expect(is_sent and self.token != "", "serve", "a token is letters, digits and signs")
        expect(
            self.is_local or self.token is not None or self.is_open,
            "serve",
            f"on {self.host} others can reach it: give a --token, or let anybody in with --open",
        )

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK


def run(path: Path, settings: Settings) -> None:
    """Serve the model at `path` until the process is told to stop."""
    settings.check()
    console = Console(stderr=True)
    # first, because a port that is taken should not cost the time of loading
    with closing(_listen(settings)) as listening:
        model, tokenizer = load(path, settings)
        service = make_service(model, tokenizer, settings, settings.name or path.stem)
        where = listening.getsockname()
        host = f"[{where[0]}]" if ":" in where[0] else where[0]
        limits = f"{settings.rows} answers at once, of {service.limits.context} tokens"
        console.print(f"{service.name} at http://{host}:{where[1]}/v1: {limits}", highlight=False)
        console.print("Ctrl-C ends it", style="dim")
        server(service, verbose=settings.verbose).run(sockets=[listening])
        console.print("stopped", style="dim")


def load(path: Path, settings: Settings) -> tuple[Any, Any]:
    """An accelerated model and its tokenizer."""
    if path.is_file():
        writer = Writer(
            path, adapter=settings.adapter, device=settings.device, tiles=settings.tiles
        )
        return writer.model, writer.tokenizer
    quiet()
    transformers = need("transformers", "serve")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    if settings.adapter is not None:
        model = need("peft", "serve --adapter").PeftModel.from_pretrained(model, settings.adapter)
    model = model.to(settings.device).eval()
    accelerate(model)
    return model, tokenizer


def make_service(model: Any, tokenizer: Any, settings: Settings, name: str) -> Service:
    """A model ready to be asked."""
    config = model.config.get_text_config()
    longest: int = getattr(config, "max_position_embeddings", _LONGEST)
    context = min(longest, _LONGEST) if settings.context is None else settings.context
    expect(2 <= context <= longest, "serve", f"context must be from 2 to {longest}, got {context}")
    rows = make_rows(model, settings)
    # what is made once is made before the first request
    row = rows.begin([0])
    rows.advance(row, 1)
    rows.free(row)
    engine = Engine(rows, copy.deepcopy(tokenizer), ends_of(model), waiting=settings.waiting)
    hosts = LOOPBACK if settings.is_local else ("*",)
    limits = Limits(context, config.vocab_size)
    return Service(engine, Prompts(tokenizer), name, limits, settings.token, hosts)


def make_rows(model: Any, settings: Settings) -> Rows:
    """By the tape of the model's step, where it has one."""
    dtype = _CACHES[settings.cache]
    recorded = decoder(model, dtype=dtype)
    if recorded.is_recorded:
        return recorded.rows(settings.rows)
    return ModelRows(model, settings.rows, dtype=dtype)


def ends_of(model: Any) -> list[int]:
    """The tokens that end an answer."""
    found = model.generation_config.eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def server(service: Service, *, verbose: bool = False) -> "_Server":
    """A server of uvicorn for a service."""
    logging.getLogger("asyncio").addFilter(_is_news)
    config = uvicorn.Config(
        application(service),
        log_level="info" if verbose else "warning",
        access_log=verbose,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    return _Server(config, service.engine)


def _is_news(record: logging.LogRecord) -> bool:
    """A client that leaves while it is written to is none: thousands fill a pipe that nobody reads,
    and then the server waits."""
    return record.msg != "socket.send() raised exception."


class _Server(uvicorn.Server):
    """Ends answers as soon as it is told to stop, and then itself, without an error."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def stop(self) -> None:
        """Answers that are being written end with an error; then the server ends."""
        self._engine.close()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self._on_signal) for one in signals}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _on_signal(self, *_: Any) -> None:
        self.force_exit = self.should_exit
        self.stop()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        said = f"cannot listen on {settings.host} port {settings.port}: {error.strerror}"
        raise OSError(f"serve: {said}; --port chooses another") from error
