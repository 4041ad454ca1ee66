# SPDX-License-Identifier: MIT
"""Which backends and dtypes an op has kernels for, and whether they give right results here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore import _torch, _trace
from metalcore._accuracy import error, tolerance
from metalcore._check import FLOATS, dtype_name
from metalcore._op import Example, Op
from metalcore.metal.plans import PLANS
from metalcore.metal.run import has_metal_kernels


class Health(NamedTuple):
    """One op computed on one backend in one dtype, against its reference in float64."""

    op: str
    backend: str
    dtype: str
    path: str
    max_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.max_error <= self.allowed


def devices() -> list[torch.device]:
    """The devices of this machine that metalcore has kernels for."""
    found = [torch.device("cpu")]
    if has_metal_kernels():
        found.append(torch.device("mps"))
    return found


def kernel_dtypes(op: Op, backend: str) -> list[str]:
    """Dtypes that `op` has a kernel for on `backend` (`cpu` or `metal`), here or elsewhere."""
    if backend == "cpu":
        has_kernel = _torch.has_kernel(f"metalcore_kernels::{op.name}", "CPU")
        return [dtype_name(d) for d in FLOATS] if has_kernel else []
    plan = PLANS.get(op.name)
    if plan is None:
        return []
    return [dtype_name(d) for d in FLOATS if plan.program(op.samples[0](d).args) is not None]


def check(op: Op, device: torch.device, dtype: torch.dtype) -> Health:
    """Run the op's examples, compare with the truth, and tell of the worst one."""
    torch.manual_seed(0)
    found = [_check_example(op, sample(dtype), device, dtype) for sample in op.samples]
    return max(found, key=lambda health: health.max_error / health.allowed)


def _check_example(op: Op, example: Example, device: torch.device, dtype: torch.dtype) -> Health:
    args = [map_tensors(lambda x: x.to(device, copy=True), a) for a in example.args]
    doubles = [
        map_tensors(lambda x: x.double() if x.is_floating_point() else x, a) for a in example.args
    ]
    with _trace.trace() as t:
        found = op.results(op(*args), args)
    truth = op.results(op.meaning(*doubles), doubles)
    errors = [error(a, b) for a, b in zip(found, truth, strict=True)]
    # what an op has no float64 of is computed in float32
    computed = dtype if any(x.dtype == dtype for x in _trace.tensors(args)) else torch.float32
    return Health(
        op.name,
        device.type,
        dtype_name(dtype),
        t.records[-1].path,
        max(errors),
        tolerance(op.name, computed, example.reduces_over),
    )


def map_tensors(fn: Callable[[Tensor], Tensor], a: Any) -> Any:
    """`a` with `fn` applied to it, or to each tensor of a list."""
    if isinstance(a, (list, tuple)):
        return [map_tensors(fn, x) for x in a]
    return fn(a) if isinstance(a, Tensor) else a


def check_all(op: Op) -> list[Health]:
    """`check` on every device and in every dtype there is."""
    return [
        check(op, device, dtype)
        for device in devices()
        for dtype in FLOATS
        if device.type != "mps" or dtype != torch.float64
    ]
