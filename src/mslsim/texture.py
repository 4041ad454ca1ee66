# SPDX-License-Identifier: MIT
"""Textures and samplers as arguments: numpy arrays in, numpy arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arguments import Block, Bound, Encoded
from .memory import is_tensor

# Axes before the channels, by type: those of msl::TextureHeader, layers or samples first.
_AXES = {
    "texture1d": "w",
    "texture_buffer": "w",
    "texture1d_array": "lw",
    "texture2d": "hw",
    "depth2d": "hw",
    "texture2d_array": "lhw",
    "texture2d_ms": "lhw",
    "depth2d_ms": "lhw",
    "depth2d_array": "lhw",
    "texture3d": "dhw",
    "texturecube": "lhw",
    "depthcube": "lhw",
    "texturecube_array": "lfhw",
    "depthcube_array": "lfhw",
}
_FACES = 6
_HEADER_WORDS = 16
_KINDS = {"u": 0, "i": 1, "f": 2}
_ADDRESSES = ("clamp_to_zero", "clamp_to_edge", "repeat", "mirrored_repeat", "clamp_to_border")
_BORDERS = ("transparent_black", "opaque_black", "opaque_white")
_COMPARES = ("none", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal",
             "always", "never")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampler:
    """An argument for a `sampler` parameter, in the words of Metal."""

    filter: str = "nearest"
    address: str = "clamp_to_edge"
    coord: str = "normalized"
    border_color: str = "transparent_black"
    compare_func: str = "never"

    def encoded(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """As metal::sampler has it."""
        address = _choice("address", self.address, _ADDRESSES)
        words = [
            _choice("coord", self.coord, ("normalized", "pixel")),
            *[address] * 3,
            _choice("filter", self.filter, ("nearest", "linear")),
            _choice("border_color", self.border_color, _BORDERS),
            _choice("compare_func", self.compare_func, _COMPARES),
        ]
        return np.array(words, np.int32)


def _choice(what: str, value: str, known: tuple[str, ...]) -> int:
    if value not in known:
        raise ValueError(f"{what} must be one of {list(known)}, got {value!r}")
    return known.index(value)


@dataclass(slots=True)
class Texture:
    """A texture of a launch: the caller's array, and its texels behind a header."""

    array: np.ndarray[Any, Any]
    memory: np.ndarray[Any, np.dtype[np.uint8]]

    def copy_back(self) -> None:
        texels = self.memory[4 * _HEADER_WORDS :].view(self.array.dtype)
        np.copyto(self.array, texels.reshape(self.array.shape))


def add_images(
    encoded: Encoded,
    kernel: str,
    parameters: Sequence[Mapping[str, Any]],
    textures: Mapping[int, Any],
    samplers: Mapping[int, Sampler],
) -> list[Texture]:
    """Adds textures and samplers to the arguments of a launch; returns those that may be
    written."""
    given = {"texture": dict(textures), "sampler": dict(samplers)}
    written = []
    for p in parameters:
        value = given[p["kind"]].pop(p["number"], None)
        what = f"{kernel}: {p['name']} [[{p['kind']}({p['number']})]]"
        if value is None:
            raise ValueError(f"{what} is not given: {p['kind']}s={{{p['number']}: ...}}")
        if p["kind"] == "sampler":
            _bind(encoded, int(p["index"]), value.encoded().view(np.uint8))
            continue
        words = p["declared"].split()
        kind = next(w for w in words if w in _AXES)
        texture = _texture(encoded, int(p["index"]), what, kind, value)
        if "write" in words or "read_write" in words:
            written.append(texture)
    for kind, rest in given.items():
        if rest:
            raise ValueError(f"{kernel}: the kernel has no [[{kind}({min(rest)})]]")
    return written


def _texture(encoded: Encoded, slot: int, what: str, kind: str, value: Any) -> Texture:
    """Adds a texture of type `kind` to the arguments of a launch."""
    array = value.detach().numpy() if is_tensor(value) else value
    axes = _AXES[kind]
    if not isinstance(array, np.ndarray) or array.ndim not in (len(axes), len(axes) + 1):
        shape = f"an array of {len(axes)} axes, or one more for channels"
        raise TypeError(f"{what} is a {kind}, which takes {shape}")
    channels = array.shape[len(axes)] if array.ndim > len(axes) else 1
    if array.dtype.kind not in _KINDS or array.itemsize > 4 or not 1 <= channels <= 4:
        raise TypeError(f"{what} must have 1 to 4 channels of 8 to 32 bits, got {array.dtype}")
    size = dict(zip(axes, array.shape, strict=False))
    layers = size.get("l", 1) * size.get("f", 1)
    if "cube" in kind and (layers % _FACES or ("f" in size and size["f"] != _FACES)):
        raise ValueError(f"{what} is a {kind}: it must have {_FACES} faces")
    header = np.zeros(_HEADER_WORDS, np.uint32)
    header[:7] = (
        size["w"], size.get("h", 1), size.get("d", 1), layers,
        channels, array.itemsize, _KINDS[array.dtype.kind],
    )  # fmt: skip
    texels = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    memory = np.concatenate([header.view(np.uint8), texels])
    _bind(encoded, slot, memory)
    return Texture(array, memory)


def _bind(encoded: Encoded, slot: int, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    block = Block(memory.ctypes.data, memory.nbytes, slot, memory)
    encoded.blocks.append(block)
    encoded.bound.append(Bound(slot, block, 0))
