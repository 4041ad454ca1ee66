# SPDX-License-Identifier: MIT
"""Norms of heads, in both conventions of xLSTM."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance

OP = "multi_head_norm"


def _normed(x: Tensor, kind: str, eps: float) -> Tensor:
    size = x.shape[-1:]
    return F.rms_norm(x, size, eps=eps) if kind == "rms" else F.layer_norm(x, size, eps=eps)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_heads_side_by_side(kind: str, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, 5, 3, 24).to(dtype), torch.randn(72), torch.randn(72)
    y = metalcore.multi_head_norm(x, weight, bias, kind=kind)
    truth = _normed(x.double(), kind, 1e-6).flatten(2) * weight.double() + bias.double()
    assert (y.shape, y.dtype) == ((2, 5, 72), dtype)
    # rounded before it is scaled, and after each step
    assert error(y, truth) <= 2 * tolerance(OP, dtype, 24)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_heads_first_equals_group_norm(kind: str) -> None:
    x, weight = torch.randn(2, 3, 5, 24), torch.randn(72)
    y = metalcore.multi_head_norm(x, weight, kind=kind, eps=1e-5, weight_offset=1, heads_first=True)
    if kind == "layer":
        rows = x.double().transpose(1, 2).reshape(10, 72)
        truth = F.group_norm(rows, 3, 1 + weight.double(), eps=1e-5)
        truth = truth.view(2, 5, 3, 24).transpose(1, 2)
    else:
        truth = _normed(x.double(), kind, 1e-5) * (1 + weight.double().view(3, 1, 24))
    assert error(y, truth) <= tolerance(OP, torch.float32, 24)


def test_gradients() -> None:
    x, weight, bias = (torch.randn(s).double().requires_grad_() for s in ((1, 2, 2, 4), 8, 8))
    for kind in ("layer", "rms"):
        assert torch.autograd.gradcheck(
            lambda *a, kind=kind: metalcore.multi_head_norm(*a, kind=kind), (x, weight, bias)
        )


def test_wrong_arguments() -> None:
    x = torch.randn(2, 5, 3, 4)
    with pytest.raises(ValueError, match=r"multi_head_norm: weight must have the shape \[12\]"):
        metalcore.multi_head_norm(x, torch.ones(4))
    with pytest.raises(ValueError, match="kind must be one of"):
        metalcore.multi_head_norm(x, kind="group")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must be"):
        metalcore.multi_head_norm(x[0])
