# SPDX-License-Identifier: MIT
"""Launches that write a part of what they are given, and leave the rest as it was.

An output of MLX is a new array. For these it is filled with a number that no kernel writes, and
where that is found afterwards, the old value stands. A kernel that is missing here shows as NaN in
`tests/mlx/test_functions.py`, where what nobody wrote is NaN.
"""

import torch

_FLOAT = -(2.0**101 + 2.0**80)
_INTEGER = -(2.0**30 + 2.0**10)

_KEEPS: dict[str, tuple[str, ...]] = {
    "cholesky_panel": ("L",),
    "cholesky_threadgroup": ("L",),
    "eigh_block": ("J",),
    "eigh_rotate_columns": ("next", "next_V"),
    "eigh_rotate_rows": ("next",),
    "lu_columns": ("LU",),
    "lu_panel": ("pivots", "rows"),
    "mlstm_gradient": ("products",),
    "orthogonalize_factor": ("L_next", "low_next", "zeros"),
    "orthogonalize_gram": ("parts",),
    "qr_panel": ("W",),
    "trsm_columns": ("X",),
    "trsm_rows": ("X",),
}


def keeps(function: str, parameter: str) -> bool:
    """Whether what `function` does not write of `parameter` must stay."""
    return parameter in _KEEPS.get(function, ())


def untouched(dtype: torch.dtype) -> float:
    """The number that says: nobody wrote here. Exact in the dtype."""
    return _FLOAT if dtype.is_floating_point else _INTEGER
