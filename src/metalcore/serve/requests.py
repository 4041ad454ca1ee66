# SPDX-License-Identifier: MIT
"""Requests in OpenAI's form: each field is checked, and what is not known is refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metalcore.serve.options import Options

_MOST_STOPS = 4
_MOST_BIASES = 1024


class BadRequest(Exception):
    """A request that cannot be answered: the status and the error that the client gets."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    context: int
    vocabulary: int


@dataclass(frozen=True)
class Asked:
    """A request that was understood, but for the number of its tokens."""

    messages: list[dict[str, str]] | None
    prompt: str | list[int] | None
    # None: as many as there is room for
    max_tokens: int | None
    options: Mapping[str, Any]
    is_streamed: bool
    has_usage: bool
    model: str | None

    def with_prompt(self, tokens: Sequence[int], limits: Limits) -> Options:
        """The options, when it is known how long the prompt is."""
        if not tokens:
            raise BadRequest("the prompt has no tokens", self._param)
        room = limits.context - len(tokens)
        if room < (self.max_tokens or 1):
            wanted = f" and {self.max_tokens} to be written" if self.max_tokens else ""
            raise BadRequest(
                f"the context is {limits.context} tokens; there are {len(tokens)} in the prompt"
                f"{wanted}",
                self._param,
                code="context_length_exceeded",
            )
        return Options(max_tokens=self.max_tokens or room, **self.options)

    @property
    def _param(self) -> str:
        return "prompt" if self.messages is None else "messages"


# Fields that change nothing in the text, for the bookkeeping of others.
_IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields whose one value asks for what happens anyhow.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
_WHY_NOT = {
    "n": "one answer is written for each request",
    "logprobs": "log probabilities are not given",
    "top_logprobs": "log probabilities are not given",
    "best_of": "one answer is written for each request",
    "tools": "tools are not called",
    "functions": "functions are not called",
    "response_format": "only text is written",
}


