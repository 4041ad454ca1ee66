# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.linalg.inputs import POSITIVE

CASES = [
    # batch, n, why
    ((5,), 5, "several matrices per simdgroup"),
    ((2, 9), 8, "two batch dimensions, a group of lanes that is not full"),
    ((3,), 13, "two matrices per simdgroup"),
    ((2,), 31, "one matrix per simdgroup"),
    ((3,), 47, "one matrix per threadgroup"),
    ((), 33, "one matrix"),
    ((2,), 35, "LAPACK"),
    ((3,), 70, "two blocks"),
    ((4,), 1, "one number"),
    ((0,), 6, "no matrices"),
    ((3,), 0, "no numbers"),
]


def _positive(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    n = size[-1]
    x = backend.randn(*size, n)
    return (x @ x.mT / max(1, n) + torch.eye(n, device=backend.device)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[tuple[int, ...], int, str]) -> None:
    batch, n, _ = case
    for i, dtype in enumerate(backend.dtypes):
        A = _positive(backend, *batch, n, dtype=dtype)
        check_op(backend, "cholesky", (A, i % 2 == 1), reduces_over=n)


@pytest.mark.parametrize("name", POSITIVE)
def test_residuals_of_hard_matrices(backend: Backend, name: str) -> None:
    for n in (7, 30, 65):
        exact = POSITIVE[name](n)
        A = torch.stack([exact, exact, exact]).float().to(backend.device)
        L = metalcore.cholesky(A).cpu().double()
        size = A.cpu().double().diagonal(dim1=-2, dim2=-1).sqrt()
        # relative to the diagonal: graded matrices too
        off = (L @ L.mT - A.cpu().double()) / (size[..., :, None] * size[..., None, :])
        assert off.tril().abs().max() <= tolerance("cholesky", torch.float32, n)


def test_only_the_named_triangle_is_read(backend: Backend) -> None:
    for n in (6, 40, 70):
        A = _positive(backend, 3, n)
        junk = torch.full_like(A, float("nan"))
        L = metalcore.cholesky(A)
        torch.testing.assert_close(metalcore.cholesky(A.tril() + junk.triu(1)), L)
        U = metalcore.cholesky(A.triu() + junk.tril(-1), upper=True)
        torch.testing.assert_close(U, L.mT)
        assert torch.equal(L, L.tril())


def test_not_positive_definite(backend: Backend) -> None:
    for n, minor in ((7, 1), (9, 4), (31, 20), (47, 47), (70, 30), (70, 69)):
        A = _positive(backend, 3, n)
        A[1, minor - 1, minor - 1] = -1.0
        L, info = metalcore.cholesky(A, check=False)
        assert info.dtype == torch.int32
        assert info.tolist() == [0, minor, 0]
        # what comes before the minor is its factor
        known = torch.linalg.cholesky(A[1, : minor - 1, : minor - 1].cpu())
        torch.testing.assert_close(L[1, : minor - 1, : minor - 1].cpu(), known)
        with pytest.raises(torch.linalg.LinAlgError) as caught:
            metalcore.cholesky(A)
        assert str(caught.value) == (
            "cholesky: (Batch element 1): The factorization could not be completed because the "
            f"input is not positive-definite (the leading minor of order {minor} is not "
            "positive-definite). Add a multiple of the identity to A."
        )


def test_one_matrix_is_named_without_a_batch() -> None:
    for n in (3, 30):
        with pytest.raises(
            torch.linalg.LinAlgError, match=r"^cholesky: The factorization .* order 1"
        ):
            metalcore.cholesky(-torch.eye(n))


def test_pivots_that_are_no_positive_numbers(backend: Backend) -> None:
    for value in (0.0, float("nan")):
        A = _positive(backend, 3, 6)
        A[1, 3, 3] = value
        _, info = metalcore.cholesky(A, check=False)
        assert info.tolist() == [0, 4, 0]
    A[1, 3, 3] = float("inf")
    L, _ = metalcore.cholesky(A, check=False)
    assert not L[1].isfinite().all()


def test_paths() -> None:
    found = []
    for batch, n in ((20, 16), (3, 200), (2, 40), (2, 8), (3, 300)):
        A = _positive(Backend("cpu"), batch, n)
        with metalcore.trace() as t:
            torch.ops.metalcore.cholesky(A, False)
        found.append(t.records[0].variant)
    assert found == ["interleaved", "interleaved", "lapack", "interleaved", "lapack"]


def test_results_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    A = _positive(Backend("cpu"), 300, 24)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(metalcore.cholesky(A))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_derivatives_and_registration() -> None:
    # symmetric, because the gradient is taken of that
    check_registration("cholesky", (_positive(Backend("cpu"), 2, 2), False), differentiable=False)

    def factor(x: Tensor, upper: bool = True) -> Tensor:
        return Op.all["cholesky"](x @ x.mT + torch.eye(2), upper)[0]  # type: ignore[no-any-return]

    x = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    with metalcore.trace() as t:
        assert torch.autograd.gradcheck(lambda x: factor(x, False), x)
        assert torch.autograd.gradcheck(factor, x)
        assert torch.autograd.gradgradcheck(factor, x)
    assert {path.split(":")[0] for path in t.paths["cholesky"]} == {"cpu"}


def test_compiles_and_maps(device: Backend) -> None:
    A = _positive(device, 3, 7).requires_grad_()
    compiled = torch.compile(metalcore.cholesky, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A), metalcore.cholesky(A))
    (dA,) = torch.autograd.grad(compiled(A).square().sum(), A)
    (expected,) = torch.autograd.grad(torch.linalg.cholesky(A).square().sum(), A)
    torch.testing.assert_close(dA, expected)
    mapped = torch.func.vmap(metalcore.cholesky)(A)
    torch.testing.assert_close(mapped, metalcore.cholesky(A))


def test_single_matrices_are_those_of_torch() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        A = _positive(Backend("cpu"), 20, dtype=dtype)
        L = metalcore.cholesky(A)
        assert L.dtype == dtype
        assert error(L, torch.linalg.cholesky(A.double())) <= tolerance("cholesky", dtype, 20)


BAD = [
    (
        lambda: metalcore.cholesky(torch.randn(3, 4)),
        ValueError,
        "cholesky: A must be square matrices [..., N, N], got [3, 4]",
    ),
    (
        lambda: metalcore.cholesky(torch.randn(3)),
        ValueError,
        "cholesky: A must be square matrices [..., N, N], got [3]",
    ),
    (
        lambda: metalcore.cholesky(torch.eye(3).long()),
        TypeError,
        "cholesky: A must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with A.float()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
