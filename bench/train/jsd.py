# SPDX-License-Identifier: MIT
"""Jensen-Shannon divergence of log probabilities [rows, n]."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ._divergence import divergence


def _torch(input: Tensor, target: Tensor) -> Tensor:
    m = torch.logaddexp(input, target) - math.log(2.0)
    parts = [F.kl_div(m, x, reduction="batchmean", log_target=True) for x in (input, target)]
    return 0.5 * (parts[0] + parts[1])


BENCHES = divergence("train/jsd", metalcore.jsd, _torch)
