# SPDX-License-Identifier: MIT
"""Attention that trains: exact, without a matrix of scores in memory.

One line per op is in the stub, `__init__.pyi`.
"""

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
