# SPDX-License-Identifier: MIT
"""`metalcore doctor`: what is here, which kernels load, and whether they give right results."""

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from metalcore import _native, _where
from metalcore._op import Op
from metalcore._policy import user_file
from metalcore.metal import plans, source
from metalcore.metal.run import has_metal_kernels

# What keeps oneDNN away from AMX, whose tiles some virtual machines announce but do not have.
SAFE_ONEDNN = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def examine() -> dict[str, Any]:
    """Everything `doctor` knows, as plain values. `ok` is False when something is broken."""
    report: dict[str, Any] = {
        "versions": _versions(),
        "cpu": {
            "machine": platform.machine(),
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "kernels": _native.isa,
            "built_for": list(_native.built_sets()),
            "build": _native.build_info(),
            "problem": _native.problem,
        },
        "metal": _metal(),
        "policy_file": str(user_file()) if os.path.exists(user_file()) else None,
        "bfloat16_matmul": probe_bfloat16_matmul(),
    }
    ops = track(list(Op.all.values()), "checking ops", console=Console(stderr=True), transient=True)
    checks = [health for op in ops for health in _where.check_all(op)]
    report["ops"] = [{**h._asdict(), "ok": h.ok} for h in checks]
    report["problems"] = _problems(report)
    report["ok"] = not report["problems"]
    return report


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "os": platform.platform()}
    for package in ("metalcore-torch", "mslsim", "torch", "transformers", "mlx", "ziglang"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _metal() -> dict[str, Any]:
    available = has_metal_kernels()
    kernels: dict[str, str] = {}
    for program in plans.examples() if available else ():
        for launch in program.launches:
            try:
                source.kernel(launch.file, launch.function, launch.variant)
                kernels[launch.kernel] = "loads"
            except (RuntimeError, SyntaxError) as error:
                kernels[launch.kernel] = f"does not compile: {error}"
    return {"available": available, "files": source.files(), "kernels": kernels}


def probe_bfloat16_matmul() -> str:
    """Multiply two bfloat16 matrices with torch, in another process, because it may be killed."""
    program = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    code = subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
    if code == 0:
        return "works"
    if code == -signal.SIGILL:
        return "torch is killed by SIGILL; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    return f"torch fails with exit code {code}"


def restart_where_bfloat16_is_broken() -> None:
    """Start this program again with AMX off, if torch would be killed by it."""
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and probe_bfloat16_matmul() != "works":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | SAFE_ONEDNN)


def _problems(report: dict[str, Any]) -> list[str]:
    found = []
    if report["cpu"]["kernels"] is None:
        found.append(f"no compiled CPU kernels: {report['cpu']['problem']}")
    if report["bfloat16_matmul"] != "works":
        found.append(f"bfloat16 matmul: {report['bfloat16_matmul']}")
    found += [f"{k}: {v}" for k, v in report["metal"]["kernels"].items() if v != "loads"]
    for op in report["ops"]:
        where = f"{op['op']} on {op['backend']} in {op['dtype']}"
        if not op["ok"]:
            found.append(f"{where}: error {op['max_error']:.2g}, allowed {op['allowed']:.2g}")
        elif op["path"] == "reference" and report["cpu"]["kernels"] is not None:
            found.append(f"{where}: no kernel, computed by the reference")
    return found


def show(report: dict[str, Any], all_checks: bool = False) -> None:
    """Print a report of `examine` for people: what is wrong, or all that was checked."""
    console = Console()
    about = Table(show_header=False, box=None)
    for package, version in report["versions"].items():
        about.add_row(package, version or "[dim]not installed[/]")
    cpu = report["cpu"]
    about.add_row("CPU kernels", cpu["build"] or f"[red]none[/]: {cpu['problem']}")
    about.add_row("CPU", f"{cpu['machine']}, torch sees {cpu['torch_capability']}")
    about.add_row("", f"{cpu['threads']} threads, built for {', '.join(cpu['built_for']) or '-'}")
    metal = report["metal"]
    about.add_row("Metal", "available" if metal["available"] else "no Apple GPU here")
    if metal["kernels"]:
        load = sum(state == "loads" for state in metal["kernels"].values())
        about.add_row("", f"{load} of {len(metal['kernels'])} kernels load")
    about.add_row("policy file", report["policy_file"] or "packaged values")
    about.add_row("bfloat16 matmul", report["bfloat16_matmul"])
    console.print(about)

    table = Table("op", "backend", "dtype", "path", "error", "allowed", "")
    shown = [op for op in report["ops"] if all_checks or not op["ok"]]
    for op in shown:
        table.add_row(
            op["op"],
            op["backend"],
            op["dtype"],
            op["path"],
            f"{op['max_error']:.1e}",
            f"{op['allowed']:.1e}",
            "[green]ok[/]" if op["ok"] else "[red]wrong[/]",
        )
    if shown:
        console.print(table)
    right, ops = sum(op["ok"] for op in report["ops"]), {op["op"] for op in report["ops"]}
    console.print(f"{right} of {len(report['ops'])} results of {len(ops)} ops are right.")
    for problem in report["problems"]:
        console.print(f"[red]broken[/] {problem}", highlight=False)
    if report["ok"]:
        console.print("[green]Everything works.[/]")
