# SPDX-License-Identifier: MIT
"""The server as a client of OpenAI's sees it."""

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
import torch

from metalcore.serve.app import Service
from metalcore.serve.server import Settings, load, make_service
from tests.gguf import tiny
from tests.serve.serving import ENDLESS, client, listening, served, tokenizer, until

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_answers(ask: openai.OpenAI) -> None:
    found = ask.chat.completions.create(messages=say("3+4"), **GREEDY)
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "7"
    assert choice.finish_reason == "stop"
    assert found.model == "tiny"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (4, 2)
    assert found.usage.total_tokens == 6


def test_every_sum_is_right_when_all_are_asked_at_once(server: tuple[Service, str]) -> None:
    import asyncio

    async def run() -> list[str | None]:
        made = openai.AsyncOpenAI(base_url=f"{server[1]}/v1", api_key="x", max_retries=0)

        async def one(question: str) -> str | None:
            messages = say(question.removesuffix("="))
            found = await made.chat.completions.create(messages=messages, **GREEDY)
            answer: str | None = found.choices[0].message.content
            return answer

        async with made:
            return await asyncio.gather(*(one(question) for question, _ in tiny.SUMS))

    assert asyncio.run(run()) == [answer for _, answer in tiny.SUMS]
    assert server[0].engine.state["rows_free"] == 8


