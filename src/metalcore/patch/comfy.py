# SPDX-License-Identifier: MIT
"""ComfyUI with metalcore: call `patch_comfy()` in a custom node or before the server starts."""

from metalcore.patch import _replace
from metalcore.patch.overrides import describe

_HOLDER = "patch_comfy"
_GROUPS = ("activations", "linalg", "attention")


def patch_comfy(activations: bool = True, sdpa: bool = False, verbose: bool = True) -> None:
    """Let what ComfyUI calls of torch use metalcore, in all threads: `torch.linalg`'s solvers and
    decompositions, as samplers use them, and what is asked for here.

    Each keeps torch's contract, by the replacements of `enable_pytorch_overrides`, and leaves to
    torch what torch does faster.

    Args:
        activations: SiLU and GELU, with `inplace` and `approximate`.
        sdpa: `F.scaled_dot_product_attention`, by `attention`; a `metalcore.trace()` shows the
            calls that are left to torch with the path `torch`.
        verbose: print what is replaced.

    Example:
        >>> metalcore.patch_comfy()
        >>> metalcore.unpatch_comfy()
    """
    groups = [
        *(["activations"] if activations else []),
        "linalg",
        *(["attention"] if sdpa else []),
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
