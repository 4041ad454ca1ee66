# SPDX-License-Identifier: MIT
"""ComfyUI with metalcore: call `patch_comfy()` in a custom node or before the server starts."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from metalcore import _torch, _trace
from metalcore.patch import _replace
from metalcore.patch._replace import Function, compiling, may_replace, replaces
from metalcore.patch.overrides import describe

_HOLDER = "patch_comfy"
_GROUPS = ("activations", "linalg", "sdpa")


def patch_comfy(activations: bool = True, sdpa: bool = False, verbose: bool = True) -> None:
    """Let what ComfyUI calls of torch use metalcore, in all threads: `torch.linalg`'s solvers and
    decompositions, as samplers use them, and what is asked for here.

    Each keeps torch's contract, by the replacements of `enable_pytorch_overrides`, and leaves to
    torch what torch does faster.

    Args:
        activations: SiLU and GELU, with `inplace` and `approximate`.
        sdpa: `F.scaled_dot_product_attention`. It stays torch's kernel, which is the fastest there
            is for it here; a `metalcore.trace()` shows its calls with the path `torch`.
        verbose: print what is replaced.

    Example:
        >>> metalcore.patch_comfy()
        >>> metalcore.unpatch_comfy()
    """
    groups = [
        *(["activations"] if activations else []),
        "linalg",
        *(["sdpa"] if sdpa else []),
    ]
    _replace.hold(_HOLDER, groups)
    if verbose:
        describe(groups)


def unpatch_comfy() -> None:
    """Put back what `patch_comfy` replaced; what `enable_pytorch_overrides` holds stays."""
    _replace.release(_HOLDER, _GROUPS)


def is_patched() -> bool:
    """Whether `patch_comfy` is in force."""
    return bool(_replace.held_everywhere(_HOLDER))


@replaces("sdpa", (F, "scaled_dot_product_attention"))
def _(original: Function) -> Function:
    def scaled_dot_product_attention(*args: Any, **named: Any) -> Any:
        if not compiling() and _torch.has_dispatch_mode():
            query = args[0] if args else named.get("query")
            if isinstance(query, Tensor) and may_replace("sdpa", query):
                _trace.record_torch_path("scaled_dot_product_attention", query)
        return original(*args, **named)

    return scaled_dot_product_attention
