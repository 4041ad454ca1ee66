# SPDX-License-Identifier: MIT
"""Products with weights in ggml's blocks: as exact as promised, for any bytes and any M."""

from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._op import Op
from metalcore.bench.counters import recorded
from metalcore.ops.quant._activation import ERROR
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import quantize_meaning
from tests.backends import FLOATS, Backend
from tests.check import check_op, check_registration

TYPES = list(FORMATS)


def blocks_of(name: str, N: int, K: int) -> Tensor:
    return metalcore.quantize_ggml(torch.randn(N, K), name)


def blocks_on_cpu(name: str, N: int, K: int) -> Tensor:
    """The same inside of a simulation."""
    return quantize_meaning(torch.randn(N, K), FORMATS[name].id)


def off(y: Tensor, x: Tensor, blocks: Tensor, name: str) -> float:
    """|y - truth| / |truth| over all of y."""
    truth = x.double() @ metalcore.dequantize_ggml(blocks, name).double().T
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", TYPES)
def test_matches_reference(name: str) -> None:
    f = FORMATS[name]
    for dtype in FLOATS:
        for N, K, M in ((19, 512, 3), (16, 256, 1), (1, 256, 5), (5, 0, 2), (0, 256, 2)):
            blocks, x = blocks_of(name, N, K), torch.randn(M, K).to(dtype)
            for tiles in (None, metalcore.pack_ggml(blocks, name)):
                args = (x, blocks, tiles, f.id, "float")
                check_op(Backend("cpu"), "matmul_ggml", args, reduces_over=max(1, K, N))


@pytest.mark.parametrize("name", TYPES)
def test_on_metal(name: str) -> None:
    """From blocks as they are, few rows and many; and from tiles."""
    f = FORMATS[name]
    with Backend("sim") as backend:
        for M in (1, 2, 3, 7, 9, 70) if name == "q4_0" else (3,):
            blocks, x = blocks_on_cpu(name, 19, 512), torch.randn(M, 512)
            check_op(backend, "matmul_ggml", (x, blocks, None, f.id, "float"), reduces_over=512)
        tiles = Op.all["pack_ggml"](blocks, f.id)
        assert torch.equal(tiles, Op.all["pack_ggml"].meaning(blocks, f.id))
        for M in (1, 3, 9) if name == "q4_0" else (3,):
            args = (torch.randn(M, 512), blocks, tiles, f.id, "float")
            check_op(backend, "matmul_ggml", args, reduces_over=512)


def test_half_types_on_metal() -> None:
    with Backend("sim") as backend:
        for dtype in (torch.float16, torch.bfloat16):
            for M in (2, 9):
                blocks, x = blocks_on_cpu("q8_0", 19, 64), torch.randn(M, 64).to(dtype)
                args = (x, blocks, None, 8, "float")
                check_op(backend, "matmul_ggml", args, reduces_over=64)


def test_metal_moves_tiles_once() -> None:
    blocks, x = blocks_of("q4_0", 64, 1024), torch.randn(1, 1024)
    tiles = metalcore.pack_ggml(blocks, "q4_0")
    with recorded(checked=False) as (_, profiles):
        metalcore.matmul_ggml(x, blocks, "q4_0", tiles=tiles)
    assert sum(p.moved for p in profiles) <= 1.05 * (tiles.nbytes + x.nbytes + 64 * 4)


@pytest.mark.parametrize("name", TYPES)
def test_errors_are_as_promised(name: str) -> None:
    blocks = blocks_of(name, 48, 1024)
    tiles = metalcore.pack_ggml(blocks, name)
    for M in (1, 2, 3, 4, 5, 7, 8, 9, 16, 27, 64, 300):
        x = torch.randn(M, 1024)
        for activation, promised in ERROR.items():
            y = metalcore.matmul_ggml(x, blocks, name, activation=activation, tiles=tiles)
            assert off(y, x, blocks, name) <= promised, (M, activation)
            unpacked = metalcore.matmul_ggml(x, blocks, name, activation=activation)
            assert torch.equal(y, unpacked)


