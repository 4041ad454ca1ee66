# SPDX-License-Identifier: MIT
"""Optimizers as programs use them: checkpoints, and parameters that are parts of larger ones."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

import metalcore
from metalcore.ops.train._eight_bit import dequantize


def test_a_saved_run_in_8_bits_goes_on_bit_for_bit() -> None:
    grads = [torch.randn(300) * 10.0**-i for i in range(6)]

    def run(p: Tensor, optimizer: torch.optim.Optimizer, grads: list[Tensor]) -> None:
        for grad in grads:
            p.grad = grad.clone()
            optimizer.step()

    whole = torch.ones(300, requires_grad=True)
    run(whole, metalcore.MetalAdamW([whole], state_bits=8, amsgrad=True), grads)
    half = torch.ones(300, requires_grad=True)
    first = metalcore.MetalAdamW([half], state_bits=8, amsgrad=True)
    run(half, first, grads[:3])
    second = metalcore.MetalAdamW([half], state_bits=8, amsgrad=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(half, second, grads[3:])
    assert torch.equal(whole, half)
    # what was changed since counts, not its 8 bits
    saved = second.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(300)
    second.load_state_dict(saved)
    assert not dequantize(second.state[half]["exp_avg"], True, half).any()


def test_the_norm_of_a_part_is_refused(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="clip_norm needs all gradients"):
            ZeroRedundancyOptimizer([p], metalcore.MetalAdamW, clip_norm=1.0)
        ZeroRedundancyOptimizer([p], metalcore.MetalAdamW)
    finally:
        dist.destroy_process_group()
    for mark in ("_is_flat_param", "_fsdp_flattened"):
        part = torch.nn.Parameter(torch.ones(3))
        setattr(part, mark, True)
        with pytest.raises(ValueError, match="clip_norm needs all gradients"):
            metalcore.MetalAdamW([part], clip_norm=1.0)
        metalcore.MetalAdamW([part])
