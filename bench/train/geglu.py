# SPDX-License-Identifier: MIT
"""GEGLU by tanh, [rows, n]."""

import torch.nn.functional as F
from torch import Tensor

import metalcore

from ._elementwise import elementwise


def _run(gate: Tensor, up: Tensor) -> Tensor:
    return metalcore.geglu(gate, up, "tanh")


def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


BENCHES = elementwise("train/geglu", _run, _torch, tensors=2)
