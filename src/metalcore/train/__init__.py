# SPDX-License-Identifier: MIT
"""What transformers are trained and run with: norms, activations, losses, optimizer.

One line per op is in the stub, `__init__.pyi`.
"""

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
