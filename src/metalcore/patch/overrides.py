# SPDX-License-Identifier: MIT
"""torch's own functions, computed by metalcore where that is faster.

Functions are replaced by name (`_replace.py`), at the innermost place where torch looks them up, so
modules, optimizers and imported names that exist already are reached too. A call that is not taken
costs 0.3 us. The other ways cost more: a kernel in the dispatcher (`torch.library`) 2 us for each
such call, in all threads, and a `TorchFunctionMode` 4 us for every function of torch.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from metalcore._check import expect
from metalcore.patch import (
    _attention,
    _functions,
    _linalg,
    _replace,
    _singular_values,
    _systems,
    _training,
)

__all__ = [
    "disable_pytorch_overrides",
    "enable_pytorch_overrides",
    "get_active_overrides",
    "overrides",
]

# These fill _replace.PLACES.
_FILLED_BY = (_attention, _functions, _linalg, _singular_values, _systems, _training)
_HOLDER, _SDPA = "metalcore overrides", "enable_slow_metal_sdpa"
GROUPS = (
    *("activations", "embedding_bag", "normalization", "softmax", "losses"),
    *("linalg", "optimizers", "attention"),
)


def enable_pytorch_overrides(
    activations: bool = True,
    embedding_bag: bool = True,
    normalization: bool = True,
    softmax: bool = True,
    linalg: bool = True,
    optimizers: bool = True,
    all: bool = False,
    verbose: bool = False,
    *,
    losses: bool = True,
    attention: bool = True,
) -> None:
    """Let torch's functions use metalcore from now on, in all threads.

    Results, gradients and errors stay torch's but for rounding. A shape for which torch's kernel is
    faster goes to that kernel, and so does every unusual call. Modules and optimizers that exist
    already are included.

    Args:
        activations: SiLU and GELU.
        embedding_bag: `F.embedding_bag`.
        normalization: RMSNorm and LayerNorm.
        softmax: softmax over the last dimension.
        linalg: decompositions and solvers of `torch.linalg`, for batches of small matrices.
        optimizers: the step of `torch.optim.AdamW`, and of `Adam` without weight decay.
        losses: `F.cross_entropy` of class indices.
        attention: `F.scaled_dot_product_attention`.
        all: all of these, whatever else is given.
        verbose: print what is replaced.

    Example:
        >>> metalcore.enable_pytorch_overrides()
    """
    chosen = (activations, embedding_bag, normalization, softmax, losses, linalg, optimizers)
    groups = _groups((*chosen, attention), all)
    _replace.hold(_HOLDER, groups)
    if verbose:
        describe(groups)


def disable_pytorch_overrides(*groups: str) -> None:
    """Put torch's own functions back, the very same objects.

    Args:
        groups: as `enable_pytorch_overrides` calls them; none for everything.

    Example:
        >>> metalcore.disable_pytorch_overrides("softmax", "linalg")
    """
    unknown = [g for g in groups if g not in GROUPS]
    expect(
        not unknown,
        "disable_pytorch_overrides",
        f"takes {', '.join(GROUPS)}, got {', '.join(map(repr, unknown))}",
    )
    _replace.release(_HOLDER, groups or GROUPS)


def get_active_overrides() -> dict[str, list[str]]:
    """The groups that the caller sees replaced, with the names that torch looks up for each.

    Example:
        >>> metalcore.enable_pytorch_overrides()
        >>> metalcore.get_active_overrides()["softmax"]
        ['torch.softmax', 'torch.Tensor.softmax', 'torch.special.softmax']
    """
    active = _replace.held_everywhere(_HOLDER) | _replace.held_by_blocks()
    return {g: [str(p) for p in _replace.PLACES[g]] for g in GROUPS if g in active}


@contextmanager
def overrides(
    activations: bool = True,
    embedding_bag: bool = True,
    normalization: bool = True,
    softmax: bool = True,
    linalg: bool = True,
    optimizers: bool = True,
    all: bool = False,
    verbose: bool = False,
    *,
    losses: bool = True,
    attention: bool = True,
) -> Iterator[None]:
    """`enable_pytorch_overrides` for a block, and for the thread (and asyncio task) that runs it
    alone. Blocks may be nested; each adds its groups.

    Args:
        activations, embedding_bag, normalization, softmax, linalg, optimizers, losses, attention:
            as for `enable_pytorch_overrides`.
        all, verbose: likewise.

    Example:
        >>> with metalcore.overrides(linalg=False):
        ...     loss = model(x).sum()
        ...     loss.backward()
    """
    chosen = (activations, embedding_bag, normalization, softmax, losses, linalg, optimizers)
    groups = _groups((*chosen, attention), all)
    if verbose:
        describe(groups)
    with _replace.block(groups):
        yield


def _groups(chosen: Sequence[bool], all: bool) -> list[str]:
    return [g for g, wanted in zip(GROUPS, chosen, strict=True) if wanted or all]


def describe(groups: Collection[str]) -> None:
    """Print which names are replaced."""
    for group in groups:
        names = ", ".join(map(str, _replace.PLACES[group]))
        Console().print(f"metalcore replaces {group}: {names}", highlight=False, soft_wrap=True)


def enable_slow_metal_sdpa() -> None:
    """Let `F.scaled_dot_product_attention` use metalcore where it is faster, in all threads. The
    name is the original's, whose kernel was slow."""
    _replace.hold(_SDPA, ["attention"])


def disable_slow_metal_sdpa() -> None:
    """Take back what `enable_slow_metal_sdpa` did."""
    _replace.release(_SDPA, ["attention"])


def is_slow_metal_sdpa_enabled() -> bool:
    """Whether `enable_slow_metal_sdpa` is in force."""
    return bool(_replace.held_everywhere(_SDPA))
