# SPDX-License-Identifier: MIT
"""Seeds, strictness, NaN-filled memory, and the backends every op is tested on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ["METALCORE_STRICT"] = "1"

# Some virtual machines announce AMX and kill torch's bfloat16 matmul. The way around it has to be
# in the environment before torch is imported here; child processes find the answer there.
_cpu = Path("/proc/cpuinfo")
if "ONEDNN_MAX_CPU_ISA" not in os.environ and _cpu.exists() and "amx_tile" in _cpu.read_text():
    _program = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    _probe = subprocess.run([sys.executable, "-c", _program], capture_output=True)
    _is_killed = _probe.returncode == -signal.SIGILL
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16" if _is_killed else "ALL"

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import hypothesis
import pytest
import torch

from metalcore import _native, _policy
from metalcore._route import Route
from tests.backends import BACKENDS, DEVICES, Backend, shipped_kernels, simulated_kernels

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=40, print_blob=True
)
hypothesis.settings.register_profile("long", deadline=None, max_examples=50_000, print_blob=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Same numbers each run; memory that an op leaves unwritten reads as NaN, also in C++."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def write_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """Writes the user's policy file, next to which no packaged number of this CPU counts."""
    file = tmp_path / "policy.toml"
    for route in Route.all.values():
        monkeypatch.setattr(route, "_forced", None)
    monkeypatch.setattr(_policy, "packaged_file", lambda: tmp_path / "none.toml")
    monkeypatch.setenv("METALCORE_POLICY", str(file))

    def write(text: str) -> Path:
        file.write_text(text)
        _policy.changed()
        return file

    write("")
    yield write
    monkeypatch.undo()
    _policy.changed()


@pytest.fixture(autouse=True)
def _always_ours() -> Iterator[None]:
    """No call is left to torch, whatever the machine's numbers say; but for tests of policies."""
    with ExitStack() as stack:
        for route in Route.all.values():
            stack.enter_context(route.forced(to_torch=False))
        yield


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with request.param as on:
        yield on


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> Backend:
    """A backend that is a device of torch: what compilers know of."""
    return request.param  # type: ignore[no-any-return]


# Each of the processes that share the cores computes with one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_never_simulated = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", help="only this one of cpu, sim and mps, where a test has them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.backend:
        wanted = ("", config.option.backend)
        config.hook.pytest_deselected(items=[i for i in items if _backend_of(i) not in wanted])
        items[:] = [i for i in items if _backend_of(i) in wanted]


def _backend_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("backend", "")) if callspec else ""


@pytest.hookimpl(optionalhook=True)  # of xdist, which emulated machines do not have
def pytest_testnodedown(node: Any) -> None:
    simulated_kernels.update(getattr(node, "workeroutput", {}).get("simulated_kernels", ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run of the whole suite fails where a kernel was never simulated."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["simulated_kernels"] = sorted(simulated_kernels)
    elif exitstatus == 0 and not config.option.keyword and config.args == ["tests"]:
        missing = config.stash[_never_simulated] = shipped_kernels() - simulated_kernels
        session.exitstatus = int(bool(missing))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ended = [r for r in terminalreporter.getreports("") if r.when == "teardown"]
    others = sorted(p for report in ended for p in report.user_properties)
    for name, result in [(_native.isa, "this run"), *others] if others else []:
        terminalreporter.write_line(f"instruction set {name}: {result}")
    missing = config.stash.get(_never_simulated, set())
    if missing:
        terminalreporter.write_line(f"no test simulates {', '.join(sorted(missing))}", red=True)
