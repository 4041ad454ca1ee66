# SPDX-License-Identifier: MIT
"""Programs of decode."""
