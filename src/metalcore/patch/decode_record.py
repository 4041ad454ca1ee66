# SPDX-License-Identifier: MIT
"""The tape of a model: from what its parts are found to compute."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._quantized_layers import GGMLEmbedding, GGMLLinear
from metalcore.ops.decode._tape import (
    ACTIVATIONS,
    SCALE_DTYPES,
    Place,
    Tape,
    rotary_table,
)
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.embedding_ggml import embedding_ggml
from metalcore.patch import mlp as mlps
from metalcore.patch import rotary
from metalcore.patch.decode_cache import Store
from metalcore.patch.decode_parts import (
    Layer,
    NotRecorded,
    asking_once,
    expect_linear,
    is_near,
    known_norm,
    layer_parts,
    plain_class,
)
from metalcore.patch.decode_seen import SeenLayer, SeenModel, end_of, run

# what is the same at every length
_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional", None}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BYTES = {"int8": 1, "int16": 2, "auto": 2, "float": 3}


class Rope(NamedTuple):
    """A rotary embedding of a model, with the arguments that it is called with, and how layers
    apply it. `slot` is the place of its table among the tensors of the tape."""

    module: Any
    others: dict[str, Any]
    rotary: int
    how: rotary.How
    slot: int

    def table(self, positions: int, like: Tensor) -> Tensor:
        places = torch.arange(positions, device=like.device)[None]
        cos, sin = (t[0].float() for t in self.module(like, places, **self.others))
        if self.how.half_tables or self.how.short_tables:
            cos, sin = (t[:, : self.rotary // 2] for t in (cos, sin))
            if self.how.interleaved:
                cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
            else:
                cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        return rotary_table(cos, sin, self.rotary, self.how.interleaved)


class Recording(NamedTuple):
    """A tape with its tensors, and the shape of the cache that it needs."""

    text: str
    tensors: list[Tensor]
    ropes: list[Rope]
    layers: int
    key_heads: int
    size: int
    dtype: torch.dtype
    window: int | None
    like: Tensor

    @property
    def rounds_to(self) -> torch.dtype:
        """What its numbers are rounded to: activations of 8 bits are as coarse as a bfloat16."""
        has_bytes = re.search(r"^quantize .*\bbytes=1\b", self.text, re.MULTILINE)
        return torch.bfloat16 if has_bytes else self.dtype

    def store(self, dtype: torch.dtype | None = None) -> Store:
        """Memory for keys and values, in the dtype of the model where none is given."""
        return Store(self.layers, self.key_heads, self.size, dtype or self.dtype)


def record(model: Any) -> Recording:
    """The tape of a causal language model of transformers; `NotRecorded` says why there is none."""
    with torch.no_grad(), asking_once():
        return _Recorder(model).record()


class _Recorder:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.tape = Tape()
        self.ropes: list[Rope] = []
        self._expect_known()

    def _expect_known(self) -> None:
        from transformers import GenerationMixin, PreTrainedModel

        if not isinstance(self.model, PreTrainedModel) or not isinstance(
            self.model, GenerationMixin
        ):
            raise NotRecorded("it is no language model of transformers")
        config = self.model.config.get_text_config(decoder=True)
        for module in self.model.modules():
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                raise NotRecorded(f"{type(module).__name__} has hooks, or a forward of its own")
        if any(p.device.type != "cpu" for p in self.model.parameters()):
            raise NotRecorded("it is not on the CPU")
        types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if types:
            raise NotRecorded(f"its config has layers of {', '.join(sorted(types))}")
        ropes = getattr(config, "rope_parameters", None) or {}
        nested = [v for v in ropes.values() if isinstance(v, dict)]
        for rope in nested or [ropes]:
            kind = rope.get("rope_type")
            if kind not in _ROPE_TYPES:
                raise NotRecorded(f"its rotary embedding {kind!r} changes with the length")
        if getattr(config, "is_encoder_decoder", False):
            raise NotRecorded("it has an encoder")

    def record(self) -> Recording:
        model, tape = self.model, self.tape
        base = model.base_model
        layers = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m)]
        if len(layers) != 1:
            raise NotRecorded("it has no one list of layers")
        final = [m for m in base.children() if known_norm(m) is not None]
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
        if len(final) != 1 or head is None:
            raise NotRecorded("it has no final norm, or no layer that makes logits")
        seen = run(model, embed, list(layers[0]), final[0], head)
        parts = [
            layer_parts(module, values.embeddings, values.x)
            for module, values in zip(layers[0], seen.layers, strict=True)
        ]
        shapes = {(p.heads.heads, p.heads.key_heads, p.heads.size) for p in parts}
        if len(shapes) != 1:
            raise NotRecorded("its layers have heads of several shapes")
        self.x = tape.buffer(seen.layers[0].x.shape[-1])
        self.h = tape.buffer(tape.buffers[0])
        self._embed(embed, seen)
        heads, key_heads, size = shapes.pop()
        self.qkv = tape.buffer((heads + 2 * key_heads) * size)
        self.attended = tape.buffer(heads * size)
        self.aside = tape.buffer(tape.buffers[0])
        self.within: dict[int, Place] = {}
        for i, (module, part) in enumerate(zip(layers[0], parts, strict=True)):
            self._layer(i, module, part, seen.layers[i])
        self._norm(final[0], self.x, self.h)
        logits = tape.buffer(seen.logits.shape[-1])
        scale, cap = end_of(model, head, seen)
        self._linear(head, "the output layer", self.h, logits, scale=scale)
        if cap is not None:
            tape.add("soft_cap", x=logits, y=logits, n=seen.logits.shape[-1], cap=float(cap))
        windows = [p.heads.window for p in parts if p.heads.window is not None]
        return Recording(
            tape.text(logits),
            tape.tensors,
            self.ropes,
            len(parts),
            key_heads,
            size,
            seen.layers[0].x.dtype,
            max(windows) if windows else None,
            seen.layers[0].x[:, :1],
        )

    def _embed(self, embed: nn.Module, seen: SeenModel) -> None:
        kind, x = plain_class(embed), seen.layers[0].x[0].float()
        form = -1
        if kind is GGMLEmbedding:
            raw = embedding_ggml(seen.tokens[0], embed.weight, embed.scheme, torch.float32)  # type: ignore[arg-type]
            form = FORMATS[embed.scheme].id  # type: ignore[index]
        elif isinstance(embed, nn.Embedding) and type(embed.weight) in (Tensor, nn.Parameter):
            raw = embed.weight[seen.tokens[0]].float()
        else:
            raise NotRecorded(f"its embedding is a {kind.__name__}")
        scale = float((x * raw).sum() / raw.square().sum())
        if not is_near(raw * scale, x):
            raise NotRecorded("what goes into its first layer is not its embedding")
        if abs(scale - 1) < 1e-6:
            scale = 1.0
        fields = {"type": form} if form >= 0 else {}
        w = self.tape.tensor(_kept(embed.weight))  # type: ignore[arg-type]
        self.tape.add("embed", y=self.x, w=w, n=raw.shape[-1], scale=scale, **fields)

    def _layer(self, i: int, module: nn.Module, part: Layer, seen: SeenLayer) -> None:
        wiring, n = part.wiring, self.tape.buffers[self.x.buffer]
        computes = (self._attend, self._feed)
        if wiring.parallel:
            for which, compute in enumerate(computes):
                x = self._normed(module, wiring.before[which])
                compute(i, part, seen, x, self.aside, which, wiring.scale)
            self.tape.add("add", x=self.aside, y=self.x, n=n, scale=1.0)
            return
        for which, compute in enumerate(computes):
            x, after = self._normed(module, wiring.before[which]), wiring.after[which]
            if after is None:
                compute(i, part, seen, x, self.x, 1, wiring.scale)
                continue
            compute(i, part, seen, x, self.aside, 0, 1.0)
            self._norm(module.get_submodule(after), self.aside, self.aside)
            self.tape.add("add", x=self.aside, y=self.x, n=n, scale=wiring.scale)

    def _normed(self, module: nn.Module, name: str | None) -> Place:
        if name is None:
            return self.x
        self._norm(module.get_submodule(name), self.x, self.h)
        return self.h

    def _norm(
        self, module: nn.Module, x: Place, y: Place, n: int | None = None, times: int = 1
    ) -> None:
        how = known_norm(module)
        assert how is not None
        weight: Any = module._parameters.get("weight")
        size = n or self.tape.buffers[x.buffer]
        eps = getattr(module, how.eps)
        eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
        scale = None
        if weight is not None:
            scale = (weight.detach().float() + how.weight_offset).contiguous()
        self.tape.add("norm", x=x, y=y, w=self.tape.tensor(scale), n=size, times=times, eps=eps)

    def _attend(
        self, i: int, part: Layer, seen: SeenLayer, x: Place, y: Place, add: int, scale: float
    ) -> None:
        tape, how, module = self.tape, part.heads, part.attention
        sizes = (how.heads * how.size, how.key_heads * how.size, how.key_heads * how.size)
        q, k, v = self.qkv, self.qkv + sizes[0], self.qkv + (sizes[0] + sizes[1])
        for name, to in zip(how.projections, (q, k, v), strict=False):
            self._linear(module.get_submodule(name), name, x, to)
        if how.norms is not None:
            for name, place, count in zip(how.norms, (q, k), sizes[:2], strict=True):
                n = count if how.norm_is_whole else how.size
                self._norm(module.get_submodule(name), place, place, n, count // n)
        heads = {"heads": how.heads, "key_heads": how.key_heads, "size": how.size, "layer": i}
        turn = {}
        if how.rope is not None:
            rope = self._rope(how.rope, seen, how.size)
            turn = {
                "w": rope.slot,
                "rotary": rope.rotary,
                "interleaved": int(rope.how.interleaved),
            }
        tape.add("rope", x=q, y=k, z=v, **heads, **turn)
        sinks = None if how.sinks is None else how.sinks.detach().float().contiguous()
        tape.add(
            "attend",
            x=q,
            y=self.attended,
            w=tape.tensor(sinks),
            scale=how.scale,
            cap=float(how.cap or 0.0),
            window=how.window or 0,
            **heads,
        )
        out = module.get_submodule(how.out)
        self._linear(out, how.out, self.attended, y, add=add, scale=scale)

    def _rope(self, how: rotary.How, seen: SeenLayer, size: int) -> Rope:
        if how.to_halves:
            raise NotRecorded("its rotary embedding moves what it turns")
        if seen.rope is None:
            raise NotRecorded("its cosines and sines come from nowhere that was seen")
        given = seen.embeddings[0].shape[-1]
        turned = 2 * given if how.short_tables else given
        for rope in self.ropes:
            if rope.module is seen.rope[0] and rope.others == seen.rope[1] and rope.how == how:
                return rope
        # a table of its own, even where another has equal values
        slot = self.tape.tensor(torch.empty(0))
        self.ropes.append(Rope(*seen.rope, min(turned, size), how, slot))
        return self.ropes[-1]

    def _feed(
        self, i: int, part: Layer, seen: SeenLayer, x: Place, y: Place, add: int, scale: float
    ) -> None:
        how, module = part.mlp_how, part.mlp
        down: Any = module.get_submodule(how.down)
        n = down.in_features
        if n not in self.within:
            self.within[n] = self.tape.buffer(2 * n)
        gate = self.within[n]
        up = gate + n
        self._linear(module.get_submodule(how.gate), how.gate, x, gate)
        if part.mlp_kind is mlps.GatedMLP:
            self._linear(module.get_submodule(str(how.up)), str(how.up), x, up)
        act = ACTIVATIONS.index(how.act)
        self.tape.add("glu", x=gate, z=up, y=gate, n=n, act=act)
        self._linear(down, how.down, gate, y, add=add, scale=scale)

    def _linear(
        self, module: Any, name: str, x: Place, y: Place, *, add: int = 0, scale: float = 1.0
    ) -> None:
        expect_linear(name, module)
        tape, n, k = self.tape, module.out_features, module.in_features
        bias = module.bias
        fields: dict[str, Any] = {"n": n, "k": k, "add": add, "scale": scale}
        if bias is not None:
            fields["bias"] = tape.tensor(bias.detach().float().contiguous())
        fields["w"] = tape.tensor(_kept(module.weight))
        if plain_class(module) is not nn.Linear:
            fields |= self._packed(module, x, k)
        tape.add("linear", x=x, y=y, **fields)

    def _packed(self, module: Any, x: Place, k: int) -> dict[str, Any]:
        """What packed weights add; their input is quantized before, once for all that share it."""
        if isinstance(module, GGMLLinear):
            form = FORMATS[module.scheme]
            values, fields = form.values, {"type": form.id}
        else:
            values = module.group_size
            scales = module.scales.detach()
            if scales.dtype not in SCALE_DTYPES:
                scales = scales.float()
            offsets = module.biases
            fields = {
                "bits": module.bits,
                "group": module.group_size,
                "dtype": SCALE_DTYPES.index(scales.dtype),
                "offsets": int(offsets is not None),
                "scales": self.tape.tensor(scales),
                "biases": self.tape.tensor(None if offsets is None else offsets.detach()),
            }
        parts, count = -(-k // values) * values // 32, _BYTES[module.activation]
        wanted = f"quantize x={x} n={k} bytes={count} parts={parts}"
        if self._last_quantized(x) != wanted:
            self.tape.lines.append(wanted)
        return {"tiles": self.tape.tensor(module.tiles()), **fields}

    def _last_quantized(self, x: Place) -> str:
        """How x is quantized at the end of the tape: nothing else but products came since."""
        for line in reversed(self.tape.lines):
            if line.startswith(f"quantize x={x} "):
                return line
            if not line.startswith("linear"):
                break
        return ""


def _kept(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight if weight.is_contiguous() else weight.contiguous()
