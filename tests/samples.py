# SPDX-License-Identifier: MIT
"""torch's own sample inputs for its functions: what a call of them determines."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput


def of(op: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd))
    assert samples
    return samples


def results(op: OpInfo, function: Callable[..., Any], sample: SampleInput) -> list[Tensor]:
    """What the sample's outputs determine, then the gradients of its inputs."""
    outputs = sample.output_process_fn_grad(function(sample.input, *sample.args, **sample.kwargs))
    outputs = [outputs] if isinstance(outputs, Tensor) else [o for o in outputs if o is not None]
    wanted = list(_inputs(sample))
    losses = [o.sin().sum() for o in outputs if o.requires_grad]
    if op.supports_autograd and losses and wanted:
        found = torch.autograd.grad(sum(losses), wanted, allow_unused=True)
        outputs += [
            torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
        ]
    return [o.to_dense() for o in outputs]


def _inputs(sample: SampleInput) -> Iterator[Tensor]:
    for a in (sample.input, *sample.args, *sample.kwargs.values()):
        if isinstance(a, Tensor) and a.requires_grad:
            yield a
