# SPDX-License-Identifier: MIT
"""The parts of xLSTM, exact and differentiable at any length.

One line per op is in the stub, `__init__.pyi`. Where the package mlstm_kernels is installed, its
registries have `metalcore` from now on.
"""

import warnings
from importlib.util import find_spec

from metalcore._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

if find_spec("mlstm_kernels") is not None:
    from metalcore.xlstm.registration import register

    try:
        register()
    except ImportError as problem:
        warnings.warn(
            f"metalcore is not among the kernels of mlstm_kernels, which fails to load: {problem}",
            stacklevel=2,
        )
