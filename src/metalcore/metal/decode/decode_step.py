# SPDX-License-Identifier: MIT
"""The program of decode_step: a launch or two for each node of the tape, and nothing between."""

from typing import Any

import torch

from metalcore._check import refuse
from metalcore._policy import policy
from metalcore.metal.plans import PLANS, metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up
from metalcore.metal.train._elementwise import in_neighbours

FILE = "decode/decode_step.metal"
_ACTIVATIONS = ("silu_of", "gelu_erf", "gelu_tanh")
# tokens that a simdgroup multiplies its row of weights with
_ROWS = (1, 2, 4, 8)
# values of a head that the lanes of a simdgroup keep
_LARGEST_HEAD = 256
_WHOLE = 32
_STORED = {**MSL_TYPE, torch.int8: "char"}
_NODES = ("embed", "norm", "quantize", "linear", "rope", "attend", "glu", "add", "soft_cap")


@metal_kernel("decode_step")
def plan(p: Program, a: Arguments) -> Any:
    if a.cache.dtype not in _STORED:
        return NotImplemented
    head, *lines = a.tape.split("\n")
    *sizes, _, out = head.split()[1:]
    made = _Tape(p, a, [int(n) for n in sizes])
    if made.tokens == 0:
        return made.buffers[int(out)]
    for line in lines:
        name, *fields = line.split()
        node = _Node(dict(f.split("=", 1) for f in fields))
        if name not in _NODES:
            refuse("decode_step", f"the tape has an unknown node {name!r}")
        if getattr(made, name)(node) is NotImplemented:
            return NotImplemented
    # one with gaps is written by way of a copy
    for to, written in ((a.cache, made.cache), (a.scales, made.scales)):
        if written is not None and written is not to:
            p.copy(to, written)
    return made.buffers[int(out)]


