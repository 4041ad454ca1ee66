# SPDX-License-Identifier: MIT
"""What a Metal source says, read from its text: no compiler, no numpy.

Nothing here imports the rest of mslsim: a package of kernels can link this folder into itself.
"""
