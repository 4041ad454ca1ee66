# SPDX-License-Identifier: MIT
"""What a layer of a model computes for one token, found out by asking it.

Norms, rotary embedding and feed-forward layers are recognised as `accelerate` does. Attention is
called with a function in the place of its scores, which sees the queries, keys and values; a layer
is called with known functions in the place of attention and feed-forward.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._accuracy import error
from metalcore._quantized_layers import NOT_KEPT, GGMLLinear, Int4Linear, Int8Linear
from metalcore.patch import attention as attentions
from metalcore.patch import mlp as mlps
from metalcore.patch import norms, rotary
from metalcore.patch.probe import ask, likeness, stand_in
from metalcore.patch.swap import Swapped

PACKED = (GGMLLinear, Int4Linear, Int8Linear)
_PROBE = "metalcore_decode_probe"
# a formula that is not the layer's is further away
_FAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class NotRecorded(Exception):
    """Why there is no tape of a model."""


class Attention(NamedTuple):
    """Heads, numbers and names of an attention layer's parts. `projections` are of q, k and v, or
    one for all; norms of q and k are of each head, or of all heads together."""

    heads: int
    key_heads: int
    size: int
    scale: float
    cap: float | None
    window: int | None
    sinks: Tensor | None
    rope: rotary.How | None
    projections: tuple[str, ...]
    norms: tuple[str, str] | None
    norm_is_whole: bool
    out: str


class Wiring(NamedTuple):
    """Names of the norms before and after attention and feed-forward, and what both are times
    before they are added; `parallel`: both of the layer's input."""

    before: tuple[str | None, str | None]
    after: tuple[str | None, str | None]
    scale: float
    parallel: bool


class Layer(NamedTuple):
    """A decoder layer by its parts."""

    attention: nn.Module
    mlp: nn.Module
    heads: Attention
    wiring: Wiring
    mlp_kind: type
    mlp_how: mlps.How


def plain_class(module: nn.Module) -> type:
    """The class of a module, without what `accelerate` did to it."""
    return module.origin.base if isinstance(module, Swapped) else type(module)


def known_norm(module: nn.Module) -> norms.How | None:
    """The variant of an RMSNorm, None for everything else."""
    if not norms.is_candidate(module):
        return None
    found: Any = _known(module, norms)
    return found[1] if isinstance(found, tuple) and found[0] is norms.RMSNorm else None


def _known(module: nn.Module, where: Any) -> Any:
    """What `accelerate` recognises; modules that are alike are asked once."""
    if isinstance(module, Swapped):
        return module.origin.kind, module.origin.how
    return _once(where.__name__, module, lambda: where.recognise(module))


def _once(what: str, module: nn.Module, ask: Callable[[], Any]) -> Any:
    """The answer of a module, or of one that is like it: of layers that are counted, the first."""
    key = (what, likeness(module, _OF_EACH))
    answers = _answers.get()
    if key not in answers:
        answers[key] = ask()
    return answers[key]


# what sets layers apart that are alike
_OF_EACH = frozenset({"layer_idx", *NOT_KEPT})
# while a model is recorded: what was asked already
_answers: ContextVar[dict[Any, Any]] = ContextVar("metalcore_recognised")


@contextmanager
def asking_once() -> Iterator[None]:
    """Within, no two modules that are alike are asked what they compute."""
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def expect_linear(name: str, module: nn.Module) -> None:
    """Refuse what is not known to be a product with a weight, and a bias at most."""
    kind = plain_class(module)
    if kind is not nn.Linear and kind not in PACKED:
        raise NotRecorded(f"{name} is a {kind.__module__}.{kind.__name__}, not a linear layer")
    if getattr(module, "order", None) is not None:
        raise NotRecorded(f"{name} reorders its inputs")
    if kind is nn.Linear:
        weight: Any = module.weight
        if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in _FAR:
            raise NotRecorded(f"the weight of {name} is no plain tensor in float32 or half")


