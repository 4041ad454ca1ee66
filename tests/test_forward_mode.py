# SPDX-License-Identifier: MIT
"""Every public function has its derivative in forward mode, or says that it has none: never a
constant in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp

import metalcore as m
from metalcore import _trace, attn, linalg, train, xlstm
from metalcore._op import Op
from metalcore.ops.decode.decode_step import small_tape, tape_end
from metalcore.ops.train.cross_entropy import in_place as cross_entropy_in_place

Function = Callable[..., Any]
Call = tuple[Function, tuple[Tensor, ...]]


def _r(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def _definite(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[-1], dtype=x.dtype)


def _linalg() -> dict[str, Call]:
    A, B, wide = _r(2, 3, 3), _r(2, 3, 2), _r(2, 2, 4)
    lower = _definite(A).tril()
    return {
        "apply_householder": (
            lambda A, x: m.apply_householder(A, *m.householder_vector(x)),
            (A, B[..., 0]),
        ),
        "householder_vector": (m.householder_vector, (B[..., 0],)),
        "cholesky": (lambda A: m.cholesky(_definite(A)), (A,)),
        "cholesky_solve": (m.cholesky_solve, (B, lower)),
        "trsm": (m.trsm, (lower, B)),
        "cond": (m.cond, (A,)),
        "det": (m.det, (A,)),
        "slogdet": (lambda A: m.slogdet(A)[1], (A,)),
        "eigh": (lambda A: (lambda L, Q: (L, Q.square()))(*m.eigh(_definite(A))), (A,)),
        "eigvalsh": (lambda A: m.eigvalsh(_definite(A)), (A,)),
        "inv": (m.inv, (A,)),
        "solve": (m.solve, (A, B)),
        "solve refined": (lambda A, B: m.solve(A, B, refine=True), (A, B)),
        "lstsq": (lambda A, B: m.lstsq(A, B).solution, (wide.mT, _r(2, 4, 1))),
        "lu": (lambda A: m.lu(A)[1:], (A,)),
        "orthogonalize": (m.orthogonalize, (wide.mT,)),
        "polar": (m.polar, (A,)),
        "pinv": (m.pinv, (wide,)),
        "pinv hermitian": (lambda A: m.pinv(_definite(A), hermitian=True), (A,)),
        "qr": (lambda A: [x.square() for x in m.qr(A)], (A,)),
        "qr_solve": (m.qr_solve, (wide.mT, _r(2, 4, 1))),
        "svd": (lambda A: (lambda U, S, V: (U.square(), S, V.square()))(*m.svd(A)), (A,)),
        "svd of values": (lambda A: m.svd(A, compute_uv=False)[1], (A,)),
        "svdvals": (m.svdvals, (A,)),
    }


def _train() -> dict[str, Call]:
    x, y, w, b = _r(4, 6), _r(4, 6), _r(6), _r(6)
    ids, targets = torch.tensor([[0, 2], [3, 1]]), torch.tensor([0, 5, 3, -100])
    table, index = _r(4, 6), torch.tensor([[0, 2, 1, 3, 1, 1]])
    q, k, cos, sin = _r(1, 2, 3, 4), _r(1, 1, 3, 4), _r(1, 3, 4), _r(1, 3, 4)
    head, pairs = _r(9, 6), torch.tensor([[1, 2], [0, 3]])
    gate, up, down = _r(5, 6), _r(5, 6), _r(6, 5)
    a, bb = _r(2, 6), _r(5, 2)
    losses: dict[str, Call] = {
        f"cross_entropy {how}": (lambda x, how=how: m.cross_entropy(x, targets, **how), (x,))
        for how in (
            {},
            {"label_smoothing": 0.2, "reduction": "none"},
            {"z_loss": 0.1, "softcap": 3.0, "reduction": "sum"},
            {"inplace_backward": True},
        )
    }
    return losses | {
        "add_layer_norm": (m.add_layer_norm, (x, y, w, b)),
        "add_rms_norm": (m.add_rms_norm, (x, y, w)),
        "fused_add_layernorm": (m.fused_add_layernorm, (x, y, w, b)),
        "fused_add_rmsnorm": (lambda x, y, w: m.fused_add_rmsnorm(x, y.clone(), w), (x, y, w)),
        "layer_norm": (lambda x, w, b: m.layer_norm(x, (6,), w, b), (x, w, b)),
        "rms_norm": (m.rms_norm, (x, w)),
        "apply_rotary_pos_emb": (lambda q, k: m.apply_rotary_pos_emb(q, k, cos, sin), (q, k)),
        "bias_gelu": (m.bias_gelu, (x, b)),
        "bias_silu": (m.bias_silu, (x, b)),
        "gelu": (m.gelu, (x,)),
        "silu": (m.silu, (x,)),
        "geglu": (m.geglu, (x, y)),
        "swiglu": (m.swiglu, (x, y)),
        "swiglu_bwd": (m.swiglu_bwd, (x, y, x.flip(0))),
        "soft_cap": (lambda x: m.soft_cap(x, 2.0), (x,)),
        "softmax": (lambda x, y: m.softmax(x, mask=y), (x, y)),
        "softmax across": (lambda x: m.softmax(x, 0), (x,)),
        "embedding_bag": (lambda t: m.embedding_bag(ids, t, mode="sum"), (table,)),
        "embedding_bag of max": (lambda t: m.embedding_bag(ids, t, mode="max"), (table,)),
        "gather": (lambda t: m.gather(t, 0, index), (table,)),
        "index_select": (lambda t: m.index_select(t, 0, ids[0]), (table,)),
        "scatter_add": (lambda t, s: m.scatter_add(t, 0, index, s), (table, x[:1])),
        "jsd": (lambda x, y: m.jsd(x.log_softmax(-1), y.log_softmax(-1)), (x, y)),
        "kl_div": (lambda x, y: m.kl_div(x.log_softmax(-1), y.softmax(-1)), (x, y)),
        "linear_cross_entropy": (
            lambda x, h: m.linear_cross_entropy(x, h, targets, softcap=5.0),
            (x, head),
        ),
        "linear_dpo": (lambda x, h: m.linear_dpo(x.view(2, 2, 6), h, pairs), (x, head)),
        "linear_orpo": (lambda x, h: m.linear_orpo(x.view(2, 2, 6), h, pairs), (x, head)),
        "lora_linear": (m.lora_linear, (x, gate, a, bb)),
        "fused_swiglu_mlp": (
            lambda x, g, u, d, a, b, w: m.fused_swiglu_mlp(x, g, u, d, a, b, rms_weight=w),
            (x, gate, up, down, a, bb, w),
        ),
    }


def _attention() -> dict[str, Call]:
    q, k, v, sinks = _r(1, 2, 3, 4), _r(1, 1, 5, 4), _r(1, 1, 5, 4), _r(2)
    how: dict[str, Any] = {"causal": True, "softcap": 4.0, "return_lse": True}
    return {
        "attention": (lambda q, k, v, s: m.attention(q, k, v, sinks=s, **how), (q, k, v, sinks)),
        "attention of a mask": (lambda q, b: m.attention(q, k, v, mask=b), (q, _r(1, 2, 3, 5))),
        "scaled_dot_product_attention": (
            lambda *qkv: m.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True),
            (q, k, v),
        ),
        "flex_attention": (lambda *qkv: attn.flex_attention(*qkv, enable_gqa=True), (q, k, v)),
    }


def _xlstm() -> dict[str, Call]:
    x, weight, bias, state = _r(2, 3, 4), _r(4, 3), _r(4), _r(2, 2, 4)
    how: dict[str, Any] = {"activation": "silu", "return_last_state": True}
    sequence = (_r(1, 2, 3, 4), _r(1, 2, 3, 4), _r(1, 2, 3, 3), _r(1, 2, 3), _r(1, 2, 3))
    return {
        "causal_conv1d": (
            lambda x, w, b, s: m.causal_conv1d(x, w, b, initial_state=s, **how),
            (x, weight, bias, state),
        ),
        "causal_conv1d_step": (m.causal_conv1d_step, (_r(2, 4), state, weight, bias)),
        "mlstm_chunkwise": (m.mlstm_chunkwise, sequence),
        "mlstm_parallel": (lambda *a: m.mlstm_parallel(*a, gate="sigmoid"), sequence),
        "mlstm_step": (lambda *a: m.mlstm_step(*a)[0], tuple(x[:, :, 0] for x in sequence)),
        "multi_head_norm": (m.multi_head_norm, (_r(1, 2, 2, 4), _r(8), _r(8))),
        "slstm": (m.slstm, (_r(2, 3, 4, 1, 2), _r(1, 2, 4, 2), _r(1, 4, 2))),
        "slstm_step": (lambda *a: m.slstm_step(*a)[0], (_r(2, 4, 1, 2), _r(1, 2, 4, 2))),
    }


def calls() -> dict[str, Call]:
    """Calls of each public function, with the tensors that are differentiated."""
    torch.manual_seed(0)
    return _linalg() | _train() | _attention() | _xlstm()


def _scalar(call: Function) -> Function:
    def loss(*args: Tensor) -> Tensor:
        found = call(*args)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        return torch.stack([o.sin().sum() for o in outputs if o.is_floating_point()]).sum()

    return loss


def _directions(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn_like(a) for a in args)


@pytest.mark.parametrize("name", list(calls()))
def test_derivatives_along_a_direction(name: str) -> None:
    call, args = calls()[name]
    loss, directions = _scalar(call), _directions(args)
    leaves = [a.clone().requires_grad_() for a in args]
    grads = torch.autograd.grad(loss(*leaves), leaves)
    truth = torch.stack([(g * d).sum() for g, d in zip(grads, directions, strict=True)]).sum()
    assert truth != 0
    close = torch.testing.assert_close
    close(jvp(loss, args, directions)[1], truth)
    with fw.dual_level():
        close(fw.unpack_dual(loss(*map(fw.make_dual, args, directions))).tangent, truth)
        # also where a gradient is recorded besides
        duals = map(fw.make_dual, (a.clone().requires_grad_() for a in args), directions)
        close(fw.unpack_dual(loss(*duals)).tangent.detach(), truth)


@pytest.mark.parametrize("name", list(calls()))
def test_jacobians_and_hessians(name: str) -> None:
    call, args = calls()[name]
    loss, first, rest = _scalar(call), args[0], args[1:]

    def of(x: Tensor) -> Tensor:
        return loss(x, *rest)

    close = torch.testing.assert_close
    close(jacfwd(of)(first), jacrev(of)(first))
    found = hessian(of)(first)
    close(jacrev(grad(of))(first), found)
    if "inplace" not in name:
        close(torch.autograd.functional.hessian(of, first), found)


def test_every_public_function_is_among_them() -> None:
    public = {
        n for module in (attn, linalg, train, xlstm) for n in module.__all__ if n[0].islower()
    }
    known = {name.split(" ")[0] for name in calls()}
    # counts; gradients by hand and what has none, which are refused below
    refused = {"fused_mlp_bwd", "fused_attention_bwd", "attention_decode"}
    pages = {"paged_attention", "paged_write", "copy_blocks", "swap_blocks"}
    over_processes = {"tsqr", "ring_attention"}
    assert public - known == {"matrix_rank"} | refused | pages | over_processes


def _without_derivatives() -> dict[str, tuple[Function, Tensor]]:
    """What writes its arguments, takes lists of tensors or is a gradient itself, as a function of
    one of them."""
    x, w, target = _r(4, 6), _r(6), torch.tensor([0, 5, 3, 1])
    dy, weight, adapters = _r(4, 6), [_r(5, 6), _r(5, 6), _r(6, 5)], [None] * 6
    zeros, step = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(())
    numbers = (1e-3, 0.9, 0.99, 1e-8, 0.0, False, 1.0, None, 0.0, False, 0)

    def mlp(x: Tensor) -> Any:
        hidden = (_r(4, 5), _r(4, 5), *weight, *adapters, 1.0)
        return m.fused_mlp_bwd(dy, x, *hidden, _r(4, 6), w, torch.rand(4, dtype=x.dtype))

    def attention(x: Tensor) -> Any:
        q, cos = _r(1, 4, 1, 6), _r(1, 4, 6)
        hidden = (cos, cos, x[None], *(_r(6, 6) for _ in range(3)), *adapters, 1.0)
        return m.fused_attention_bwd(q, q, q, *hidden, _r(1, 4, 6), w, torch.rand(1, 4).to(x))

    def decode(x: Tensor) -> Any:
        return m.attention_decode(x.view(1, 4, 1, 6), *(_r(1, 2, 7, 6) for _ in range(2)))

    def paged(x: Tensor) -> Any:
        places = (torch.tensor([[0, 1]]), torch.tensor([7]))
        return m.paged_attention(x.view(1, 4, 1, 6), *(_r(2, 4, 2, 6) for _ in range(2)), *places)

    def write(x: Tensor) -> Any:
        new = x.view(4, 1, 6)
        return m.paged_write(new, new, *(_r(2, 4, 1, 6) for _ in range(2)), torch.arange(4))

    tape, one = small_tape(torch.float32), torch.zeros(1, dtype=torch.int64)

    def token(cache: Tensor) -> Any:
        return m.decode_step(tape.text(tape_end(tape)), tape.tensors, cache, *[one] * 4)

    return {
        "add_rms_norm_": (lambda x: Op.all["add_rms_norm_"](x, _r(4, 6), w, 1e-6, 0.0), x),
        "cross_entropy_": (
            lambda x: cross_entropy_in_place(x.clone(), target, None, None, -100, 0.0, 0.0, 0.0, 1),
            x,
        ),
        "adamw_norm": (lambda x: Op.all["adamw_norm"]([x]), x),
        "adamw_step": (
            lambda x: Op.all["adamw_step"](
                *([x.clone()], [x], [zeros], [zeros.clone()], [], [step]), *numbers
            ),
            x,
        ),
        "fused_mlp_bwd": (mlp, x),
        "fused_attention_bwd": (attention, x),
        "attention_decode": (decode, x),
        "paged_attention": (paged, x),
        "paged_write": (write, x),
        "decode_step": (token, torch.randn(1, 2, 1, 2, 9, 8)),
        # of which DoubleFloats are made, whose gradients are torch's
        "double_float": (lambda x: Op.all["double_float"](x, zeros, *[None] * 4, "exp"), x),
        "double_float_matmul": (
            lambda x: Op.all["double_float_matmul"](x, zeros, x.mT, zeros.mT, *[None] * 4),
            x,
        ),
        "double_float_trsm": (
            lambda x: Op.all["double_float_trsm"](x[:, :4], zeros[:, :4], x, zeros, True),
            x,
        ),
    }


@pytest.mark.parametrize("name", list(_without_derivatives()))
def test_what_has_no_derivative_refuses(name: str) -> None:
    call, x = _without_derivatives()[name]
    with torch.no_grad():
        call(x)
    with fw.dual_level(), pytest.raises(RuntimeError, match="no gradient"):
        call(fw.make_dual(x, x))
    with pytest.raises(RuntimeError, match="no gradient"):
        jvp(call, (x,), (x,))
    with pytest.raises(RuntimeError, match="no gradient"):
        grad(_scalar(call))(x)
    if name in Op.all:
        with pytest.raises(RuntimeError, match="no gradient"):
            call(x.clone().requires_grad_())


def test_a_gradient_in_the_memory_of_logits_has_no_second_derivative() -> None:
    x = _r(4, 6).requires_grad_()
    loss = m.cross_entropy(x * 1, torch.tensor([0, 5, 3, 1]), inplace_backward=True)
    with pytest.raises(ValueError, match="second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def _is_of_floats(op: Op) -> bool:
    """Whether there is anything to differentiate: integers, of or from floats, are steps."""
    args = list(op.samples[0](torch.float32).args)
    given, made = list(_trace.tensors(args)), op.results(op.meaning(*args), args)
    return all(any(x.is_floating_point() for x in tensors) for tensors in (given, made))


def test_every_op_without_a_gradient_is_among_them() -> None:
    without = {n for n, op in Op.all.items() if not op.is_differentiable and _is_of_floats(op)}
    assert without <= set(_without_derivatives())
