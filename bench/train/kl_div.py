# SPDX-License-Identifier: MIT
"""Kullback-Leibler divergence of log probabilities [rows, n]."""

import torch.nn.functional as F
from torch import Tensor

import metalcore

from ._divergence import divergence


def _run(input: Tensor, target: Tensor) -> Tensor:
    return metalcore.kl_div(input, target, "batchmean", log_target=True)


def _torch(input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(input, target, reduction="batchmean", log_target=True)


BENCHES = divergence("train/kl_div", _run, _torch)
