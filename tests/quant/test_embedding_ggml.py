# SPDX-License-Identifier: MIT
"""Rows of a quantized table are those of the table as floats."""

import pytest
import torch

import metalcore
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import quantize_meaning
from tests.backends import FLOATS, Backend
from tests.check import check_op


@pytest.mark.parametrize("name", list(FORMATS))
def test_rows_are_those_of_the_table(name: str) -> None:
    blocks = metalcore.quantize_ggml(torch.randn(7, 512), name)
    for dtype in FLOATS:
        table = metalcore.dequantize_ggml(blocks, name, dtype)
        for indices in (torch.tensor([[3, 0], [6, 3]]), torch.tensor(5), torch.empty(0).int()):
            with metalcore.trace() as t:
                rows = metalcore.embedding_ggml(indices, blocks, name, dtype)
            assert torch.equal(rows, table[indices.long()])
            assert [(r.op, r.variant) for r in t.records] == [("embedding_ggml", "rows")]


@pytest.mark.parametrize("name", list(FORMATS))
def test_matches_reference(name: str) -> None:
    blocks, at = metalcore.quantize_ggml(torch.randn(7, 512), name), torch.tensor([[3, 0], [6, 3]])
    for dtype in FLOATS:
        args = (at, blocks, FORMATS[name].id, dtype)
        check_op(Backend("cpu"), "embedding_ggml", args, reduces_over=1, differentiable=False)


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q5_K", "q6_K", "iq4_nl"])
def test_on_metal(name: str) -> None:
    blocks = quantize_meaning(torch.randn(7, 256), FORMATS[name].id)
    with Backend("sim") as backend:
        for dtype in backend.dtypes if name == "q6_K" else (torch.float32,):
            args = (torch.tensor([[3, 0], [6, 3]]), blocks, FORMATS[name].id, dtype)
            check_op(backend, "embedding_ggml", args, reduces_over=1, differentiable=False)
        wrong = torch.tensor([0, 7])
        with pytest.raises(IndexError, match="index 7 is out of range for a table of 7 rows"):
            metalcore.embedding_ggml(wrong, blocks, name)


def test_registration_and_compile() -> None:
    blocks, at = metalcore.quantize_ggml(torch.randn(7, 64), "q8_0"), torch.tensor([1, 6])
    args = (at, blocks, 8, torch.float32)
    torch.library.opcheck(torch.ops.metalcore_kernels.embedding_ggml.default, args)

    def rows(at: torch.Tensor) -> torch.Tensor:
        return metalcore.embedding_ggml(at, blocks, "q8_0")

    assert torch.equal(torch.compile(rows, fullgraph=True, backend="aot_eager")(at), rows(at))


def test_bad_input_is_named() -> None:
    blocks = metalcore.quantize_ggml(torch.randn(7, 64), "q8_0")
    for wrong in (7, -1):
        with pytest.raises(RuntimeError, match=f"index {wrong} is out of range for a table of 7"):
            metalcore.embedding_ggml(torch.tensor([0, wrong]), blocks, "q8_0")
    with pytest.raises(TypeError, match="embedding_ggml: indices must be int64 or int32, got"):
        metalcore.embedding_ggml(torch.ones(2), blocks, "q8_0")
    with pytest.raises(ValueError, match=r"blocks must be \[N, bytes of a row\], got"):
        metalcore.embedding_ggml(torch.tensor([0]), blocks[0], "q8_0")
