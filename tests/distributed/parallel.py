# SPDX-License-Identifier: MIT
"""Tensor and sequence parallel, and two-dimensional meshes, with accelerate in either order."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import metalcore
from metalcore._accuracy import error
from tests.distributed import llama
from tests.distributed.launch import check


def parallelized(net: nn.Module, mesh: DeviceMesh, head: bool) -> None:
    for layer in net.model.layers:
        plan: dict[str, Any] = {
            f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")
        }
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    if head:
        style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(net, mesh, {"lm_head": style})


def _trained(order: str, head: bool, clip: float | None = None, by_torch: bool = False) -> float:
    """All processes see the whole batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = llama.model()
    if order == "accelerate first":
        metalcore.accelerate(net)
    parallelized(net, mesh, head)
    if order == "accelerate last":
        metalcore.accelerate(net)
    optimizer = metalcore.MetalAdamW(net.parameters(), **llama.ADAMW, clip_norm=clip)

    def loss(net: nn.Module, ids: Tensor) -> Tensor:
        parts = ids.chunk(dist.get_world_size())
        return torch.stack([_plain(llama.loss_of(net, part)) for part in parts]).mean()

    def _plain(x: Any) -> Tensor:
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    with loss_parallel() if by_torch else contextlib.nullcontext(), metalcore.trace() as t:
        llama.train(net, optimizer, llama.batch(), loss=loss)
    assert {"adamw_step", "rms_norm"} <= set(t.paths), t.paths
    if head:
        # the kernel of the loss, on the classes that are here
        classes = {r.shape[-1] for r in t.records if r.op == "cross_entropy_"}
        assert classes == {256 // dist.get_world_size()}, classes
    return llama.off(net.named_parameters(), clip=clip)


@check
def tensor_parallel_accelerate_first() -> float:
    return _trained("accelerate first", head=False)


@check
def tensor_parallel_accelerate_last() -> float:
    return _trained("accelerate last", head=False)


@check
def tensor_parallel_clip_norm() -> float:
    return _trained("accelerate first", head=False, clip=0.1)


@check
def vocabulary_parallel_accelerate_first() -> float:
    return _trained("accelerate first", head=True)


@check
def vocabulary_parallel_accelerate_last() -> float:
    return _trained("accelerate last", head=True)


@check
def vocabulary_parallel_in_loss_parallel() -> float:
    return _trained("accelerate first", head=True, by_torch=True)


@check
def sequence_parallel_norms() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, 9, 64)
    worst = 0.0
    for norm in (
        metalcore.MetalRMSNorm(64),
        metalcore.MetalLayerNorm(64),
        llama.model().model.norm,
    ):
        if "Llama" in type(norm).__name__:
            metalcore.accelerate(norm)
        with torch.no_grad():
            norm.weight.copy_(torch.rand(64) + 0.5)
        given = x.clone().requires_grad_()
        true = norm(given)
        true_grads = torch.autograd.grad(true.sin().sum(), [given, *norm.parameters()])
        parallelize_module(norm, mesh, SequenceParallel(use_local_output=False))
        shards = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        with metalcore.trace() as t:
            found = norm(shards)
            grads = torch.autograd.grad(found.sin().sum(), [shards, *norm.parameters()])
        assert found.placements == (Shard(1),)
        # where torch is ahead for so few values, a trace tells
        assert set(t.paths) & {"rms_norm", "layer_norm"}, t.paths
        pairs = zip((true, *true_grads), (found, *grads), strict=True)
        worst = max(worst, *(error(llama.full(b), a.detach()) for a, b in pairs))
    return worst


@check
def sharded_heads() -> float:
    """Rotary embedding and attention, each process with its heads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = torch.randn(2, 8, 33, 16), torch.randn(2, 4, 33, 16), torch.randn(2, 4, 33, 16)
    cos, sin = metalcore.RotaryEmbedding(16)(seq_len=33)

    def attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
        return metalcore.attention(q, k, v, causal=True)

    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    true = attend(*whole, cos, sin)
    true_grads = torch.autograd.grad(true.square().sum(), whole)
    parts = [distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in (q, k, v)]
    tables = [distribute_tensor(t, mesh, [Replicate()]) for t in (cos, sin)]
    found = attend(*parts, *tables)
    assert found.placements == (Shard(1),)
    grads = torch.autograd.grad(found.square().sum(), parts)
    pairs = zip((true, *true_grads), (found, *grads), strict=True)
    return max(error(llama.full(b), a.detach()) for a, b in pairs)


@check
def small_and_large() -> float:
    """Public functions work on DTensors of any size: also where small ones are left to torch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    worst = 0.0
    for n in (8, 512):
        x = torch.randn(n, n)
        spd = x @ x.T / n + torch.eye(n)
        target = torch.arange(n)
        calls = {
            "silu": lambda t: metalcore.silu(t),
            "softmax": lambda t: metalcore.softmax(t),
            "swiglu": lambda t: metalcore.swiglu(t, t),
            "layer_norm": lambda t: metalcore.layer_norm(t, (t.shape[-1],)),
            "cross_entropy": lambda t, target=target: metalcore.cross_entropy(t, target),
            "cholesky": lambda t: metalcore.cholesky(t),
        }
        for name, function in calls.items():
            whole = (spd if name == "cholesky" else x).clone().requires_grad_()
            true = function(whole)
            (true_grad,) = torch.autograd.grad(true.sin().sum(), [whole])
            for place in (Replicate(), Shard(0), Shard(1)):
                part = distribute_tensor(whole.detach(), mesh, [place]).requires_grad_()
                found = function(part)
                (grad,) = torch.autograd.grad(found.sin().sum(), [part])
                for a, b in ((true, found), (true_grad, grad)):
                    worst = max(worst, error(llama.full(b), a.detach()))
    return worst


@check
def two_dimensional_mesh() -> float:
    """FSDP2 over tensor parallel, with clip_norm: four processes."""
    if dist.get_world_size() != 4:
        return 0.0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = llama.model()
    metalcore.accelerate(net)
    parallelized(net, mesh["tensor"], head=True)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    optimizer = metalcore.MetalAdamW(net.parameters(), **llama.ADAMW, clip_norm=0.1)
    # the truth is the mean over four parts; a process of `data` has two of them
    parts = llama.batch().chunk(4)
    own = parts[2 * mesh.get_local_rank("data") :][:2]

    def loss(net: nn.Module, ids: Tensor) -> Tensor:
        losses = [llama.loss_of(net, part) for part in own]
        return sum(x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses) / 2

    llama.train(net, optimizer, llama.batch(), loss=loss)
    return llama.off(net.named_parameters(), clip=0.1)
