# SPDX-License-Identifier: MIT
"""Metal kernels of attention, and the programs that run them."""
