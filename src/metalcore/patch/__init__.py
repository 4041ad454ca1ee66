# SPDX-License-Identifier: MIT
"""Opt-in use of metalcore in code that was not written for it; every patch can be taken back."""
