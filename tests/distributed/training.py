# SPDX-License-Identifier: MIT
"""Training as people do it with more than one process: each gives plain torch's parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import metalcore
from tests.distributed import llama
from tests.distributed.launch import ALLOWED, check

CLIP = 0.1


def _ddp(tied: bool = False, **options: Any) -> nn.Module:
    net = llama.model(tied)
    metalcore.accelerate(net)
    return DistributedDataParallel(net, **options)


def _trained(net: nn.Module, tied: bool = False, clip: float | None = None, **how: Any) -> float:
    optimizer = metalcore.MetalAdamW(net.parameters(), **llama.ADAMW, clip_norm=clip, **how)
    llama.train(net, optimizer, llama.own_batch())
    return llama.off(net.named_parameters(), tied, clip, remove="module.")


@check
def ddp() -> float:
    return _trained(_ddp())


@check
def ddp_static_graph_and_bucket_views() -> float:
    return _trained(_ddp(static_graph=True, gradient_as_bucket_view=True))


@check
def ddp_find_unused() -> float:
    return _trained(_ddp(find_unused_parameters=True))


@check
def ddp_tied() -> float:
    return _trained(_ddp(tied=True), tied=True)


@check
def ddp_clip_norm() -> float:
    return _trained(_ddp(), clip=CLIP)


def fsdp2_model(order: str = "accelerate first", tied: bool = False, **options: Any) -> nn.Module:
    net = llama.model(tied)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if order == "accelerate first":
        metalcore.accelerate(net)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    if order != "accelerate first":
        metalcore.accelerate(net)
    return net


@check
def fsdp2() -> float:
    return _trained(fsdp2_model())


@check
def fsdp2_accelerate_last() -> float:
    return _trained(fsdp2_model("accelerate last"))


@check
def fsdp2_tied() -> float:
    return _trained(fsdp2_model(tied=True), tied=True)


@check
def fsdp2_clip_norm() -> float:
    return _trained(fsdp2_model(), clip=CLIP)


@check
def fsdp2_bfloat16() -> float:
    """Off by what bfloat16 is, as plain torch; scaled to the allowance of the others."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return _trained(fsdp2_model(mp_policy=policy)) * ALLOWED / 0.1


@check
def fsdp2_eight_bits() -> float:
    """Moments in 8 bits: as far from float32 as in one process."""
    one = llama.model()
    optimizer = metalcore.MetalAdamW(one.parameters(), **llama.ADAMW, state_bits=8)
    for _ in range(llama.STEPS):
        optimizer.zero_grad()
        parts = llama.batch().chunk(dist.get_world_size())
        torch.stack([llama.loss_of(one, ids) for ids in parts]).mean().backward()
        optimizer.step()
    allowed = llama.off(one.named_parameters())
    return _trained(fsdp2_model(), state_bits=8) * ALLOWED / (2 * allowed)


@check
def fsdp2_muon() -> float:
    """Matrices by Muon, whose truth is Muon in one process."""
    net, one = fsdp2_model(), llama.model()
    found = []
    for m, ids in ((net, llama.own_batch()), (one, None)):
        hidden = [p for p in m.model.layers.parameters() if p.ndim == 2]
        optimizer = metalcore.MetalMuon(hidden, lr=1e-2)
        for _ in range(llama.STEPS):
            m.zero_grad()
            parts = llama.batch().chunk(dist.get_world_size()) if ids is None else [ids]
            torch.stack([llama.loss_of(m, part) for part in parts]).mean().backward()
            optimizer.step()
        found.append([llama.full(p) for p in hidden])
    # products are in bfloat16 where that is fast
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) / 50


@check
def fsdp1() -> float:
    net = llama.model()
    metalcore.accelerate(net)
    sharded = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    return _fsdp1_off(sharded, None)


@check
def fsdp1_clip_norm() -> float:
    net = llama.model()
    sharded = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="process_group"):
        metalcore.MetalAdamW(sharded.parameters(), clip_norm=CLIP)
    return _fsdp1_off(sharded, CLIP, process_group=dist.group.WORLD)


def _fsdp1_off(sharded: nn.Module, clip: float | None, **how: Any) -> float:
    optimizer = metalcore.MetalAdamW(sharded.parameters(), **llama.ADAMW, clip_norm=clip, **how)
    llama.train(sharded, optimizer, llama.own_batch())
    with FullyShardedDataParallel.summon_full_params(sharded):
        named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in sharded.named_parameters()]
        return llama.off(named, clip=clip)


@check
def zero() -> float:
    net = _ddp()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), metalcore.MetalAdamW, **llama.ADAMW)
    llama.train(net, optimizer, llama.own_batch())
    optimizer.consolidate_state_dict(to=0)
    return llama.off(net.named_parameters(), remove="module.")


@check
def zero_clip_norm() -> float:
    net = _ddp()
    optimizer = _zero_with_group(net, dist.group.WORLD)
    llama.train(net, optimizer, llama.own_batch())
    return llama.off(net.named_parameters(), clip=CLIP, remove="module.")


def _zero_with_group(net: nn.Module, group: Any) -> ZeroRedundancyOptimizer:
    # its own argument has the same name
    def adamw(params: Any, **options: Any) -> metalcore.MetalAdamW:
        return metalcore.MetalAdamW(params, process_group=group, **options)

    return ZeroRedundancyOptimizer(net.parameters(), adamw, **llama.ADAMW, clip_norm=CLIP)


class _Stage(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *([nn.Linear(8, 16)] if first else [metalcore.MetalRMSNorm(16), nn.Linear(16, 8)])
        )

    def forward(self, x: Tensor) -> Tensor:
        return metalcore.silu(self.layers(x))


@check
def pipeline_clip_norm() -> float:
    """Without a group refused; with one the norm of all stages. Two processes only."""
    if dist.get_world_size() != 2:
        return 0.0
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    stages = [_Stage(True), _Stage(False)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    rank = dist.get_rank()
    mine = _Stage(rank == 0)
    mine.load_state_dict(stages[rank].state_dict())
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    refused = metalcore.MetalAdamW(mine.parameters(), clip_norm=CLIP)
    optimizer = metalcore.MetalAdamW(
        mine.parameters(), **llama.ADAMW, clip_norm=CLIP, process_group=dist.group.WORLD
    )
    one = nn.Sequential(*stages)
    true = torch.optim.AdamW(one.parameters(), **llama.ADAMW)
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": y}))
        optimizer.step()
        true.zero_grad()
        nn.functional.mse_loss(one(x), y).backward()
        nn.utils.clip_grad_norm_(one.parameters(), CLIP)
        true.step()
    with pytest.raises(ValueError, match="with pipelines a process has a part"):
        refused.step()
    pairs = zip(mine.parameters(), stages[rank].parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
