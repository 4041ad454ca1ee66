# SPDX-License-Identifier: MIT
"""Text comes in whole characters, and what may be a stop waits."""

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import pytest

from metalcore.serve.text import Text


class Bytes:
    """A token is a byte; 0 is special."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(t for t in tokens if t).decode(errors="replace")


class Pieces:
    """A token is a word; a space before the first word of a text is left out."""

    words = ("\u2581a", "\u2581b", "c")

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[t] for t in tokens).replace("\u2581", " ").removeprefix(" ")


def told(text: Text, tokens: Sequence[int]) -> list[str]:
    parts = []
    for token in tokens:
        parts.append(text.add(token))
        if text.is_stopped:
            return parts
    return [*parts, text.finish()]


@pytest.mark.parametrize("content", ["aü€😀b", "plain", "日本語"])
def test_characters_of_several_tokens_are_told_whole(content: str) -> None:
    parts = told(Text(Bytes(), [], ()), content.encode())
    assert "".join(parts) == content
    assert "\ufffd" not in "".join(parts)
    assert len([p for p in parts if p]) == len(content)


def test_bytes_that_are_no_character_hold_nothing_up() -> None:
    parts = told(Text(Bytes(), [], ()), [0xFF] * 3 + list(b"abcdef"))
    assert "".join(parts).endswith("abcdef")
    assert parts[3]
    assert told(Text(Bytes(), [], ()), "é".encode()[:1]) == ["", "\ufffd"]


def test_a_space_between_prompt_and_answer_is_kept() -> None:
    assert "".join(told(Text(Pieces(), [0], ()), [1, 2, 0])) == " bc a"
    assert "".join(told(Text(Pieces(), [], ()), [1, 2, 0])) == "bc a"


@hypothesis.given(
    content=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stops_cut_wherever_tokens_end(content: str, stops: list[str]) -> None:
    text = Text(Bytes(), [], tuple(stops))
    parts = told(text, content.encode())
    ends = [content.index(stop) + len(stop) for stop in stops if stop in content]
    if not ends:
        assert "".join(parts) == content
        assert not text.is_stopped
        return
    # the first stop that is complete ends the text, before its first letter
    read = content[: min(ends)]
    begin = min(read.index(stop) for stop in stops if stop in read)
    assert "".join(parts) == content[:begin]
    assert text.is_stopped


def test_what_cannot_be_a_stop_does_not_wait() -> None:
    parts = told(Text(Bytes(), [], ("abab",)), b"xabaab")
    assert parts == ["x", "", "", "", "aba", "", "ab"]
