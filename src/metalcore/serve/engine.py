# SPDX-License-Identifier: MIT
"""Continuous batching: one thread computes, answers join and leave between two tokens.

A turn computes a piece of one prompt, so that a long one holds nobody up for long, and then one
token of each answer that is being written, in one go.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from metalcore.serve.options import Options, Sampler
from metalcore.serve.rows import Rows
from metalcore.serve.text import Text

_log = logging.getLogger(__name__)
_FAILED = "the model could not compute this answer; the server's log says why"


class Full(Exception):
    """No more answers can wait."""


class Closed(Exception):
    """The engine computes no more."""


@dataclass(frozen=True)
class Piece:
    """Something of an answer: text; at its end why it ended, "stop" or "length", or an error."""

    text: str = ""
    finish: str | None = None
    error: str | None = None
    # of the answer so far
    tokens: int = 0

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """An answer that is asked for; `emit` is called with its pieces, by the engine's thread."""

    prompt: list[int]
    options: Options
    emit: Callable[[Piece], None]
    is_cancelled: bool = False


@dataclass(eq=False)
class _Answer:
    """A job that has a row."""

    job: Job
    row: int
    text: Text
    sampler: Sampler
    is_read: bool = False
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Writes answers, as many at once as there are rows.

    Args:
        rows: the model.
        tokenizer: of transformers; only the engine's thread uses it.
        ends: the tokens that end an answer.
        chunk: so many tokens of a prompt are computed between two tokens of other answers.
        waiting: so many jobs may wait for a row.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        ends: Collection[int],
        *,
        chunk: int = 256,
        waiting: int = 64,
    ) -> None:
        self._rows, self._tokenizer, self._ends = rows, tokenizer, frozenset(ends)
        self._chunk, self._most_waiting = chunk, waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._answers: list[_Answer] = []
        self._is_closed = False
        self.done = self.failed = self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="metalcore engine", daemon=True)
        self._thread.start()

    # -- called by any thread

    def submit(self, job: Job) -> None:
        """Let a job be answered; its pieces come by `emit`.

        Raises:
            Full: too many wait already.
            Closed: there will be no answers.
        """
        with self._changed:
            if not self.is_alive:
                raise Closed
            if len(self._waiting) >= self._most_waiting + self._rows.count_free:
                raise Full
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more. Its row is free before the next token; nothing is emitted
        after that."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Stop between two tokens; answers that are not done end with an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closed

    @property
    def state(self) -> dict[str, int]:
        """What is going on, in numbers."""
        with self._changed:
            return {
                "running": len(self._answers),
                "waiting": len(self._waiting),
                "rows_free": self._rows.count_free,
                "done": self.done,
                "failed": self.failed,
                "tokens": self.tokens,
            }

    # -- the thread

    def _run(self) -> None:
        try:
            while self._has_work():
                self._turn()
        finally:
            with self._changed:
                self._is_closed = True
                left = [a.job for a in self._answers] + list(self._waiting)
                self._answers, self._waiting = [], deque()
            for job in left:
                _emit(job, Piece(error="the server is shutting down"))

    def _has_work(self) -> bool:
        """Wait for work, and give a row to who waits for one; whether to go on."""
        with self._changed:
            self._leave()
            while not self._is_closed and not self._answers and not self._waiting:
                self._changed.wait()
                self._leave()
            while not self._is_closed and self._waiting and self._rows.count_free:
                self._begin(self._waiting.popleft())
            return not self._is_closed

    def _leave(self) -> None:
        """Forget what was cancelled."""
        self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
        for answer in [a for a in self._answers if a.job.is_cancelled]:
            self._remove(answer)

    def _begin(self, job: Job) -> None:
        try:
            row = self._rows.begin(job.prompt)
        except Exception:
            _log.exception("an answer could not begin")
            self.failed += 1
            _emit(job, Piece(error=_FAILED))
            return
        text = Text(self._tokenizer, job.prompt, job.options.stop)
        self._answers.append(_Answer(job, row, text, Sampler(job.options)))

    def _remove(self, answer: _Answer) -> None:
        self._answers.remove(answer)
        self._rows.free(answer.row)

    def _turn(self) -> None:
        unread = next((a for a in self._answers if not a.is_read), None)
        if unread is not None:
            self._guarded([unread], lambda: self._read(unread))
        writing = [a for a in self._answers if a.is_read]
        if writing:
            self._guarded(writing, lambda: self._step(writing))

    def _guarded(self, answers: list[_Answer], compute: Callable[[], None]) -> None:
        """What goes wrong costs the answers that were computed, and no others."""
        try:
            compute()
        except Exception:
            _log.exception("an answer could not be computed")
            for answer in [a for a in answers if a in self._answers]:
                self._fail(answer, _FAILED)

    def _fail(self, answer: _Answer, error: str) -> None:
        with self._changed:
            self._remove(answer)
            self.failed += 1
        _emit(answer.job, Piece(error=error, tokens=len(answer.tokens)))

    def _read(self, answer: _Answer) -> None:
        answer.is_read = self._rows.advance(answer.row, self._chunk)
        if answer.is_read:
            self._choose(answer, self._rows.logits(answer.row))

    def _step(self, answers: list[_Answer]) -> None:
        found = self._rows.step({a.row: a.tokens[-1] for a in answers})
        for answer in answers:
            self._choose(answer, found[answer.row])

    def _choose(self, answer: _Answer, logits: Tensor) -> None:
        """Take the next token of an answer, and tell what it adds."""
        try:
            token = answer.sampler.choose(logits)
        except ArithmeticError as error:
            self._fail(answer, str(error))
            return
        answer.tokens.append(token)
        count, is_end = len(answer.tokens), token in self._ends
        new = "" if is_end else answer.text.add(token)
        is_full = count >= answer.job.options.max_tokens
        if is_end or is_full:
            new += answer.text.finish()
        is_stopped = is_end or answer.text.is_stopped
        finish = "stop" if is_stopped else "length" if is_full else None
        with self._changed:
            self.tokens += 1
            if finish is not None:
                self._remove(answer)
                self.done += 1
        if new or finish is not None:
            _emit(answer.job, Piece(new, finish, tokens=count))


def _emit(job: Job, piece: Piece) -> None:
    if not job.is_cancelled:
        job.emit(piece)
