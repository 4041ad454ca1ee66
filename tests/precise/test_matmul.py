# SPDX-License-Identifier: MIT
"""Matrix products: `"matmul"` at each level, against exact fractions."""

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import precise
from metalcore.ops.precise import matmul as module
from tests.backends import FLOATS
from tests.precise.exactly import KINDS, nearest, same_bits, total_of_products, values


def _truth(A: Tensor, B: Tensor) -> list[list[float]]:
    return [[nearest(total_of_products(a, b), A.dtype) for b in B.T] for a in A]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_is_the_nearest_number(kind: str, dtype: torch.dtype) -> None:
    A, B = values(kind, 3, 60, dtype).view(4, 15), values("normal", 4, 45, dtype).view(15, 3)
    found = precise.matmul(A, B, level="exact")
    assert found.double().tolist() == _truth(A, B)
    # of some kinds, only dot products hold the range; where both do, they agree
    slices = module._by_slices(A, B)
    assert slices is None or same_bits(slices, module._by_dots(A, B))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_slices_are_taken_and_are_enough(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for spread in (0, 12, 30):
        powers = torch.randint(-spread, spread + 1, (6, 40), generator=generator)
        A = torch.ldexp(torch.randn(6, 40, generator=generator, dtype=torch.float64), powers)
        B = torch.randn(40, 3, generator=generator, dtype=torch.float64)
        A, B = (A / 2**spread if dtype == torch.float16 else A).to(dtype), B.to(dtype)
        found = module._by_slices(A, B)
        assert found is not None
        assert found.double().tolist() == _truth(A, B)


def test_ties_of_narrow_types_are_seen_by_what_is_left_over() -> None:
    # half way between two numbers, but for a little that float64 cannot hold beside it
    for dtype, digits in ((torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
        for sign in (-1.0, 1.0):
            tiny = sign * (2.0**-20 if dtype == torch.float16 else 2.0**-60)
            A = torch.tensor([[1.0, 2.0**-digits, tiny]], dtype=dtype)
            B = torch.tensor([[1.0], [1.0], [abs(tiny)]], dtype=dtype)
            found = precise.matmul(A, B, level="exact").item()
            assert found == (1.0 if sign < 0 else 1.0 + 2.0 ** (1 - digits))


def test_float32_slices_of_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = torch.randn(5, 30), torch.randn(30, 4)
    monkeypatch.setattr(module, "widest", lambda x: x.float())
    found = module._by_slices(A, B)
    assert found is not None
    assert found.double().tolist() == _truth(A, B)


def test_threads_batches_and_devices_do_not_change_a_bit() -> None:
    A, B = torch.randn(3, 20, 200), torch.randn(200, 10)
    first = precise.matmul(A, B, level="exact")
    assert first.shape == (3, 20, 10)
    before = torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert same_bits(precise.matmul(A, B, level="exact"), first)
    torch.set_num_threads(before)
    order = torch.randperm(200)
    assert same_bits(precise.matmul(A[..., order], B[order], level="exact"), first)
    with metalcore.simulate():
        assert same_bits(precise.matmul(A[0, :2], B[:, :2], level="exact"), first[0, :2, :2])


def test_the_other_levels() -> None:
    A, B = torch.randn(20, 300), torch.randn(300, 10)
    exact = precise.matmul(A, B, level="exact")
    for level in ("compensated", "float64"):
        found = precise.matmul(A, B, level=level)
        assert (found != exact).float().mean() < 0.02
        torch.testing.assert_close(found, exact, rtol=2e-7, atol=0)
    A, B = A.double(), B.double()
    assert same_bits(precise.matmul(A, B), precise.matmul(A, B, level="exact"))
    torch.testing.assert_close(precise.matmul(A, B, level="float64"), A @ B, rtol=0, atol=0)


def test_what_is_not_finite_and_what_is_empty() -> None:
    A, B = torch.randn(3, 5), torch.randn(5, 2)
    A[1, 2] = torch.inf
    found = precise.matmul(A, B, level="exact")
    assert found[1].isinf().all()
    assert found[[0, 2]].isfinite().all()
    assert precise.matmul(A[:0], B, level="exact").shape == (0, 2)
    assert not precise.matmul(A[:, :0], B[:0], level="exact").any()


def test_gradients() -> None:
    A = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    B = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    for level in ("exact", "float64"):
        assert torch.autograd.gradcheck(lambda a, b, k=level: precise.matmul(a, b, level=k), (A, B))


def test_compiles_without_graph_breaks() -> None:
    A, B = torch.randn(3, 5), torch.randn(5, 2)

    def product(A: Tensor, B: Tensor) -> Tensor:
        return precise.matmul(A, B, level="exact")

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(A, B), product(A, B))


def test_bad_shapes_are_named() -> None:
    message = r"matmul: A must have as many columns as B rows; got \[2, 3\] and \[4, 5\]"
    with pytest.raises(ValueError, match=message):
        precise.matmul(torch.ones(2, 3), torch.ones(4, 5))
