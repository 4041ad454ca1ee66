# SPDX-License-Identifier: MIT
"""Metal kernels and their plans. Importing this package registers each plan under the MPS key."""

import importlib
from pathlib import Path

from metalcore.metal import launch, source

for _plan in sorted(Path(__file__).parent.glob("*/[!_]*.py")):
    importlib.import_module(f"{__name__}.{_plan.parent.name}.{_plan.stem}")

__all__ = ["launch", "source"]
