# SPDX-License-Identifier: MIT
"""Compiled libraries and their kernels, callable like those of torch.mps.compile_shader."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from . import isolated, native
from .arguments import (
    MAX_THREADGROUP_BYTES,
    TENSOR,
    Encoded,
    Row,
    check_arguments,
    check_launch,
    encode,
    three,
)
from .build import BUILD_ALL_UP_TO, Build, Builder
from .frontend.parse import Source
from .memory import Uninitialized, is_tensor
from .process import Died
from .report import CompileError, Finding, KernelError, LaunchError, Report
from .static import ALWAYS_STARTS, findings_of
from .steps import thread_at
from .structs import add_struct, add_tensor
from .texture import Sampler, add_images
from .worker import Launch

# Seconds without progress after which a checked kernel counts as hanging.
DEFAULT_TIMEOUT = 20.0
CHECKS = frozenset(
    {"bounds", "race", "uninitialized", "divergence", "schedule", "counters", "limits"}
)
# How many kernels of a source may fail before it counts as wrong altogether.
_ATTEMPTS = 4
# What makes a kernel slow, not wrong; to be asked for by name.
COST = "cost"


def chosen_checks(checks: str | Collection[str]) -> frozenset[str]:
    """The set behind "all", "none" or an explicit choice."""
    if checks == "all":
        return CHECKS
    if checks == "none":
        return frozenset()
    names, known = frozenset([checks] if isinstance(checks, str) else checks), CHECKS | {COST}
    if names - known:
        raise ValueError(
            f"checks must be 'all', 'none' or from {sorted(known)}, got {sorted(names - known)}"
        )
    return names


def compile_shader(
    source: str,
    checks: str | Collection[str] = "all",
    *,
    include: Sequence[str] = (),
    defines: Mapping[str, str | int | float] | None = None,
    constants: Mapping[int, bool | int | float] | None = None,
    strict: bool = True,
    on_finding: str = "raise",
    name: str = "source.metal",
    version: int = 320,
    timeout: float = DEFAULT_TIMEOUT,
    contract: str = "on",
    kernels: Collection[str] = (),
) -> Library:
    """Compiles Metal source to a library whose kernels are called as torch.mps calls them.

    Args:
        source: Metal text.
        checks: "all" that can be wrong, "none" (fast, in this process), or a set of check names;
            "cost" is another, for what is slow.
        include: folders for `#include "..."`.
        defines: preprocessor macros.
        constants: values of function constants by index.
        strict: refuse what Apple's compiler refuses though C++ allows it.
        on_finding: "raise" a KernelError, or "collect" into the returned Report.
        name: what messages call the source.
        version: value of __METAL_VERSION__.
        timeout: seconds without progress before a checked kernel is stopped.
        contract: which a * b + c are fused where no `#pragma METAL fp contract` says: "on" for
            those of one statement, as Apple's safe math does, "fast" for all, as its other modes
            may, and "off".
        kernels: those to build, together; others are built when they are asked for. Without it a
            source of many kernels is built one by one.
    """
    if contract not in ("on", "fast", "off"):
        raise ValueError(f"contract must be 'on', 'fast' or 'off', got {contract!r}")
    if on_finding not in ("raise", "collect"):
        raise ValueError(f"on_finding must be 'raise' or 'collect', got {on_finding!r}")
    text = Source(source, name, include, defines or {}, constants or {}, version, strict, contract)
    return Library(text, chosen_checks(checks), on_finding, timeout, kernels)


def run(
    source: str,
    kernel: str,
    args: Sequence[Any],
    threads: Any,
    group_size: Any,
    *,
    checks: str | Collection[str] = "all",
    arg_casts: Mapping[int, str] | str | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    order: str = "ascending",
    textures: Mapping[int, Any] | None = None,
    samplers: Mapping[int, Sampler] | None = None,
    **options: Any,
) -> Report:
    """Compiles and runs one kernel; every finding, of any stage, is in the report.

    `options` are those of `compile_shader`.
    """
    try:
        library = compile_shader(source, checks, **options)
        return library[kernel].run(
            args, threads, group_size, arg_casts, threadgroup_memory, order, None, textures,
            samplers,
        )  # fmt: skip
    except (CompileError, LaunchError) as error:
        return Report(kernel, list(error.findings))


class Library:
    """A compiled source. Its kernels are attributes."""

    def __init__(
        self,
        source: Source,
        checks: frozenset[str],
        on_finding: str,
        timeout: float,
        together: Collection[str] = (),
    ) -> None:
        self._checks = checks
        self._on_finding = on_finding
        self._timeout = timeout
        self._strict = source.strict
        self._builder = Builder(source, bool(checks))
        self._kernels: dict[str, Kernel] = {}
        if self._builder.index.findings:
            raise CompileError(self._builder.index.findings)
        self._together = frozenset(together)
        if unknown := self._together - self._builder.index.kernels.keys():
            raise KeyError(f"no kernels {sorted(unknown)}")
        if len(self._builder.index.kernels) <= BUILD_ALL_UP_TO and not together:
            self._build_any()

    def _build_any(self) -> None:
        """Builds all kernels, or else one of them: those that cannot be built raise when they are
        asked for. Raises where the first few all fail."""
        first: CompileError | None = None
        for kernel in [*self._builder.index.kernels][:_ATTEMPTS] or [""]:
            try:
                self._builder.build(kernel)
                return
            except CompileError as error:
                first = first or error
        assert first
        raise first

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_") or name not in self._builder.index.kernels:
            raise AttributeError(
                f"no kernel '{name}'; there are {sorted(self._builder.index.kernels)}"
            )
        return self[name]

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]

    def __dir__(self) -> list[str]:
        return sorted(self._builder.index.kernels)


class Kernel:
    """One kernel of a library."""

    def __init__(self, library: Library, name: str) -> None:
        self.name = name
        self._library = library
        index = library._builder.index.kernels
        if name not in index:
            raise KeyError(f"no kernel '{name}'; there are {sorted(index)}")
        self._place = (str(index[name]["file"]), int(index[name]["line"]))
        self._parameters = [_described(p) for p in index[name]["parameters"]]
        self._all = index[name]["parameters"]
        self._images = [p for p in index[name]["parameters"] if p["number"] >= 0]
        self._built: Build | None = None
        self._rows: list[Row] | None = None

    def _build(self) -> Build:
        # Another process may have thrown it out of the cache.
        if self._built is None or not self._built.library.exists():
            together = self._library._together
            self._built = self._library._builder.build(self.name, together=together)
        return self._built

    def _table(self) -> list[Row]:
        if self._rows is None:
            if self._library._checks:
                path = self._build().library
                try:
                    with isolated.lock:
                        self._rows = isolated.worker().table(path, self.name, self._parameters)
                except Died as death:
                    message = f"the process that loaded the compiled kernel {death}"
                    raise LaunchError(
                        [Finding("crash", message, self.name, *self._place)]
                    ) from None
            else:
                library = native.open_library(self._build().library)
                self._rows = native.read_table(library, self.name, self._parameters)
        return self._rows

    def __call__(
        self,
        *args: Any,
        threads: Any = None,
        group_size: Any = None,
        arg_casts: Mapping[int, str] | str | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        order: str = "ascending",
        without_barrier_at: tuple[str, int] | None = None,
        textures: Mapping[int, Any] | None = None,
        samplers: Mapping[int, Sampler] | None = None,
    ) -> Report:
        """Runs the kernel on `args`, which are changed in place, and so are `textures`.

        `without_barrier_at`, a file and a line, has the race check take the barriers there for
        absent: where it then finds nothing, this launch does not need them.
        """
        report = self.run(
            args, threads, group_size, arg_casts, threadgroup_memory, order, without_barrier_at,
            textures, samplers,
        )  # fmt: skip
        if report.findings and self._library._on_finding == "raise":
            raise KernelError(report.findings)
        return report

    def run(
        self,
        args: Sequence[Any],
        threads: Any,
        group_size: Any,
        arg_casts: Mapping[int, str] | str | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        order: str = "ascending",
        without_barrier_at: tuple[str, int] | None = None,
        textures: Mapping[int, Any] | None = None,
        samplers: Mapping[int, Sampler] | None = None,
        thread: Sequence[int] | None = None,
    ) -> Report:
        """As calling the kernel, but findings are only returned. What the thread at position
        `thread` does is in the report's steps."""
        if without_barrier_at and "race" not in self._library._checks:
            raise ValueError("without_barrier_at asks the race check, which is off")
        if order not in native.ORDERS:
            raise ValueError(f"order must be one of {sorted(native.ORDERS)}, got {order!r}")
        tensors = {r.index: r for r in self._table() if r.number > TENSOR}
        plain = [None if i in tensors else value for i, value in enumerate(args)]
        encoded = encode(self.name, plain, arg_casts)
        self._add_structs(encoded, plain)
        for index, row in tensors.items():
            if index < len(args) and args[index] is not None:
                add_tensor(encoded, row, f"{self.name}: {row.label}", args[index])
        images = add_images(encoded, self.name, self._images, textures or {}, samplers or {})
        if threads is None:
            threads = _elements(self.name, args)
        grid = three(threads)
        group = three(group_size) if group_size is not None else (min(1024, grid[0]), 1, 1)
        rows = self._table()
        memory = dict(threadgroup_memory or {})
        findings = check_launch(self.name, self._place, grid, group, [r.index for r in rows])
        if findings:
            raise LaunchError(findings)
        findings = check_arguments(self.name, rows, encoded, self._place, self._library._strict)
        if findings:
            raise LaunchError(findings)
        if "uninitialized" not in self._library._checks:
            # Nobody looks: what it may write counts as written.
            for block in encoded.blocks:
                if block.written is not None:
                    block.written.fill(1)
        if self._library._checks:
            library, traced = self._library, None
            build, checks = self._build(), library._checks
            if thread is not None:
                traced = thread_at(thread, grid, group)
                build, checks = (
                    library._builder.build(self.name, True, "traced"),
                    checks | {"trace"},
                )
            job = isolated.Job(
                self.name, build, rows, encoded, grid, group, memory, order, checks,
                library._timeout, self._place, library._builder.source.line, without_barrier_at,
                traced,
            )  # fmt: skip
            report = isolated.run(job)
            if not without_barrier_at:
                report.findings += self._static_findings(prod(group))
            for image in images:
                image.copy_back()
            return report
        launch, said = native.run(self._build(), self.name, encoded, grid, group, memory, order)
        for image in images:
            image.copy_back()
        return Report(self.name, self._unchecked_findings(launch), log=said)

    def _add_structs(self, encoded: Encoded, args: Sequence[Any]) -> None:
        """Adds the dicts among the arguments, each as the struct that its parameter is."""
        structs = self._library._builder.index.structs
        for index, values in enumerate(args):
            if not isinstance(values, Mapping):
                continue
            declared = next((p["declared"] for p in self._all if p["index"] == str(index)), "")
            kind = next((w for w in declared.split() if w in structs), None)
            if kind is None:
                raise TypeError(f"{self.name}: argument {index} is a dict, but no known struct")
            add_struct(encoded, index, f"{self.name}[{index}]", kind, values, structs)

    def _static_findings(self, group: int) -> list[Finding]:
        """Those that need no run, for threadgroups of so many threads."""
        checks, builder = self._library._checks, self._library._builder
        if COST in checks:
            return findings_of(builder, {self.name: group})
        if "limits" in checks and group > ALWAYS_STARTS:
            return [f for f in findings_of(builder, {self.name: group}) if f.kind == "fit"]
        return []

    def _unchecked_findings(self, launch: Launch) -> list[Finding]:
        findings = []
        if launch.failed:
            findings.append(
                Finding(
                    "divergence",
                    "a threadgroup_barrier was not reached by all threads of the group; "
                    "run with checks for the line",
                    self.name,
                    *self._place,
                )
            )
        if launch.static_threadgroup_bytes > MAX_THREADGROUP_BYTES:
            findings.append(
                Finding(
                    "limit",
                    f"threadgroup memory is at most {MAX_THREADGROUP_BYTES} bytes, "
                    f"the kernel uses {launch.static_threadgroup_bytes}",
                    self.name,
                    *self._place,
                )
            )
        return findings


def _described(parameter: Mapping[str, Any]) -> tuple[str, str]:
    """Name and declaration; a texture's name tells its number."""
    name, number = str(parameter["name"]), parameter["number"]
    label = f"{name} [[{parameter['kind']}({number})]]" if number >= 0 else name
    return label, str(parameter["declared"])


def _elements(kernel: str, args: Sequence[Any]) -> int:
    for given in args:
        value = given.array if isinstance(given, Uninitialized) else given
        if is_tensor(value):
            return int(value.numel())
        if hasattr(value, "size"):
            return int(value.size)
    raise ValueError(f"{kernel}: threads must be given when no argument is a tensor or array")
