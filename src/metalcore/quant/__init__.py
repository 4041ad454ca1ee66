# SPDX-License-Identifier: MIT
"""Weights in 4 to 8 bits, in groups or in ggml's blocks: to and from floats, and products.

One line per op is in the stub, `__init__.pyi`.
"""

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
