# SPDX-License-Identifier: MIT
"""`quantize_model`: the linear layers of a model in 4 to 8 bits, in place."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._check import expect
from metalcore._quantized_layers import GGMLEmbedding, GGMLLinear, Int4Linear, Int8Linear, frozen
from metalcore.ops.quant._ggml import FORMATS

SCHEMES = ("int4", "int8", *FORMATS)
_GROUPS = {"int4": Int4Linear, "int8": Int8Linear}
# what layers of packed weights have beside what torch's have
_ADDED = ("scheme", "activation", "group_size", "scale", "_tiles", "_tiles_of")
# what takes rows that are no multiple of 256
_SMALLER = {"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}


@dataclass
class Row:
    """One layer: its name, what became of it, bytes before and after, and the relative error of
    its weight; or why it stays as it is."""

    name: str
    scheme: str
    before: int
    after: int
    error: float = 0.0
    why_not: str = ""


@dataclass
class Report:
    """What `quantize_model` did. `print(report)` shows it, `undo()` takes it back."""

    rows: list[Row] = field(default_factory=list)
    _taken: list["_Taken"] = field(default_factory=list)

    @property
    def before(self) -> int:
        """Bytes of the layers before."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Bytes of the layers now."""
        return sum(row.after for row in self.rows)

    def undo(self) -> None:
        """Give the layers their classes again, and plain weights: the original ones if they were
        kept (`keep=True`), otherwise the values of the packed ones."""
        while self._taken:
            self._taken.pop().give_back()

    def __str__(self) -> str:
        lines = [
            f"{'layer':<44} {'scheme':<8} {'MB':>9} {'now':>9} {'error':>8}",
            *(
                f"{r.name:<44} {r.scheme:<8} {r.before / 1e6:9.2f} {r.after / 1e6:9.2f} "
                + (f"{r.error:8.4f}" if not r.why_not else r.why_not)
                for r in self.rows
            ),
        ]
        share = self.after / self.before if self.before else 1.0
        total = f"{self.before / 1e6:.2f} MB are {self.after / 1e6:.2f} MB now ({share:.0%})"
        return "\n".join([*lines, total])


@dataclass
class _Taken:
    """A layer that was quantized, and how it was before."""

    module: Any
    kind: type[nn.Module]
    weight: Tensor | None
    dtype: torch.dtype
    trained: bool

    def give_back(self) -> None:
        weight = self.weight if self.weight is not None else self.module.dequantized(self.dtype)
        for name in _ADDED:
            vars(self.module).pop(name, None)
        for name in ("scales", "biases"):
            self.module._parameters.pop(name, None)
        for name in ("_like", "order"):
            self.module._buffers.pop(name, None)
        self.module.__class__ = self.kind
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=self.trained)
        self.module.weight = weight


def quantize_model(
    model: nn.Module,
    scheme: str | Mapping[str, str] = "int4",
    *,
    skip: Sequence[str] = ("lm_head",),
    group_size: int = 64,
    keep: bool = False,
    progress: Callable[[str, int, int], None] | bool | None = None,
) -> Report:
    """Quantize the linear layers of a model in place, one after the other.

    The weights are frozen from then on; gradients go through them, so adapters can be trained.

    Args:
        model: any module. Layers that are exactly `torch.nn.Linear` are quantized, and those that
            are `torch.nn.Embedding` where a pattern names them.
        scheme: "int4", "int8" (groups of any rows), or a type of ggml such as "q4_K"; or a table of
            patterns and schemes, of which the first that is found in the layer's name counts:
            `{"embed_tokens": "q8_0", "down_proj": "q6_K", ".*": "q4_K"}`.
        skip: patterns of layers that stay as they are.
        group_size: of int4 and int8.
        keep: keep the original weights, so that `undo` gives them back exactly.
        progress: called with the name of each layer, how many are done and how many there are;
            True shows a bar.

    Returns:
        A `Report`: bytes before and after, the error of each layer, and `undo()`.

    Example:
        >>> report = metalcore.quantize_model(model, "q4_K", progress=True)
        >>> print(report)
    """
    given = [scheme] if isinstance(scheme, str) else list(scheme.values())
    wrong = [one for one in given if one not in SCHEMES]
    expect(not wrong, "quantize_model", f"a scheme is one of {', '.join(SCHEMES)}, got {wrong}")
    chosen = _chosen(model, scheme, skip)
    shared = _shared(model)
    report = Report()
    with _shown(progress) as show:
        for i, (name, module, wanted) in enumerate(chosen):
            if id(module.weight) in shared:
                size = module.weight.nbytes
                report.rows.append(
                    Row(name, "-", size, size, why_not="stays: its weight is shared")
                )
            else:
                row = _quantize(name, module, wanted, group_size, keep, report._taken)
                report.rows.append(row)
            show(name, i + 1, len(chosen))
    return report


