# SPDX-License-Identifier: MIT
"""Products with weights of 4 and 8 bits in groups of any shape."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._op import Op
from metalcore.bench.counters import recorded
from metalcore.ops.quant._activation import ERROR
from tests.backends import FLOATS, Backend
from tests.check import check_op, check_registration


class Form(NamedTuple):
    """The functions of weights of so many bits."""

    bits: int
    quantize: Any
    dequantize: Any
    pack: Any
    matmul: Any


m = metalcore
FORMS = {
    "matmul_int4": Form(4, m.quantize_int4, m.dequantize_int4, m.pack_int4, m.matmul_int4),
    "matmul_int8": Form(8, m.quantize_int8, m.dequantize_int8, m.pack_int8, m.matmul_int8),
}
SHAPES = [(19, 100, 32), (16, 256, 64), (33, 1000, 96), (1, 33, 256), (5, 1, 32), (3, 0, 32)]


@pytest.mark.parametrize("op", list(FORMS))
@pytest.mark.parametrize("symmetric", [False, True])
def test_matches_reference(op: str, symmetric: bool) -> None:
    form = FORMS[op]
    for dtype in FLOATS:
        for N, K, group in SHAPES[:2] + SHAPES[3:]:
            q = form.quantize(torch.randn(N, K), group, symmetric=symmetric)
            for tiles in (None, form.pack(q)):
                args = (
                    torch.randn(3, K).to(dtype),
                    q.packed,
                    q.scale,
                    q.bias,
                    tiles,
                    group,
                    "float",
                )
                check_op(Backend("cpu"), op, args, reduces_over=max(1, K, N))


@pytest.mark.parametrize("op", list(FORMS))
@pytest.mark.parametrize("symmetric", [False, True])
def test_on_metal(op: str, symmetric: bool) -> None:
    """Few rows by simdgroups, many and gradients by tiles; rows of whole words, and others."""
    form = FORMS[op]
    with Backend("sim") as backend:
        for M, N, K, group in ((1, 19, 512, 64), (3, 9, 99, 96), (9, 70, 160, 96), (40, 5, 33, 32)):
            q = form.quantize(torch.randn(N, K), group, symmetric=symmetric)
            for dtype in FLOATS[:1] if M != 3 else FLOATS:
                if dtype == torch.float64:
                    continue
                args = (torch.randn(M, K).to(dtype), q.packed, q.scale, q.bias, None, group)
                check_op(backend, op, (*args, "float"), reduces_over=max(K, N))
            pack = Op.all[f"pack_int{form.bits}"]
            args = (q.packed, q.scale, q.bias, group, K)
            assert torch.equal(pack(*args), pack.meaning(*args))


def test_metal_moves_weights_once() -> None:
    q, x = metalcore.quantize_int4(torch.randn(64, 1024)), torch.randn(1, 1024)
    with recorded(checked=False) as (_, profiles):
        metalcore.matmul_int4(x, q)
    (profile,), weight = profiles, q.packed.nbytes + q.scale.nbytes + q.bias.nbytes
    # x is read by each threadgroup
    assert profile.moved <= 1.1 * (weight + profile.groups * x.nbytes + 64 * 4)


@pytest.mark.parametrize("op", list(FORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_as_promised(op: str, dtype: torch.dtype) -> None:
    form = FORMS[op]
    for symmetric in (False, True):
        q = form.quantize(torch.randn(48, 1000).to(dtype), 96, symmetric=symmetric)
        tiles, weight = form.pack(q), form.dequantize(q, torch.float64)
        for M in (1, 2, 3, 5, 8, 17, 300):
            x = torch.randn(M, 1000)
            truth = x.double() @ weight.T
            for activation, promised in ERROR.items():
                y = form.matmul(x, q, activation=activation, tiles=tiles)
                assert float((y - truth).norm() / truth.norm()) <= promised, (M, activation)
                assert torch.equal(form.matmul(x, q, activation=activation), y)


@pytest.mark.parametrize("op", list(FORMS))
def test_the_largest_quants_and_activations(op: str) -> None:
    form = FORMS[op]
    for symmetric in (False, True):
        q = form.quantize(torch.randn(20, 96), 32, symmetric=symmetric)
        for byte in (0, 0x80, 0xFF):
            q = q._replace(packed=torch.full_like(q.packed, byte))
            weight = form.dequantize(q, torch.float64)
            for x in (-torch.ones(6, 96), torch.randn(6, 96).sign()):
                size = x.double().abs() @ weight.abs().T
                for activation, promised in ERROR.items():
                    y = form.matmul(x, q, activation=activation, tiles=form.pack(q))
                    assert ((y - x.double() @ weight.T).abs() <= promised * size + 1e-6).all()


@pytest.mark.parametrize("op", list(FORMS))
def test_tiles_are_those_of_the_meaning(op: str) -> None:
    form = FORMS[op]
    for N, K, group in SHAPES:
        for dtype in FLOATS:
            for symmetric in (False, True):
                q = form.quantize(torch.randn(N, K).to(dtype), group, symmetric=symmetric)
                meaning = Op.all[f"pack_int{form.bits}"].meaning
                expected = meaning(q.packed, q.scale, q.bias, group, K)
                assert torch.equal(form.pack(q), expected)


@pytest.mark.parametrize("op", list(FORMS))
def test_gradients_go_to_activations_and_to_scales_that_ask(op: str) -> None:
    form = FORMS[op]
    q = form.quantize(torch.randn(7, 100), 32)
    x, bias = torch.randn(2, 3, 100).requires_grad_(), torch.randn(7).requires_grad_()
    form.matmul(x, q, bias).square().sum().backward()
    a = x.detach().clone().requires_grad_()
    (a @ form.dequantize(q).T + bias.detach()).square().sum().backward()
    torch.testing.assert_close(x.grad, a.grad, rtol=1e-3, atol=1e-2)
    assert bias.grad is not None
    trained = q._replace(scale=q.scale.clone().requires_grad_())
    form.matmul(x.detach(), trained, activation="float").sum().backward()
    assert trained.scale.grad is not None


def test_registration_and_compile() -> None:
    q, x = metalcore.quantize_int4(torch.randn(5, 40), 32), torch.randn(2, 40)
    scale, bias = q.scale.double(), q.bias.double()
    check_registration("matmul_int4", (x, q.packed, scale, bias, None, 32, "float"))
    args = (q.packed, q.scale, q.bias, 32, 40)
    torch.library.opcheck(torch.ops.metalcore_kernels.pack_int4.default, args)

    def run(x: Tensor) -> Tensor:
        return metalcore.matmul_int4(x, q, tiles=metalcore.pack_int4(q))

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_bad_input_is_named() -> None:
    q, x = metalcore.quantize_int4(torch.randn(5, 40), 32), torch.randn(2, 40)
    bad = [
        (lambda: metalcore.matmul_int4(x[:, :7], q), "x must be [..., 40], got [2, 7]"),
        (
            lambda: metalcore.matmul_int4(x, q._replace(scale=q.scale[:2])),
            "scale must have the shape [5, 2], got [2, 2]",
        ),
        (
            lambda: metalcore.matmul_int4(x, q, activation="int2"),
            "activation must be one of auto, int8, int16, float, got 'int2'",
        ),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match="matmul_int4: ") as caught:
            call()
        assert str(caught.value) == f"matmul_int4: {message}"
