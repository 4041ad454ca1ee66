# SPDX-License-Identifier: MIT
import math

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._check import LinAlgError
from metalcore._op import Op
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.linalg.inputs import SYMMETRIC, orthogonal

CASES = [
    # batch, n, why
    ((5,), 5, "several matrices per simdgroup, odd"),
    ((3, 3), 2, "two batch dimensions, the smallest rotation"),
    ((3,), 16, "two matrices per simdgroup, one lane idle"),
    ((1,), 31, "one matrix per simdgroup"),
    ((1,), 35, "one matrix per threadgroup"),
    ((9,), 12, "a group of lanes that is not full"),
    ((), 7, "one matrix, without a batch"),
    ((4,), 1, "one row"),
    ((0,), 6, "no matrices"),
    ((3,), 0, "no rows"),
]


def _separate(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Eigenvalues that are half apart at least: gradients of eigenvectors divide by this."""
    n = size[-1]
    Q = torch.linalg.qr(torch.randn(*size))[0]
    A = Q * (torch.arange(n) - n / 3 + torch.rand(*size[:-2], 1, n) / 2) @ Q.mT
    return ((A + A.mT) / 2).to(backend.device, dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[tuple[int, ...], int, str]) -> None:
    batch, n, _ = case
    for i, dtype in enumerate(backend.dtypes):
        A = _separate(backend, *batch, n, n, dtype=dtype)
        check_op(backend, "eigh", (A, i % 2 == 1), reduces_over=n)
        check_op(backend, "eigvalsh", (A, i % 2 == 0), reduces_over=n)


def test_a_matrix_in_blocks(backend: Backend) -> None:
    # nearly diagonal, which takes few sweeps
    A = torch.diag(torch.linspace(-1, 1, 70)) + backend.randn(1, 70, 70).cpu() / 500
    A = A.to(backend.device)
    A[0, 0, 69] = 100  # in the triangle that is not read
    check_decomposed(A, *metalcore.eigh(A))
    poisoned = torch.full((1, 65, 65), math.inf, dtype=torch.bfloat16, device=backend.device)
    values, info = metalcore.eigvalsh(poisoned, "U", check=False)
    assert values.dtype == torch.bfloat16
    assert values.isnan().all()
    assert info.tolist() == [65]


def check_decomposed(A: Tensor, L: Tensor, Q: Tensor) -> None:
    """||A Q - Q L|| / ||A|| and ||Q^T Q - I||, of matrices of any scale."""
    n = A.shape[-1]
    allowed = (1e-6 if A.dtype == torch.float32 else 4e-15) * math.sqrt(n)
    lower = A.cpu().double().tril()
    scale = lower.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    A = (lower + lower.tril(-1).mT) / scale
    L, Q = L.cpu().double() / scale[..., 0], Q.cpu().double()
    norm = torch.linalg.matrix_norm(A).clamp(min=0.5)
    assert (torch.linalg.matrix_norm(A @ Q - Q * L[..., None, :]) <= allowed * norm).all()
    assert (torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(n)) <= allowed).all()
    assert (L.diff() >= 0).all()


@pytest.mark.parametrize("name", SYMMETRIC)
def test_hard_matrices(backend: Backend, name: str) -> None:
    """Also eigenvalues of both signs, equal and clustered ones, in one group with others."""
    for dtype in backend.dtypes[:2] if backend.name == "cpu" else backend.dtypes[:1]:
        for n in (2, 5, 16, *((33, 64) if backend.name == "cpu" else ())):
            A = torch.stack([SYMMETRIC[name](n), SYMMETRIC["random"](n), SYMMETRIC[name](n)])
            A = A.to(backend.device, dtype)
            L, Q = metalcore.eigh(A)
            check_decomposed(A, L, Q)
            values = metalcore.eigvalsh(A)
            scale = L.abs().amax(-1, keepdim=True)
            assert ((values - L).abs() <= 4 * n * torch.finfo(dtype).eps * scale).all()


def test_opposite_eigenvalues_keep_their_vectors(backend: Backend) -> None:
    """A^2 is 4 I here: what a method that only looks at A^2 cannot tell apart."""
    n = 24
    signs = torch.tensor([2.0, -2.0]).repeat(n // 2).double()
    Q = orthogonal(n)
    A = (Q * signs @ Q.mT).to(backend.device, torch.float32)[None]
    L, Q = metalcore.eigh(A)
    torch.testing.assert_close(L.cpu(), signs.sort()[0].float()[None])
    check_decomposed(A, L, Q)


def test_only_one_triangle_is_read(backend: Backend) -> None:
    for n in (6, 20, 34):
        A = _separate(backend, 2, n, n)
        whole, _ = metalcore.eigh(A)
        for uplo, other in (("L", torch.triu), ("U", torch.tril)):
            half = A.masked_fill(other(torch.ones_like(A), 1 if uplo == "L" else -1) > 0, torch.nan)
            torch.testing.assert_close(metalcore.eigh(half, uplo)[0], whole)
            torch.testing.assert_close(metalcore.eigvalsh(half, UPLO=uplo.lower()), whole)


def test_a_poisoned_matrix_is_named_and_spoils_no_other(backend: Backend) -> None:
    for n, poison in ((4, math.nan), (20, math.inf), (34, math.nan)):
        A = _separate(backend, 6, n, n)
        A[4, n - 1, 1] = poison
        for solve in (metalcore.eigh, metalcore.eigvalsh):
            with pytest.raises(LinAlgError, match=r"\(Batch element 4\): .* Look for NaN"):
                solve(A)
        L, Q, info = metalcore.eigh(A, check=False)
        values, info_of_values = metalcore.eigvalsh(A, check=False)
        assert info.tolist() == info_of_values.tolist() == [0, 0, 0, 0, n, 0]
        assert L[4].isnan().all()
        assert Q[4].isnan().all()
        assert values[4].isnan().all()
        good = info == 0
        check_decomposed(A[good], L[good], Q[good])


def test_a_single_matrix_with_a_nan_raises() -> None:
    A = torch.full((30, 30), math.nan)
    for solve in (metalcore.eigh, metalcore.eigvalsh):
        with pytest.raises(LinAlgError, match=f"^{solve.__name__}: .*Look for NaN and inf in A"):
            solve(A)
        with metalcore.trace(), pytest.raises(LinAlgError, match=f"^{solve.__name__}: "):
            solve(A)
        *_, info = getattr(torch.ops.metalcore, solve.__name__)(A, False)
        assert info > 0


def test_registration() -> None:
    A = _separate(Backend("cpu"), 2, 4, 4)
    check_registration("eigh", (A, False), differentiable=False)
    check_registration("eigvalsh", (A, True), differentiable=False)

    def parts(a: Tensor) -> tuple[Tensor, ...]:
        L, Q = metalcore.eigh(a + a.mT)
        return L, Q * L.exp()[..., None, :] @ Q.mT, Op.all["eigvalsh"](a + a.mT, True)[0]

    # symmetric whatever is changed in it, as only one triangle is read
    a = (A / 2).double().requires_grad_()
    assert torch.autograd.gradcheck(parts, a)
    assert torch.autograd.gradgradcheck(parts, a)


def test_gradients_of_values_need_no_vectors(backend: Backend) -> None:
    """Where eigenvalues are equal, those of eigenvectors are not defined, but these are."""
    A = torch.eye(6, device=backend.device).expand(3, 6, 6).clone().requires_grad_()
    L = metalcore.eigvalsh(A)
    assert isinstance(L, Tensor)
    L.sum().backward()
    torch.testing.assert_close(A.grad, torch.eye(6).expand(3, 6, 6).to(backend.device))


def test_compiles_and_maps(device: Backend) -> None:
    A = _separate(device, 4, 3, 6, 6)
    whole, _ = metalcore.eigh(A)
    compiled = torch.compile(lambda a: metalcore.eigh(a)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(A), whole)
    torch.testing.assert_close(torch.vmap(lambda a: metalcore.eigvalsh(a))(A), whole)
    gradients = torch.vmap(torch.func.grad(lambda a: metalcore.eigh(a)[0].square().sum()))(A)
    assert error(gradients, 2 * A) <= tolerance("eigh", torch.float32, 6)


def test_paths() -> None:
    def variants(n: int, *batch: int) -> list[str]:
        with metalcore.trace() as t:
            torch.ops.metalcore.eigh(torch.eye(n).expand(*batch, n, n), False)
            torch.ops.metalcore.eigvalsh(torch.eye(n).expand(*batch, n, n), False)
        return [r.variant for r in t.records]

    assert variants(20, 9) == variants(5, 3) == ["interleaved"] * 2
    assert variants(5) == variants(5, 2) == ["lapack"] * 2
    assert variants(96) == variants(520, 3) == ["lapack", "alone"]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_values_of_one_large_matrix(name: str) -> None:
    """Sizes below, at and above those of a panel, a tile and a part of a product."""
    for dtype in (torch.float32, torch.float64):
        for n in (96, 99, 130, 257, 300):
            A = SYMMETRIC[name](n).to(dtype)
            with metalcore.trace() as t:
                values, _ = torch.ops.metalcore.eigvalsh(A, False)
            assert [r.variant for r in t.records] == ["alone"]
            # in float64, of a scaled matrix: LAPACK loses what it squares
            scale = torch.finfo(dtype).tiny if not A.any() else A.abs().amax().item()
            truth = torch.linalg.eigvalsh(A.double() / scale) * scale
            size = truth.abs().amax().item()
            assert (values.diff() >= 0).all()
            assert (values - truth).abs().amax() <= tolerance("eigh", dtype, n) * size
            assert torch.equal(metalcore.eigvalsh(A.tril().mT, "U"), values)


def test_values_of_one_large_matrix_on_any_number_of_threads() -> None:
    A = _separate(Backend("cpu"), 2, 280, 280)
    A[1, 279, 3] = math.inf
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(metalcore.eigvalsh(A, check=False))
    torch.set_num_threads(before)
    for values, info in results:
        assert torch.equal(values[0], results[0][0][0])
        assert values[1].isnan().all()
        assert info.tolist() == [0, 280]


def test_lapack_gives_rows_in_order() -> None:
    A = _separate(Backend("cpu"), 40, 40)
    L, Q, _ = torch.ops.metalcore.eigh(A, False)
    check_decomposed(A, L, Q)
    assert Q.is_contiguous()


A4 = torch.eye(4)
BAD = [
    (
        lambda: metalcore.eigh(torch.randn(3, 4)),
        ValueError,
        "eigh: A must be square matrices [..., N, N], got [3, 4]",
    ),
    (
        lambda: metalcore.eigvalsh(torch.randn(4)),
        ValueError,
        "eigvalsh: A must be square matrices [..., N, N], got [4]",
    ),
    (
        lambda: metalcore.eigh(A4.long()),
        TypeError,
        "eigh: A must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with A.float()",
    ),
    (
        lambda: metalcore.eigvalsh(A4, "X"),
        ValueError,
        'eigvalsh: UPLO must be "L" or "U", got \'X\'',
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
