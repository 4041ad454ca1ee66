# SPDX-License-Identifier: MIT
"""Metal kernels of packed weights."""
