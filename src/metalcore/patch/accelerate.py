# SPDX-License-Identifier: MIT
"""accelerate(model): one call that lets a transformers model compute with metalcore."""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from uuid import uuid4

from rich.console import Console
from rich.table import Table
from torch import nn

from metalcore.patch import activations, norms, rotary
from metalcore.patch import attention as attentions
from metalcore.patch import conv as convs
from metalcore.patch import loss as losses
from metalcore.patch import mlp as mlps
from metalcore.patch import mlstm as mlstms
from metalcore.patch.probe import likeness
from metalcore.patch.swap import Swapped, restore, swap, swapped_by


@dataclass(frozen=True)
class Row:
    """Layers of one class: what computes them now, or why they were left alone."""

    layer: str
    cls: str
    count: int
    by: str = ""
    left_alone: str = ""


@dataclass
class Summary:
    """What `accelerate` did; prints as a table.

    `rows` are the layers that were examined. `not_examined` counts the others by class, each with
    all its parts: none of the parts of `accelerate` looks for what they compute, or it was not
    wanted.

    `undo()` takes back what this call did, and no more. As a context manager it does so on leaving.
    """

    rows: list[Row] = field(default_factory=list)
    not_examined: dict[str, int] = field(default_factory=dict)
    _model: nn.Module | None = field(default=None, repr=False)
    _swapped: list[nn.Module] = field(default_factory=list, repr=False)
    _attention: list[tuple[attentions.Layers, str]] = field(default_factory=list, repr=False)
    _decoder: Any = field(default=None, repr=False)
    _call: str = field(default_factory=lambda: uuid4().hex, repr=False)

    def undo(self) -> None:
        """Give the layers their classes again; a second call does nothing."""
        if self._decoder is not None:
            self._decoder.undo()
            self._decoder = None
        for module in self._swapped:
            restore(module)
        # adapters copy layers of a model that they train
        for module in self._model.modules() if self._model else ():
            if swapped_by(module) == self._call:
                restore(module)
        for layers, name in self._attention:
            attentions.restore(layers, name)
        self._swapped, self._attention, self._model = [], [], None

    def swap(self, module: nn.Module, kind: type[Swapped], how: Any) -> None:
        """Let `kind` compute for `module` until `undo()`."""
        swap(module, kind, how, self._call)
        self._swapped.append(module)

    def count(self, layer: str) -> int:
        """How many layers of a kind (`norm`, `rope`, `attention`, `mlp`, `mlstm`, `conv`, `loss`)
        metalcore computes now."""
        return sum(r.count for r in self.rows if r.layer == layer and r.by)

    def __enter__(self) -> "Summary":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.undo()

    def __rich__(self) -> Table:
        table = Table("layer", "class", "count", "computed by", "left alone because")
        table.columns[2].justify = "right"
        for r in self.rows:
            table.add_row(r.layer, r.cls, str(r.count), r.by, r.left_alone)
        if not self.rows:
            table.add_row("", "", "0", "", "there is no layer that metalcore could compute")
        if self.not_examined:
            modules, classes = sum(self.not_examined.values()), len(self.not_examined)
            names = ", ".join(f"{cls} ({n})" for cls, n in self.not_examined.items())
            table.caption = (
                f"Not examined, {modules} modules of {classes} classes that no part asked for "
                f"would replace: {names}"
            )
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def accelerate(
    model: nn.Module,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    rope: bool = True,
    attention: bool = True,
    mlp: bool = True,
    mlstm: bool = True,
    conv: bool = True,
    loss: bool = True,
    decode: bool = False,
) -> Summary:
    """Let the layers of a transformers model compute with metalcore, in place.

    Layers are recognised by what they compute: each class is asked with small weights of our own,
    and one that does not give our result is left alone. Weights stay the same tensors, and
    `state_dict`, checkpoints, optimizers, adapters and hooks stay as they are.

    Args:
        model: a transformers model, or any module; its parts are searched.
        rms_norm, layer_norm: norms become `rms_norm` and `layer_norm`.
        rope: rotary embedding becomes `apply_rotary_pos_emb`.
        attention: what layers look up in the `AttentionInterface` of transformers becomes
            `attention`, and `attention_decode` in generation.
        mlp: products and activations of feed-forward layers become `swiglu`, `geglu`, `gelu`.
        mlstm: the mLSTM of xLSTM models becomes `mlstm_chunkwise`, and `mlstm_step` in generation.
        conv: causal convolutions of Mamba and its kin become `causal_conv1d`.
        loss: with `labels`, the loss becomes `linear_cross_entropy`, and logits are computed only
            if somebody looks at them.
        decode: the steps of `generate` become one `decode_step` each, where they can be recorded:
            see `metalcore.decoder`.

    Returns:
        A summary to print, with `undo()`. Layers that are accelerated already are left to the
        summary of the call that did it.

    Example:
        >>> print(metalcore.accelerate(model))
        >>> model(input_ids, labels=labels).loss.backward()
    """
    summary = Summary(_model=model)
    kinds = [
        kind
        for kind, wanted in (
            (norms.RMSNorm, rms_norm),
            (norms.GatedRMSNorm, rms_norm),
            (norms.HeadRMSNorm, rms_norm),
            (norms.LayerNorm, layer_norm),
            (norms.HeadLayerNorm, layer_norm),
        )
        if wanted
    ]
    examined: set[nn.Module] = set()
    if kinds:
        examined |= _each(summary, model, "norm", norms, kinds)
    if rope:
        examined |= _each(summary, model, "rope", rotary, [rotary.Attention])
    if attention:
        examined |= _attention(summary, model)
    if mlp:
        layers = _each(summary, model, "mlp", mlps, mlps.KINDS)
        within = {
            part for layer in layers if isinstance(layer, Swapped) for part in layer.modules()
        }
        examined |= layers
        examined |= _each(summary, model, "mlp", activations, [activations.Activation], within)
    if mlstm:
        examined |= _each(summary, model, "mlstm", mlstms, [mlstms.MLSTM])
    if conv:
        examined |= _each(summary, model, "conv", convs, [convs.CausalConv])
    if loss:
        examined |= _loss(summary, model)
    if decode:
        _decode(summary, model)
    summary.not_examined = dict(Counter(type(m).__name__ for m in _others(model, examined)))
    return summary


