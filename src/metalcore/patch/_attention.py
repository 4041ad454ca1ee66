# SPDX-License-Identifier: MIT
"""What takes the place of torch's attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore import _trace
from metalcore.ops.attention.scaled_dot_product_attention import ROUTES, case_of, compute, takes
from metalcore.patch._replace import (
    PLAIN,
    Function,
    compiling,
    is_ours,
    may_replace,
    records,
    replaces,
)
from metalcore.patch._replace import (
    compute as ours,
)

_OP = "scaled_dot_product_attention"


@replaces("attention", (F, _OP))
def _(original: Function) -> Function:
    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: Any = 0.0,
        is_causal: Any = False,
        scale: Any = None,
        enable_gqa: Any = False,
    ) -> Any:
        route = ROUTES[case_of(attn_mask, is_causal is True)]
        if (
            is_ours("attention", route, query, key, value)
            and type(is_causal) is bool
            and (scale is None or type(scale) is float)
            and (attn_mask is None or type(attn_mask) in PLAIN)
            and takes(query, key, value, attn_mask, dropout_p, enable_gqa)
            and _is_ahead(query, key, value)
        ):
            return ours(compute, query, key, value, attn_mask, is_causal, scale)
        is_watched = _trace.entered and not compiling() and isinstance(query, Tensor)
        if is_watched and may_replace("attention", query):
            _trace.record_torch_path(_OP, query)
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return original(query, key, value, attn_mask, dropout_p, is_causal, **how)

    return scaled_dot_product_attention


def _is_ahead(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """On a GPU torch is fast without a gradient, and has a matrix of scores with one. A kernel that
    somebody chose by `sdpa_kernel` stays."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    return q.is_cpu or any(map(records, (q, k, v)))
