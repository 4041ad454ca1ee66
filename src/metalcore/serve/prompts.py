# SPDX-License-Identifier: MIT
"""Requests as tokens."""

import threading
from typing import Any

from metalcore._optional import need
from metalcore.serve.requests import Asked, BadRequest


class Prompts:
    """Makes tokens of requests, for any thread.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # a tokenizer is set up anew in each call
        self._lock = threading.Lock()
        self._template_error: Any = need("jinja2", "serve").exceptions.TemplateError

    def tokens(self, asked: Asked) -> list[int]:
        """The tokens of a prompt, or of a conversation as the chat template writes it."""
        if isinstance(asked.prompt, list):
            return asked.prompt
        if asked.prompt is not None:
            return self._encode(asked.prompt, special=True)
        messages = asked.messages or []
        if self._tokenizer.chat_template is None:
            return self._encode("".join(m["content"] for m in messages), special=True)
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except self._template_error as error:
            said = f"the model's chat template refuses these messages: {error}"
            raise BadRequest(said, "messages") from error
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the text has half of a character (a lone surrogate)") from error
        with self._lock:
            found: list[int] = self._tokenizer(text, add_special_tokens=special).input_ids
        return found
