# SPDX-License-Identifier: MIT
"""What figures belong to: the machine, its threads and the versions."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from metalcore import _native


@dataclass(frozen=True)
class Machine:
    """`load` is how many processes wanted to run in the minute before the first measurement."""

    processor: str
    cores: int
    threads: int
    system: str
    device: str
    kernels: str
    torch: str
    metalcore: str
    date: str
    load: float

    def __str__(self) -> str:
        return (
            f"{self.processor}, {counted(self.cores, 'core')}, {self.system}; {self.device}, "
            f"{counted(self.threads, 'thread')}; torch {self.torch}; metalcore {self.metalcore}, "
            f"CPU kernels: {self.kernels}; {self.date}"
        )

    @property
    def is_busy(self) -> bool:
        return self.load > self.cores / 2


def this_machine(device: str) -> Machine:
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        kernels=_native.isa or f"none ({_native.problem})",
        torch=torch.__version__,
        metalcore=importlib.metadata.version("metalcore"),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        load=round(os.getloadavg()[0], 2),
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _processor() -> str:
    """The processor's name as the system tells it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
