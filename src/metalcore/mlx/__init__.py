# SPDX-License-Identifier: MIT
"""metalcore for MLX: the same kernels as functions of `mx.array`.

>>> import mlx.core as mx
>>> import metalcore.mlx
>>> Q, R = metalcore.mlx.qr(mx.random.normal((100, 8, 8)))

What there is stands in the stub, `__init__.pyi`; a name is loaded when it is first asked for.
"""

from importlib import import_module
from typing import Any

from metalcore._optional import need

need("mlx.core", "metalcore.mlx")

_MODULES = ("nn", "optimizers", "precise")
_OTHERS = {
    "accelerate": "metalcore.mlx._accelerate",
    "adamw_step": "metalcore.mlx._adamw",
    "default_loss": "metalcore.mlx.losses",
    "from_torch": "metalcore.mlx.exchange",
    "rope": "metalcore.mlx._rope",
    "to_torch": "metalcore.mlx.exchange",
    "vmap": "metalcore.mlx._vmap",
    "has_metal_kernels": "metalcore.mlx._function",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _OTHERS:
        found = getattr(import_module(_OTHERS[name]), name)
    else:
        table = import_module("metalcore.mlx._table")
        if name not in table.FUNCTIONS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        found = table.made(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    table = import_module("metalcore.mlx._table")
    return sorted({*globals(), *_MODULES, *_OTHERS, *table.FUNCTIONS})
