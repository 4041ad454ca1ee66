# SPDX-License-Identifier: MIT
"""What the kernels of a Metal source declare, read from its text: no compiler, no numpy.

>>> softmax = read_signatures(text)["softmax"]
>>> [p.name for p in softmax.parameters if p.is_written]
['y']
"""

from .text.signature import (
    Array,
    Parameter,
    Position,
    Signature,
    read_signatures,
    without_kernels,
)

__all__ = ["Array", "Parameter", "Position", "Signature", "read_signatures", "without_kernels"]
