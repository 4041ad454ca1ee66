# SPDX-License-Identifier: MIT
"""LazyLogits: the logits of a linear layer, computed if somebody looks at them.

What a causal language model does to its logits before the loss (scale, soft cap, float(), view,
slices of tokens) is written down, and `torch.nn.functional.cross_entropy` becomes
`linear_cross_entropy`, which never holds [tokens, vocabulary]. Everything else gets the values.

Where somebody will look, as in a loop that reads them in each step, they are computed at once
(`keep`), and the loss is taken of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import expect
from metalcore.ops.train.cross_entropy import cross_entropy
from metalcore.ops.train.linear_cross_entropy import linear_cross_entropy
from metalcore.patch._split_logits import SplitLogits

_aten = torch.ops.aten


class Products:
    """hidden @ weight.T + bias of all tokens without a gradient, computed once."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, when_read: Callable[[], None]
    ) -> None:
        self._operands = (hidden, weight, bias)
        self._versions = self._versions_now()
        self._when_read = when_read
        self.values: Tensor | None = None

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(t._version for t in self._operands if t is not None)

    def compute(self) -> Tensor:
        if self.values is None:
            expect(
                self._versions == self._versions_now(),
                "accelerate",
                "logits of a training step must be read before its weights change "
                "(optimizer.step), and these were not computed until now; or use "
                "accelerate(model, loss=False)",
            )
            with torch.no_grad():
                self.values = F.linear(*self._operands)
        return self.values

    def read(self) -> Tensor:
        """The values, for somebody who looks at them."""
        self._when_read()
        return self.compute()


@dataclass(frozen=True)
class Recipe:
    """`products` times `scale`, then with a cap `cap * tanh(.)`, of some tokens."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    products: Products
    # What was done to the dimensions before the last one, to be done to `hidden` with its history;
    # `tokens` is the result without a history.
    tokens: Tensor
    moves: tuple[Callable[[Tensor], Tensor], ...] = ()
    scale: float = 1.0
    cap: float | None = None
    # its values are its own, and may be written to
    is_copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tokens.shape[:-1], self.weight.shape[0])

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Recipe":
        return replace(self, moves=(*self.moves, move), tokens=move(self.tokens))

    def compute(self) -> Tensor:
        """The logits, without a gradient."""
        with torch.no_grad():
            y = self.move(self.products.read()).to(self.dtype, copy=self.is_copy)
            if self.scale != 1.0:
                y = y * self.scale
            return y if self.cap is None else y.tanh().mul_(self.cap)

    def move(self, x: Tensor) -> Tensor:
        """`x` with its dimensions before the last one as those of the logits."""
        for move in self.moves:
            x = move(x)
        return x

    @property
    def factor(self) -> float:
        """What the products are multiplied by before the soft cap.

        cap * tanh(s * x) is the soft cap of (s * cap) * x.
        """
        factor = self.scale if self.cap is None else self.scale * self.cap
        return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor

    def linear(self) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
        """hidden, weight and bias of a linear layer and the soft cap that give these logits."""
        hidden, bias = self.move(self.hidden), self.bias
        if self.factor != 1.0:
            hidden = hidden * self.factor
            bias = None if bias is None else bias * self.factor
        return hidden, self.weight, bias, self.cap


class LazyLogits(SplitLogits, Tensor):
    """A tensor without memory. Autograd sees an ordinary result of an ordinary layer."""

    recipe: Recipe
    _computed: Tensor | None

    @staticmethod
    def __new__(cls, recipe: Recipe) -> "LazyLogits":
        made: LazyLogits = Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device
        )
        made.recipe, made._computed = recipe, None
        return made

    def compute(self) -> Tensor:
        """The logits as a plain tensor without a gradient, computed once."""
        if self._computed is None:
            self._computed = self.recipe.compute()
        return self._computed

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.compute())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "cross_entropy":
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        if func in _OF_PLAIN_TENSORS:
            args = _plain(args)
        return Tensor.__torch_function__(func, (Tensor,), args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WRITTEN_DOWN and isinstance(args[0], LazyLogits) and args[0]._computed is None:
            recipe = _WRITTEN_DOWN[func](args[0].recipe, *args[1:], **kwargs)
            if recipe is not None:
                return LazyLogits(recipe)
        return func(*_plain(args), **_plain(kwargs))


# torch refuses these for tensors without memory
_OF_PLAIN_TENSORS = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
}


def _plain(a: Any) -> Any:
    """`a` with values in the place of lazy logits."""
    if isinstance(a, LazyLogits):
        return a.compute()
    if isinstance(a, (list, tuple)):
        return type(a)(map(_plain, a))
    return {k: _plain(v) for k, v in a.items()} if isinstance(a, dict) else a


class _Linear(torch.autograd.Function):
    """What `LazyLogits` is to autograd; its backward runs only for those who took the values.

    It is no op: its result has no memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keep: bool,
        when_read: Callable[[], None],
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        products = Products(hidden, weight, bias, when_read)
        if keep:
            products.compute()
        return LazyLogits(Recipe(hidden, weight, bias, hidden.dtype, products, hidden.detach()))

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dlogits), None, None


