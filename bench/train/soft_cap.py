# SPDX-License-Identifier: MIT
"""Soft cap, [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ._elementwise import elementwise


def _run(x: Tensor) -> Tensor:
    return metalcore.soft_cap(x, 30.0)


def _torch(x: Tensor) -> Tensor:
    return 30.0 * torch.tanh(x / 30.0)


BENCHES = elementwise("train/soft_cap", _run, _torch)