def _others(model: nn.Module, examined: set[nn.Module]) -> Iterator[nn.Module]:
    """The outermost modules that neither are among those examined nor hold one of them."""
    if model in examined:
        return
    if examined.isdisjoint(model.modules()):
        yield model
        return
    for child in model.children():
        yield from _others(child, examined)


def _each(
    summary: Summary,
    model: nn.Module,
    layer: str,
    where: Any,
    kinds: Sequence[type[Swapped]],
    but: Set[nn.Module] = frozenset(),
) -> set[nn.Module]:
    """Exchange the layers that the module `where` recognises, `but` some; those alike are asked
    once.

    Returns all that were asked.
    """
    answers: dict[Hashable, Any] = {}
    asked: set[nn.Module] = set()
    found: dict[tuple[str, str, str], int] = {}
    for module in model.modules():
        if module in but or not where.is_candidate(module):
            continue
        key = likeness(module)
        if key not in answers:
            answers[key] = _one_of(kinds, where.recognise, module)
        answer = answers[key]
        if answer is None:
            continue
        asked.add(module)
        name = type(module).__name__
        if isinstance(answer, str):
            row = (name, "", answer)
        else:
            row = (name, _describe(*answer), "")
            summary.swap(module, *answer)
        found[row] = found.get(row, 0) + 1
    summary.rows += [Row(layer, cls, n, by, why) for (cls, by, why), n in found.items()]
    return asked


def _one_of(
    kinds: Sequence[type[Swapped]], recognise: Callable[[nn.Module], Any], module: nn.Module
) -> Any:
    """What `recognise` says of `module`, None where its kind is not wanted."""
    if isinstance(module, Swapped):
        return _ALREADY if module.origin.kind in kinds else None
    found = recognise(module)
    if found is None or isinstance(found, str):
        return found
    return found if found[0] in kinds else None


