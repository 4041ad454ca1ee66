# SPDX-License-Identifier: MIT
"""Parts of xLSTM: one module per op."""
