# SPDX-License-Identifier: MIT
"""A model is run once on a few tokens, and what goes in and out of its parts is looked at.

Whether each layer continues the last, which cosines and sines it got, and what its logits are
times.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore.patch.decode_parts import NotRecorded, is_near
from metalcore.patch.probe import ask


class SeenLayer(NamedTuple):
    """What a layer got: its input, its cosines and sines, and the call that made these."""

    x: Tensor
    embeddings: tuple[Tensor, Tensor]
    rope: tuple[Any, dict[str, Any]] | None


class SeenModel(NamedTuple):
    tokens: Tensor
    layers: list[SeenLayer]
    last: Tensor
    logits: Tensor


@contextmanager
def _hooked(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(
    model: Any, embed: nn.Module, layers: list[nn.Module], final: nn.Module, head: nn.Module
) -> SeenModel:
    """A forward pass of three tokens, and what its parts got and gave."""
    got: dict[nn.Module, tuple[Any, Any, Any]] = {}
    ropes: list[tuple[Any, dict[str, Any], Any]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        got[module] = (args, kwargs, out)

    def keep_rope(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(out, tuple) and len(out) == 2:
            named = {k: v for k, v in kwargs.items() if k not in ("x", "position_ids")}
            extra = args[2:] if len(args) > 2 else ()
            if extra:
                named["layer_type"] = extra[0]
            ropes.append((module, named, out))

    watched = {embed, *layers, final, head}
    hooks = [m.register_forward_hook(keep, with_kwargs=True) for m in watched]
    hooks += [
        m.register_forward_hook(keep_rope, with_kwargs=True)
        for m in model.base_model.children()
        if m not in watched and not list(m.parameters()) and not isinstance(m, nn.ModuleList)
    ]
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.tensor([[vocabulary // 3, vocabulary // 5, vocabulary // 2]])
    was_training = model.training
    with _hooked(hooks):
        model.eval()
        out = ask(lambda: model(input_ids=tokens, use_cache=False))
        model.train(was_training)
    if out is None or any(m not in got for m in watched):
        raise NotRecorded("it did not answer when it was asked")
    seen, before = [], None
    for layer in layers:
        args, kwargs, made = got[layer]
        x = args[0] if args else kwargs.get("hidden_states")
        embeddings = kwargs.get("position_embeddings")
        if x is None or not isinstance(embeddings, tuple):
            raise NotRecorded(f"{type(layer).__name__} does not get cosines and sines")
        if before is not None and not torch.equal(before, x):
            raise NotRecorded(f"{type(layer).__name__} does not get what the layer before gave")
        before = made[0] if isinstance(made, tuple) else made
        found = [(m, named) for m, named, o in ropes if o[0] is embeddings[0]]
        seen.append(SeenLayer(x, embeddings, found[0] if found else None))
    args, kwargs, normed = got[final]
    if before is None or not torch.equal(args[0], before):
        raise NotRecorded("its final norm does not get what the last layer gave")
    last = got[head][0][0]
    if not torch.equal(last, normed):
        raise NotRecorded("its output layer does not get what the final norm gave")
    return SeenModel(tokens, seen, last, out.logits)


def end_of(model: Any, head: nn.Module, seen: SeenModel) -> tuple[float, float | None]:
    """What the logits are times, and what they are capped at."""
    plain, logits = ask(lambda: head(seen.last)).float(), seen.logits.float()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    if cap is not None and is_near(torch.tanh(plain / cap) * cap, logits):
        return 1.0, cap
    scale = float((plain * logits).sum() / plain.square().sum())
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    if not is_near(plain * scale, logits):
        raise NotRecorded("its logits are not what its output layer gives")
    return scale, None