def layer_parts(module: nn.Module, embeddings: tuple[Tensor, Tensor], x: Tensor) -> Layer:
    """What a decoder layer is made of; x [1, n, width] and the cosines and sines of n positions
    are what it was seen to get."""
    attention = [c for c in module.children() if attentions._eager(c) is not None]
    if len(attention) != 1:
        raise NotRecorded(f"{type(module).__name__} has {len(attention)} attention layers, not one")
    found = [
        (c, _known(c, mlps))
        for c in module.children()
        if c is not attention[0] and mlps.is_candidate(c)
    ]
    if len(found) != 1:
        others = ", ".join(type(c).__name__ for c in module.children())
        raise NotRecorded(f"{type(module).__name__} ({others}) has no one feed-forward layer")
    mlp, answer = found[0]
    if isinstance(answer, str) or answer is None or answer[0] is mlps.PlainMLP:
        raise NotRecorded(f"{type(mlp).__name__} is no gated feed-forward layer of plain matrices")
    if answer[0] is mlps.Experts:
        raise NotRecorded(f"{type(mlp).__name__} chooses among experts")
    heads = _once("heads", attention[0], lambda: _heads(attention[0], embeddings, x))
    if heads.sinks is not None:
        # which are weights, of each layer its own
        heads = _heads(attention[0], embeddings, x)
    wiring = _once("wiring", module, lambda: _wiring(module, attention[0], mlp, embeddings, x))
    return Layer(attention[0], mlp, heads, wiring, *answer)


