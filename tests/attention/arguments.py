# SPDX-License-Identifier: MIT
"""Arguments of the op `attention`, for tests: chosen ones, and any."""

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Case(NamedTuple):
    """Sizes, and which of the arguments there are."""

    why: str
    heads: tuple[int, int] = (4, 2)
    length: tuple[int, int] = (33, 40)
    size: tuple[int, int] = (16, 16)
    batch: int = 2
    mask: str = ""
    alibi: str = ""
    sinks: bool = False
    packed: bool = False
    softcap: float | None = None
    left: int | None = None
    right: int | None = None

    @property
    def reduces_over(self) -> int:
        return max(self.size) + max(self.length)

    def args(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """What the op takes."""
        (H, Hk), (Tq, Tk), (D, Dv) = self.heads, self.length, self.size
        B = 1 if self.packed else self.batch
        q = torch.randn(B, H, Tq, D).to(dtype)
        k, v = torch.randn(B, Hk, Tk, D).to(dtype), torch.randn(B, Hk, Tk, Dv).to(dtype)
        mask = self._mask((B, H, Tq, Tk), dtype)
        slopes = {"": None, "heads": torch.rand(H), "entries": torch.rand(B, H)}[self.alibi]
        sinks = torch.randn(H).to(dtype) if self.sinks else None
        starts = self._starts() if self.packed else (None, None)
        numbers = (D**-0.5, self.softcap, self.left, self.right)
        return q, k, v, mask, slopes, sinks, *starts, *numbers

    def _mask(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        kind, _, form = self.mask.partition(" ")
        if not kind:
            return None
        forms = {"": (0, 1, 2, 3), "heads": (1, 2, 3), "keys": (0, 3), "rows": (2, 3)}
        kept = [n if i in forms[form] else 1 for i, n in enumerate(size)]
        hides = torch.rand(kept) > 0.6
        # whole tiles that are hidden, or not
        hides[..., : size[3] // 3] = True
        hides[:, :, size[2] // 2 :] = False
        if kind == "bool":
            return ~hides
        numbers = torch.randn(kept).masked_fill(hides, -torch.inf)
        return numbers.to(dtype if kind == "same" else torch.float32)

    def _starts(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        starts = []
        for n in self.length:
            inner = torch.randint(0, n + 1, (3,), generator=generator).sort().values
            starts.append(torch.tensor([0, *inner.tolist(), n]))
        return starts[0], starts[1]


CASES = [
    Case("one panel and one tile"),
    Case("several panels and tiles", length=(150, 300), right=0),
    Case("one query", length=(1, 300), heads=(8, 2), right=0),
    Case("few queries and a window", length=(3, 700), heads=(8, 2), left=300, right=0),
    Case("few queries of odd heads", length=(4, 90), heads=(7, 1), size=(7, 37), right=0),
    Case("few queries and a mask", length=(2, 150), mask="bool", softcap=2.0, sinks=True),
    Case("few queries and numbers", length=(3, 150), mask="float32 heads", alibi="entries"),
    Case("few queries, packed", length=(7, 150), packed=True, sinks=True, right=0),
    Case("more queries than keys", length=(70, 9), right=0),
    Case("odd head sizes", size=(7, 5), heads=(3, 3), right=0),
    Case("head sizes past a register", size=(80, 33), heads=(6, 1)),
    Case("large heads", size=(256, 128), heads=(2, 1), length=(9, 140), batch=1),
    Case("more heads in a group than panels in a task", heads=(7, 1), right=0),
    Case("keys in parts", length=(40, 1030), heads=(2, 1), batch=1, right=0),
    Case("window", length=(300, 310), left=20, right=0, batch=1),
    Case("window on both sides", length=(100, 300), left=5, right=40, batch=1),
    Case("negative reach", length=(50, 60), left=None, right=-3),
    Case("soft cap", softcap=1.5, right=0),
    Case("sinks", sinks=True, right=0),
    Case("sinks of rows without keys", sinks=True, length=(20, 9), right=0),
    Case("slopes", alibi="heads", right=0),
    Case("slopes of entries on both sides", alibi="entries"),
    Case("mask", mask="bool", length=(70, 300)),
    Case("mask of keys", mask="bool keys", length=(40, 300), right=0),
    Case("mask of rows", mask="bool rows"),
    Case("numbers", mask="same", length=(40, 200)),
    Case("float32 numbers for each head", mask="float32 heads", softcap=4.0, sinks=True),
    Case("packed", packed=True, length=(90, 120), right=0),
    Case("packed in parts", packed=True, heads=(2, 1), length=(90, 1300), right=0),
    Case("packed with all else", packed=True, mask="same", alibi="heads", sinks=True, softcap=2.0),
]

# Gradients of queries that all see one key would be differences of equal numbers.
_SIZES = st.sampled_from([3, 8, 16, 17, 33, 64])
_LENGTHS = st.sampled_from([7, 15, 31, 33, 64, 65, 129, 150])
_QUERIES = st.one_of(st.integers(2, 5), _LENGTHS)

problems = st.builds(
    Case,
    why=st.just(""),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda n: (n[0] * n[1], n[1])),
    length=st.tuples(_QUERIES, _LENGTHS),
    size=st.tuples(_SIZES, _SIZES),
    batch=st.integers(1, 2),
    mask=st.sampled_from(["", "", "bool", "bool keys", "same heads", "float32 rows", "float32"]),
    alibi=st.sampled_from(["", "", "heads", "entries"]),
    sinks=st.booleans(),
    packed=st.booleans(),
    softcap=st.sampled_from([None, None, 2.0]),
    left=st.sampled_from([None, None, 5, 40]),
    right=st.sampled_from([None, 0, 0, 3]),
)


def sees(distance: int, left: int, right: int, causal: bool) -> bool:
    """Whether a key so far after a query's position is seen by it."""
    is_near = (left == -1 or distance >= -left) and (right == -1 or distance <= right)
    return is_near and not (causal and distance > 0)
