# SPDX-License-Identifier: MIT
"""A ring of one; tests/distributed has rings of more."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import metalcore
from metalcore._accuracy import error, tolerance


def test_a_ring_of_one_is_attention(tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    with pytest.raises(ValueError, match=r"ring_attention: torch\.distributed must be"):
        metalcore.ring_attention(q, k, v)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for causal in (False, True):
            found = metalcore.ring_attention(*leaves, causal=causal)
            true = metalcore.attention(*leaves, causal=causal)
            assert torch.equal(found, true)
            seed = torch.randn_like(true)
            pairs = zip(
                torch.autograd.grad(found, leaves, seed),
                torch.autograd.grad(true, leaves, seed),
                strict=True,
            )
            for a, b in pairs:
                assert error(a, b) <= tolerance("attention", torch.float32, 9)
        with pytest.raises(ValueError, match="ring_attention: q, k and v must be"):
            metalcore.ring_attention(q[0], k[0], v[0])
    finally:
        dist.destroy_process_group()
    assert "ring_attention" in metalcore.__all__
