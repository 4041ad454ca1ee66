# SPDX-License-Identifier: MIT
"""Layers, optimizers and whole models of MLX with metalcore in them, and without it again."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as theirs
import pytest
import torch
from mlx.utils import tree_flatten

import metalcore
import metalcore.mlx
from metalcore.mlx.optimizers import AdamW, Muon
from tests.mlx.tiny import Model
from tests.mlx.ways import SIMULATED


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    # MLX would call a C++ compiler for every function
    mx.disable_compile()
    mx.random.seed(0)
    yield
    mx.enable_compile()
    mx.set_default_device(before)


def close(a: mx.array, b: mx.array, tolerance: float = 2e-6) -> None:
    scale = max(1.0, float(mx.abs(b).max()))
    assert float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()) <= tolerance * scale


def loss_of(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


@pytest.mark.parametrize(
    ("ours", "mlx"),
    [
        (metalcore.mlx.nn.RMSNorm(24), nn.RMSNorm(24)),
        (metalcore.mlx.nn.LayerNorm(24), nn.LayerNorm(24)),
        (metalcore.mlx.nn.LayerNorm(24, affine=False), nn.LayerNorm(24, affine=False)),
        (metalcore.mlx.nn.RoPE(16), nn.RoPE(16)),
        (metalcore.mlx.nn.RoPE(24, traditional=True, base=500.0), nn.RoPE(24, True, 500.0)),
        (metalcore.mlx.nn.SiLU(), nn.SiLU()),
        (metalcore.mlx.nn.GELU("tanh"), nn.GELU("tanh")),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_are_those_of_mlx(ours: nn.Module, mlx: nn.Module) -> None:
    x = mx.random.normal((2, 3, 5, 24))
    close(ours(x), mlx(x))
    assert [n for n, _ in tree_flatten(ours.parameters())] == [
        n for n, _ in tree_flatten(mlx.parameters())
    ]


@pytest.mark.parametrize("offset", [0, 7, mx.array([3, 11])], ids=str)
def test_rope_has_the_arguments_of_mlx(offset: Any) -> None:
    x = mx.random.normal((2, 3, 5, 24))
    how = {"traditional": False, "base": 100.0, "scale": 0.5}
    close(
        metalcore.mlx.rope(x, 16, **how, offset=offset), mx.fast.rope(x, 16, **how, offset=offset)
    )
    if isinstance(offset, int):
        freqs = mx.random.uniform(1, 50, (8,))
        how = {"traditional": True, "base": None, "scale": 1.0, "freqs": freqs}
        theirs = mx.fast.rope(x[0], 16, **how, offset=offset)
        close(metalcore.mlx.rope(x[0], 16, **how, offset=offset), theirs)


@SIMULATED
def test_an_accelerated_model_is_the_same_model(simulated: bool) -> None:
    model, tokens = Model(), mx.random.randint(0, 50, (2, 13))
    value, gradient = nn.value_and_grad(model, loss_of)(model, tokens)
    mx.eval(value, gradient)
    kinds = [type(m) for m in model.modules()]
    summary = metalcore.mlx.accelerate(model)
    assert dict(summary.layers) == {"RMSNorm": 5, "Attention": 2, "RoPE": 2, "MLP": 2}
    with metalcore.trace() as t:
        if simulated:
            with metalcore.simulate():
                ours, ours_gradient = nn.value_and_grad(model, loss_of)(model, tokens)
        else:
            ours, ours_gradient = nn.value_and_grad(model, loss_of)(model, tokens)
        mx.eval(ours, ours_gradient)
    for op in ("rms_norm", "rope", "attention", "swiglu", "attention_backward"):
        # few values of a norm are MLX's
        few = "mlx" if op in ("rms_norm", "swiglu") else "cpu"
        assert {p.split(":")[0] for p in t.paths[op]} == {"sim" if simulated else few}, t
    close(ours, value)
    for (name, a), (_, b) in zip(tree_flatten(ours_gradient), tree_flatten(gradient), strict=True):
        assert a.dtype == b.dtype, name
        close(a, b, 1e-5)
    assert metalcore.mlx.accelerate(model).layers == {}
    summary.undo()
    assert [type(m) for m in model.modules()] == kinds


def test_parts_of_accelerate_can_be_left_out() -> None:
    model = Model()
    summary = metalcore.mlx.accelerate(model, rope=False, attention=False, mlp=False)
    assert str(summary) == "metalcore computes in 5 x RMSNorm"
    other = Model()
    assert type(other.model.norm) is nn.RMSNorm
    summary.undo()


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_mlx_lm_without_logits(tied: bool) -> None:
    model, tokens = Model(tied=tied), mx.random.randint(0, 50, (2, 13))
    lengths = mx.array([[0, 12], [2, 7]])

    def by_logits(model: nn.Module, batch: mx.array, lengths: mx.array) -> Any:
        steps = mx.arange(1, batch.shape[1])
        mask = (steps >= lengths[:, 0:1]) & (steps <= lengths[:, 1:])
        each = nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:]) * mask
        return each.sum() / mask.sum(), mask.sum()

    found, truth = (
        nn.value_and_grad(model, f)(model, tokens, lengths)
        for f in (metalcore.mlx.default_loss, by_logits)
    )
    close(found[0][0], truth[0][0])
    assert int(found[0][1]) == int(truth[0][1])
    for (_, a), (_, b) in zip(tree_flatten(found[1]), tree_flatten(truth[1]), strict=True):
        close(a, b, 1e-5)


def test_default_loss_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="default_loss: the model must have `lm_head`"):
        metalcore.mlx.default_loss(nn.Linear(2, 2), mx.zeros((1, 3), mx.int32), mx.zeros((1, 2)))


@SIMULATED
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_adamw_is_that_of_torch(dtype: Any, simulated: bool) -> None:
    tree = {"a": mx.random.normal((5, 7)), "b": {"c": mx.random.normal((40,))}}
    params = {"a": tree["a"].astype(dtype), "b": {"c": tree["b"]["c"].astype(dtype)}}
    leaves = [metalcore.mlx.to_torch(x).float().clone() for _, x in tree_flatten(params)]
    theirs_of_torch = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    ours = AdamW(lambda step: 1e-2, weight_decay=0.1)
    for k in range(3):
        grads = {"a": params["a"] * (k + 1), "b": {"c": mx.cos(params["b"]["c"])}}
        for leaf, (_, g) in zip(leaves, tree_flatten(grads), strict=True):
            leaf.grad = metalcore.mlx.to_torch(g).float().clone()
        theirs_of_torch.step()
        if simulated:
            with metalcore.simulate(), metalcore.trace() as t:
                params = ours.apply_gradients(grads, params)
            assert {r.path.split(":")[0] for r in t.records} == {"sim"}
        else:
            params = ours.apply_gradients(grads, params)
        mx.eval(params, ours.state)
        for leaf, (_, p) in zip(leaves, tree_flatten(params), strict=True):
            assert p.dtype == dtype
            close(p, metalcore.mlx.from_torch(leaf), 1e-6 if dtype == mx.float32 else 1e-2)
            leaf.copy_(metalcore.mlx.to_torch(p).float())
    assert ours.state["b"]["c"]["m"].dtype == mx.float32


def test_optimizers_train_a_model() -> None:
    model, tokens = Model(), mx.random.randint(0, 50, (2, 13))
    before = loss_of(model, tokens)
    for optimizer in (AdamW(1e-2), Muon(2e-2), theirs.SGD(0.0)):
        value, gradient = nn.value_and_grad(model, loss_of)(model, tokens)
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state)
    assert float(value) < float(before)


def test_muon_steps_along_the_orthogonal_factor() -> None:
    gradient = mx.random.normal((6, 4))
    new = Muon(1.0, momentum=0.0, weight_decay=0.0).apply_gradients(
        {"w": gradient}, {"w": mx.zeros((6, 4))}
    )["w"]
    close(new.T @ new, 1.5 * mx.eye(4), 1e-5)
