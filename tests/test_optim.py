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
from metalcore._accuracy import error, tolerance
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


def _truth_of_muon(p: Tensor, grads: list[Tensor], lr: float, decay: float, mu: float) -> Tensor:
    """Muon in float64, as its paper has it."""
    p, buffer = p.double(), torch.zeros_like(p, dtype=torch.float64)
    a, b, c = 3.4445, -4.7750, 2.0315
    for grad in grads:
        buffer = buffer.lerp(grad.double(), 1 - mu)
        X = grad.double().lerp(buffer, mu)
        X = X / X.norm()
        for _ in range(5):
            G = X @ X.mT
            X = a * X + (b * G + c * G @ G) @ X
        p = p * (1 - lr * decay) - lr * max(1, p.shape[0] / p.shape[1]) ** 0.5 * X
    return p


def test_muon_takes_the_steps_of_torchs() -> None:
    shapes = ((6, 20), (20, 6), (6, 20), (9, 9), (521, 530))
    starts = [torch.randn(s) for s in shapes]
    grads = [[torch.randn(s) for s in shapes] for _ in range(3)]
    found = {}
    for kind in (torch.optim.Muon, metalcore.MetalMuon):
        params = [torch.nn.Parameter(s.clone()) for s in starts]
        optimizer = kind(params, lr=0.1, weight_decay=0.2, momentum=0.9)
        for step in grads:
            for p, grad in zip(params, step, strict=True):
                p.grad = grad.clone()
            optimizer.step()
        found[kind] = params
        state = optimizer.state_dict()["state"][0]
        assert set(state) == {"momentum_buffer"}
    for i, start in enumerate(starts):
        truth = _truth_of_muon(start, [step[i] for step in grads], 0.1, 0.2, 0.9)
        # singular values around 1 stay uncertain by what bfloat16 does to a product, five times
        allowed = 5 * tolerance("orthogonalize", torch.bfloat16, max(start.shape))
        for params in found.values():
            assert error(params[i], truth) <= allowed


def test_muon_loads_checkpoints_of_torch_and_the_other_way_round() -> None:
    p = torch.nn.Parameter(torch.randn(4, 6))
    kinds = (torch.optim.Muon, metalcore.MetalMuon)
    for first, second in (kinds, kinds[::-1]):
        saved = first([p], lr=0.1)
        p.grad = torch.randn(4, 6)
        saved.step()
        again = second([p])
        again.load_state_dict(saved.state_dict())
        assert torch.equal(again.state[p]["momentum_buffer"], saved.state[p]["momentum_buffer"])
        assert again.param_groups[0]["lr"] == 0.1


def test_muon_takes_matrices_alone() -> None:
    with pytest.raises(ValueError, match="2D parameters"):
        metalcore.MetalMuon([torch.nn.Parameter(torch.ones(3))])
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="Muon: gradients must be dense"):
        metalcore.MetalMuon([p]).step()
