# SPDX-License-Identifier: MIT
"""Attention of sequences that are split over processes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.distributed.launch import check


@check
def ring_attention() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    worst = 0.0
    for causal in (False, True):
        q, k, v = (torch.randn(2, h, 24, 16) for h in (4, 2, 2))
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        true = metalcore.attention(*whole, causal=causal)
        seed = torch.randn_like(true)
        true_grads = torch.autograd.grad(true, whole, seed)
        parts = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]
        with metalcore.trace() as t:
            found = metalcore.ring_attention(*parts, causal=causal)
            grads = torch.autograd.grad(found, parts, distribute_tensor(seed, mesh, [Shard(2)]))
        assert set(t.paths) == {"attention", "attention_backward"}, t.paths
        assert {r.shape[2] for r in t.records} == {24 // dist.get_world_size()}
        for a, b in zip((found, *grads), (true, *true_grads), strict=True):
            worst = max(worst, error(a.full_tensor(), b))
    assert worst <= 4 * tolerance("attention", torch.float32, 24), worst
    return worst
