# SPDX-License-Identifier: MIT
"""What hooks of tensor parallelism ask the result of an output layer for, as of any DTensor."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from metalcore._sharding import is_dtensor


class SplitLogits:
    """The part of `LazyLogits` that is for weights whose rows, the classes, processes share."""

    recipe: Any

    @property
    def placements(self) -> tuple[Any, ...]:
        """Where the logits would be."""
        from torch.distributed.tensor import Replicate, Shard

        weight = self.recipe.weight
        if not is_dtensor(weight):
            raise AttributeError("placements")
        classes = len(self.recipe.shape) - 1
        return tuple(Shard(classes) if p.is_shard(0) else Replicate() for p in weight.placements)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **how: Any) -> Any:
        """These logits, or others that are somewhere else and computed."""
        from torch.distributed.tensor import Shard

        rank = len(self.recipe.shape)
        wanted = tuple(Shard(p.dim % rank) if p.is_shard() else p for p in placements)
        if wanted == self.placements:
            return self
        return self._computed_with_gradient().redistribute(device_mesh, placements, **how)

    def to_local(self, **how: Any) -> Tensor:
        """The logits of the classes that are here, computed."""
        local: Tensor = self._computed_with_gradient().to_local(**how)
        return local

    def _computed_with_gradient(self) -> Any:
        hidden, weight, bias, cap = self.recipe.linear()
        logits: Any = F.linear(hidden, weight, bias)
        if cap is not None:
            logits = cap * (logits / cap).tanh()
        return logits.to(self.recipe.dtype)
