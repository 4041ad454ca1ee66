# SPDX-License-Identifier: MIT
"""What figures belong to: the machine, its threads and the versions."""

import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from metalcore import _native
from metalcore._installed import own_version
from metalcore._measure import processor


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
        processor=processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        kernels=_native.isa or f"none ({_native.problem})",
        torch=torch.__version__,
        metalcore=own_version(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        load=round(os.getloadavg()[0], 2),
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
