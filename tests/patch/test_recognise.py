# SPDX-License-Identifier: MIT
"""Layers are recognised by what they compute: look-alikes are told apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.patch import mlp, norms

N = 24


class Norm(nn.Module):
    def __init__(self, formula: Callable[["Norm", Tensor], Tensor], weight: bool = True) -> None:
        super().__init__()
        self.formula, self.eps = formula, 1e-3
        self.weight = nn.Parameter(torch.randn(N)) if weight else None
        self.normalized_shape = (N,)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def _rms(m: Norm, x: Tensor, dim: int = -1) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(dim, keepdim=True) + m.eps)).to(x.dtype)


def _scaled(m: Norm, x: Tensor) -> Tensor:
    assert m.weight is not None
    return m.weight * _rms(m, x)


def _centered(m: Norm, x: Tensor) -> Tensor:
    assert m.weight is not None
    return F.layer_norm(x, (N,), m.weight, None, m.eps)


NORMS = [
    (Norm(_scaled), "rms_norm"),
    (Norm(lambda m, x: (_rms(m, x).float() * (1 + m.weight.float())).to(x.dtype)), "rms_norm"),
    (Norm(_rms, weight=False), "rms_norm"),
    (Norm(_centered), "layer_norm"),
    (nn.RMSNorm(N), "rms_norm"),
    (nn.RMSNorm(N, eps=1e-5, elementwise_affine=False), "rms_norm"),
    (nn.LayerNorm(N), "layer_norm"),
    (nn.LayerNorm(N, bias=False), "layer_norm"),
    (nn.LayerNorm(N, elementwise_affine=False), "layer_norm"),
]
LOOK_ALIKES = [
    # eps beside the root, a sum in the place of the mean, another dimension, another dtype, ...
    Norm(lambda m, x: m.weight * x / (x.float().square().mean(-1, keepdim=True).sqrt() + m.eps)),
    Norm(lambda m, x: m.weight * x * torch.rsqrt(x.square().sum(-1, keepdim=True) + m.eps)),
    Norm(lambda m, x: m.weight * _rms(m, x, dim=1)),
    Norm(lambda m, x: m.weight * _rms(m, x).clamp(-2, 2)),
    Norm(lambda m, x: (m.weight * _rms(m, x)).float()),
    Norm(lambda m, x: 2 * m.weight * _rms(m, x)),
    nn.GroupNorm(1, N),
]


@pytest.mark.parametrize(("module", "op"), NORMS)
def test_norms(module: nn.Module, op: str) -> None:
    x = torch.randn(2, 5, N)
    plain = module(x)
    with metalcore.accelerate(module), metalcore.trace() as t:
        found = module(x)
    assert [r.op for r in t.records] == [op]
    assert error(found, plain) <= tolerance(op, torch.float32, N)


@pytest.mark.parametrize("module", LOOK_ALIKES)
def test_look_alikes_of_norms(module: nn.Module) -> None:
    assert norms.is_candidate(module)
    assert isinstance(norms.recognise(module), str)


def test_norms_that_never_are_candidates() -> None:
    for module in (nn.BatchNorm1d(N), nn.Linear(N, N), nn.Softplus()):
        assert not norms.is_candidate(module)
    two = Norm(_scaled)
    two.weight = nn.Parameter(torch.randn(3, N))
    assert norms.recognise(two) == "its weight has 2 dimensions, ours one"


class MLP(nn.Module):
    def __init__(self, formula: Callable[["MLP", Tensor], Tensor], within: int = 16) -> None:
        super().__init__()
        self.formula = formula
        # up before gate: names and order tell nothing
        self.a, self.b = nn.Linear(8, within), nn.Linear(8, within)
        self.c = nn.Linear(within, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


GATED = [
    (lambda m, x: m.c(F.silu(m.b(x)) * m.a(x)), "swiglu"),
    (lambda m, x: m.c(m.b(x) * F.gelu(m.a(x))), "geglu"),
    (lambda m, x: m.c(m.b(x) * F.gelu(m.a(x), approximate="tanh")), "geglu"),
]
NOT_GATED = [
    lambda m, x: m.c(F.silu(m.b(x)) + m.a(x)),
    lambda m, x: m.c(F.relu(m.b(x)) * m.a(x)),
    lambda m, x: m.c(F.silu(m.b(x)) * m.a(x)) + x,
    lambda m, x: m.c(F.silu(m.b(x)) * m.a(x).clamp(-20, 20)),
    lambda m, x: m.c(F.dropout(F.silu(m.b(x)), 0.5, m.training) * m.a(x)),
]


@pytest.mark.parametrize("within", [8, 16])
@pytest.mark.parametrize(("formula", "op"), GATED)
def test_gated_layers(formula: Any, op: str, within: int) -> None:
    module, x = MLP(formula, within), torch.randn(3, 8)
    plain = module(x)
    with metalcore.accelerate(module), metalcore.trace() as t:
        found = module(x)
    assert [r.op for r in t.records] == [op]
    assert error(found, plain) <= tolerance(op, torch.float32, within)


@pytest.mark.parametrize("formula", NOT_GATED)
def test_look_alikes_of_gated_layers(formula: Any) -> None:
    assert mlp.is_candidate(MLP(formula))
    assert isinstance(mlp.recognise(MLP(formula)), str)


class Function(nn.Module):
    def __init__(self, formula: Callable[["Function", Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


ALONE = [
    (nn.SiLU(), "silu"),
    (nn.GELU(), "gelu"),
    (nn.GELU(approximate="tanh"), "gelu"),
    (Function(lambda m, x: x * torch.sigmoid(1.702 * x)), "silu"),
    (Function(lambda m, x: 0.5 * x * (1 + torch.erf(x / 2**0.5))), "gelu"),
]
NOT_ALONE = [
    nn.ReLU(),
    nn.Tanh(),
    nn.Identity(),
    nn.Dropout(0.1),
    nn.Softmax(-1),
    Function(lambda m, x: 1.01 * F.gelu(x)),
    Function(lambda m, x: F.gelu(x).clamp(max=10)),
    Function(lambda m, x: F.dropout(F.gelu(x), 0.1, m.training)),
    Function(lambda m, x: F.gelu(x).float()),
    Function(lambda m, x: F.gelu(x)[:-1]),
]


@pytest.mark.parametrize(("module", "op"), ALONE)
def test_activations(module: nn.Module, op: str) -> None:
    x = torch.randn(300, 500)
    plain = module(x)
    with metalcore.accelerate(module) as summary, metalcore.trace() as t:
        found = module(x)
    assert summary.count("mlp") == 1
    assert [r.op for r in t.records] == [op]
    assert error(found, plain) <= tolerance("gelu", torch.float32, 1)


@pytest.mark.parametrize("module", NOT_ALONE)
def test_look_alikes_of_activations(module: nn.Module) -> None:
    summary = metalcore.accelerate(module)
    assert not summary.rows
    assert summary.not_examined == {type(module).__name__: 1}


class Dropping(MLP):
    def __init__(self, formula: Callable[["MLP", Tensor], Tensor]) -> None:
        super().__init__(formula)
        self.drop = nn.Dropout(0.5)


@pytest.mark.parametrize(
    ("formula", "is_ours"),
    [
        (lambda m, x: m.c(m.drop(F.silu(m.b(x)) * m.a(x))), True),
        (lambda m, x: m.drop(m.c(F.silu(m.b(x)) * m.a(x))), False),
        (lambda m, x: m.c(F.silu(m.b(m.drop(x))) * m.a(x)), False),
        (lambda m, x: m.c(F.silu(m.b(x)) * m.a(x)), False),
    ],
)
def test_where_a_dropout_stands_is_found_out(formula: Any, is_ours: bool) -> None:
    module, x = Dropping(formula), torch.randn(3, 8)
    torch.manual_seed(0)
    plain = module(x)
    with metalcore.accelerate(module) as summary:
        assert summary.count("mlp") == is_ours
        torch.manual_seed(0)
        assert error(module(x), plain) <= tolerance("swiglu", torch.float32, 16)


def test_layers_of_one_class_may_differ_in_their_parts() -> None:
    class Activated(MLP):
        def __init__(self, act: nn.Module, within: int = 16) -> None:
            super().__init__(lambda m, x: m.c(act(m.b(x)) * m.a(x)), within)
            self.act = act

    kinds = [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.SiLU()]
    model, x = nn.ModuleList(Activated(act) for act in kinds), torch.randn(3, 8)
    plain = [layer(x) for layer in model]
    summary = metalcore.accelerate(model)
    by = ["swiglu", "swiglu", "geglu", "geglu, tanh"]
    assert sorted(r.by for r in summary.rows for _ in range(r.count) if r.by) == sorted(by)
    for layer, y in zip(model, plain, strict=True):
        assert error(layer(x), y) <= tolerance("swiglu", torch.float32, 16)


def test_hooks_of_linear_layers_are_called() -> None:
    module, x = MLP(GATED[0][0]), torch.randn(3, 8)
    module.b.register_forward_hook(lambda m, args, y: 2 * y)
    plain = module(x)
    with metalcore.accelerate(module):
        assert error(module(x), plain) <= tolerance("swiglu", torch.float32, 16)


def _half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _half(q) * sin, k * cos + _half(k) * sin


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return rope(q, k, cos, -sin, unsqueeze_dim)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> Any:
        return rope(q, k, cos, sin, **kwargs)


class Backwards(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return backwards(q, k, cos, sin)


def _inputs(dtype: torch.dtype = torch.float32, tables: torch.dtype = torch.float32) -> list[Any]:
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 8), (1, 5, 8))
    types = (dtype, dtype, tables, tables)
    return [torch.randn(s).to(t) for s, t in zip(shapes, types, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding(dtype: torch.dtype) -> None:
    layer, inputs = Attention(), _inputs(dtype)
    plain = layer(*inputs)
    with metalcore.accelerate(layer), metalcore.trace() as t:
        found = layer(*inputs)
        # other layers of the class stay as they are
        Attention()(*inputs)
    assert [r.op for r in t.records] == ["rope"]
    for a, b in zip(found, plain, strict=True):
        # tables in float32 make the result float32
        assert a.dtype == b.dtype == torch.float32
        assert error(a, b) <= tolerance("rope", torch.float32, 2)


def test_unusual_arguments_of_rotary_embedding_go_to_the_original() -> None:
    q, k, cos, sin = _inputs()
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([q, k, cos[0], sin[0]], {"unsqueeze_dim": 0}),
        ([q[0], k[0], cos, sin], {"unsqueeze_dim": 1}),
        ([q, k, cos[:, :1], sin[:, :1]], {}),
    ]
    layer = Attention()
    for args, kwargs in cases:
        plain = layer(*args, **kwargs)
        with metalcore.accelerate(layer), metalcore.trace() as t:
            found = layer(*args, **kwargs)
        assert not t.records
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_another_rotation_is_left_alone() -> None:
    summary = metalcore.accelerate(Backwards())
    assert "backwards computes no rotation that metalcore has" in summary.rows[0].left_alone


def test_probing_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    drawn = torch.randn(3)
    torch.manual_seed(5)
    metalcore.accelerate(nn.Sequential(nn.LayerNorm(8), MLP(GATED[0][0])))
    model = nn.Sequential(nn.LayerNorm(8))
    torch.manual_seed(5)
    metalcore.accelerate(model)
    assert torch.equal(torch.randn(3), drawn)
