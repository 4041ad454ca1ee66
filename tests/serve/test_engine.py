# SPDX-License-Identifier: MIT
"""Answers join, leave, fail and wait, and none of it changes another."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from metalcore.serve.engine import Closed, Engine, Full, Job, Piece
from metalcore.serve.options import Options
from tests.serve.serving import Numbers, Words, goes_on, until


class Asked:
    """A job, and what came of it."""

    def __init__(self, engine: Engine, prompt: list[int], count: int = 5, **options: Any) -> None:
        self.pieces: list[Piece] = []
        self.is_done = threading.Event()
        self.job = Job(prompt, Options(count, temperature=0, **options), self._take)
        engine.submit(self.job)

    def _take(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.is_last:
            self.is_done.set()

    def wait(self) -> Piece:
        assert self.is_done.wait(30)
        return self.pieces[-1]

    @property
    def text(self) -> str:
        self.wait()
        return "".join(piece.text for piece in self.pieces)


def together(engine: Engine, many: int, prompt: list[int], count: int) -> list[Asked]:
    """Jobs that the engine sees at once."""
    with engine._changed:
        return [Asked(engine, prompt, count) for _ in range(many)]


def words(numbers: list[int]) -> str:
    return "".join(f"{n} " for n in numbers)


@pytest.fixture
def rows() -> Numbers:
    return Numbers()


@pytest.fixture
def engine(rows: Numbers) -> Iterator[Engine]:
    made = Engine(rows, Words(), ends=[7], chunk=4, waiting=3)
    yield made
    rows.may_step.set()
    made.close()
    made.join(30)
    assert not made.is_alive


def test_answers_are_what_each_of_them_alone_is(engine: Engine, rows: Numbers) -> None:
    prompts = [[3], [1, 2, 4, 8, 16], [5, 5]]
    with engine._changed:
        asked = [Asked(engine, prompt, 6) for prompt in prompts]
    for one, prompt in zip(asked, prompts, strict=True):
        assert one.text == words(goes_on(prompt, 6))
        assert one.pieces[-1].finish == "length"
        assert one.pieces[-1].tokens == 6
    assert ("step", 2) in rows.calls
    assert engine.state == {
        "running": 0, "waiting": 0, "rows_free": 2, "done": 3, "failed": 0, "tokens": 18,
    }  # fmt: skip


def test_a_long_prompt_is_read_between_tokens_of_others(engine: Engine, rows: Numbers) -> None:
    rows.may_step.clear()
    first = Asked(engine, [3], 30)
    until(lambda: engine.state["running"] == 1)
    second = Asked(engine, [1] * 13, 2)
    rows.may_step.set()
    assert second.text == words(goes_on([1] * 13, 2))
    assert first.text == words(goes_on([3], 30))
    reads = [i for i, (kind, n) in enumerate(rows.calls) if kind == "read" and i]
    assert [rows.calls[i][1] for i in reads] == [4, 4, 4, 1]
    assert all(("step", 1) in rows.calls[a:b] for a, b in pairwise(reads))


def test_the_end_and_stops_end_an_answer(engine: Engine) -> None:
    # 2, 4, 8: of [1]; the sum of [6] goes on with 7, which ends
    assert Asked(engine, [6], 20).text == ""
    one = Asked(engine, [1], 20, stop=("8 1",))
    assert one.text == "2 4 "
    assert one.wait().finish == "stop"
    assert one.wait().tokens == 4


def test_who_leaves_frees_the_row(engine: Engine, rows: Numbers) -> None:
    rows.may_step.clear()
    leaving = together(engine, 2, [3], 10_000)
    waiting = [Asked(engine, [4], 3) for _ in range(2)]
    until(lambda: engine.state["waiting"] == 2)
    for one in (*leaving, waiting[0]):
        engine.cancel(one.job)
    rows.may_step.set()
    assert waiting[1].text == words(goes_on([4], 3))
    until(lambda: engine.state["rows_free"] == 2)
    assert not any(one.is_done.is_set() for one in (*leaving, waiting[0]))


def test_no_more_may_wait_than_said(engine: Engine, rows: Numbers) -> None:
    rows.may_step.clear()
    asked = together(engine, 2, [3], 3)
    until(lambda: engine.state["running"] == 2)
    asked += [Asked(engine, [3], 3) for _ in range(3)]
    with pytest.raises(Full):
        Asked(engine, [3], 3)
    rows.may_step.set()
    assert {one.text for one in asked} == {words(goes_on([3], 3))}


@pytest.mark.parametrize("when", ["reading", "writing"])
def test_a_failure_costs_its_own_answers_alone(
    when: str, engine: Engine, rows: Numbers, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = [9] if when == "reading" else [9, *goes_on([9], 2)]
    rows.wrong = lambda text: text == wrong
    piece = Asked(engine, [9]).wait()
    assert piece.error is not None
    assert "could not compute" in piece.error
    assert "the numbers are wrong" in caplog.text
    assert Asked(engine, [3]).text == words(goes_on([3], 5))
    assert engine.state["failed"] == 1
    assert engine.state["rows_free"] == 2


def test_logits_that_are_no_numbers_are_an_error(
    engine: Engine, rows: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = rows.logits
    monkeypatch.setattr(rows, "logits", lambda row: logits(row) * float("nan"))
    error = Asked(engine, [3]).wait().error
    assert error is not None
    assert "not finite" in error
    assert engine.state["rows_free"] == 2


def test_a_model_that_takes_no_row_costs_one_answer(
    engine: Engine, rows: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(prompt: Any) -> int:
        raise MemoryError

    with monkeypatch.context() as m:
        m.setattr(rows, "begin", refuse)
        assert Asked(engine, [3]).wait().error is not None
    assert Asked(engine, [3]).text == words(goes_on([3], 5))


def test_closing_ends_answers_with_an_error(engine: Engine, rows: Numbers) -> None:
    rows.may_step.clear()
    asked = together(engine, 3, [3], 10_000)
    until(lambda: engine.state["running"] == 2)
    engine.close()
    rows.may_step.set()
    assert {one.wait().error for one in asked} == {"the server is shutting down"}
    with pytest.raises(Closed):
        Asked(engine, [3])
