# SPDX-License-Identifier: MIT
"""SiLU, [rows, n]."""

import torch.nn.functional as F

import metalcore

from ._elementwise import elementwise

BENCHES = elementwise("train/silu", metalcore.silu, F.silu)
