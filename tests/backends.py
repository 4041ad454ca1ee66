# SPDX-License-Identifier: MIT
"""Where ops are tested: `cpu`, and `mps` where there is one."""

from types import TracebackType

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Backend:
    """A place to run ops, entered for the duration of a test."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("mps" if name == "mps" else "cpu")
        self.dtypes = FLOATS if name == "cpu" else (torch.float32, torch.float16, torch.bfloat16)

    def __enter__(self) -> "Backend":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None: ...

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> str:
        """How `metalcore.trace()` names a kernel of this backend, up to the colon."""
        return {"cpu": "cpu", "mps": "metal"}[self.name]

    def randn(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, dtype=torch.float32).to(self.device, dtype)


BACKENDS = [Backend("cpu"), *([Backend("mps")] if torch.backends.mps.is_available() else [])]
