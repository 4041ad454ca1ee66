# SPDX-License-Identifier: MIT
"""The parts of xLSTM, exact and differentiable at any length.

One line per op is in the stub, `__init__.pyi`.
"""

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
