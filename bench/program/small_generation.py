# SPDX-License-Identifier: MIT
"""As `generation`, of a Llama of 110 million parameters: for a quick look."""

from ._generation import benches

BENCHES = benches("program/small_generation", width=1024, layers=4)
