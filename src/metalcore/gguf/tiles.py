# SPDX-License-Identifier: MIT
"""Tiles of a model in a file beside it: made once, and mapped from then on.

A CPU multiplies by tiles, rearranged weights. In a file they cost no time to make at the next load,
and memory that processes share and that the system may take back.
"""

import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metalcore._quantized_layers import GGMLLinear
from metalcore.gguf.format import padding
from metalcore.gguf.reader import GGUFFile
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.matmul_ggml import pack_ggml

# Where tiles begin: a page, so that one weight's are read without another's.
_ALIGNMENT = 4096
_SAMPLE_BYTES = 4096


def map_tiles(model: Any, file: GGUFFile, folder: str | PathLike[str]) -> Path:
    """Give the packed layers of a model their tiles from a file in `folder`, which is written
    first if it is not there; the file."""
    layers = list(_layers(model))
    path = Path(folder) / f"{file.path.stem}-{_key(file, layers)}.tiles"
    sizes = [layer.tile_size() for layer in layers]
    starts, end = _places(sizes)
    if not path.exists():
        _write(path, layers, starts)
    found = path.stat().st_size
    if found != end:
        raise OSError(f"{path} has {found} bytes in place of {end}: delete it")
    if not end:
        return path
    with path.open("rb") as opened:
        # private, so that torch may take it for writable: no byte ever reaches the file
        buffer = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    for layer, start, size in zip(layers, starts, sizes, strict=True):
        count = size.numel()
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=start)
        layer.set_tiles(flat.view(size))
    return path


def _layers(model: Any) -> Iterator[GGMLLinear]:
    for module in model.modules():
        if isinstance(module, GGMLLinear) and module.weight.numel():
            yield module


def _places(sizes: list[torch.Size]) -> tuple[list[int], int]:
    """Where each begins, and where the last ends."""
    starts, end = [], 0
    for size in sizes:
        end += padding(end, _ALIGNMENT)
        starts.append(end)
        end += size.numel()
    return starts, end


def _write(path: Path, layers: list[GGMLLinear], starts: list[int]) -> None:
    """All or nothing: others see the file when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(".tmp", path.name, path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for layer, start in zip(layers, starts, strict=True):
                out.write(bytes(start - out.tell()))
                pack_ggml(layer.weight, layer.scheme).numpy().tofile(out)
                layer.forget_weight()
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _key(file: GGUFFile, layers: list[GGMLLinear]) -> str:
    """Differs for files that differ, and where tiles are laid out in another way."""
    found = hashlib.sha256()
    status = file.path.stat()
    found.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    for name, info in sorted(file.tensors.items()):
        found.update(f"{name} {info.shape} {info.type.name} {info.start}".encode())
        found.update(bytes(file.packed(name).flatten()[:_SAMPLE_BYTES].tolist()))
    for scheme in sorted({layer.scheme for layer in layers}):
        found.update(pack_ggml(_sample(scheme), scheme).numpy().tobytes())
    return found.hexdigest()[:24]


def _sample(scheme: str) -> Tensor:
    """Blocks of two tiles, no byte of which is like its neighbours."""
    form = FORMATS[scheme]
    count = 32 * 2 * form.bytes
    return (torch.arange(count) * 37 % 251).to(torch.uint8).view(32, 2 * form.bytes)
