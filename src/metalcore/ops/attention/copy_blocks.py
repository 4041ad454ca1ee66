# SPDX-License-Identifier: MIT
"""Pages of caches copied, within a cache or from one to another."""

from collections.abc import Sequence

from torch import Tensor

from metalcore._check import expect_tensors, refuse, shape
from metalcore.ops.attention._arguments import can_be_read, expect_integers


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy pages within each cache, as when two sequences part: all are read before any is written.

    Args:
        caches: keys, values and scales of all layers, [pages, ...] each. Written in place.
        pairs: int32 or int64 [n, 2]: from which page to which, each of the second at most once.

    Returns:
        Nothing.

    Example:
        >>> metalcore.copy_blocks([k_cache, v_cache], torch.tensor([[0, 7]]))
    """
    for cache in caches:
        _copy("copy_blocks", cache, cache, pairs)


def swap_blocks(source: Tensor, to: Tensor, pairs: Tensor) -> None:
    """Copy pages of one cache into another, which may be on another device.

    Args:
        source: [pages, ...].
        to: [other pages, ...], of the same dtype. Written in place.
        pairs: int32 or int64 [n, 2]: from which page of `source` to which of `to`, each of these at
            most once.

    Returns:
        Nothing.

    Example:
        >>> metalcore.swap_blocks(k_cache, k_cache_on_cpu, torch.tensor([[3, 0]]))
    """
    _copy("swap_blocks", source, to, pairs)


def _copy(op: str, source: Tensor, to: Tensor, pairs: Tensor) -> None:
    expect_tensors(op, source=source, to=to)
    expect_integers(op, pairs=pairs)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        refuse(op, f"pairs must be [n, 2], got {shape(pairs)}")
    if source.dim() == 0 or source.shape[1:] != to.shape[1:] or source.dtype != to.dtype:
        found = f"got {shape(source)} {source.dtype} and {shape(to)} {to.dtype}"
        refuse(op, f"pages must be of one shape and dtype; {found}")
    if can_be_read(pairs) and pairs.numel():
        for name, page, cache in (("first", pairs[:, 0], source), ("second", pairs[:, 1], to)):
            least, most = (int(n) for n in page.aminmax())
            if least < 0 or most >= cache.shape[0]:
                found = f"got {least} to {most}"
                refuse(op, f"the {name} of pairs must be one of {cache.shape[0]} pages; {found}")
    pages = source.index_select(0, pairs[:, 0].to(source.device))
    to.index_copy_(0, pairs[:, 1].to(to.device).long(), pages.to(to.device))
