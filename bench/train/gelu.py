# SPDX-License-Identifier: MIT
"""GELU, exact and by tanh, [rows, n]."""

from functools import partial

import torch.nn.functional as F

import metalcore

from ._elementwise import elementwise

_by_tanh = {"approximate": "tanh"}

BENCHES = (
    *elementwise("train/gelu", metalcore.gelu, F.gelu),
    *elementwise(
        "train/gelu",
        partial(metalcore.gelu, **_by_tanh),
        partial(F.gelu, **_by_tanh),
        kind="tanh",
    ),
)
