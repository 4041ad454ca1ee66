# SPDX-License-Identifier: MIT
"""Many checks in one launch of a few processes on this machine, which talk by gloo.

A check is a function in a module of this folder, named by `@check`. All processes run all checks in
the same order; what each returns, or the error that it ended with, comes back to pytest.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
CHECKS: dict[str, Callable[[], Any]] = {}
_SECONDS = 300
ALLOWED = 1e-4
"""How far a parameter may be from what one process trains."""


class Outcome(NamedTuple):
    """What a check gave in each process, or how it ended there."""

    values: list[Any]
    errors: list[str]
    seconds: float


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] = function
    return function


def run(processes: int, *modules: str, only: str = "") -> dict[str, Outcome]:
    """All checks of `modules`, in so many processes; `only`: parts of names, with commas."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "METALCORE_STRICT": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.launch", folder]
        command += [str(processes), only, *modules]
        started = [
            subprocess.Popen(
                [*command, str(rank)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(processes)
        ]
        try:
            printed = [p.communicate(timeout=_SECONDS)[0] for p in started]
        finally:
            for p in started:
                p.kill()
        files = [Path(folder, f"{rank}.json") for rank in range(processes)]
        if not all(f.exists() for f in files):
            raise AssertionError("a process ended early:\n" + "\n".join(printed))
        found = [json.loads(f.read_text()) for f in files]
    return {
        name: Outcome(
            [f[name].get("value") for f in found],
            [f[name]["error"] for f in found if "error" in f[name]],
            max(f[name]["seconds"] for f in found),
        )
        for name in found[0]
    }


def _main(folder: str, processes: str, only: str, *rest: str) -> None:
    *modules, rank = rest
    import torch
    import torch.distributed as dist

    for module in modules:
        importlib.import_module(f"tests.distributed.{module}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=int(rank),
        world_size=int(processes),
        timeout=timedelta(seconds=40),
    )
    torch.use_deterministic_algorithms(True)
    results: dict[str, Any] = {}
    for name, function in CHECKS.items():
        if not any(part in name for part in only.split(",")):
            continue
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            results[name] = {"value": function()}
        except Exception:
            results[name] = {"error": f"rank {rank}\n{traceback.format_exc()}"}
        results[name]["seconds"] = time.perf_counter() - start
        if _anywhere("error" in results[name], int(rank), int(processes)):
            results[name].setdefault("value", None)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _anywhere(is_bad: bool, rank: int, processes: int) -> bool:
    """Whether any process ended with an error; all wait for each other here."""
    import torch
    import torch.distributed as dist

    bad = torch.tensor(float(is_bad))
    dist.all_reduce(bad)
    return bool(bad)


if __name__ == "__main__":
    # by its full name: checks register there
    importlib.import_module("tests.distributed.launch")._main(*sys.argv[1:])