class _Fields:
    """The fields of a request, each taken once; those that are left were not known."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        # null is the same as nothing
        self.left = {key: value for key, value in body.items() if value is not None}

    def take(self, name: str, kinds: type | tuple[type, ...], what: str) -> Any:
        value = self.left.pop(name, None)
        # True is an int for Python
        is_bool = isinstance(value, bool) and kinds is not bool
        if value is not None and (is_bool or not isinstance(value, kinds)):
            raise BadRequest(f"{name} must be {what}, got {_short(value)}", name)
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        value = self.take(name, (int, float), f"a number from {least:g} to {most:g}")
        if value is None:
            return default
        if not least <= value <= most:
            raise BadRequest(f"{name} must be from {least:g} to {most:g}, got {value}", name)
        return float(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value: int | None = self.take(name, int, "a whole number")
        if value is not None and not least <= value <= most:
            raise BadRequest(f"{name} must be from {least} to {most}, got {value}", name)
        return value

    def expect_none_left(self) -> None:
        for name, value in self.left.items():
            if name in _IGNORED or any(value == only for only in _ONLY.get(name, ())):
                continue
            if name in _ONLY:
                why = _WHY_NOT.get(name, "this server does not do that")
                raise BadRequest(f"{name} = {_short(value)}: {why}", name, code="unsupported_value")
            param = name if name.isascii() else None
            raise BadRequest(f"{_short(name)} is not known here", param, code="unknown_parameter")


def parse_chat(body: Any, limits: Limits) -> Asked:
    """A request for /v1/chat/completions."""
    fields = _Fields(body)
    messages = _messages(fields)
    most = fields.integer("max_completion_tokens", 1, limits.context)
    older = fields.integer("max_tokens", 1, limits.context)
    return _asked(fields, limits, messages, None, most if most is not None else older)


def parse_completion(body: Any, limits: Limits) -> Asked:
    """A request for /v1/completions."""
    fields = _Fields(body)
    prompt = _prompt(fields, limits)
    most = fields.integer("max_tokens", 1, limits.context)
    return _asked(fields, limits, None, prompt, 16 if most is None else most)


def _asked(
    fields: _Fields,
    limits: Limits,
    messages: list[dict[str, str]] | None,
    prompt: str | list[int] | None,
    max_tokens: int | None,
) -> Asked:
    options = {
        "temperature": fields.number("temperature", 0, 2, 1.0),
        "top_p": fields.number("top_p", 0, 1, 1.0),
        "top_k": fields.integer("top_k", 1, 2**31),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2, 0.0),
        "presence_penalty": fields.number("presence_penalty", -2, 2, 0.0),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "stop": _stops(fields),
        "logit_bias": _biases(fields, limits),
    }
    model = fields.take("model", str, "a text")
    is_streamed = bool(fields.take("stream", bool, "true or false"))
    has_usage = _has_usage(fields, is_streamed)
    fields.expect_none_left()
    return Asked(messages, prompt, max_tokens, options, is_streamed, has_usage, model)


def _messages(fields: _Fields) -> list[dict[str, str]]:
    given = fields.take("messages", list, "a list of messages")
    if not given:
        raise BadRequest("messages must be a list with at least one message", "messages")
    found = []
    for i, message in enumerate(given):
        param = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{param} must have a role and a content", param)
        if message.get("tool_calls") or message["role"] in ("tool", "function"):
            raise BadRequest(f"{param}: tools are not called", param, code="unsupported_value")
        found.append({"role": message["role"], "content": _content(message, param)})
    return found


def _content(message: Mapping[str, Any], param: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{param}.content must be a text, got {_short(content)}", param)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"{param}.content may have parts of the type text, got {_short(kind)}",
                param,
                code="unsupported_value",
            )
    return "".join(part["text"] for part in content)


def _prompt(fields: _Fields, limits: Limits) -> str | list[int]:
    given = fields.take("prompt", (str, list), "a text or a list of tokens")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return given
    if not given:
        raise BadRequest("prompt must be a text or a list of tokens", "prompt")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in given):
        raise BadRequest("prompt must be one text, or the tokens of one", "prompt")
    wrong = [token for token in given if not 0 <= token < limits.vocabulary]
    if wrong:
        most = limits.vocabulary - 1
        raise BadRequest(f"tokens must be from 0 to {most}, got {wrong[0]}", "prompt")
    return list(given)


def _stops(fields: _Fields) -> tuple[str, ...]:
    given = fields.take("stop", (str, list), "a text, or a list of texts")
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"stop must be up to {_MOST_STOPS} texts, none of them empty", "stop")
    return tuple(stops)


def _biases(fields: _Fields, limits: Limits) -> dict[int, float]:
    given = fields.take("logit_bias", dict, "an object of tokens and numbers") or {}
    found = {}
    for token, bias in given.items():
        is_token = token.isascii() and token.isdigit() and int(token) < limits.vocabulary
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_token or not is_number or not -100 <= bias <= 100:
            raise BadRequest(
                "logit_bias must be numbers from -100 to 100 for tokens of the model, got "
                f"{_short(token)}: {_short(bias)}",
                "logit_bias",
            )
        found[int(token)] = float(bias)
    if len(found) > _MOST_BIASES:
        raise BadRequest(f"logit_bias has at most {_MOST_BIASES} tokens", "logit_bias")
    return found


def _has_usage(fields: _Fields, is_streamed: bool) -> bool:
    given = fields.take("stream_options", dict, "an object")
    if given is None:
        return False
    if not is_streamed:
        raise BadRequest("stream_options is for stream = true", "stream_options")
    unknown = set(given) - {"include_usage", "include_obfuscation"}
    if unknown or not isinstance(given.get("include_usage", False), bool):
        raise BadRequest("stream_options may have include_usage, true or false", "stream_options")
    return bool(given.get("include_usage", False))


def _short(value: Any) -> str:
    """A value as messages quote it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
