# SPDX-License-Identifier: MIT
"""Pages that are copied within a cache, or from one to another."""

import pytest
import torch

import metalcore


def test_copy_blocks_reads_all_before_it_writes() -> None:
    caches = [torch.randn(5, 4, 2, 8), torch.randint(-9, 9, (5, 4, 2), dtype=torch.int8)]
    before = [x.clone() for x in caches]
    metalcore.copy_blocks(caches, torch.tensor([[0, 3], [3, 1]], dtype=torch.int32))
    for x, b in zip(caches, before, strict=True):
        assert torch.equal(x, b[[0, 3, 2, 0, 4]])


def test_swap_blocks_copies_into_another_cache() -> None:
    source, to = torch.randn(5, 4, 2), torch.zeros(3, 4, 2)
    metalcore.swap_blocks(source, to, torch.tensor([[4, 0], [1, 2]]))
    assert torch.equal(to, torch.stack([source[4], torch.zeros(4, 2), source[1]]))
    metalcore.swap_blocks(source, to, torch.zeros(0, 2, dtype=torch.int64))


def test_bad_input_is_named() -> None:
    x = torch.zeros(3, 4)
    pairs = torch.tensor([[0, 3]])
    with pytest.raises(ValueError, match="copy_blocks: the second of pairs must be one of 3 pages"):
        metalcore.copy_blocks([x], pairs)
    with pytest.raises(ValueError, match=r"swap_blocks: pairs must be \[n, 2\], got \[1, 1\]"):
        metalcore.swap_blocks(x, x, pairs[:, :1])
    with pytest.raises(ValueError, match="swap_blocks: pages must be of one shape and dtype"):
        metalcore.swap_blocks(x, x.half(), pairs)


def test_it_is_a_name_of_the_package() -> None:
    assert {"copy_blocks", "swap_blocks"} <= set(metalcore.attn.__all__)
