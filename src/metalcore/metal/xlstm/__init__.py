# SPDX-License-Identifier: MIT
"""Plans of the parts of xLSTM."""