def test_a_stream_brings_the_same_piece_by_piece(ask: openai.OpenAI) -> None:
    how = {**GREEDY, **ENDLESS, "max_tokens": 20}
    whole = ask.chat.completions.create(messages=say("6+6"), **how)
    parts = list(
        ask.chat.completions.create(
            messages=say("6+6"), stream=True, stream_options={"include_usage": True}, **how
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    texts = [p.choices[0].delta.content or "" for p in parts if p.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 10
    assert parts[-2].choices[0].finish_reason == "length"
    assert [p.usage for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].usage is not None
    assert parts[-1].usage == whole.usage
    assert len({p.id for p in parts}) == 1
    plain = list(ask.chat.completions.create(messages=say("3+4"), stream=True, **GREEDY))
    assert plain[-1].choices[0].finish_reason == "stop"


def test_a_prompt_goes_on(ask: openai.OpenAI) -> None:
    for prompt in ("5+5=", ["5+5="], tiny.tokenizer()("5+5=").input_ids):
        found = ask.completions.create(prompt=prompt, **GREEDY)
        assert found.choices[0].text == "10"
    streamed = ask.completions.create(prompt="5+5=", stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in streamed) == "10"
    assert len(ask.completions.create(prompt="5+5=", **GREEDY, **ENDLESS).choices[0].text) == 16


def test_stops_seeds_and_lengths(ask: openai.OpenAI) -> None:
    def text(**how: Any) -> str:
        how = {"model": "tiny", **ENDLESS, "max_tokens": 12, **how}
        found = ask.completions.create(prompt="1", **how).choices[0]
        return f"{found.text}/{found.finish_reason}"

    free = text(temperature=0)
    assert free.endswith("/length")
    assert text(temperature=0, stop=free[3]) == free[: free.index(free[3])] + "/stop"
    assert text(temperature=0, stop=["never", free[1:3]]) == free[0] + "/stop"
    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(top_p=0) == free
    assert text(extra_body={"top_k": 1}) == free
    assert text(temperature=0, max_tokens=3) == free[:3] + "/length"


def test_the_model_is_listed(ask: openai.OpenAI) -> None:
    assert [model.id for model in ask.models.list()] == ["tiny"]
    assert ask.models.retrieve("tiny").owned_by == "metalcore"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here"):
        ask.models.retrieve("gpt")


MESSAGES = say("1")
WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "at least one message", "messages"),
    ({"messages": "hello"}, "must be a list of messages", "messages"),
    ({"messages": ["hello"]}, "must have a role and a content", "messages[0]"),
    ({"messages": [{"role": "user"}]}, "content must be a text", "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "tools are not called", "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "parts of the type text",
        "messages[0]",
    ),
    ({"messages": [{"role": "system", "content": "a"}]}, "template refuses", "messages"),
    ({"messages": say("\ud800")}, "half of a character", None),
    ({"messages": say("1" * 64)}, "the context is 64 tokens", "messages"),
    ({"messages": say("1" * 10), "max_tokens": 60}, "60 to be written", "messages"),
    ({"max_tokens": 0}, "from 1 to 64, got 0", "max_tokens"),
    ({"max_tokens": 2.5}, "a whole number", "max_tokens"),
    ({"max_completion_tokens": True}, "a whole number", "max_completion_tokens"),
    ({"temperature": 3}, "from 0 to 2, got 3", "temperature"),
    ({"temperature": "hot"}, "must be a number", "temperature"),
    ({"top_p": -1}, "from 0 to 1", "top_p"),
    ({"top_k": 0}, "from 1", "top_k"),
    ({"seed": 2**70}, "seed must be", "seed"),
    ({"stop": ["a"] * 5}, "up to 4 texts", "stop"),
    ({"stop": ""}, "none of them empty", "stop"),
    ({"n": 2}, "one answer is written", "n"),
    ({"logprobs": True}, "log probabilities are not given", "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools are not called", "tools"),
    ({"response_format": {"type": "json_object"}}, "only text is written", "response_format"),
    ({"logit_bias": {"99999": 1}}, "tokens of the model", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "-100 to 100", "logit_bias"),
    ({"stream": 1}, "true or false", "stream"),
    ({"stream_options": {}}, "for stream = true", "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "include_usage", "stream_options"),
    ({"temprature": 0}, "'temprature' is not known", "temprature"),
    ({"model": 3}, "must be a text", "model"),
]


def post(address: str, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | {
        key.replace("_", "-"): value for key, value in headers.items()
    }
    with urlopen(Request(address + path, data, sent), timeout=60) as answer:
        return json.loads(answer.read())


def refused(address: str, body: Any, *path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(HTTPError) as caught:
        post(address, body, *path, **headers)
    with caught.value as answer:
        return answer.code, json.loads(answer.read())["error"]


@pytest.mark.parametrize(("fields", "says", "param"), WRONG, ids=lambda x: str(x)[:40])
def test_what_is_wrong_is_said(
    fields: dict[str, Any], says: str, param: str | None, address: str
) -> None:
    status, error = refused(address, {"messages": MESSAGES, **fields})
    assert status == 400
    assert says in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "a text or a list of tokens"),
        ({"prompt": ["1", "2"]}, "one text"),
        ({"prompt": [True]}, "one text"),
        ({"prompt": [10**6]}, "from 0 to"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "1", "echo": True}, "does not do that"),
        ({"prompt": "1", "best_of": 2}, "one answer"),
        ({"prompt": "1", "messages": []}, "not known"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_prompt_is_said(
    fields: dict[str, Any], says: str, address: str
) -> None:
    status, error = refused(address, fields, "/v1/completions")
    assert status == 400
    assert says in error["message"]


def test_bodies_and_paths_that_are_none(address: str) -> None:
    assert refused(address, b"{")[0] == 400
    assert refused(address, b"[1]")[0] == 400
    assert refused(address, b"\xff")[0] == 400
    assert refused(address, b"[" * 100_000)[0] == 400
    assert refused(address, b"1" * 5000)[0] == 400
    assert refused(address, b" " * (9 * 2**20))[0] == 413
    assert refused(address, {"messages": MESSAGES}, content_type="text/plain")[0] == 415
    assert refused(address, {}, "/v1/nothing")[0] == 404
    assert refused(address, {}, "/v1/models")[0] == 405
    assert refused(address, {"messages": MESSAGES, "model": "gpt"})[0] == 404
    status, error = refused(address, {"messages": MESSAGES, "\ud800": 1})
    assert (status, error["code"]) == (400, "unknown_parameter")


def test_what_changes_nothing_may_be_said(address: str) -> None:
    extra = {"n": 1, "user": "me", "logprobs": False, "stop": None, "tools": [], "store": False}
    found = post(address, {"messages": say("3+4"), "temperature": 0, **extra})
    assert found["choices"][0]["message"]["content"] == "7"


def test_a_page_of_another_name_is_refused(address: str) -> None:
    with pytest.raises(HTTPError) as caught:
        post(address, {"messages": MESSAGES}, host="evil.example")
    caught.value.close()
    assert caught.value.code == 400
    assert post(address, {"messages": MESSAGES}, host="localhost:1234")["choices"]


def test_who_leaves_a_stream_or_an_answer_frees_its_row() -> None:
    with served(Settings(rows=2, waiting=1)) as (service, address), client(address) as ask:
        how: dict[str, Any] = {"messages": say("1"), "model": "tiny", **ENDLESS, "max_tokens": 50}
        with _slow(service):
            stream = ask.chat.completions.create(stream=True, **how)
            next(iter(stream))
            with pytest.raises(openai.APITimeoutError):
                ask.with_options(timeout=0.2).chat.completions.create(**how)
            assert service.engine.state["running"] >= 1
            stream.close()
            until(lambda: service.engine.state["rows_free"] == 2)
            assert service.engine.state["done"] == 0
        assert ask.chat.completions.create(messages=say("3+4"), **GREEDY).choices


class _slow:  # noqa: N801 - it is called
    """Tokens of a service take a while."""

    def __init__(self, service: Service) -> None:
        self.rows: Any = service.engine._rows

    def __enter__(self) -> None:
        import time

        step = self.rows.step

        def slowly(tokens: Any) -> Any:
            time.sleep(0.1)
            return step(tokens)

        self.rows.step = slowly

    def __exit__(self, *_: object) -> None:
        del self.rows.step


def test_too_many_get_429() -> None:
    with served(Settings(rows=1, waiting=0)) as (service, address), client(address) as ask:
        how: dict[str, Any] = {"messages": say("1"), "model": "tiny", **ENDLESS, "max_tokens": 50}
        with _slow(service):
            with ask.chat.completions.create(stream=True, **how) as stream:
                next(iter(stream))
                until(lambda: service.engine.state["running"] == 1)
                with pytest.raises(openai.RateLimitError, match="too many requests wait") as caught:
                    ask.chat.completions.create(**how)
                assert caught.value.response.headers["retry-after"] == "1"
            until(lambda: service.engine.state["rows_free"] == 1)


def test_a_token_is_asked_for_everywhere_but_for_health() -> None:
    settings = Settings(token="geheim-1")
    with served(settings) as (_, address):
        for key in ("wrong", "geheim"):
            with client(address, key) as ask:
                with pytest.raises(openai.AuthenticationError, match="Authorization must be"):
                    ask.models.list()
                with pytest.raises(openai.AuthenticationError):
                    ask.chat.completions.create(messages=MESSAGES, **GREEDY)
        status, error = refused(address, b"no json", Authorization="Basic geheim-1")
        assert (status, error["code"]) == (401, "invalid_api_key")
        with urlopen(f"{address}/health", timeout=60) as answer:
            assert json.loads(answer.read()) == {"status": "ok"}
    with served(Settings(token="geheim")) as (_, address), client(address, "geheim") as ask:
        assert ask.chat.completions.create(messages=say("3+4"), **GREEDY).choices


def test_a_failure_of_the_model_is_a_500_and_the_next_is_answered(
    server: tuple[Service, str], ask: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(row: int, n: int) -> bool:
        raise RuntimeError("out of numbers")

    with monkeypatch.context() as m:
        m.setattr(server[0].engine._rows, "advance", fail)
        with pytest.raises(openai.InternalServerError, match="could not compute"):
            ask.chat.completions.create(messages=MESSAGES, **GREEDY)
        with pytest.raises(openai.APIError, match="could not compute"):
            list(ask.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert ask.chat.completions.create(messages=say("3+4"), **GREEDY).choices


def test_a_server_that_stops_says_so() -> None:
    how: dict[str, Any] = {"messages": say("1"), "model": "tiny", **ENDLESS, "max_tokens": 50}
    with served() as (service, address), client(address) as ask, _slow(service):
        stream = iter(ask.chat.completions.create(stream=True, **how))
        next(stream)
        service.engine.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            ask.chat.completions.create(**how)
        status, _ = _health(address)
        assert status == 503


def _health(address: str) -> tuple[int, Any]:
    try:
        with urlopen(f"{address}/health", timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_a_folder_of_transformers_is_served_with_8_bit_keys(tmp_path: Path) -> None:
    tiny.trained().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings = Settings(cache="int8", rows=1)
    service = make_service(*load(tmp_path, settings), settings, "folder")
    with listening(service) as address, client(address) as ask:
        found = ask.chat.completions.create(messages=say("6+6"), model="folder", temperature=0)
        assert found.choices[0].message.content == "12"
    rows: Any = service.engine._rows
    assert rows._store.dtype == torch.int8
    assert rows.active == ()
