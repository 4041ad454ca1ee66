# SPDX-License-Identifier: MIT
"""Weights in 4 to 8 bits: to and from floats, products and rows of them."""