@pytest.mark.parametrize("name", TYPES)
def test_any_bytes_and_the_largest_activations(name: str) -> None:
    f = FORMATS[name]
    for quant in (0, 0x80, 0xFF, None):
        blocks = blocks_of(name, 20, 512)
        parts = blocks.view(20, -1, f.bytes)
        # all that is no scale of the whole block
        inside = (
            parts[..., : f.bytes - 2] if name == "q6_K" else parts[..., f.bytes - f.values // 2 :]
        )
        inside = parts[..., 2:] if name == "q8_0" else inside
        if quant is None:
            inside.copy_(torch.randint(256, inside.shape))
        else:
            inside.fill_(quant)
        tiles = metalcore.pack_ggml(blocks, name)
        for x in (-torch.ones(6, 512), torch.randn(6, 512).sign(), torch.rand(6, 512)):
            truth = x.double() @ metalcore.dequantize_ggml(blocks, name).double().T
            size = x.double().abs() @ metalcore.dequantize_ggml(blocks, name).double().abs().T
            for activation, promised in ERROR.items():
                y = metalcore.matmul_ggml(x, blocks, name, activation=activation, tiles=tiles)
                assert ((y - truth).abs() <= promised * size + 1e-30).all(), (quant, activation)


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    blocks, x = blocks_of("q4_0", 20, 64), torch.randn(5, 64)
    clean = metalcore.matmul_ggml(x, blocks, "q4_0", activation="int16")
    blocks[7, 18:20] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    x[2, 3] = nan
    y = metalcore.matmul_ggml(x, blocks, "q4_0", activation="int16")
    assert y[2].isnan().all()
    assert y[:, 7].isnan().all()
    rows, columns = [0, 1, 3, 4], [n for n in range(20) if n != 7]
    assert torch.equal(y[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("activation", ["int8", "int16"])
@pytest.mark.parametrize("name", ["q4_0", "q4_K", "q6_K", "q8_0"])
def test_rows_do_not_depend_on_their_number_or_threads(name: str, activation: str) -> None:
    blocks, x = blocks_of(name, 50, 512), torch.randn(23, 512)
    y = metalcore.matmul_ggml(x, blocks, name, activation=activation)
    for m in range(23):
        one = metalcore.matmul_ggml(x[m], blocks, name, activation=activation)
        assert torch.equal(one, y[m])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(metalcore.matmul_ggml(x, blocks, name, activation=activation), y)
    finally:
        torch.set_num_threads(before)


def test_a_trace_tells_how_activations_were_taken() -> None:
    blocks = blocks_of("q4_0", 20, 64)
    tiles = metalcore.pack_ggml(blocks, "q4_0")

    def way(M: int, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        with metalcore.trace() as t:
            metalcore.matmul_ggml(torch.randn(M, 64).to(dtype), blocks, "q4_0", **options)
        assert [r.op for r in t.records] == ["matmul_ggml"]
        return t.records[0].variant.replace("bytes", "words")

    assert way(8, tiles=tiles) == "int16_words"
    assert way(9) == "int16_words_unpacked"
    assert way(8, torch.bfloat16, tiles=tiles) == "int16_words"
    assert way(9, torch.bfloat16, tiles=tiles) == "int8_words"
    assert way(2, activation="int8", tiles=tiles) == "int8_words"
    assert way(2, activation="float") == "float_words_unpacked"
    assert way(500, activation="float") == "dense"
    assert way(1, torch.float64) == "dense"


@pytest.mark.parametrize("name", TYPES)
def test_the_gradient_is_that_of_the_dequantized_weight(name: str) -> None:
    blocks = blocks_of(name, 35, 512)
    weight = metalcore.dequantize_ggml(blocks, name)
    for dtype in FLOATS:
        x = torch.randn(2, 3, 512).to(dtype).requires_grad_()
        bias = torch.randn(35).requires_grad_()
        metalcore.matmul_ggml(x, blocks, name, bias).square().sum().backward()
        a = x.detach().double().requires_grad_()
        (a @ weight.double().T + bias.detach().double()).square().sum().backward()
        size = float((x.grad.double() - a.grad).norm() / a.grad.norm())
        assert size <= 2e-2 if dtype.itemsize == 2 else size <= 1e-4
        assert bias.grad is not None


def test_adapters_train_over_a_packed_weight() -> None:
    blocks, x = blocks_of("q4_K", 32, 256), torch.randn(64, 256)
    a, b = torch.randn(256, 4) / 16, torch.zeros(4, 32)
    a.requires_grad_(), b.requires_grad_()
    target = x @ (
        metalcore.dequantize_ggml(blocks, "q4_K").T + torch.randn(256, 4) @ torch.randn(4, 32)
    )
    optimizer = torch.optim.Adam([a, b], lr=0.02)
    losses = []
    for _ in range(60):
        y = metalcore.matmul_ggml(x, blocks, "q4_K") + x @ a @ b
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_registration_and_compile() -> None:
    blocks, x = blocks_of("q5_1", 5, 64), torch.randn(2, 64)
    check_registration("matmul_ggml", (x, blocks, None, 7, "float"))
    args = (blocks, 7)
    torch.library.opcheck(torch.ops.metalcore_kernels.pack_ggml.default, args)

    def run(x: Tensor) -> Tensor:
        return metalcore.matmul_ggml(x, blocks, "q5_1", tiles=metalcore.pack_ggml(blocks, "q5_1"))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), run(x))


@pytest.mark.parametrize("name", TYPES)
def test_tiles_are_those_of_the_meaning(name: str) -> None:
    for N in (0, 1, 16, 37):
        blocks = torch.randint(256, (N, 2 * FORMATS[name].bytes), dtype=torch.uint8)
        tiles = metalcore.pack_ggml(blocks, name)
        assert torch.equal(tiles, Op.all["pack_ggml"].meaning(blocks, FORMATS[name].id))


def test_the_name_of_q4_0() -> None:
    blocks, x = blocks_of("q4_0", 20, 64), torch.randn(3, 64)
    y = metalcore.matmul_ggml(x, blocks, "q4_0", torch.ones(20))
    assert torch.equal(metalcore.matmul_ggml_q4_0(x, blocks, torch.ones(20)), y)


def test_bad_input_is_named() -> None:
    blocks, x = blocks_of("q4_0", 20, 64), torch.randn(3, 64)
    bad = [
        (lambda: metalcore.matmul_ggml(x[:, :5], blocks, "q4_0"), "blocks must be those of"),
        (lambda: metalcore.matmul_ggml(x, blocks[0], "q4_0"), "blocks must be those of"),
        (
            lambda: metalcore.matmul_ggml(x, blocks, "q4_0", activation="int4"),
            "activation must be one of auto, int8, int16, float, got 'int4'",
        ),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match="matmul_ggml: ") as caught:
            call()
        assert str(caught.value).startswith(f"matmul_ggml: {message}")
    with pytest.raises(RuntimeError, match="tiles must be those of the weight"):
        metalcore.matmul_ggml(x, blocks, "q4_0", tiles=metalcore.pack_ggml(blocks[:5], "q4_0"))
