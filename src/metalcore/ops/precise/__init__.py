# SPDX-License-Identifier: MIT
"""Extended precision: one module per op."""