class _Node:
    """The fields of a line; what is not written has a default."""

    def __init__(self, fields: dict[str, str]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> int:
        return self.get(name, 0)

    def get(self, name: str, default: int) -> int:
        return int(self._fields.get(name, default))

    def number(self, name: str, default: float) -> float:
        return float(self._fields.get(name, default))

    def place(self, name: str) -> tuple[int, int]:
        buffer, _, offset = self._fields[name].partition("+")
        return int(buffer), int(offset or 0)


class _Tape:
    """Buffers of a tape, and what its nodes launch."""

    def __init__(self, p: Program, a: Arguments, sizes: list[int]) -> None:
        self.p, self.a = p, a
        self.cache = p.dense(a.cache)
        self.scales = None if a.scales is None else p.dense(a.scales)
        self.tokens = a.tokens.shape[0]
        self.buffers = [p.new((self.tokens, n)) for n in sizes]
        self.where = tuple(p.dense(x) for x in (a.rows, a.slots, a.starts))

    def at(self, node: _Node, name: str) -> tuple[Buffer, int]:
        """Memory from the first value of a place on, and how far its rows are apart."""
        which, offset = node.place(name)
        buffer = self.buffers[which]
        return buffer.view(-1)[offset:], buffer.shape[1]

    def tensor(self, node: _Node, name: str) -> Buffer | None:
        which = node.get(name, -1)
        return None if which < 0 else self.p.dense(self.a.tensors[which])

    def grid(self, n: int) -> Any:
        return in_neighbours(self.p, (n, self.tokens, 1))

    def by(self, op: str, **arguments: Any) -> Any:
        """What the plan of another op adds to the program."""
        own = self.p.policy
        self.p.policy = {**policy(op, "metal"), "gpu_cores": own["gpu_cores"]}
        found = PLANS[op].plan(self.p, Arguments(arguments))
        self.p.policy = own
        return found

    def put(self, node: _Node, x: Buffer, n: int, bias: Buffer | None, add: bool) -> None:
        """A result [tokens, n] to where the node wants it."""
        (y, to), scale = self.at(node, "y"), node.number("scale", 1.0)
        args = (x, x if bias is None else bias, y, y, x.shape[1], to, scale)
        self.p.launch(FILE, "decode_put", (bias is not None, add), args, *self.grid(n))

    def embed(self, node: _Node) -> Any:
        n, table, tokens = node["n"], self.tensor(node, "w"), self.p.dense(self.a.tokens)
        assert table is not None
        if node.get("type", -1) >= 0:
            kind = {"type": node["type"], "dtype": torch.float32}
            found = self.by("embedding_ggml", indices=tokens, blocks=table, **kind)
            return self.put(node, found, n, None, False)
        if table.dtype not in MSL_TYPE:
            return NotImplemented
        y, to = self.at(node, "y")
        args = (table, tokens, y, n, to, table.shape[0], node.number("scale", 1.0))
        self.p.launch(FILE, "decode_embed", (MSL_TYPE[table.dtype],), args, *self.grid(n))
        return None

    def norm(self, node: _Node) -> None:
        (x, from_), (y, to), w = self.at(node, "x"), self.at(node, "y"), self.tensor(node, "w")
        args = (x, x if w is None else w, y, node["n"], from_, to, node.number("eps", 0.0))
        threads = (SIMD_WIDTH * node.get("times", 1), self.tokens, 1)
        group = (SIMD_WIDTH, 1, 1)
        self.p.launch(FILE, "decode_norm", (w is not None,), args, threads, group)

    def quantize(self, node: _Node) -> None:
        """A GPU multiplies packed weights with numbers as they are."""

    def linear(self, node: _Node) -> Any:
        n, k, add = node["n"], node["k"], bool(node["add"])
        w, bias = self.tensor(node, "w"), self.tensor(node, "bias")
        assert w is not None
        if node["bits"] or node.get("type", -1) >= 0:
            which, offset = node.place("x")
            x = self.p.dense(self.buffers[which][:, offset : offset + k])
            return self.put(node, self._packed(node, x, w), n, bias, add)
        if w.dtype not in MSL_TYPE:
            return NotImplemented
        (x, from_), (y, to) = self.at(node, "x"), self.at(node, "y")
        simdgroups = self.p.policy["simdgroups"]
        group = SIMD_WIDTH * simdgroups
        for first in range(0, self.tokens, _ROWS[-1]):
            rows = min(_ROWS[-1], self.tokens - first)
            held = next(r for r in _ROWS if r >= rows)
            args = (
                *(x[first * from_ :], w, x if bias is None else bias),
                *(y[first * to :], y[first * to :]),
                *(rows, n, k, from_, to, node.number("scale", 1.0)),
            )
            variant = (MSL_TYPE[w.dtype], held, bias is not None, add, simdgroups)
            threads = round_up(n * SIMD_WIDTH, group)
            self.p.launch(FILE, "decode_linear", variant, args, threads, group)
        return None

    def _packed(self, node: _Node, x: Buffer, w: Buffer) -> Any:
        given = {"x": x, "tiles": self.tensor(node, "tiles"), "activation": "auto"}
        if not node["bits"]:
            return self.by("matmul_ggml", blocks=w, type=node["type"], **given)
        scales, biases = self.tensor(node, "scales"), self.tensor(node, "biases")
        groups = {"packed": w, "scale": scales, "bias": biases, "group_size": node["group"]}
        return self.by(f"matmul_int{node['bits']}", **groups, **given)

    def _layer(self, node: _Node) -> tuple[Buffer, ...]:
        """Keys and values of a layer, and their scales."""
        kept = (self.cache,) if self.scales is None else (self.cache, self.scales)
        found = [part[node["layer"], i].memory() for part in kept for i in range(2)]
        # what is not touched
        return *found, *(self.p.new((1,)) for _ in range(4 - len(found)))

    @property
    def _storage(self) -> tuple[str, bool]:
        return _STORED[self.cache.dtype], self.scales is not None

    def rope(self, node: _Node) -> None:
        heads, key_heads, size, rotary = (
            node[name] for name in ("heads", "key_heads", "size", "rotary")
        )
        (q, from_q), (k, from_k), (v, from_v) = (self.at(node, name) for name in "xyz")
        interleaved, table = bool(node["interleaved"]), self.tensor(node, "w")
        part = rotary if interleaved else rotary // 2
        width = round_up(part, _WHOLE) * (1 if interleaved else 2)
        sizes = (heads, key_heads, size, rotary, width, self.cache.shape[4])
        args: tuple[Any, ...] = (
            *(q, k, v, q, v if table is None else table.view(-1)),
            *(*self._layer(node), *self.where),
            (*sizes, from_q, from_k, from_v),
        )
        variant = (*self._storage, interleaved)
        threads = (SIMD_WIDTH * (heads + 2 * key_heads), self.tokens, 1)
        self.p.launch(FILE, "decode_rope", variant, args, threads, (SIMD_WIDTH, 1, 1))

    def attend(self, node: _Node) -> Any:
        heads, key_heads, size = (node[name] for name in ("heads", "key_heads", "size"))
        if size > _LARGEST_HEAD:
            return NotImplemented
        (q, from_), (y, to), sinks = self.at(node, "x"), self.at(node, "y"), self.tensor(node, "w")
        cap = node.number("cap", 0.0)
        simdgroups = self.p.policy["attend_simdgroups"]
        sizes = (key_heads, heads // key_heads, self.cache.shape[4], from_, to, node["window"])
        args: tuple[Any, ...] = (
            *(q, *self._layer(node), q if sinks is None else sinks, y, *self.where, sizes),
            *(node.number("scale", 1.0), cap),
        )
        flags = (cap > 0, sinks is not None, simdgroups)
        variant = (*self._storage, size, *flags)
        group = SIMD_WIDTH * simdgroups
        threads = (group * heads, self.tokens, 1)
        self.p.launch(FILE, "decode_attend", variant, args, threads, (group, 1, 1))
        return None

    def glu(self, node: _Node) -> None:
        (x, from_), (z, from_z), (y, to) = (self.at(node, name) for name in "xzy")
        variant = (_ACTIVATIONS[node["act"]],)
        args = (x, z, y, from_, from_z, to)
        self.p.launch(FILE, "decode_glu", variant, args, *self.grid(node["n"]))

    def add(self, node: _Node) -> None:
        (x, from_), (y, to) = self.at(node, "x"), self.at(node, "y")
        args = (x, x, y, y, from_, to, node.number("scale", 1.0))
        self.p.launch(FILE, "decode_put", (False, True), args, *self.grid(node["n"]))

    def soft_cap(self, node: _Node) -> None:
        (x, from_), (y, to) = self.at(node, "x"), self.at(node, "y")
        args = (x, y, from_, to, node.number("cap", 1.0))
        self.p.launch(FILE, "decode_cap", (), args, *self.grid(node["n"]))
