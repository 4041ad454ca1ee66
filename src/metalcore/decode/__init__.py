# SPDX-License-Identifier: MIT
"""One token's way through a model, recorded once and replayed by one call.

One line per op is in the stub, `__init__.pyi`.
"""

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
