# SPDX-License-Identifier: MIT
"""GGUF, the file format of llama.cpp: read, written, and turned into models of transformers."""
