# SPDX-License-Identifier: MIT
"""How precisely a product with quantized weights takes its activations, on a CPU.

They are integers of 1, 2 or 3 bytes with a scale for each 32 values, so sums of 32 products are
exact. `ERROR` is what is promised: |y - truth| / |truth| over all of y, with the truth in float64
of the weights as they are dequantized.
"""

from metalcore._check import expect_one_of

CHOICES = ("auto", "int8", "int16", "float")

ERROR = {"int8": 8e-3, "int16": 5e-5, "float": 1e-6}


def expect_activation(op: str, activation: str) -> None:
    expect_one_of(op, "activation", activation, CHOICES)
