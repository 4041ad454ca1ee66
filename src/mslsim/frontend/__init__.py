# SPDX-License-Identifier: MIT
"""Metal source text: its tokens, its kernels, and its translation to C++."""
