# SPDX-License-Identifier: MIT
"""Fast primitives for PyTorch on Apple GPUs and any CPU.

`import metalcore` loads next to nothing: what there is stands in the stub, `__init__.pyi`, and each
name is loaded when it is first asked for.
"""

from typing import Any

from metalcore import _installed

_installed.expect_one_owner()
_installed.expect_torch()

from metalcore import _lazy, _native, _policy, _torch  # noqa: E402  (they import torch)

_native.load()
_policy.tune_cpu_kernels()
for _namespace in ("metalcore", "metalcore_kernels"):
    _torch.watch_namespace(_namespace, _lazy.load_families)

_attribute, __dir__, __all__ = _lazy.attach(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _installed.own_version()
    if name == "mlx":  # no star import has it: it needs MLX
        from importlib import import_module

        return import_module("metalcore.mlx")
    return _attribute(name)
