# SPDX-License-Identifier: MIT
"""Metal kernels, the plans of what they do, and who executes that."""