_ALREADY = "it is accelerated already"


def _describe(kind: type[Swapped], how: Any) -> str:
    if kind is norms.RMSNorm:
        return "rms_norm" + (", weight + 1" if how.weight_offset else "")
    if kind is norms.LayerNorm:
        return "layer_norm"
    if kind in (norms.HeadRMSNorm, norms.HeadLayerNorm):
        return "multi_head_norm"
    if kind is mlstms.MLSTM:
        return "mlstm_chunkwise, mlstm_step"
    if kind is convs.CausalConv:
        return "causal_conv1d"
    if kind is norms.GatedRMSNorm:
        return "rms_norm, swiglu"
    if kind is activations.Activation:
        return mlps.ALONE[how]
    if kind is rotary.Attention:
        layout = ", interleaved" if how.interleaved else ""
        return "apply_rotary_pos_emb" + layout + (", then in halves" if how.to_halves else "")
    act: str = how if kind is mlps.Experts else how.act
    if kind is mlps.PlainMLP:
        return mlps.ALONE[act]
    halves = ", one layer for gate and up" if kind is mlps.FusedGatedMLP else ""
    return mlps.OP[act] + (", tanh" if act == "gelu_tanh" else "") + halves


def _attention(summary: Summary, model: nn.Module) -> set[nn.Module]:
    """Let the attention layers call ours; they are returned."""
    found = [(layers, attentions.why_not(layers)) for layers in attentions.find(model)]
    refused = {id(layers.model): why for layers, why in found if why}
    for layers, _ in found:
        # one config, one name
        why = refused.get(id(layers.model), "")
        name = type(layers.modules[0]).__name__
        if not why and layers.model.config._attn_implementation != attentions.NAME:
            summary._attention.append((layers, attentions.use(layers)))
        row = Row("attention", name, len(layers.modules), "" if why else "attention", why)
        summary.rows.append(row)
    return {module for layers, _ in found for module in layers.modules}


def _loss(summary: Summary, model: nn.Module) -> set[nn.Module]:
    """Exchange the models that compute a loss, and their output layers, which are returned."""
    heads: set[nn.Module] = set()
    for module in list(model.modules()):
        if isinstance(module, losses.LossModel):
            head: nn.Module | str | None = _ALREADY
        else:
            head = losses.recognise(module)
        if head is None:
            continue
        name = type(module).__name__
        heads.add(module.get_output_embeddings())  # type: ignore[operator]
        if isinstance(head, str):
            summary.rows.append(Row("loss", name, 1, "", head))
            continue
        summary.swap(module, losses.LossModel, None)
        if not isinstance(head, losses.OutputLayer):
            summary.swap(head, losses.OutputLayer, None)
        summary.rows.append(Row("loss", name, 1, "linear_cross_entropy"))
    return heads


def _decode(summary: Summary, model: nn.Module) -> None:
    """Let a tape compute the steps of `generate`."""
    if sys.modules.get("transformers") is None:
        return
    from metalcore.patch.decoder import Decoding, decoder

    name = type(model).__name__
    if isinstance(model, Decoding):
        summary.rows.append(Row("decode", name, 1, "", _ALREADY))
        return
    made = decoder(model, fills_in=True)
    if made.is_recorded:
        summary._decoder = made.__enter__()
        summary.rows.append(Row("decode", name, 1, "decode_step"))
    else:
        summary.rows.append(Row("decode", name, 1, "", made.why_not))


def patch_transformers_rmsnorm(model: nn.Module) -> int:
    """Replace the RMSNorms of `model` as `accelerate` does; how many there were."""
    return accelerate(model, **_all_but("rms_norm")).count("norm")


def patch_transformers_rope(model: nn.Module) -> int:
    """Replace the rotary embedding of `model` as `accelerate` does; in how many layers."""
    return accelerate(model, **_all_but("rope")).count("rope")


def _all_but(part: str) -> dict[str, bool]:
    parts = ("rms_norm", "layer_norm", "rope", "attention", "mlp", "mlstm", "conv", "loss")
    return {name: False for name in parts if name != part}
