# SPDX-License-Identifier: MIT
"""What a piece of work takes: memory at its peak, and time per operator; and on which CPU."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_CHATTER = re.compile(rb"^USDT:|Memory block of unknown size was allocated before the profiling")


def peak_bytes(work: Callable[[], Any], device: str) -> int:
    """Most memory that `work` holds at a time on top of what there was before.

    On the CPU, what tensors hold; on `mps`, what the driver gave out.
    """
    if device == "mps":
        # There is no counter of the peak: what the allocator took from the driver stays with it.
        torch.mps.empty_cache()
        before = torch.mps.driver_allocated_memory()
        work()
        return int(torch.mps.driver_allocated_memory() - before)
    profile = _profiled(work, profile_memory=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [int(e["args"]["Total Allocated"]) for e in memory]
    # The total goes on from an earlier profile: count from before the first event.
    return max(totals) - (totals[0] - int(memory[0]["args"]["Bytes"]))


def operator_seconds(work: Callable[[], Any]) -> dict[str, float]:
    """CPU seconds that `work` spends in each operator itself, the longest first."""
    events = _profiled(work).key_averages()
    seconds = {e.key: e.self_cpu_time_total / 1e6 for e in events}
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _profiled(work: Callable[[], Any], **options: Any) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        _without_profiler_chatter(),
        torch.profiler.profile(activities=activities, **options) as profile,
    ):
        work()
    return profile


@contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Hold back standard error, and pass on what is not a note of the profiler about itself."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            os.write(2, b"".join(line for line in file if not _CHATTER.search(line)))


def processor() -> str:
    """The processor's name as the system tells it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
