# SPDX-License-Identifier: MIT
"""Sums and products that lose less than their dtype, or nothing; float64 where there is none.

One line per op is in the stub, `__init__.pyi`.
"""

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
