# SPDX-License-Identifier: MIT
"""The MLP block of a Llama layer, against its parts in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.train.products import by_torch, in_blocks

OP = "fused_swiglu_mlp"
T, H, WIDE, RANK, EPS = 5, 12, 20, 3, 1e-6
SIZES = (
    (T, H),
    (WIDE, H),
    (WIDE, H),
    (H, WIDE),
    *((RANK, H), (WIDE, RANK)) * 2,
    (RANK, WIDE),
    (H, RANK),
    (H,),
)


@pytest.fixture(params=["torch", "blocks"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision products by torch, and in blocks of float32."""
    (in_blocks if request.param == "blocks" else by_torch)(monkeypatch)


def _inputs(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    """In the order of the arguments: x, three weights, six adapters, the norm's weight."""
    scaled = (backend.randn(*s) * (s[-1] ** -0.5 if i else 1.0) for i, s in enumerate(SIZES))
    return [t.to(dtype).requires_grad_() for t in scaled]


def _plain(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *rest: Tensor,
    scale: float = 0.5,
    residual: Tensor | None = None,
) -> Tensor:
    """In torch alone; `rest` are the adapters, if there are any, and the norm's weight."""
    *loras, weight = rest
    n = F.rms_norm(x, weight.shape, weight, EPS)
    pairs = [loras[i : i + 2] for i in (0, 2, 4)]

    def linear(x: Tensor, W: Tensor, pair: list[Tensor]) -> Tensor:
        y = F.linear(x, W)
        return y + scale * F.linear(F.linear(x, pair[0]), pair[1]) if pair else y

    hidden = F.silu(linear(n, gate, pairs[0])) * linear(n, up, pairs[1])
    return (x if residual is None else residual) + linear(hidden, down, pairs[2])


def _check(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    off, allowed = error(found, truth), tolerance(OP, dtype, WIDE)
    assert off <= allowed, f"error {off:.3g} is over {allowed:.3g}"


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("has_loras", [False, True], ids=["plain", "adapters"])
def test_equals_the_plain_composition(backend: Backend, has_loras: bool) -> None:
    for dtype in backend.dtypes:
        leaves = _inputs(backend, dtype)
        if has_loras:
            # the call of the documentation: all in a row
            y = metalcore.fused_swiglu_mlp(*leaves, EPS, lora_scale=0.5)
        else:
            leaves = [*leaves[:4], leaves[-1]]
            y = metalcore.fused_swiglu_mlp(*leaves[:4], rms_weight=leaves[-1], rms_eps=EPS)
        doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
        truth = _plain(*doubles)
        assert y.dtype == dtype
        _check(y, truth, dtype)
        seed = torch.randn(T, H).to(dtype)
        grads = torch.autograd.grad(y, leaves, seed.to(y.device))
        for a, b in zip(grads, torch.autograd.grad(truth, doubles, seed.double()), strict=True):
            assert a.dtype == dtype
            _check(a, b, dtype)


def test_keywords_name_the_adapters_and_a_residual() -> None:
    x, gate, up, down, *loras, weight = _inputs(Backend("cpu"), torch.float64)
    residual = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    y = metalcore.fused_swiglu_mlp(
        x,
        gate,
        up,
        down,
        lora_up_A=loras[2],
        lora_up_B=loras[3],
        rms_weight=weight,
        residual=residual,
    )
    merged = up + loras[3] @ loras[2]
    truth = _plain(x, gate, merged, down, weight, residual=residual)
    torch.testing.assert_close(y, truth)
    wanted = (x, residual, *loras[2:4])
    found = torch.autograd.grad(y.square().sum(), wanted)
    torch.testing.assert_close(found, torch.autograd.grad(truth.square().sum(), wanted))


def test_the_kernels_of_the_device_compute_it(backend: Backend) -> None:
    # large enough that nothing is left to torch
    x, gate, up = backend.randn(130, 8), backend.randn(130, 8), backend.randn(130, 8)
    down, weight = backend.randn(8, 130), backend.randn(8)
    with metalcore.trace() as t:
        y = metalcore.fused_swiglu_mlp(x.requires_grad_(), gate, up, down, rms_weight=weight)
        y.sum().backward()
    ops = [r.op for r in t.records]
    assert ops == ["rms_norm", "swiglu", "rms_norm", "swiglu_backward", "rms_norm_backward"]
    assert {r.path.split(":")[0] for r in t.records} == {backend.path}


def test_the_residual_sets_the_dtype() -> None:
    x, gate, up, down, *_ = _inputs(Backend("cpu"), torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        residual = torch.randn(T, H).to(dtype).requires_grad_()
        y = metalcore.fused_swiglu_mlp(x, gate, up, down, residual=residual)
        assert y.dtype == dtype
        dx, d = torch.autograd.grad(y.sum(), (x, residual))
        assert (dx.dtype, d.dtype) == (torch.float32, dtype)


def test_dropout_leaves_out_what_torch_would() -> None:
    x, gate, up, down, *loras, weight = leaves = _inputs(Backend("cpu"), torch.float64)
    torch.manual_seed(1)
    y = metalcore.fused_swiglu_mlp(*leaves, EPS, lora_scale=0.5, dropout=0.3)
    torch.manual_seed(1)
    masks = [F.dropout(torch.ones(T, K), 0.3).double() for K in (H, H, WIDE)]
    masks = [(m != 0) / 0.7 for m in masks]

    def linear(i: int, x: Tensor, W: Tensor) -> Tensor:
        return F.linear(x, W) + 0.5 * (x * masks[i]) @ loras[2 * i].T @ loras[2 * i + 1].T

    n = F.rms_norm(x, (H,), weight, EPS)
    truth = x + linear(2, F.silu(linear(0, n, gate)) * linear(1, n, up), down)
    torch.testing.assert_close(y, truth)
    found = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(truth.square().sum(), leaves))
    off = metalcore.fused_swiglu_mlp(*leaves, EPS, lora_scale=0.5, dropout=0.3, training=False)
    torch.testing.assert_close(off, _plain(*leaves))


def test_derivatives() -> None:
    sizes = ((2, 3), (4, 3), (4, 3), (3, 4), *((1, 3), (4, 1)) * 2, (1, 4), (3, 1), (3,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]

    def y(*leaves: Tensor) -> Tensor:
        torch.manual_seed(1)
        return metalcore.fused_swiglu_mlp(*leaves, EPS, dropout=0.3)

    assert torch.autograd.gradcheck(y, leaves)
    assert torch.autograd.gradgradcheck(y, leaves)


def _held(call: Any, given: list[Tensor]) -> int:
    """Bytes that are kept for the backward pass beside what was given."""
    held: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = call(*given)
    for t in given:
        held.pop(t.untyped_storage().data_ptr(), None)
    assert y.requires_grad
    return sum(held.values())


def test_two_intermediate_results_are_held_and_no_more() -> None:
    given = _inputs(Backend("cpu"), torch.float32)

    def ours(*t: Tensor) -> Tensor:
        return metalcore.fused_swiglu_mlp(*t, EPS, lora_scale=0.5)

    assert _held(ours, given) == 2 * T * WIDE * 4
    assert _held(_plain, given) > 2 * _held(ours, given)


def test_frozen_weights_get_no_gradient() -> None:
    leaves = _inputs(Backend("cpu"), torch.float64)
    frozen = [t.detach().requires_grad_(4 <= i < 10) for i, t in enumerate(leaves)]
    y = metalcore.fused_swiglu_mlp(*frozen, EPS, lora_scale=0.5)
    found = torch.autograd.grad(y.sum(), frozen[4:10])
    torch.testing.assert_close(found, torch.autograd.grad(_plain(*leaves).sum(), leaves[4:10]))
    only = [t.detach().requires_grad_(i == 3) for i, t in enumerate(leaves)]
    (found,) = torch.autograd.grad(
        metalcore.fused_swiglu_mlp(*only, EPS, lora_scale=0.5).sum(), only[3]
    )
    torch.testing.assert_close(found, torch.autograd.grad(_plain(*leaves).sum(), leaves[3])[0])


def test_leading_dimensions_strides_no_rows_and_no_weight(backend: Backend) -> None:
    _, gate, up, down, *_ = _inputs(backend, torch.float32)
    wide = backend.randn(2, H, 3).requires_grad_()
    for x in (wide.transpose(1, 2), wide[0, :, 1], wide.transpose(1, 2)[:0]):
        y = metalcore.fused_swiglu_mlp(x, gate, up, down)
        doubles = [t.detach().cpu().double() for t in (x, gate, up, down)]
        _check(y, _plain(*doubles, torch.ones(H, dtype=torch.float64)), torch.float32)
        (dx,) = torch.autograd.grad(y.sum(), wide)
        assert dx.isfinite().all()


@pytest.mark.usefixtures("_way")
def test_autocast_keeps_the_residual_in_float32() -> None:
    leaves = _inputs(Backend("cpu"), torch.float32)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    truth = _plain(*doubles)
    with torch.autocast("cpu", torch.bfloat16):
        y = metalcore.fused_swiglu_mlp(*leaves, EPS, lora_scale=0.5)
    for leaf, double in zip(leaves, doubles, strict=True):
        assert torch.equal(leaf.double(), double)  # as it was
    assert y.dtype == torch.float32
    _check(y, truth, torch.bfloat16)
    grads = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(grads, torch.autograd.grad(truth.sum(), doubles), strict=True):
        assert a.dtype == torch.float32
        _check(a, b, torch.bfloat16)


def test_compiles_without_graph_breaks(device: Backend) -> None:
    leaves = _inputs(device, torch.float32)

    def y(*leaves: Tensor) -> Tensor:
        return metalcore.fused_swiglu_mlp(*leaves, EPS, lora_scale=0.5)

    compiled = torch.compile(y, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*leaves), y(*leaves))
    found = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(y(*leaves).sum(), leaves))


def test_function_transforms() -> None:
    leaves = [t.detach() for t in _inputs(Backend("cpu"), torch.float64)]
    x = torch.randn(4, T, H, dtype=torch.float64)
    y = torch.vmap(lambda x: metalcore.fused_swiglu_mlp(x, *leaves[1:], EPS))(x)
    torch.testing.assert_close(y, metalcore.fused_swiglu_mlp(x, *leaves[1:], EPS))
    found = torch.func.grad(lambda x: metalcore.fused_swiglu_mlp(x, *leaves[1:], EPS).sum())
    leaf = leaves[0].clone().requires_grad_()
    truth = _plain(leaf, *leaves[1:], scale=1.0)
    torch.testing.assert_close(found(leaves[0]), torch.autograd.grad(truth.sum(), leaf)[0])


@pytest.mark.usefixtures("_way")
def test_the_raw_backward_call_gives_the_gradients(backend: Backend) -> None:
    for dtype in backend.dtypes:
        x, gate, up, down, *loras, weight = leaves = _inputs(backend, dtype)
        doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
        d = torch.randn(T, H).to(dtype)
        exact = torch.autograd.grad(_plain(*doubles) - doubles[0], doubles, d.double())
        xd, gd, ud, _, *lorad, wd = doubles
        rstd = torch.rsqrt(xd.square().mean(-1, keepdim=True) + EPS)
        n = xd * rstd * wd
        g = F.linear(n, gd) + 0.5 * n @ lorad[0].T @ lorad[1].T
        u = F.linear(n, ud) + 0.5 * n @ lorad[2].T @ lorad[3].T
        n, g, u = (t.detach().to(x.device, dtype) for t in (n, g, u))
        rstd = rstd.detach().to(x.device, torch.promote_types(dtype, torch.float32))
        found = metalcore.fused_mlp_bwd(
            d.to(x.device), n, g, u, gate, up, down, *loras, 0.5, x, weight, rstd
        )
        for a, b in zip(found, exact, strict=True):
            assert a is not None
            _check(a, b, dtype)
        none = torch.empty(0, dtype=dtype, device=x.device)
        frozen = metalcore.fused_mlp_bwd(
            d.to(x.device),
            n,
            g,
            u,
            gate,
            up,
            down,
            *(none,) * 4,
            None,
            None,
            0.5,
            x,
            None,
            rstd,
            weight_grads=False,
        )
        assert [g is None for g in frozen] == [False] + [True] * 10


BAD = [
    (
        lambda x, g, u, d, w: metalcore.fused_swiglu_mlp(x, g, u, d, w, EPS),
        "adapters must be matrices, got [12] for the first one; without adapters, name what comes "
        "after them, as in rms_weight=weight",
    ),
    (
        lambda x, g, u, d, w: metalcore.fused_swiglu_mlp(x, g, u, g, rms_weight=w),
        "hidden_states must be [..., H], gate_proj and up_proj [I, H] and down_proj [H, I]; got "
        "hidden_states [5, 12], gate_proj [20, 12], up_proj [20, 12], down_proj [20, 12]",
    ),
    (
        lambda x, g, u, d, w: metalcore.fused_swiglu_mlp(x, g, u, d, lora_up_A=g[:3]),
        "lora_up_A and lora_up_B come together; pass both or neither",
    ),
    (
        lambda x, g, u, d, w: metalcore.fused_swiglu_mlp(x, g, u, d, rms_weight=w[:3]),
        "rms_weight must have the shape [12], got [3]",
    ),
    (
        lambda x, g, u, d, w: metalcore.fused_swiglu_mlp(x, g, u, d, residual=x[0]),
        "residual must have the shape [5, 12], got [12]",
    ),
    (
        lambda x, g, u, d, w: metalcore.fused_swiglu_mlp(x, g, u, d, rms_eps=-1.0),
        "eps must be greater than 0, got -1.0",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[b[1][:40] for b in BAD])
def test_bad_input_is_named(call: Any, message: str) -> None:
    leaves = _inputs(Backend("cpu"), torch.float32)
    with pytest.raises(ValueError, match="fused_swiglu_mlp: ") as caught:
        call(*leaves[:4], leaves[-1])
    assert str(caught.value) == f"fused_swiglu_mlp: {message}"


def test_dtypes_do_not_mix() -> None:
    x, gate, up, down, *_ = _inputs(Backend("cpu"), torch.float32)
    with pytest.raises(TypeError, match="fused_swiglu_mlp: all of these must have one dtype"):
        metalcore.fused_swiglu_mlp(x, gate.half(), up, down)
