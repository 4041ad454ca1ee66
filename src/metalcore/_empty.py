# SPDX-License-Identifier: MIT
"""Models without weights, for weights that come from a file."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class without_weights(TorchFunctionMode):  # noqa: N801 - it reads as a function where it is used
    """In its block, memory that nobody has written (`torch.empty`) is not there at all.

    Layers make their weights of it. What they compute, such as rotary frequencies, is there.

    Example:
        >>> with without_weights():
        ...     model = AutoModelForCausalLM.from_config(config)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
