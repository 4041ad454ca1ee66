# SPDX-License-Identifier: MIT
"""On paper: how the time and memory of a training step change with the number of machines.

Each machine keeps its own batch. A ring sends each byte of an all-reduce twice, and of an
all-gather or a reduce-scatter once, but for the share that is there already:

    DDP    sent = 2 (P - 1) / P * 4 n       hidden behind the backward pass, 2/3 of the computing
    FSDP2  sent = 3 (P - 1) / P * 4 n       hidden behind all of it
    step   = computing + max(0, sent / link - what hides it) + 2 (P - 1) * latency per layer
"""

from dataclasses import dataclass
from pathlib import Path

from .plot import Dots, svg

FILE = Path(__file__).parents[1] / "docs" / "distributed.svg"

# bytes per second that a program sees, and seconds until the first arrives: assumptions
LINKS = {
    "Ethernet, 1 Gbit/s": (0.11e9, 1e-4),
    "Ethernet, 10 Gbit/s": (1.1e9, 5e-5),
    "Thunderbolt, 20 Gbit/s": (2.2e9, 5e-5),
    "100 Gbit/s": (11e9, 1e-5),
}
MACHINES = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Job:
    """A model, and what a machine computes per second."""

    parameters: float = 1e9
    layers: int = 24
    tokens: float = 8192
    flops: float = 5e12

    @property
    def computing(self) -> float:
        """Seconds: two products forward, four backward, per parameter and token."""
        return 6 * self.parameters * self.tokens / self.flops


def step_seconds(job: Job, machines: int, link: str, how: str = "ddp") -> float:
    rate, latency = LINKS[link]
    passes, hidden = {"ddp": (2, 2 / 3), "fsdp2": (3, 1.0)}[how]
    sent = passes * (machines - 1) / machines * 4 * job.parameters
    waited = max(0.0, sent / rate - hidden * job.computing)
    return job.computing + waited + 2 * (machines - 1) * latency * job.layers


def speedup(job: Job, machines: int, link: str, how: str = "ddp") -> float:
    """Tokens per second, as a multiple of one machine's."""
    return machines * job.computing / step_seconds(job, machines, link, how)


def gigabytes(job: Job, machines: int, how: str = "ddp", state_bits: int = 32) -> float:
    """Of parameters, gradients and the two moments of AdamW in each machine; FSDP2 has one layer
    whole besides."""
    moments = 8.0 if state_bits == 32 else 2 * 132 / 128
    whole = job.parameters * (8 + moments)
    if how == "ddp":
        return whole / 1e9
    return (whole / machines + 8 * job.parameters / job.layers) / 1e9


def plot() -> str:
    job = Job()
    times = {link: [[speedup(job, n, link, "fsdp2")] for n in MACHINES] for link in LINKS}
    groups = [f"{n} machines" for n in MACHINES]
    title = "FSDP2 on paper: 1e9 parameters, 8192 tokens per machine and step"
    return svg(Dots(title, "times the tokens per second of one machine", groups, times, {}, ""))


if __name__ == "__main__":
    FILE.write_text(plot())
