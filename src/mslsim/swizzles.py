# SPDX-License-Identifier: MIT
"""Writes swizzles.h: the swizzle properties of vec<T, 2>, vec<T, 3> and vec<T, 4>; and those of
packed vectors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

ALPHABETS = ("xyzw", "rgba")


def _members(width: int) -> Iterator[str]:
    for alphabet in ALPHABETS:
        for i, letter in enumerate(alphabet[:width]):
            yield (
                f"constexpr T get_{letter}() const {{ return get({i}); }}"
                f" template <typename U> constexpr void put_{letter}(U u) {{"
                f' static_assert(!MSL_NARROWS(T, U), "bfloat from float needs a cast");'
                f" v[{i}] = pack(u); }}"
                f" __declspec(property(get = get_{letter}, put = put_{letter})) T {letter};"
            )
        for length in (2, 3, 4):
            for lanes in product(range(width), repeat=length):
                distinct = len(set(lanes)) == length
                # Repeated colours are legal but unseen in compute kernels; leaving them out
                # halves the declarations.
                if alphabet == "rgba" and not distinct:
                    continue
                yield _property(alphabet, lanes, distinct)


def _property(alphabet: str, lanes: tuple[int, ...], assignable: bool) -> str:
    name = "".join(alphabet[i] for i in lanes)
    kind = f"vec<T, {len(lanes)}>"
    indices = ", ".join(map(str, lanes))
    text = (
        f"constexpr {kind} get_{name}() const {{ return {kind}(typename {kind}::from_raw{{}},"
        f" __builtin_shufflevector(v, v, {indices})); }}"
    )
    put = ""
    if assignable:
        stores = " ".join(f"v[{i}] = s.v[{k}];" for k, i in enumerate(lanes))
        text += f" constexpr void put_{name}({kind} s) {{ {stores} }}"
        put = f", put = put_{name}"
    return f"{text} __declspec(property(get = get_{name}{put})) {kind} {name};"


def packed_header() -> str:
    """The text of packed_swizzles.h: those of packed_vec<T, N> that name each element once."""
    lines = []
    for alphabet in ALPHABETS:
        for length in (2, 3, 4):
            for lanes in permutations(range(4), length):
                name, kind = "".join(alphabet[i] for i in lanes), f"vec<T, {length}>"
                parts = ", ".join(f"e[{i}]" for i in lanes)
                stores = " ".join(f"e[{i}] = s.get({k});" for k, i in enumerate(lanes))
                lines.append(
                    f"constexpr {kind} get_{name}() const {{ return {kind}({parts}); }}"
                    f" constexpr void put_{name}({kind} s) {{ {stores} }}"
                    f" __declspec(property(get = get_{name}, put = put_{name})) {kind} {name};"
                )
    return "\n".join(lines) + "\n"


def header() -> str:
    """The text of swizzles.h, which vector_body.h includes with MSL_N defined."""
    lines = []
    for width in (2, 3, 4):
        lines.append(f"#if MSL_N == {width}")
        lines += _members(width)
        lines.append("#endif")
    return "\n".join(lines) + "\n"
