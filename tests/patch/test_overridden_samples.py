# SPDX-License-Identifier: MIT
"""torch's own sample inputs, and its bad ones, through the overridden functions of torch."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.samples import of, results

NAMES = (
    *("softmax", "nn.functional.silu", "nn.functional.gelu", "nn.functional.rms_norm"),
    *("nn.functional.layer_norm", "nn.functional.embedding_bag", "nn.functional.cross_entropy"),
    *("linalg.svd", "linalg.svdvals", "linalg.qr", "linalg.cholesky", "linalg.cholesky_ex"),
    *("linalg.solve", "linalg.solve_ex", "linalg.eigh", "linalg.eigvalsh", "linalg.lstsq"),
    *("linalg.pinv", "linalg.inv", "linalg.inv_ex", "linalg.det", "linalg.slogdet", "linalg.lu"),
    *("cholesky_solve", "cholesky_inverse", "linalg.solve_triangular", "linalg.matrix_rank"),
    *("linalg.cond", "linalg.matrix_norm", "nn.functional.scaled_dot_product_attention"),
)
OPS = [op for op in op_db if op.name in NAMES]


def _title(op: OpInfo) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


def _function(op: OpInfo) -> Callable[..., Any]:
    """The function as user code finds it; variants are functions that do so themselves."""

    def by_name(*args: Any, **named: Any) -> Any:
        return reduce(getattr, op.name.split("."), torch)(*args, **named)  # type: ignore[operator]

    return by_name if op.op is reduce(getattr, op.name.split("."), torch) else op.op


def test_all_functions_have_samples() -> None:
    assert {op.name for op in OPS} == set(NAMES)


@pytest.mark.parametrize("op", OPS, ids=_title)
def test_samples_of_torch(backend: Backend, op: OpInfo) -> None:
    dtype = torch.float64 if backend.name == "cpu" else torch.float32
    samples = of(op, dtype)
    if backend.name == "sim":
        # one shape that is taken and one more are enough for each kernel's way there
        # a few, with batches before single matrices, or of rows
        dim = 3 if op.name.startswith("linalg") else 2
        samples = sorted(samples, key=lambda s: (not s.input.numel(), s.input.dim() != dim))[:6]
    function = _function(op)
    truths = [results(op, function, sample) for sample in samples]
    # two algorithms for one problem differ by its condition
    allowed = 8 * tolerance(op.name.rpartition(".")[2], torch.float32, 25)
    with metalcore.overrides(), metalcore.trace() as t:
        for sample, truth in zip(samples, truths, strict=True):
            found = results(op, function, sample)
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in truth]
            # together, because a gradient may be zero
            assert error(_flat(found), _flat(truth)) <= allowed, sample
    if op.variant_test_name == "with_dtype" and backend.name != "cpu":
        return  # which asks for float64
    if op.name.startswith("cholesky_"):
        return  # torch's gradients, which these samples ask for, have both triangles
    assert any(r.path.startswith(backend.path) for r in t.records), t


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


@pytest.mark.parametrize("op", [op for op in OPS if op.error_inputs_func], ids=_title)
def test_bad_input_gets_the_words_of_torch(op: OpInfo) -> None:
    function = _function(op)
    for bad in op.error_inputs("cpu"):
        sample = bad.sample_input
        said = []
        for overridden in (False, True):
            with metalcore.overrides() if overridden else nullcontext():
                try:
                    function(sample.input, *sample.args, **sample.kwargs)
                except Exception as problem:
                    said.append((type(problem), str(problem)))
        assert len(said) in (0, 2)
        assert said[:1] == said[1:]
