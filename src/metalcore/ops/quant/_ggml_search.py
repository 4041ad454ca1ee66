# SPDX-License-Identifier: MIT
"""How ggml makes the blocks of 256 values, q4_K, q5_K and q6_K: scales by search, in plain torch.

float32, one rounding per step, sums in the order of the values.
"""

import torch
from torch import Tensor

from metalcore.ops.quant._ggml import Format
from metalcore.ops.quant._ggml_rules import half_bytes, in_order, largest, ratio

_TINY = 1e-15


def large_blocks(x: Tensor, f: Format) -> Tensor:
    """x [blocks, 256], float32, as bytes [blocks, f.bytes]."""
    if f.name == "q6_K":
        return _q6_k(x)
    bits = 4 if f.name == "q4_K" else 5
    groups = x.view(-1, 8, 32)
    first, scale, least = _fit_scale_and_min(groups, (1 << bits) - 1, bits)
    most_scale, most_least = (t.amax(-1, keepdim=True).clamp(min=0) + 0.0 for t in (scale, least))
    sixes = [
        torch.where(most > 0, ratio(63, most) * t, 0.0).round().clamp(max=63).to(torch.uint8)
        for t, most in ((scale, most_scale), (least, most_least))
    ]
    d, dmin = half_bytes(most_scale[:, 0] / 63), half_bytes(most_least[:, 0] / 63)
    step = d.view(torch.float16).float() * sixes[0]
    offset = dmin.view(torch.float16).float() * sixes[1]
    q = ((groups + offset[..., None]) / step[..., None]).round().clamp(0, (1 << bits) - 1)
    q = torch.where(step[..., None] != 0, q, first).to(torch.uint8)
    low = (q & 15).view(-1, 4, 2, 32)
    packed = [d, dmin, _six_bits(*sixes), (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)]
    if bits == 5:
        place = torch.arange(8, device=x.device).view(8, 1)
        packed.insert(3, ((q >> 4).int() << place).sum(1).to(torch.uint8))
    return torch.cat(packed, -1)


def _six_bits(scale: Tensor, least: Tensor) -> Tensor:
    """Eight numbers of 6 bits and eight more in 12 bytes."""
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = least[:, :4] | least[:, 4:] >> 4 << 6
    return torch.cat([first, second, scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4], -1)


def _fit_scale_and_min(x: Tensor, most: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quants, scale and -min of each 32 values [..., 32] with x about scale * q + min."""
    # by way of float64: the root of float32 is not always the nearest
    root = torch.sqrt((in_order(x * x) / 32).double()).float()
    weight = root[..., None] + x.abs()
    sum_w, sum_x = (in_order(t)[..., None] for t in (weight, weight * x))
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    is_flat = high == low

    def quants(factor: Tensor, least: Tensor) -> Tensor:
        return (factor * (x - least)).round().clamp(0, most)

    def off(scale: Tensor, least: Tensor, q: Tensor) -> Tensor:
        diff = scale * q + least - x
        return in_order(weight * (diff * diff))[..., None]

    factor = ratio(most, high - low)
    q, scale, least = quants(factor, low), 1 / factor, low
    best = off(scale, least, q)
    from_step, steps = (-1.0, 20) if bits == 4 else (-0.5, 15)
    for step in range(steps + 1):
        # in float32, where the sum of the three is rounded twice; what was found moves the least
        start = torch.tensor(from_step) + torch.tensor(0.1) * step + most
        tried = quants(start.to(x.device) / (high - least), least)
        wl = weight * tried
        sum_l, sum_l2, sum_xl = (in_order(t)[..., None] for t in (wl, wl * tried, wl * x))
        D = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / D
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / D
        new_scale = torch.where(new_least > 0, sum_xl / sum_l2, new_scale)
        new_least = new_least.clamp(max=0)
        error = off(new_scale, new_least, tried)
        better = (D > 0) & (error < best)
        q, best = torch.where(better, tried, q), torch.where(better, error, best)
        scale = torch.where(better, new_scale, scale)
        least = torch.where(better, new_least, least)
    q = q.masked_fill(is_flat, 0)
    scale, least = scale.masked_fill(is_flat, 0), torch.where(is_flat, low, least)
    return q, scale[..., 0], -least[..., 0]


def _fit_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quants from 0 to 63 and the scale of each 16 values [..., 16] with x about scale * (q - 32);
    weights are x^2."""
    peak, weight = largest(x)[..., None], x * x
    is_zero = peak.abs() < _TINY

    def fit(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = (factor * x).round().clamp(-32, 31)
        return q, in_order(weight * x * q)[..., None], in_order(weight * q * q)[..., None]

    q, lx, ll = fit(ratio(-32, peak))
    scale = torch.where(ll != 0, lx / ll, 0.0)
    best = scale * lx
    for step in range(-9, 10):
        if step:
            factor = -(32 + torch.tensor(0.1) * step).to(x.device) / peak
            tried, lx, ll = fit(factor)
            better = (ll > 0) & (lx * lx > best * ll)
            q = torch.where(better, tried, q)
            scale = torch.where(better, lx / ll, scale)
            best = torch.where(better, scale * lx, best)
    # those of zeros are 0 before 32 is added
    q = (q + 32).masked_fill(is_zero, 0)
    return q, scale.masked_fill(is_zero, 0)[..., 0]


def _q6_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    first, scale = _fit_scale(groups)
    top = largest(scale)[:, None]
    is_zero = top.abs() < _TINY
    factor = ratio(-128, top)
    d = half_bytes((1 / factor)[:, 0].masked_fill(is_zero[:, 0], 0))
    scales = (factor * scale).round().clamp(max=127).masked_fill(is_zero, 0).to(torch.int8)
    step = (d.view(torch.float16).float() * scales)[..., None]
    q = (groups / step).round().clamp(-32, 31) + 32
    q = torch.where(step != 0, q, first).masked_fill(is_zero[..., None], 0)
    q = q.to(torch.uint8).view(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    four = torch.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    two = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat([four.flatten(1), two.flatten(1), scales.view(torch.uint8), d], -1)
