# SPDX-License-Identifier: MIT
"""vmap(): `mx.vmap` for functions in which ours are called.

MLX batches all that it finds in a graph, also what a function with a rule of its own is made of,
and kernels have none. So inside of `vmap` our functions are not computed: each stands in the graph
as its rule and NaNs, and the rule computes it for the whole batch.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from metalcore._check import expect

of_a_sample: ContextVar[mx.array | None] = ContextVar("of_a_sample", default=None)
"""Inside `vmap`, an array that differs from sample to sample: what depends on it is batched."""


def vmap(function: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """`mx.vmap` for functions that call those of `metalcore.mlx`, also on a GPU.

    Args:
        function: of arrays.
        in_axes: the axis of each argument that is mapped over: one for all, or a list with None
            for arguments that every sample shares.
        out_axes: where the new axis of each result stands.

    Returns:
        The function of batches. Its gradient may be taken.

    Example:
        >>> Q, R = metalcore.mlx.vmap(metalcore.mlx.qr)(mx.random.normal((10, 5, 3)))
    """

    def mapped(*args: Any) -> Any:
        is_many = isinstance(in_axes, (list, tuple))
        axes = tuple(in_axes) if is_many else (in_axes,) * len(args)
        arrays = (i for i, axis in enumerate(axes) if isinstance(axis, int))
        place = next((i for i in arrays if isinstance(args[i], mx.array)), -1)
        message = "one argument at least must be an array with an axis to map over"
        expect(place >= 0, "vmap", message)

        def sample(*values: Any) -> Any:
            token = of_a_sample.set(values[place])
            try:
                return function(*values)
            finally:
                of_a_sample.reset(token)

        return mx.vmap(sample, axes if is_many else in_axes, out_axes)(*args)

    return mapped
