# SPDX-License-Identifier: MIT
"""Docstrings as the site reads them: our `Example:` is its `Examples:`."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Titles of sections by the names that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
