# SPDX-License-Identifier: MIT
"""A tape: one token's way through a model as a text, and what each of its lines means.

    buffers 64 96 64 512 out 3
    embed y=0 w=0 n=64
    linear x=0 y=1+32 w=2 n=64 k=64 add=1

Buffers hold a row of numbers for each token; `y=1+32` is buffer 1 from its value 32 on. `w`,
`bias`, `tiles` and the like count the tensors that belong to the tape.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import refuse
from metalcore.ops.attention._eight_bit import decoded, encoded
from metalcore.ops.attention.attention import attention_meaning
from metalcore.ops.quant._ggml import dequantized, known
from metalcore.ops.quant._groups import group_values

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# names that are numbers, places in buffers, or tensors; the rest are integers
_FLOATS = ("eps", "scale", "cap")
_PLACES = ("x", "y", "z")
_TENSORS = ("w", "bias", "tiles", "scales", "biases")
_WHOLE = 32


class Place(NamedTuple):
    """Values of a row: of a buffer, from `offset` on."""

    buffer: int
    offset: int = 0

    def __add__(self, more: object) -> "Place":
        assert isinstance(more, int)
        return Place(self.buffer, self.offset + more)

    def __str__(self) -> str:
        return f"{self.buffer}+{self.offset}" if self.offset else str(self.buffer)


class Node:
    """A line: its name and what it works on. What is not written has a default."""

    def __init__(self, name: str, fields: dict[str, str]) -> None:
        self.name = name
        self._fields = fields

    def place(self, name: str) -> Place:
        buffer, _, offset = self._fields.get(name, "-1").partition("+")
        return Place(int(buffer), int(offset or 0))

    def integer(self, name: str, default: int = 0) -> int:
        return int(self._fields.get(name, default))

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self._fields.get(name, default))


class Tape:
    """Writes a tape: buffers and tensors are counted, nodes are lines of its text.

    Example:
        >>> tape = Tape()
        >>> x, y = tape.buffer(64), tape.buffer(512)
        >>> tape.add("embed", y=x, w=tape.tensor(table), n=64)
        >>> tape.add("linear", x=x, y=y, w=tape.tensor(weight), n=512, k=64)
        >>> logits = decode_step(tape.text(y), tape.tensors, cache, tokens, rows, slots, starts)
    """

    def __init__(self) -> None:
        self.buffers: list[int] = []
        self.tensors: list[Tensor] = []
        self.lines: list[str] = []
        self._known: dict[int, int] = {}

    def buffer(self, values: int) -> Place:
        """A new buffer of so many values for each token."""
        self.buffers.append(values)
        return Place(len(self.buffers) - 1)

    def tensor(self, x: Tensor | None) -> int:
        """The number of a tensor, which is kept; -1 for none."""
        if x is None:
            return -1
        if id(x) not in self._known:
            self._known[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._known[id(x)]

    def add(self, name: str, **fields: Place | float) -> None:
        """A node; fields that have their default are left out."""
        given = (
            f"{k}={v!r}" if k in _FLOATS else f"{k}={v}"
            for k, v in fields.items()
            if not (k in _TENSORS and v == -1)
        )
        self.lines.append(" ".join((name, *given)))

    def text(self, out: Place) -> str:
        sizes = " ".join(map(str, self.buffers))
        return "\n".join((f"buffers {sizes} out {out.buffer}", *self.lines))


def read(tape: str) -> tuple[list[int], int, Iterator[Node]]:
    """Sizes of the buffers, which of them is the result, and the nodes."""
    head, *lines = tape.split("\n")
    words = head.split()
    if len(words) < 4 or words[0] != "buffers" or words[-2] != "out":
        refuse("decode_step", f"a tape starts with its buffers, got {head!r}")
    return list(map(int, words[1:-2])), int(words[-1]), map(_node, lines)


def _node(line: str) -> Node:
    name, *fields = line.split()
    return Node(name, dict(f.split("=", 1) for f in fields))


def rotary_table(cos: Tensor, sin: Tensor, rotary: int, interleaved: bool) -> Tensor:
    """Cosines and signed sines [positions, 2, width] as nodes read them, of [positions, rotary]
    each: halves, or pairs, filled up to whole registers."""
    part = rotary if interleaved else rotary // 2
    sign = torch.ones(rotary)
    if interleaved:
        sign[0::2] = -1
    else:
        sign[: rotary // 2] = -1
    both = torch.stack((cos, sin * sign.to(sin)), 1).float()
    pieces = both.split(part, -1)
    width = -(-part // _WHOLE) * _WHOLE
    return torch.cat([F.pad(piece, (0, width - part)) for piece in pieces], -1).contiguous()


def table_width(rotary: int, interleaved: bool) -> int:
    """Of a row of `rotary_table`."""
    part = rotary if interleaved else rotary // 2
    return -(-part // _WHOLE) * _WHOLE * (1 if interleaved else 2)


class Replay:
    """The meaning of a tape, in plain torch."""

    def __init__(
        self,
        sizes: Sequence[int],
        tensors: Sequence[Tensor],
        cache: Tensor,
        tokens: Tensor,
        rows: Tensor,
        slots: Tensor,
        starts: Tensor,
        scales: Tensor | None = None,
    ) -> None:
        exact = torch.float64 in (cache.dtype, None if scales is None else scales.dtype)
        self.dtype = torch.float64 if exact else torch.float32
        self.tensors, self.cache, self.scales = tensors, cache, scales
        self.tokens, self.rows, self.slots, self.starts = tokens, rows, slots, starts
        self.buffers = [
            torch.zeros(len(tokens), n, dtype=self.dtype, device=cache.device) for n in sizes
        ]

    def at(self, place: Place, n: int) -> Tensor:
        return self.buffers[place.buffer][:, place.offset : place.offset + n]

    def floats(self, node: Node, name: str) -> Tensor | None:
        which = node.integer(name, -1)
        return None if which < 0 else self.tensors[which].to(self.dtype)

    def run(self, node: Node) -> None:
        if node.name not in _MEANINGS:
            refuse("decode_step", f"the tape has an unknown node {node.name!r}")
        _MEANINGS[node.name](self, node)

    def embed(self, node: Node) -> None:
        n, table = node.integer("n"), self.tensors[node.integer("w")]
        if node.integer("type", -1) >= 0:
            form = known("decode_step", node.integer("type"))
            found = dequantized(table[self.tokens], form, self.dtype)
        else:
            found = table[self.tokens].to(self.dtype)
        self.at(node.place("y"), n).copy_(found * node.number("scale", 1.0))

    def norm(self, node: Node) -> None:
        n, times = node.integer("n"), node.integer("times", 1)
        x = self.at(node.place("x"), n * times).unflatten(-1, (times, n))
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + node.number("eps"))
        w = self.floats(node, "w")
        self.at(node.place("y"), n * times).copy_((y if w is None else y * w).flatten(1))

    def quantize(self, node: Node) -> None:
        """What is multiplied with packed weights; a matter of precision alone."""

    def linear(self, node: Node) -> None:
        n, k = node.integer("n"), node.integer("k")
        y = self.at(node.place("x"), k) @ self._weight(node).mT
        bias = self.floats(node, "bias")
        y = (y if bias is None else y + bias) * node.number("scale", 1.0)
        to = self.at(node.place("y"), n)
        to.copy_(to + y if node.integer("add") else y)

    def _weight(self, node: Node) -> Tensor:
        w = self.tensors[node.integer("w")]
        if node.integer("bits"):
            scale, bias = (self.floats(node, name) for name in ("scales", "biases"))
            assert scale is not None
            bits, group, k = (node.integer(name) for name in ("bits", "group", "k"))
            return group_values(w, scale, bias, bits, group, k).to(self.dtype)
        if node.integer("type", -1) >= 0:
            return dequantized(w, known("decode_step", node.integer("type")), self.dtype)
        return w.to(self.dtype)

    def rope(self, node: Node) -> None:
        heads, key_heads, size = (node.integer(n) for n in ("heads", "key_heads", "size"))
        q, k, v = (
            self.at(node.place(name), count * size).unflatten(-1, (count, size))
            for name, count in zip("xyz", (heads, key_heads, key_heads), strict=True)
        )
        if node.integer("rotary"):
            q.copy_(self._rotated(node, q))
            k.copy_(self._rotated(node, k))
        for i, x in enumerate((k, v)):
            at = (node.integer("layer"), i, self.rows, slice(None), self.slots)
            if self.scales is not None:
                x, scale = encoded(x, self.cache.dtype, has_scale=True)
                self.scales[at] = scale.to(self.scales.dtype)
            self.cache[at] = x.to(self.cache.dtype)

    def _rotated(self, node: Node, x: Tensor) -> Tensor:
        rotary, interleaved = node.integer("rotary"), bool(node.integer("interleaved"))
        width = table_width(rotary, interleaved)
        table = self.floats(node, "w")
        assert table is not None
        position = self.slots - self.starts
        cos, sin = table.reshape(-1, 2, width)[position].unbind(1)
        turned = x[..., :rotary]
        if interleaved:
            cos, sin = cos[:, :rotary], sin[:, :rotary]
            partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            half = rotary // 2
            first, second = slice(0, half), slice(width // 2, width // 2 + half)
            cos, sin = (torch.cat((t[:, first], t[:, second]), -1) for t in (cos, sin))
            partner = torch.cat((turned[..., half:], turned[..., :half]), -1)
        made = turned * cos[:, None] + partner * sin[:, None]
        return torch.cat((made, x[..., rotary:]), -1)

    def attend(self, node: Node) -> None:
        heads, size, window = (node.integer(n) for n in ("heads", "size", "window"))
        q = self.at(node.place("x"), heads * size).view(-1, heads, 1, size)
        at = (node.integer("layer"), slice(None), self.rows)
        scales = None if self.scales is None else self.scales[at]
        k, v = decoded(self.cache[at], scales, self.dtype).to(self.dtype)
        key = torch.arange(k.shape[2], device=k.device)
        distance = self.slots[:, None] - key
        visible = (distance >= 0) & (key >= self.starts[:, None])
        if window:
            visible = visible & (distance < window)
        bias = torch.zeros_like(distance, dtype=self.dtype).masked_fill(~visible, -torch.inf)
        hidden = (key > self.slots[:, None])[:, None, :, None]
        # what nobody wrote may be anything
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        cap = node.number("cap") or None
        found: tuple[Tensor, Tensor] = attention_meaning(
            *(q, k, v, bias[:, None, None], None, self.floats(node, "w"), None, None),
            *(node.number("scale", 1.0), cap, None, None),
        )
        self.at(node.place("y"), heads * size).copy_(found[0].reshape(-1, heads * size))

    def glu(self, node: Node) -> None:
        n, act = node.integer("n"), ACTIVATIONS[node.integer("act")]
        gate, up = self.at(node.place("x"), n), self.at(node.place("z"), n)
        how = {"approximate": "tanh"} if act == "gelu_tanh" else {}
        gated = F.silu(gate) if act == "silu" else F.gelu(gate, **how)
        self.at(node.place("y"), n).copy_(gated * up)

    def add(self, node: Node) -> None:
        n = node.integer("n")
        to = self.at(node.place("y"), n)
        to.copy_(to + self.at(node.place("x"), n) * node.number("scale", 1.0))

    def soft_cap(self, node: Node) -> None:
        n, cap = node.integer("n"), node.number("cap")
        self.at(node.place("y"), n).copy_(torch.tanh(self.at(node.place("x"), n) / cap) * cap)


_MEANINGS = {
    "embed": Replay.embed,
    "norm": Replay.norm,
    "quantize": Replay.quantize,
    "linear": Replay.linear,
    "rope": Replay.rope,
    "attend": Replay.attend,
    "glu": Replay.glu,
    "add": Replay.add,
    "soft_cap": Replay.soft_cap,
}
