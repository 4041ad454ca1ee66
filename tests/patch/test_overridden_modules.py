# SPDX-License-Identifier: MIT
"""torch's own samples of modules and optimizers, with overridden functions of torch below them."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db
from torch.utils._pytree import tree_leaves, tree_map

import metalcore
from metalcore._accuracy import error, tolerance

NAMES = (
    *("CrossEntropyLoss", "GELU", "LayerNorm", "RMSNorm", "SiLU", "Softmax"),
    *("TransformerEncoderLayer", "TransformerDecoderLayer", "MultiheadAttention"),
)
MODULES = [m for m in module_db if m.name.removeprefix("nn.") in NAMES]
OPTIMIZERS = [o for o in optim_db if o.optim_cls.__name__ in ("Adam", "AdamW", "Muon", "SGD")]


def test_all_have_samples() -> None:
    assert {m.name.removeprefix("nn.") for m in MODULES} == set(NAMES)
    assert len(OPTIMIZERS) == 4


def _grown(args: FunctionInput) -> FunctionInput:
    """The same arguments, floats as leaves that record a gradient."""

    def leaf(x: object) -> object:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.detach().clone().requires_grad_()
        return x

    return FunctionInput(*tree_map(leaf, args.args), **tree_map(leaf, args.kwargs))


def _slope(y: Tensor) -> Tensor:
    """A gradient of y whose sum over a row is not zero, nor all the same."""
    return torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)


def _results(info: ModuleInfo, training: bool) -> list[Tensor]:
    """Outputs and gradients of a module for all of its samples."""
    found: list[Tensor] = []
    torch.manual_seed(0)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    for sample in samples:
        if sample.forward_input is None:
            continue
        torch.manual_seed(1)  # for weights, and for dropout
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).double().train(training)
        given = _grown(sample.forward_input)
        outputs = module(*given.args, **given.kwargs)
        differentiable = [y for y in tree_leaves(outputs) if isinstance(y, Tensor) and y.grad_fn]
        torch.autograd.backward(differentiable, [_slope(y) for y in differentiable])
        found += [y.detach() for y in tree_leaves(outputs) if isinstance(y, Tensor)]
        leaves = [*tree_leaves(given.args), *tree_leaves(given.kwargs), *module.parameters()]
        found += [x.grad for x in leaves if isinstance(x, Tensor) and x.grad is not None]
    return found


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("info", MODULES, ids=lambda m: m.name)
def test_samples_of_modules(info: ModuleInfo, training: bool) -> None:
    truth = _results(info, training)
    assert truth
    with metalcore.overrides(), metalcore.trace() as t:
        found = _results(info, training)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in truth]
    allowed = 8 * tolerance("", torch.float32, 25)
    assert all(error(a, b) <= allowed for a, b in zip(found, truth, strict=True))
    assert any(r.path.startswith("cpu:") for r in t.records), t


@pytest.mark.parametrize("info", OPTIMIZERS, ids=lambda o: o.optim_cls.__name__)
def test_samples_of_optimizers(info: OptimizerInfo) -> None:
    taken = 0
    for sample in info.optim_inputs_func("cpu", torch.float32):
        ends = []
        for overridden in (False, True):
            torch.manual_seed(0)
            params = [torch.randn(7, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)]
            optimizer = info.optim_cls(params, **sample.kwargs)
            with metalcore.overrides() if overridden else nullcontext():
                with metalcore.trace() as t:
                    for _ in range(3):
                        for p in params:
                            p.grad = torch.randn(p.shape)
                        optimizer.step()
                taken += any(r.op == "adamw_step" for r in t.records)
            ends.append(torch.cat([p.detach().flatten() for p in params]))
        assert error(ends[1], ends[0]) <= tolerance("adamw_step", torch.float32, 1), sample.desc
    assert (taken > 0) == (info.optim_cls.__name__ in ("Adam", "AdamW"))
