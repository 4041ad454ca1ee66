# SPDX-License-Identifier: MIT
"""Packages that some functions need, and that nothing else does."""

from importlib import import_module
from typing import Any


def need(package: str, used_by: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: it is not installed; the message says what for and how to get it.
    """
    try:
        return import_module(package)
    except ImportError as missing:
        name = package.split(".")[0]
        raise ImportError(f"{used_by}: needs {name}: pip install {name}", name=name) from missing