def _chosen(
    model: nn.Module, scheme: str | Mapping[str, str], skip: Sequence[str]
) -> list[tuple[str, Any, str]]:
    """Name, layer and scheme of what is to be quantized."""
    patterns = {".*": scheme} if isinstance(scheme, str) else scheme
    found = []
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear
        is_table = type(module) is nn.Embedding and not isinstance(scheme, str)
        if not (is_linear or is_table) or any(re.search(pattern, name) for pattern in skip):
            continue
        match = next(((p, s) for p, s in patterns.items() if re.search(p, name)), None)
        # a pattern for everything means layers, not tables
        if match is not None and (is_linear or match[0] != ".*"):
            found.append((name, module, match[1]))
    return found


def _shared(model: nn.Module) -> set[int]:
    """The parameters that more than one layer has."""
    all_of_them = (p for m in model.modules() for p in m._parameters.values() if p is not None)
    counted = Counter(map(id, all_of_them))
    return {which for which, count in counted.items() if count > 1}


def _quantize(
    name: str, module: Any, scheme: str, group_size: int, keep: bool, taken: list[_Taken]
) -> Row:
    weight: Tensor = module.weight
    before = weight.nbytes
    columns = weight.shape[-1]
    if scheme in _SMALLER and columns % 256:
        scheme = _SMALLER[scheme]
    if scheme in FORMATS and columns % FORMATS[scheme].values:
        reason = f"stays: rows of {columns} are no multiple of {FORMATS[scheme].values}"
        return Row(name, "-", before, before, why_not=reason)
    if type(module) is nn.Embedding and scheme in _GROUPS:
        return Row(name, "-", before, before, why_not=f"stays: no {scheme} for embeddings")
    record = _Taken(
        module, type(module), weight if keep else None, weight.dtype, weight.requires_grad
    )
    if type(module) is nn.Embedding:
        made: Any = GGMLEmbedding.of(module, scheme)
    elif scheme in _GROUPS:
        made = _GROUPS[scheme].of(module, group_size)
    else:
        made = GGMLLinear.of(module, scheme)
    error = _error(weight.detach(), made.dequantized(torch.float32))
    _become(module, made)
    taken.append(record)
    after = sum(p.nbytes for n, p in module.named_parameters() if n != "bias")
    return Row(name, scheme, before, after, error)


def _error(weight: Tensor, values: Tensor) -> float:
    exact = weight.float()
    size = exact.norm()
    return float((exact - values).norm() / size) if size > 0 else 0.0


def _become(module: Any, made: Any) -> None:
    """`module` is `made` from now on; its place, its bias and its hooks stay."""
    bias = module._parameters.get("bias")
    module.__class__ = type(made)
    for name, value in vars(made).items():
        if not name.startswith("_") and name != "training":
            vars(module)[name] = value
    for name, parameter in made._parameters.items():
        module.register_parameter(name, frozen(parameter) if parameter is not None else None)
    for name, buffer in made._buffers.items():
        module.register_buffer(name, buffer, persistent=name != "_like")
    if isinstance(module, nn.Linear):
        module.register_parameter("bias", bias)


class _shown:  # noqa: N801 - it reads as a function where it is used
    """A bar, the caller's own function, or nothing."""

    def __init__(self, progress: Callable[[str, int, int], None] | bool | None) -> None:
        self.progress = progress
        self.bar: Any = None

    def __enter__(self) -> Callable[[str, int, int], None]:
        if callable(self.progress):
            return self.progress
        if not self.progress:
            return lambda name, done, of: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), transient=True
        )
        self.bar.start()
        task = self.bar.add_task("quantizing", total=None)

        def show(name: str, done: int, of: int) -> None:
            self.bar.update(task, completed=done, total=of, description=f"quantizing {name}")

        return show

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
