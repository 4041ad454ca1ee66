# SPDX-License-Identifier: MIT
"""What figures belong to: the machine, its threads and the versions."""

import os
import platform
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from metalcore import _native
from metalcore._installed import own_version
from metalcore._measure import processor


@dataclass(frozen=True)
class Machine:
    """`load` is how many cores others kept busy before the first measurement."""

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
        processor=processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        kernels=_native.isa or f"none ({_native.problem})",
        torch=torch.__version__,
        metalcore=own_version(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        load=round(_load(), 2),
    )


def _load() -> float:
    """Cores that are busy while this process waits for a second. Where the system counts no ticks,
    what wanted to run in the last minute, this process too."""
    try:
        before = _ticks()
        time.sleep(1)
        waited, idle = (b - a for a, b in zip(before, _ticks(), strict=True))
    except OSError:
        return os.getloadavg()[0]
    return (os.cpu_count() or 1) * (1 - idle / waited)


def _ticks() -> tuple[int, int]:
    """Of all cores since the start: in all, and idle ones."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(word) for word in line.split()[1:9]]
    return sum(ticks), ticks[3]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
