# SPDX-License-Identifier: MIT
"""GGUF files written by hand, byte by byte: good ones, and each way to be a bad one."""

import struct

A_WEIGHT = (b"a.weight", [32, 2], 2, 0)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def number(key: bytes, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def words(key: bytes, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", 8) + string(value)


def tensor(name: bytes, sizes: list[int], kind: int, offset: int) -> bytes:
    head = string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return head + struct.pack("<IQ", kind, offset)


ARCHITECTURE = words(b"general.architecture", b"llama")


def file(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(256),
    *,
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> bytes:
    keys = [ARCHITECTURE] if keys is None else keys
    tensors = [tensor(*A_WEIGHT)] if tensors is None else tensors
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def _with(key: bytes) -> bytes:
    return file([ARCHITECTURE, key])


def _with_tensors(*tensors: tuple[bytes, list[int], int, int], data: bytes = bytes(256)) -> bytes:
    return file(tensors=[tensor(*t) for t in tensors], data=data)


# what is wrong -> a file, and a word of what the error says
HOSTILE: dict[str, tuple[bytes, str]] = {
    "2^63 tensors": (file(tensor_count=1 << 63), "tensors take at least"),
    "2^60 keys": (file(key_count=1 << 60), "keys take at least"),
    "a key of 2^62 bytes": (file([struct.pack("<Q", 1 << 62) + b"abc"]), "a key needs"),
    "2^62 strings": (_with(string(b"x") + struct.pack("<IIQ", 9, 8, 1 << 62)), "elements of 'x'"),
    "2^40 bytes": (_with(string(b"x") + struct.pack("<IIQ", 9, 0, 1 << 40)), "elements of 'x'"),
    "arrays in arrays, 2000 deep": (
        _with(string(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000),
        "array of arrays",
    ),
    "elements of no kind": (_with(string(b"x") + struct.pack("<IIQ", 9, 77, 1)), "kind 77"),
    "a value of no kind": (_with(string(b"x") + struct.pack("<I", 13)), "kind 13"),
    "neither true nor false": (_with(string(b"x") + struct.pack("<IB", 7, 2)), "true or false"),
    "alignment 0": (_with(number(b"general.alignment", 0)), "power of two"),
    "alignment 3": (_with(number(b"general.alignment", 3)), "power of two"),
    "alignment 2^31": (_with(number(b"general.alignment", 1 << 31)), "power of two"),
    "alignment is a string": (_with(words(b"general.alignment", b"32")), "32-bit unsigned"),
    "2^31 dimensions": (
        file(tensors=[string(b"a") + struct.pack("<I", 1 << 31) + bytes(64)]),
        "2147483648 dimensions",
    ),
    "no dimensions": (_with_tensors((b"a" * 9, [], 2, 0)), "0 dimensions"),
    "2^63 x 2 values": (_with_tensors((b"a", [1 << 63, 2], 2, 0)), "sizes"),
    "2^69 values": (_with_tensors((b"a", [32, 1 << 32, 1 << 32], 2, 0)), "sizes"),
    "a size of 0": (_with_tensors((b"a", [0, 5], 2, 0)), "sizes"),
    "rows of 33 in q4_0": (_with_tensors((b"a", [33, 2], 2, 0)), "blocks of 32"),
    "rows of 16 in q4_0": (_with_tensors((b"a", [16, 2], 2, 0)), "blocks of 32"),
    "a tensor after the end": (_with_tensors((b"a", [32, 2], 2, 1 << 40)), "bytes of tensors"),
    "offset 2^64 - 32": (_with_tensors((b"a", [32, 2], 2, (1 << 64) - 32)), "bytes of tensors"),
    "offset 1": (_with_tensors((b"a", [32, 2], 2, 1)), "no multiple of 32"),
    "tensors that overlap": (
        _with_tensors((b"a", [32, 2], 2, 0), (b"b", [32, 2], 2, 32)),
        "'b' overlaps 'a'",
    ),
    "a tensor twice": (_with_tensors(A_WEIGHT, (b"a.weight", [32, 2], 2, 64)), "twice"),
    "a key twice": (file([ARCHITECTURE, ARCHITECTURE]), "twice"),
    "an empty key": (_with(number(b"", 1)), "key is empty"),
    "type 999": (_with_tensors((b"a", [32, 2], 999, 0)), "type 999"),
    "type 4, removed": (_with_tensors((b"a", [32, 2], 4, 0)), "type 4"),
    "a name that is no UTF-8": (_with_tensors((b"\xff\xfe", [32, 2], 2, 0)), "no UTF-8"),
    "a name of 64 bytes": (_with_tensors((b"a" * 64, [32, 2], 2, 0)), "1 to 63 bytes"),
    "a file that ends in its data": (
        _with_tensors((b"a", [32, 2], 2, 0), data=bytes(10)),
        "bytes of tensors",
    ),
    "version 1": (file(version=1), "version 1;"),
    "the other byte order": (file(version=0x03000000), "version 50331648;"),
    "no byte": (b"", "empty"),
    "the magic alone": (b"GGUF", "the version needs 4 bytes"),
    "another file": (b"PK\x03\x04" + bytes(64), "does not begin with GGUF"),
}
