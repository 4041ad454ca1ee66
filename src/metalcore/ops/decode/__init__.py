# SPDX-License-Identifier: MIT
"""Steps of generation: one module per op."""
