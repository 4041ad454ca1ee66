# SPDX-License-Identifier: MIT
"""Tokens become text as they come: whole characters, and nothing of what may be a stop."""

from collections.abc import Sequence
from typing import Any

# A character has at most 4 bytes, and a token at least one: what is longer is no character.
_LONGEST = 4
# The tokens before an answer that may decide about its first space.
_CONTEXT = 4


class Text:
    """The text of one answer.

    Args:
        tokenizer: of transformers.
        prompt: the tokens before the answer.
        stop: strings that end it; they are no part of it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt[-_CONTEXT:])
        # tokens up to `_told` are text already; from `_begin` on they are decoded together with new
        # ones, because a space may depend on what is before it
        self._begin, self._told = 0, len(self._tokens)
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """What can be told after one more token."""
        self._tokens.append(token)
        return self._release(self._new(at_end=False), at_end=False)

    def finish(self) -> str:
        """What is left to tell."""
        return self._release(self._new(at_end=True), at_end=True)

    def _new(self, *, at_end: bool) -> str:
        before = self._decode(self._tokens[self._begin : self._told])
        whole = self._decode(self._tokens[self._begin :])
        is_partial = whole.endswith("\ufffd") and len(self._tokens) - self._told < _LONGEST
        if is_partial and not at_end:
            return ""
        self._begin, self._told = self._told, len(self._tokens)
        return whole[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _release(self, new: str, *, at_end: bool) -> str:
        if self.is_stopped:
            return ""
        held = self._held + new
        found = [at for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)]
        kept = 0 if at_end else max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
