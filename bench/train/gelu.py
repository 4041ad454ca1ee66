# SPDX-License-Identifier: MIT
"""GELU, exact and by tanh, [rows, n]."""

import torch.nn.functional as F

import metalcore

from ._elementwise import elementwise

BENCHES = (
    *elementwise("train/gelu", metalcore.gelu, F.gelu),
    *elementwise(
        "train/gelu",
        lambda x: metalcore.gelu(x, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        kind="tanh",
    ),
)