class _Seen:
    """In the place of the scores of attention: keeps what it is called with."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **others: Any
    ) -> tuple[Tensor, None]:
        self.q, self.k, self.v, self.others = q, k, v, others
        self.result = torch.randn(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).to(v)
        return self.result, None


# of the arguments of an attention function, those that mean what they do for ours, or nothing
_UNDERSTOOD = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}


def _heads(module: nn.Module, embeddings: tuple[Tensor, Tensor], x: Tensor) -> Attention:
    name = type(module).__name__
    seen = _Seen()
    answer = ask(partial(_asked, module, seen, embeddings, x))
    if answer is None:
        raise NotRecorded(f"{name} did not answer when it was asked")
    strange = [k for k, v in seen.others.items() if k not in _UNDERSTOOD and v is not None]
    if strange:
        raise NotRecorded(f"{name} asks its attention for {', '.join(strange)}")
    causal = seen.others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotRecorded(f"{name} is not causal")
    heads, key_heads, size = seen.q.shape[1], seen.k.shape[1], seen.q.shape[-1]
    if seen.v.shape[-1] != size or heads % key_heads:
        raise NotRecorded(f"{name} has values of another size than its keys")
    others = seen.others
    # several ways share a product
    given = cache(lambda name: module.get_submodule(name)(x))
    for how in _ways(module, heads, key_heads, size):
        if ask(partial(_gives, module, how, seen, embeddings, given)) is True:
            out = _out(module, how[1], seen, answer)
            scale = others.get("scaling")
            return Attention(
                heads,
                key_heads,
                size,
                size**-0.5 if scale is None else float(scale),
                others.get("softcap"),
                others.get("sliding_window"),
                others.get("s_aux"),
                *how,
                out,
            )
    raise NotRecorded(f"{name} makes its queries and keys in a way that is not known")


def _asked(module: nn.Module, seen: _Seen, embeddings: Any, x: Tensor) -> Tensor:
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, seen)
    probe: Any = stand_in(module).eval()
    probe.config = copy.copy(probe.config)
    probe.config._attn_implementation_internal = _PROBE
    found = probe.forward(hidden_states=x, position_embeddings=embeddings, attention_mask=None)
    made: Tensor = found[0]
    return made


Ways = tuple[rotary.How | None, tuple[str, ...], tuple[str, str] | None, bool]


def _ways(module: nn.Module, heads: int, key_heads: int, size: int) -> Iterator[Ways]:
    """How q, k and v may be made: rotation, projections, norms, and whether these are of all
    heads together."""
    sizes = (heads * size, key_heads * size, key_heads * size)
    linears: dict[str, Any] = mlps._linears(module)
    fused = [(n,) for n, c in linears.items() if c.out_features == sum(sizes)]
    split = [
        names
        for names in permutations(linears, 3)
        if tuple(linears[n].out_features for n in names) == sizes
    ]
    known = {n: c for n, c in module.named_children() if known_norm(c) is not None}
    pairs: list[tuple[str, str] | None] = [*permutations(known, 2)] if len(known) >= 2 else [None]
    turn = _known(module, rotary) if rotary.is_candidate(module) else None
    turns = [turn[1], None] if isinstance(turn, tuple) else [None]
    for how in turns:
        for projections in (*fused, *split):
            for pair in pairs:
                whole = pair is not None and _width(module, pair[0]) != size
                yield how, projections, pair, whole


def _width(module: nn.Module, name: str) -> int:
    weight = module.get_submodule(name)._parameters.get("weight")
    return 0 if weight is None else weight.numel()


def _gives(
    module: nn.Module, way: Ways, seen: _Seen, embeddings: Any, given: Callable[[str], Tensor]
) -> bool:
    """Whether the queries, keys and values that were seen are made this way, of the products that
    projections give."""
    how, projections, pair, whole = way
    parts = [given(name) for name in projections]
    counts = (seen.q.shape[1], seen.k.shape[1], seen.k.shape[1])
    size = seen.q.shape[-1]
    if len(parts) == 1:
        parts = list(parts[0].split([n * size for n in counts], -1))
    if pair is not None and whole:
        parts[:2] = [module.get_submodule(n)(p) for n, p in zip(pair, parts[:2], strict=True)]
    q, k, v = (
        p.view(*p.shape[:-1], n, size).transpose(1, 2) for p, n in zip(parts, counts, strict=True)
    )
    if pair is not None and not whole:
        q, k = (module.get_submodule(n)(p) for n, p in zip(pair, (q, k), strict=True))
    if how is not None:
        turned = rotary._rotate(how, 1, q, k, *embeddings)
        if turned is None:
            return False
        q, k = turned
    pairs = ((q, seen.q), (k, seen.k), (v, seen.v))
    return all(is_near(a, b) for a, b in pairs)


def is_near(a: Tensor, b: Tensor) -> bool:
    """Whether two results of one formula may differ so."""
    return error(a, b) <= _FAR[b.dtype if b.dtype in _FAR else torch.float32]


def _out(module: nn.Module, projections: tuple[str, ...], seen: _Seen, answer: Tensor) -> str:
    attended = seen.result.flatten(2)
    linears: dict[str, Any] = mlps._linears(module)
    for name, linear in linears.items():
        if name in projections:
            continue
        if linear.in_features == attended.shape[-1] and is_near(linear(attended), answer):
            return name
    raise NotRecorded(f"{type(module).__name__} does something else than a product at its end")


class _Stub(nn.Module):
    """In the place of attention or feed-forward: a known function of its input."""

    def __init__(self, factor: Tensor, is_attention: bool) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.is_attention = is_attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        y = x * self.factor.to(x) + x.roll(1, -1)
        return (y, None) if self.is_attention else y


def _wiring(
    module: nn.Module, attention: nn.Module, mlp: nn.Module, embeddings: Any, x: Tensor
) -> Wiring:
    stubs = {
        name: _Stub(torch.linspace(-1, 1, x.shape[-1]) * (1 + is_mlp), not is_mlp)
        for name, child in module.named_children()
        for is_mlp in (child is mlp,)
        if child is attention or child is mlp
    }
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
    probe: Any = stand_in(module, modules=stubs).eval()

    def asked() -> Tensor:
        found = probe.forward(hidden_states=x, position_embeddings=embeddings, attention_mask=None)
        made: Tensor = found[0] if isinstance(found, tuple) else found
        return made

    theirs = ask(asked)
    if theirs is not None:
        attend, feed = sorted(stubs.values(), key=lambda s: not s.is_attention)
        for wiring in _wirings(module):
            ours = ask(partial(_wired, module, wiring, attend, feed, x))
            if ours is not None and is_near(ours, theirs):
                return wiring
    raise NotRecorded(f"{type(module).__name__} adds its parts up in a way that is not known")


def _wirings(module: nn.Module) -> Iterator[Wiring]:
    known = [n for n, c in module.named_children() if known_norm(c) is not None]
    scales = {1.0, float(getattr(module, "residual_multiplier", 1.0))}
    for scale in scales:
        for a, b in permutations(known, 2):
            yield Wiring((a, b), (None, None), scale, False)
            yield Wiring((None, None), (a, b), scale, False)
            yield Wiring((a, b), (None, None), scale, True)
        for a in known:
            yield Wiring((a, a), (None, None), scale, True)
        for a, b, c, d in permutations(known, 4):
            yield Wiring((a, b), (c, d), scale, False)


def _wired(
    module: nn.Module, wiring: Wiring, attend: nn.Module, feed: nn.Module, x: Tensor
) -> Tensor:
    def part(which: int, stub: nn.Module, value: Tensor) -> Tensor:
        before, after = wiring.before[which], wiring.after[which]
        y = value if before is None else module.get_submodule(before)(value)
        y = stub(y)[0] if which == 0 else stub(y)
        y = y if after is None else module.get_submodule(after)(y)
        made: Tensor = y * wiring.scale
        return made

    first = part(0, attend, x)
    if wiring.parallel:
        return x + first + part(1, feed, x)
    y = x + first
    return y + part(1, feed, y)
