# SPDX-License-Identifier: MIT
"""Training that is saved and goes on, also with another number of processes; and compiled."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import metalcore
from tests.distributed import llama
from tests.distributed.launch import ALLOWED, check
from tests.distributed.parallel import parallelized
from tests.distributed.training import fsdp2_model


def _shared_folder() -> str:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    return str(made[0])


def _model(how: str) -> nn.Module:
    if how == "fsdp2":
        return fsdp2_model()
    net = llama.model()
    metalcore.accelerate(net)
    if how == "tp":
        parallelized(net, init_device_mesh("cpu", (dist.get_world_size(),)), head=True)
    return DistributedDataParallel(net) if how == "ddp" else net


def _optimizer(net: nn.Module, bits: int) -> metalcore.MetalAdamW:
    return metalcore.MetalAdamW(net.parameters(), **llama.ADAMW, state_bits=bits)


def _steps(how: str, net: nn.Module, optimizer: Any, count: int) -> None:
    """A process of ddp and fsdp2 has its part of the batch, the others all of it."""
    parts = llama.batch().chunk(dist.get_world_size())
    if how in ("ddp", "fsdp2"):
        parts = parts[dist.get_rank() :][:1]

    def loss(net: nn.Module, _: Tensor) -> Tensor:
        found = [llama.loss_of(net, part) for part in parts]
        found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]
        return torch.stack(found).mean()

    llama.train(net, optimizer, llama.batch(), loss=loss, steps=count)


def _save(net: nn.Module, optimizer: Any, folder: str, alone: bool) -> None:
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder, no_dist=alone)


def _load(net: nn.Module, optimizer: Any, folder: str, alone: bool) -> None:
    model, state = get_state_dict(net, optimizer)
    saved = {"model": model, "optimizer": state}
    dcp.load(saved, checkpoint_id=folder, no_dist=alone)
    options = StateDictOptions(strict=True)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=options,
    )


def _resumed(first: str, second: str, bits: int = 32) -> float:
    """One step as `first`, two more as `second`, against three without a break."""
    folder = _shared_folder()
    net = _model(first)
    optimizer = _optimizer(net, bits)
    _steps(first, net, optimizer, 1)
    # what is the same in all processes is saved by one of them
    if first != "alone" or dist.get_rank() == 0:
        _save(net, optimizer, folder, alone=first == "alone")
    dist.barrier()
    again = _model(second)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    resumed = _optimizer(again, bits)
    _load(again, resumed, folder, alone=second == "alone")
    _steps(second, again, resumed, 2)
    off = llama.off(again.named_parameters(), remove="module.")
    # as far from float32 as moments in 8 bits are in one process
    return off if bits == 32 else off * ALLOWED / 1e-2


@check
def resume_ddp() -> float:
    return _resumed("ddp", "ddp")


@check
def resume_fsdp2() -> float:
    return _resumed("fsdp2", "fsdp2")


@check
def resume_tensor_parallel() -> float:
    return _resumed("tp", "tp") if dist.get_world_size() == 2 else 0.0


@check
def resume_fsdp2_eight_bits() -> float:
    return _resumed("fsdp2", "fsdp2", bits=8)


@check
def resume_fsdp2_in_one_process() -> float:
    return _resumed("fsdp2", "alone")


@check
def resume_one_process_as_fsdp2() -> float:
    return _resumed("alone", "fsdp2")


@check
def resume_eight_bits_of_one_process_as_fsdp2() -> float:
    return _resumed("alone", "fsdp2", bits=8)


@check
def resume_fsdp2_as_tensor_parallel() -> float:
    return _resumed("fsdp2", "tp") if dist.get_world_size() == 2 else 0.0


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = metalcore.MetalRMSNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(metalcore.swiglu(gate, up))


def _compiled(how: str) -> float:
    """Two blocks, three steps: against the same in one process, not compiled."""
    torch.manual_seed(0)
    one = nn.Sequential(_Block(), _Block())
    net = nn.Sequential(_Block(), _Block())
    net.load_state_dict(one.state_dict())
    x = torch.randn(8, 16)
    if how == "ddp":
        wrapped: nn.Module = DistributedDataParallel(net)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(net, mesh=mesh)
    compiled = torch.compile(wrapped, backend="aot_eager")
    own = x.chunk(dist.get_world_size())[dist.get_rank()]
    for model, given in ((compiled, own), (one, x)):
        optimizer = metalcore.MetalAdamW(model.parameters(), **llama.ADAMW, clip_norm=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
    pairs = zip(net.parameters(), one.parameters(), strict=True)
    return max(float((llama.full(a) - b).abs().max()) for a, b in pairs)


@check
def compiled_ddp() -> float:
    return _compiled("ddp")


@check
def compiled_fsdp2() -> float:
    return _compiled("fsdp2")
