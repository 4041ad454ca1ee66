# SPDX-License-Identifier: MIT
"""Public functions on DTensors, with all that they do before and after their op."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import metalcore
from metalcore._accuracy import error
from metalcore._route import Route
from metalcore._where import map_tensors
from tests.distributed.launch import check

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _cases() -> dict[str, Case]:
    A, B = torch.randn(4, 6, 6) + 4 * torch.eye(6), torch.randn(4, 6, 2)
    tall, spd = torch.randn(4, 9, 5), A @ A.mT
    x, w = torch.randn(4, 8, 12), torch.rand(12) + 0.5
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    cos, sin = metalcore.RotaryEmbedding(16)(seq_len=8)
    index = torch.randint(4, (3, 8, 12))
    p = torch.softmax(torch.randn(4, 12), -1)
    m = metalcore
    return {
        "inv": (m.inv, (A,)),
        "solve": (m.solve, (A, B)),
        "det": (m.det, (A,)),
        "slogdet": (m.slogdet, (A,)),
        "cond": (m.cond, (A,)),
        "matrix_rank": (m.matrix_rank, (tall,)),
        "pinv": (m.pinv, (tall,)),
        "lstsq": (lambda a, b: m.lstsq(a, b)[0], (tall, torch.randn(4, 9, 2))),
        "qr_solve": (m.qr_solve, (tall, torch.randn(4, 9, 2))),
        "cholesky": (m.cholesky, (spd,)),
        "cholesky_solve": (m.cholesky_solve, (B, torch.linalg.cholesky(spd))),
        "trsm": (m.trsm, (A.tril(), B)),
        "eigvalsh": (m.eigvalsh, (spd,)),
        "svdvals": (m.svdvals, (tall,)),
        "lu": (lambda a: m.lu(a)[2], (A,)),
        "householder_vector": (m.householder_vector, (tall,)),
        "orthogonalize": (m.orthogonalize, (tall,)),
        "polar": (m.polar, (tall,)),
        "rms_norm": (m.rms_norm, (x, w)),
        "layer_norm": (lambda x, w: m.layer_norm(x, (12,), w), (x, w)),
        "add_rms_norm": (m.add_rms_norm, (x, x.flip(0), w)),
        "softmax": (lambda x: m.softmax(x, 1), (x,)),
        "softmax with a mask": (lambda x, m_: m.softmax(x, mask=m_), (x, x > 0)),
        "softmax of causal scores": (lambda x: m.softmax(x, causal=True), (x,)),
        "silu": (m.silu, (x,)),
        "bias_gelu": (m.bias_gelu, (x, w)),
        "geglu": (m.geglu, (x, x.flip(0))),
        "kl_div": (lambda a, b: m.kl_div(a, b, "batchmean"), (p.log(), p.flip(0))),
        "jsd": (lambda a, b: m.jsd(a, b), (p.log(), p.flip(0).log())),
        "gather": (lambda x, i: m.gather(x, 0, i), (x, index)),
        "index_select": (lambda x, i: m.index_select(x, 1, i), (x, torch.tensor([3, 3, 1]))),
        "scatter_add": (lambda x, i, s: m.scatter_add(x, 0, i, s), (x, index, x[:3])),
        "embedding_bag": (m.embedding_bag, (torch.randint(8, (4, 5)), torch.randn(8, 6))),
        "rotary embedding": (m.apply_rotary_pos_emb, (q, k, cos, sin)),
        "attention": (lambda q, k, v: m.attention(q, k, v, causal=True), (q, k, k.flip(0))),
        "scaled_dot_product_attention": (m.scaled_dot_product_attention, (q, q.flip(0), q)),
        "fused_swiglu_mlp": (
            m.fused_swiglu_mlp,
            (x, torch.randn(20, 12), torch.randn(20, 12), torch.randn(12, 20)),
        ),
        "precise.sum": (lambda x: m.precise.sum(x, 1, level="exact"), (x,)),
        "precise.mean": (lambda x: m.precise.mean(x, level="exact"), (x,)),
        "precise.dot": (lambda x: m.precise.dot(x[0, 0], x[1, 1]), (x,)),
        "precise.norm": (lambda x: m.precise.norm(x), (x,)),
        "precise.cumsum": (lambda x: m.precise.cumsum(x, 2), (x,)),
        "precise.matmul": (m.precise.matmul, (A, B)),
        "causal_conv1d": (m.causal_conv1d, (x, torch.randn(12, 4))),
        "mlstm_chunkwise": (
            m.mlstm_chunkwise,
            (q, q.flip(1), q.flip(2), torch.randn(2, 4, 8), torch.randn(2, 4, 8)),
        ),
    }


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _computed(function: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    with ExitStack() as stack:
        # what torch computes for small tensors may have other signs
        for route in Route.all.values():
            stack.enter_context(route.forced(to_torch=False))
        return _computed_by_ours(function, args)


def _computed_by_ours(function: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    leaves = [a.requires_grad_() for a in args if a.is_floating_point()]
    outputs = function(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ends = [o for o in outputs if o.requires_grad]
    grads = torch.autograd.grad([o.square().sum() for o in ends], leaves) if ends else ()
    return [_full(t) for t in (*outputs, *grads)]


@check
def public_functions() -> int:
    """Replicated, and the first tensor along its first dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong = []
    cases = _cases()
    for name, (function, args) in cases.items():
        truth = _computed(function, [map_tensors(Tensor.clone, a) for a in args])
        for first in (Replicate(), Shard(0)):
            places = [first, *[Replicate()] * (len(args) - 1)]
            given = [
                distribute_tensor(a.clone(), mesh, [p]) for a, p in zip(args, places, strict=True)
            ]
            try:
                found = _computed(function, given)
            except Exception as e:
                wrong.append(f"{name}, {first}: {type(e).__name__}: {e}")
                continue
            for a, b in zip(found, truth, strict=True):
                off = error(a, b) if b.is_floating_point() else float(not torch.equal(a, b))
                if off > 2e-5:
                    wrong.append(f"{name}, {first}: off by {off:.2g}")
    assert not wrong, "\n".join(wrong)
    return 2 * len(cases)
