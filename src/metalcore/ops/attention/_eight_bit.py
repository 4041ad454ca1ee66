# SPDX-License-Identifier: MIT
"""Keys and values of 8 bits: integers, or codes of float8_e4m3fn, times a scale of their own.

A scale belongs to a token and a head: the largest of its numbers becomes the largest code, 127 or
448. A token that is not finite has a scale that is not finite, and reads as NaN.
"""

import torch
from torch import Tensor

from metalcore._check import dtype_name, expect_float, expect_same_device, refuse, shape

# codes of float8_e4m3fn are kept as uint8, which every device has
CODES = (torch.int8, torch.uint8)
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}


def as_codes(x: Tensor) -> Tensor:
    """float8_e4m3fn as the bytes that it is."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def expect_storage(op: str, of: Tensor, **stored: Tensor) -> None:
    """Each must be of the dtype of `of`, or all of 8 bits."""
    kinds = {x.dtype for x in stored.values()}
    if len(kinds) > 1 or not kinds <= {of.dtype, *CODES}:
        found = " and ".join(f"{name} {dtype_name(x.dtype)}" for name, x in stored.items())
        names = f"{dtype_name(of.dtype)}, int8, float8_e4m3fn or uint8"
        raise TypeError(f"{op}: the cache must be {names}; got {found}")


def as_scales(op: str, **given: tuple[Tensor | None, Tensor]) -> list[Tensor | None]:
    """Of each name its scale, which broadcasts to the codes without their last dimension."""
    return [_as_scale(op, name, scale, codes) for name, (scale, codes) in given.items()]


def _as_scale(op: str, name: str, scale: Tensor | None, codes: Tensor) -> Tensor | None:
    if scale is None:
        if codes.dtype == torch.int8:
            refuse(op, f"{name} must be given for int8, the number that each code is times")
        return None
    if codes.dtype not in CODES:
        refuse(op, f"{name} is for caches of 8 bits, got one of {dtype_name(codes.dtype)}")
    expect_float(op, **{name: scale})
    expect_same_device(op, cache=codes, **{name: scale})
    size = codes.shape[:-1]
    pairs = zip(reversed(scale.shape), reversed(size), strict=False)
    if scale.dim() > len(size) or any(a not in (1, b) for a, b in pairs):
        refuse(op, f"{name} must broadcast to {list(size)}, got {shape(scale)}")
    return scale.expand(size)


def decoded(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What the codes stand for; numbers as they are."""
    if x.dtype not in CODES:
        return x
    numbers = (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).to(dtype)
    return numbers if scale is None else numbers * scale.to(dtype)[..., None]


def encoded(x: Tensor, dtype: torch.dtype, has_scale: bool) -> tuple[Tensor, Tensor]:
    """Codes of x [..., D] and the scale [...] of each row; rounded to the nearest, ties to even."""
    x = x.float()
    most = LARGEST[dtype]
    # a row may be empty
    largest = torch.cat((x, x.new_zeros(*x.shape[:-1], 1)), -1).abs().amax(-1)
    scale = largest / most if has_scale else torch.ones_like(largest)
    is_plain = (scale > 0) & scale.isfinite()
    # a scale that is not finite tells it all
    quotient = torch.where(is_plain[..., None], x / scale[..., None], 0)
    if dtype == torch.int8:
        return quotient.round().clamp(-most, most).to(dtype), scale
    return quotient.clamp(-most, most).to(torch.float8_e4m3fn).view(dtype), scale
