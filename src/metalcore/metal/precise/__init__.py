# SPDX-License-Identifier: MIT
"""Metal kernels of extended precision, and the programs that run them."""
