# SPDX-License-Identifier: MIT
"""Where ops are tested: `cpu`, `sim` (Metal kernels, simulated), and `mps` where there is one."""

from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

import metalcore
import mslsim
from metalcore import _native
from metalcore.metal import source

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_REGISTER_BYTES = {"baseline": 16, "neon": 16, "avx2": 32, "avx512": 64}


def lanes() -> int:
    """The float32 values in a register of the instruction set that is loaded."""
    return _REGISTER_BYTES[str(_native.isa)] // 4


simulated_kernels: set[str] = set()
"""The kernels that this session ran in the simulator."""


def shipped_kernels() -> set[str]:
    """Every kernel of every Metal source of the package."""
    texts = map(source.read, source.files())
    return {kernel for text in texts for kernel in dir(mslsim.compile_shader(text, "none"))}


class Backend:
    """A place to run ops, entered for the duration of a test."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("mps" if name == "mps" else "cpu")
        self.dtypes = FLOATS if name == "cpu" else (torch.float32, torch.float16, torch.bfloat16)

    def __enter__(self) -> "Backend":
        self._entered = ExitStack()
        if self.name == "sim":
            self._traced = self._entered.enter_context(metalcore.trace())
            self._entered.enter_context(metalcore.simulate())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._entered.close()
        if self.name == "sim":
            for record in self._traced.records:
                simulated_kernels.update(record.variant.split(" + "))

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> str:
        """How `metalcore.trace()` names a kernel of this backend, up to the colon."""
        return {"cpu": "cpu", "sim": "sim", "mps": "metal"}[self.name]

    def randn(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, dtype=torch.float32).to(self.device, dtype)


DEVICES = [Backend("cpu"), *([Backend("mps")] if metalcore.has_metal_kernels() else [])]
BACKENDS = [*DEVICES, Backend("sim")]
