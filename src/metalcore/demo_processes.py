# SPDX-License-Identifier: MIT
"""`metalcore demo --processes 2`: the demo's model trained by several processes of this machine.

They talk by gloo over the loopback interface. One process trains the same model on the same data,
and the losses must be the same.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from metalcore._check import expect, expect_one_of
from metalcore._demo_models import KINDS
from metalcore._shards import gathered, part
from metalcore._text import batches
from metalcore.optim import MetalAdamW
from metalcore.patch.accelerate import accelerate

WAYS = ("ddp", "fsdp2")
_BATCH, _TIME = 4, 64
"""Sequences of each process, and their tokens."""
_LLAMA = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
_VOCABULARY = 2048
_CLIP = 1.0
# of losses, relative; sums over processes are taken in another order
_ALLOWED = 1e-4


@dataclass
class Trained:
    """What a process measured, or the one that trained alone."""

    losses: list[float]
    sent_bytes_per_step: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0


def run(processes: int, how: str = "fsdp2", steps: int = 10) -> int:
    """Train with so many processes and with one, and compare.

    Args:
        processes: how many.
        how: "ddp", where each has the whole model, or "fsdp2", where each has a part.
        steps: of training.

    Returns:
        0; 1 if the losses are not the same within the tolerance.
    """
    expect(processes >= 2, "demo", f"processes must be at least 2, got {processes}")
    expect(steps >= 1, "demo", f"steps must be at least 1, got {steps}")
    expect_one_of("demo", "how", how, WAYS)
    alone = _train(1, 0, "alone", steps, processes)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (processes, how, steps, folder), nprocs=processes)
        found = [Trained(**torch.load(Path(folder, f"{rank}.pt"))) for rank in range(processes)]
    pairs = zip(alone.losses, found[0].losses, strict=True)
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    _print(alone, found, how, difference)
    return int(not difference <= _ALLOWED)


def _work(rank: int, processes: int, how: str, steps: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=processes)
    try:
        torch.save(vars(_train(processes, rank, how, steps, processes)), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def _train(processes: int, rank: int, how: str, steps: int, parts: int) -> Trained:
    data, _ = batches(steps, _BATCH * parts, _TIME, "cpu")
    net = KINDS["llama"].build(_VOCABULARY, _LLAMA)
    accelerate(net)
    net, count = _wrapped(net, how, processes)
    optimizer = MetalAdamW(net.parameters(), lr=1e-3, clip_norm=_CLIP)
    losses = []
    with count() as sent:
        for tokens in data:
            own = tokens.chunk(processes)[rank]
            loss: Tensor = net(input_ids=own, labels=own).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(_mean(loss.detach(), processes))
    params = list(net.parameters())
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    grads = [p.grad for p in params if p.grad is not None]
    sizes = (sum(part(t).nbytes for t in some) for some in (params, grads, states))
    return Trained(losses, sent[0] / steps, *sizes)


def _mean(loss: Tensor, processes: int) -> float:
    loss = gathered(loss).clone()
    if processes > 1:
        dist.all_reduce(loss)
    return loss.item() / processes


Counter = Callable[[], Any]


def _wrapped(net: nn.Module, how: str, processes: int) -> tuple[nn.Module, Counter]:
    """The model as `how` says, and what counts the bytes that a process sends."""
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(net)
        return model, lambda: _counting_buckets(model, processes)
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (processes,))
        layers: Any = net.get_submodule("model.layers")
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net, lambda: _counting_collectives(processes)
    return net, _counting_nothing


@contextmanager
def _counting_nothing() -> Iterator[list[float]]:
    yield [0.0]


@contextmanager
def _counting_buckets(model: Any, processes: int) -> Iterator[list[float]]:
    """Of each bucket of gradients, a ring sends 2 (P - 1) / P of its bytes from each process."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    sent = [0.0]
    kept = default_hooks.allreduce_hook

    def hook(state: Any, bucket: Any) -> Any:
        sent[0] += bucket.buffer().nbytes * 2 * (processes - 1) / processes
        return kept(state, bucket)

    # torch reads the types of a hook
    hook.__annotations__ = kept.__annotations__
    model.register_comm_hook(None, hook)
    yield sent


@contextmanager
def _counting_collectives(processes: int) -> Iterator[list[float]]:
    """A ring sends (P - 1) / P of what is gathered, and of what is reduced, from each process."""
    sent = [0.0]
    share = (processes - 1) / processes

    def counted(name: str, of: int) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **named: Any) -> Any:
            whole = [*args, *named.values()][of]
            sent[0] += whole.nbytes * share
            return original(*args, **named)

        return mock.patch.object(dist, name, call)

    with ExitStack() as stack:
        # what is gathered is the first argument, what is reduced the second; by torch's version
        names = {"all_gather_single": 0, "all_gather_into_tensor": 0}
        names |= {"reduce_scatter_single": 1, "reduce_scatter_tensor": 1}
        for name, of in names.items():
            if hasattr(dist, name):
                stack.enter_context(counted(name, of))
        yield sent


def _print(alone: Trained, found: list[Trained], how: str, difference: float) -> None:
    console = Console()
    table = Table("", "one process", *(f"process {rank}" for rank in range(len(found))))
    rows: dict[str, Callable[[Trained], str]] = {
        "last loss": lambda t: f"{t.losses[-1]:.6f}",
        "sent per step": lambda t: f"{t.sent_bytes_per_step / 1e6:.2f} MB",
        "parameters": lambda t: f"{t.parameter_bytes / 1e6:.2f} MB",
        "gradients": lambda t: f"{t.gradient_bytes / 1e6:.2f} MB",
        "optimizer": lambda t: f"{t.state_bytes / 1e6:.2f} MB",
    }
    for name, shown in rows.items():
        table.add_row(name, *(shown(t) for t in (alone, *found)))
    console.print(table)
    steps, is_right = len(alone.losses), difference <= _ALLOWED
    told = "the same" if is_right else "not the same"
    console.print(
        f"{how} with {len(found)} processes: losses of {steps} steps are {told} as of one process, "
        f"within {difference:.1e}, with gradients clipped to a norm of {_CLIP} over all of them",
        highlight=False,
    )
