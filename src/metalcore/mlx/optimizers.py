# SPDX-License-Identifier: MIT
"""Optimizers of `mlx.optimizers` that compute with metalcore."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten

from metalcore._check import expect
from metalcore.mlx import _table
from metalcore.mlx._adamw import adamw_step


class AdamW(optimizers.AdamW):
    """AdamW in one pass over memory: four parameters per launch on a GPU, float32 moments for half
    precisions, and the bias corrected, as torch has it.

    Args:
        learning_rate: a number, or a schedule of MLX.
        betas: the shares of the moments that stay.
        eps: added to the root of the second moment.
        weight_decay: as `mlx.optimizers.AdamW`.

    Example:
        >>> optimizer = metalcore.mlx.optimizers.AdamW(1e-4)
        >>> optimizer.update(model, gradients)
    """

    def __init__(
        self,
        learning_rate: Any,
        betas: list[float] | tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
    ) -> None:
        expect(bias_correction, "AdamW", "bias_correction must be True")
        super().__init__(learning_rate, list(betas), eps, weight_decay, bias_correction=True)

    state: dict[str, Any]

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        wide = parameter.dtype if parameter.dtype == mx.float64 else mx.float32
        state["m"], state["v"] = (mx.zeros(parameter.shape, wide) for _ in range(2))

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        if not self._initialized:
            self.init(gradients)
        for name, schedule in self._schedulers.items():
            self.state[name] = schedule(self.step)
        self.state["step"] = self.step + 1
        given, grads = dict(tree_flatten(parameters)), dict(tree_flatten(gradients))
        states = dict(tree_flatten(self.state))
        names = list(grads)
        new = adamw_step(
            [given[n] for n in names],
            [grads[n] for n in names],
            [states[f"{n}.m"] for n in names],
            [states[f"{n}.v"] for n in names],
            step=self.step,
            learning_rate=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
        for moment, values in zip("mv", new[1:], strict=True):
            states |= {f"{n}.{moment}": x for n, x in zip(names, values, strict=True)}
        self.state = tree_unflatten(list(states.items()))
        return tree_unflatten(list((given | dict(zip(names, new[0], strict=True))).items()))


class Muon(optimizers.Muon):
    """`mlx.optimizers.Muon` with the orthogonal factor itself, `metalcore.mlx.polar`, in place of
    five steps towards it.

    Example:
        >>> optimizer = metalcore.mlx.optimizers.Muon(2e-2)
    """

    def _zeropower_via_newtonschulz5(self, X: mx.array, steps: int) -> mx.array:
        return _polar()(X)


@cache
def _polar() -> Any:
    return _table.made("polar")
