# SPDX-License-Identifier: MIT
"""A token of a made Llama in float32, after 128 others: a small one of 16 layers, a wider one."""

from ..program._generation import bench

BENCHES = tuple(
    bench("decode/decode_step", f"{layers} layers of {width}", width, layers)
    for width, layers in ((64, 16), (1024, 2))
)
