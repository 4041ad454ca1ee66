# SPDX-License-Identifier: MIT
"""SwiGLU, [rows, n]."""

import torch.nn.functional as F
from torch import Tensor

import metalcore

from ._elementwise import elementwise


def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


BENCHES = elementwise("train/swiglu", metalcore.swiglu, _torch, tensors=2)
