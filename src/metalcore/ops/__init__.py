# SPDX-License-Identifier: MIT
"""One module per op. Importing this package registers all of them."""

from metalcore.ops.train import rms_norm

__all__ = ["rms_norm"]
