# SPDX-License-Identifier: MIT
"""Which backends and dtypes an op has kernels for, and whether they give right results here."""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore import _trace
from metalcore._accuracy import error, tolerance
from metalcore._check import FLOATS, dtype_name
from metalcore._op import Example, Op, as_tuple
from metalcore._policy import policy
from metalcore.metal.launch import PLANS


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
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def kernel_dtypes(op: Op, backend: str) -> list[str]:
    """Dtypes that `op` has a kernel for on `backend` (`cpu` or `metal`), here or elsewhere."""
    if backend == "cpu":
        key = torch._C._dispatch_has_kernel_for_dispatch_key(f"metalcore::{op.name}", "CPU")
        return [dtype_name(d) for d in FLOATS] if key else []
    plan = PLANS.get(op.name)
    if plan is None:
        return []
    values = policy(op.story.split("/")[1], "metal")
    return [dtype_name(d) for d in FLOATS if plan(values, *op.samples[0](d).args) is not None]


def check(op: Op, device: torch.device, dtype: torch.dtype) -> Health:
    """Run the op's examples, compare with the truth, and tell of the worst one."""
    found = [_check_example(op, sample(dtype), device, dtype) for sample in op.samples]
    return max(found, key=lambda health: health.max_error / health.allowed)


def _check_example(op: Op, example: Example, device: torch.device, dtype: torch.dtype) -> Health:
    torch.manual_seed(0)
    args = [a.to(device) if isinstance(a, Tensor) else a for a in example.args]
    doubles = [
        a.double().clone() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in example.args
    ]
    with _trace.trace() as t:
        outputs = op(*args)
    results, truth = (op.determined(as_tuple(o)) for o in (outputs, op.meaning(*doubles)))
    errors = [error(a, b) for a, b in zip(results, truth, strict=True)]
    return Health(
        op.name,
        device.type,
        dtype_name(dtype),
        t.records[-1].path,
        max(errors),
        tolerance(op.name, dtype, example.reduces_over),
    )


def check_all(op: Op) -> list[Health]:
    """`check` on every device and in every dtype there is."""
    return [
        check(op, device, dtype)
        for device in devices()
        for dtype in FLOATS
        if device.type != "mps" or dtype != torch.float64
    ]
