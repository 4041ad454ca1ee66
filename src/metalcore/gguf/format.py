# SPDX-License-Identifier: MIT
"""What a GGUF file consists of: kinds of metadata, types of tensors, and the one error."""

import struct
from dataclasses import dataclass
from typing import NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_ALIGNMENT = 1 << 20
MOST_DIMENSIONS = 4
MOST_NAME_BYTES = 63

# metadata: number in the file -> struct's letter; strings and arrays are no letter
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
SCALAR_BYTES = {kind: struct.calcsize(f"<{letter}") for kind, letter in SCALARS.items()}


class GGUFError(ValueError):
    """A file that is no GGUF, or breaks a rule of the format.

    Attributes:
        position: the byte at which the rule is broken.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"{message} (at byte {position})")
        self.position = position


class Type(NamedTuple):
    """How tensors of a type are stored: `block` values in `bytes` bytes."""

    number: int
    name: str
    block: int
    bytes: int


# Types that this library does not compute with are here too: a file with them can be read.
TYPES = [
    Type(0, "f32", 1, 4),
    Type(1, "f16", 1, 2),
    Type(2, "q4_0", 32, 18),
    Type(3, "q4_1", 32, 20),
    Type(6, "q5_0", 32, 22),
    Type(7, "q5_1", 32, 24),
    Type(8, "q8_0", 32, 34),
    Type(9, "q8_1", 32, 40),
    Type(10, "q2_K", 256, 84),
    Type(11, "q3_K", 256, 110),
    Type(12, "q4_K", 256, 144),
    Type(13, "q5_K", 256, 176),
    Type(14, "q6_K", 256, 210),
    Type(15, "q8_K", 256, 292),
    Type(16, "iq2_xxs", 256, 66),
    Type(17, "iq2_xs", 256, 74),
    Type(18, "iq3_xxs", 256, 98),
    Type(19, "iq1_s", 256, 50),
    Type(20, "iq4_nl", 32, 18),
    Type(21, "iq3_s", 256, 110),
    Type(22, "iq2_s", 256, 82),
    Type(23, "iq4_xs", 256, 136),
    Type(24, "i8", 1, 1),
    Type(25, "i16", 1, 2),
    Type(26, "i32", 1, 4),
    Type(27, "i64", 1, 8),
    Type(28, "f64", 1, 8),
    Type(29, "iq1_m", 256, 56),
    Type(30, "bf16", 1, 2),
    Type(34, "tq1_0", 256, 54),
    Type(35, "tq2_0", 256, 66),
    Type(39, "mxfp4", 32, 17),
    Type(40, "nvfp4", 64, 36),
    Type(41, "q1_0", 128, 18),
]
BY_NUMBER = {t.number: t for t in TYPES}
BY_NAME = {t.name: t for t in TYPES}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: as in the file, `blk.0.attn_q.weight`.
        shape: slowest dimension first, as torch counts; the file has them the other way round.
        type: how its values are stored.
        start: its first byte, from the begin of the file.
        bytes: how many there are.
    """

    name: str
    shape: tuple[int, ...]
    type: Type
    start: int
    bytes: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.bytes


def padding(size: int, alignment: int) -> int:
    """How many bytes follow `size` bytes up to the next multiple of `alignment`."""
    return -size % alignment
