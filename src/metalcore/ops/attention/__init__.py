# SPDX-License-Identifier: MIT
"""Attention: one module per op."""
