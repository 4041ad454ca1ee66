# SPDX-License-Identifier: MIT
"""What this machine can do at best, measured in the run whose figures are compared with it.

- Bandwidth: copy one array into another, for working sets (both arrays) of 1 MiB to 1 GiB; every
  byte read and every byte written counts. Caches make small copies several times faster than
  large ones, so a case is compared with the copy of its own working set: the largest one measured
  that is not larger than the case, and never less than what a larger copy reaches. So the fraction
  can be too low between two sizes, but not too high.
- Arithmetic: torch's matmul of 2048 x 2048 or the products of our attention, whichever is faster
  here, because the library behind torch may not know this CPU. In bfloat16 for cases of it, else
  in float32.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

import metalcore

_MIB = 2**20
WORKING_SETS = tuple(2**i * _MIB for i in range(11))
# From here on glibc's memmove writes past the cache, which torch's copy does not: on a 2-core
# EPYC 41 against 26 GB/s at 1 GiB. Starting the threads costs 50 us, too much for less.
_STREAMING_BYTES = 64 * _MIB
_MATMUL_SIZE = 2048
_ATTENTION = (1, 8, 1024, 128)
PRODUCTS = (torch.float32, torch.bfloat16)
_SECONDS_PER_SIZE = 0.15


@dataclass(frozen=True)
class Limits:
    """`copy_gbps` is by working set in bytes, ascending."""

    copy_gbps: dict[int, float]
    product_gflops: dict[torch.dtype, float]

    def bandwidth(self, working_set: int) -> float:
        """GB/s of the copy that a case of `working_set` bytes is compared with."""
        fits = max((s for s in self.copy_gbps if s <= working_set), default=min(self.copy_gbps))
        return max(gbps for size, gbps in self.copy_gbps.items() if size >= fits)

    def fraction(
        self, seconds: float, dtype: torch.dtype, bytes_moved: int | None, flops: int | None
    ) -> float | None:
        """How much of the nearer of the two limits was reached; None without bytes and flops."""
        reached = []
        if bytes_moved is not None:
            reached.append(bytes_moved / seconds / 1e9 / self.bandwidth(bytes_moved))
        if flops is not None:
            limit = self.product_gflops.get(dtype, self.product_gflops[torch.float32])
            reached.append(flops / seconds / 1e9 / limit)
        return max(reached, default=None)

    @property
    def cached_gbps(self) -> float:
        return max(self.copy_gbps.values())

    @property
    def memory_gbps(self) -> float:
        return self.bandwidth(max(self.copy_gbps))


def measure(device: str, step: Callable[[], None] = lambda: None) -> Limits:
    """Measure all limits of `device`; `step` is called after each of them."""
    copies, products = {}, {}
    for size in WORKING_SETS:
        copies[size] = _copy_gbps(device, size)
        step()
    for dtype in PRODUCTS:
        products[dtype] = _product_gflops(device, dtype)
        step()
    return Limits(copies, products)


def _product_gflops(device: str, dtype: torch.dtype) -> float:
    a = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype, device=device)
    b, c = torch.randn_like(a), torch.empty_like(a)
    by_torch = 2 * _MATMUL_SIZE**3 / _fastest(lambda: torch.mm(a, b, out=c), device)
    x = torch.randn(_ATTENTION, dtype=dtype, device=device)
    ours = 4 * x.numel() * x.shape[2] / _fastest(lambda: metalcore.attention(x, x, x), device)
    return max(by_torch, ours) / 1e9


def _copy_gbps(device: str, working_set: int) -> float:
    source = torch.ones(working_set // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = _fastest(lambda: target.copy_(source), device)
    if device == "cpu" and working_set >= _STREAMING_BYTES:
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            split = _fastest(lambda: _memmove(target, source, pool, threads), device)
        seconds = min(seconds, split)
    return working_set / seconds / 1e9


def _memmove(target: Tensor, source: Tensor, pool: ThreadPoolExecutor, threads: int) -> None:
    cuts = [source.numel() * i // threads for i in range(threads + 1)]

    # ctypes lets go of the interpreter lock during the call.
    def part(i: int) -> None:
        to, from_ = target.data_ptr() + cuts[i], source.data_ptr() + cuts[i]
        ctypes.memmove(to, from_, cuts[i + 1] - cuts[i])

    list(pool.map(part, range(threads)))


def _fastest(call: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of the calls that fit the budget, at least five, after a warm-up."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS_PER_SIZE
    while len(seconds) < 5 or time.perf_counter() < end:
        start = synchronized(device)
        call()
        seconds.append(synchronized(device) - start)
    return min(seconds)


def synchronized(device: str) -> float:
    """The time, when everything sent to `device` is done."""
    if device == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
