# SPDX-License-Identifier: MIT
"""A token of a made Llama of 850 million parameters, in 4 bits, after `tokens` of them."""

from ._generation import benches

BENCHES = benches("program/generation", width=2048, layers=16)
