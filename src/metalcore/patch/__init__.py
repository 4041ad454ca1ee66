# SPDX-License-Identifier: MIT
"""Opt-in use of metalcore in code that was not written for it; every patch can be taken back."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "transformers_gguf":
        from metalcore.patch.gguf_kernel import transformers_gguf

        return transformers_gguf
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