class _Known(torch.autograd.Function):
    """`values` as the result of the linear layer that they were computed by."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dlogits), None


def _gradients(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
    """Of hidden, weight and bias."""
    hidden, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    rows = dlogits.flatten(0, -2)
    return (
        dlogits @ weight if needs[0] else None,
        rows.T @ hidden.flatten(0, -2) if needs[1] else None,
        rows.sum(0) if needs[2] else None,
    )


def lazy_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    keep: bool = False,
    when_read: Callable[[], None] = lambda: None,
) -> LazyLogits:
    """`torch.nn.functional.linear(hidden, weight, bias)`, not computed yet, or kept for those who
    will look at it; `when_read` is called when somebody does."""
    made: LazyLogits = _Linear.apply(hidden, weight, bias, keep, when_read)  # type: ignore[no-untyped-call]
    return made


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """torch's function of this name; None where the values of the logits are needed for it."""
    if (
        not isinstance(input, LazyLogits)
        or input._computed is not None
        or input.dim() != 2
        or target.shape != input.shape[:1]
        or target.dtype != torch.int64
        or (weight, size_average, reduce) != (None, None, None)
        # a leaf gets the gradient itself
        or (input.requires_grad and input.is_leaf)
    ):
        return None
    with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
        return _of_recipe(input, target, ignore_index, reduction, label_smoothing)


def _of_recipe(
    input: LazyLogits, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    how: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    recipe = input.recipe
    values = recipe.products.values
    if values is None:
        hidden, rows, bias, softcap = recipe.linear()
        how |= {"softcap": softcap, "dtype": input.dtype}
        return linear_cross_entropy(hidden, rows, target, bias, **how)
    logits: Tensor = _Known.apply(  # type: ignore[no-untyped-call]
        recipe.hidden, recipe.weight, recipe.bias, values
    )
    logits = recipe.move(logits).to(input.dtype)
    if recipe.factor != 1.0:
        logits = logits * recipe.factor
    return cross_entropy(logits, target, softcap=recipe.cap, **how).to(input.dtype)


def _number(value: Any) -> float | None:
    """`value` as a number, where looking at it costs nothing."""
    if isinstance(value, Tensor):
        plain = value.dim() == 0 and value.is_cpu and not value.requires_grad
        return float(value) if plain else None
    return float(value) if isinstance(value, (int, float)) else None


def _times(recipe: Recipe, factor: Any) -> Recipe | None:
    by = _number(factor)
    if by is None:
        return None
    if recipe.cap is None:
        return replace(recipe, scale=recipe.scale * by)
    # a negative or zero factor is no soft cap
    return replace(recipe, cap=recipe.cap * by) if by > 0 else None


def _over(recipe: Recipe, divisor: Any, *, rounding_mode: str | None = None) -> Recipe | None:
    by = _number(divisor)
    return _times(recipe, 1 / by) if by and rounding_mode is None else None


def _tanh(recipe: Recipe) -> Recipe | None:
    return replace(recipe, cap=1.0) if recipe.cap is None else None


def _to(recipe: Recipe, *, dtype: torch.dtype | None = None, **rest: Any) -> Recipe | None:
    # what is wider loses nothing; other devices and layouts are for torch
    if dtype is None or torch.promote_types(dtype, recipe.dtype) != dtype:
        return None
    if any(v not in (None, False) for v in rest.values()):
        return None
    return replace(recipe, dtype=dtype, is_copy=True)


def _view(recipe: Recipe, size: list[int]) -> Recipe | None:
    *rows, classes = size
    if classes != recipe.weight.shape[0] or recipe.tokens.numel() == 0:
        return None
    return recipe.moved(lambda x: x.reshape(*rows, x.shape[-1]))


def _slice(
    recipe: Recipe, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Recipe | None:
    dim %= recipe.tokens.dim()
    if dim == recipe.tokens.dim() - 1:
        whole = start in (None, 0) and step == 1 and (end is None or end >= recipe.weight.shape[0])
        return recipe if whole else None
    return recipe.moved(lambda x: _aten.slice(x, dim, start, end, step))


def _same(recipe: Recipe) -> Recipe:
    return recipe


def _copy(recipe: Recipe, *, memory_format: Any = None) -> Recipe:
    return replace(recipe, is_copy=True)


_WRITTEN_DOWN: dict[Any, Callable[..., Recipe | None]] = {
    _aten.mul.Tensor: _times,
    _aten.mul.Scalar: _times,
    _aten.div.Tensor: _over,
    _aten.div.Scalar: _over,
    _aten.tanh.default: _tanh,
    _aten._to_copy.default: _to,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.slice.Tensor: _slice,
    _aten.clone.default: _copy,
    _aten.detach.default: _same,
}
