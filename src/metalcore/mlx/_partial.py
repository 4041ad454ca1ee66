# SPDX-License-Identifier: MIT
"""Launches that write a part of what they are given, and leave the rest as it was.

An output of MLX is a new array. These are launched twice, with zeros and with ones behind their
pointers: what a kernel writes has the same bits in both, and elsewhere the old value stands. They
are kernels of a few threadgroups, which run side by side. A kernel that is missing here shows as
NaN in `tests/mlx/test_functions.py`, where what nobody wrote is NaN.
"""

import mlx.core as mx

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

_KEEPS: dict[str, tuple[str, ...]] = {
    "cholesky_panel": ("L",),
    "cholesky_threadgroup": ("L",),
    "decode_rope": ("keys", "values"),
    "eigh_rotate_columns": ("next", "next_V"),
    "eigh_rotate_rows": ("next",),
    "lu_columns": ("LU",),
    "lu_panel": ("pivots", "rows"),
    "mlstm_gradient": ("products",),
    "orthogonalize_factor": ("L_next", "low_next", "zeros"),
    "qr_panel": ("W",),
    "trsm_columns": ("X",),
    "trsm_rows": ("X",),
}


def keeps(function: str, parameter: str) -> bool:
    """Whether what `function` does not write of `parameter` must stay."""
    return parameter in _KEEPS.get(function, ())


def together(of_zeros: mx.array, of_ones: mx.array, before: mx.array) -> mx.array:
    """What a kernel wrote, and what stood `before` where it wrote nothing."""
    bits = _BITS[of_zeros.dtype.size]
    return mx.where(of_zeros.view(bits) == of_ones.view(bits), of_zeros, before)
