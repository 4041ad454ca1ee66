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
from tests.linalg.inputs import MATRICES

CASES = [
    # A shape, why
    ((9, 8, 8), "more matrices than lanes, four to a simdgroup"),
    ((3, 16, 11), "tall"),
    ((2, 3, 7), "wide"),
    ((2, 1, 5, 1), "one column, four dimensions"),
    ((1, 1), "one value"),
    ((0, 4, 3), "no matrices"),
    ((2, 0, 3), "no rows"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
def test_matches_reference(backend: Backend, size: tuple[int, ...], full: bool) -> None:
    for dtype in backend.dtypes:
        A = backend.randn(*size, dtype=dtype)
        over = 16 * max(size)
        # gradients depend on the gaps between values: they have tests of their own
        check_op(backend, "svd", (A, full), reduces_over=over, differentiable=False)
        if not full:
            check_op(backend, "svdvals", (A,), reduces_over=over, differentiable=False)


@pytest.mark.parametrize("size", [(9, 8, 8), (3, 16, 11), (9, 3, 7), (0, 4, 3), (2, 3, 0)])
def test_solutions(backend: Backend, size: tuple[int, ...]) -> None:
    *batch, m, n = size
    for dtype in backend.dtypes:
        # far from singular: the solution is as exact as the decomposition
        A = backend.randn(*size, dtype=dtype) + 9 * torch.eye(m, n, dtype=dtype).to(backend.device)
        B, rcond = backend.randn(*batch, m, 2, dtype=dtype), backend.randn(*batch, dtype=dtype) * 0
        check_op(backend, "svd_solve", (A, B, rcond), reduces_over=16 * 16, differentiable=False)


def test_more_rows_than_lanes(backend: Backend) -> None:
    A = backend.randn(2, 33, 9)
    check_op(backend, "svd", (A, True), reduces_over=33 * 16, differentiable=False)
    check_op(backend, "svdvals", (A.mT,), reduces_over=33 * 16, differentiable=False)


@pytest.mark.parametrize(
    ("size", "kernels"),
    [
        ((1, 17, 30), "svd_simdgroup_32_4_vectors"),
        ((1, 100, 7), "qr_threadgroup_7680_256_64 + svd_simdgroup_8_4_vectors"),
        ((1, 34, 50), "qr_threadgroup_7680_256_64 + svd_threadgroup_vectors"),
        ((1, 64, 64), "qr_threadgroup_7680_256_64 + svd_threadgroup_vectors"),
        ((1, 66, 65), "qr_scale_32 + qr_panel_32 + qr_finish + svd_begin + svd_pair_48 + svd_move"),
    ],
)
def test_larger_matrices_on_metal(size: tuple[int, int, int], kernels: str) -> None:
    A = torch.randn(size)
    with metalcore.simulate(), metalcore.trace() as t:
        U, S, V = metalcore.svd(A)
    assert t.records[0].variant.startswith(kernels)
    assert max(_flaws(A, U, S, V).values()) < 1
    assert error(S, torch.linalg.svdvals(A.double())) <= tolerance("svd", torch.float32, 50)


def _flaws(A: Tensor, U: Tensor, S: Tensor, V: Tensor) -> dict[str, float]:
    """Backward error and loss of orthogonality, in units of what the contract allows."""
    A, U, S, V = (x.cpu().double() for x in (A, U, S, V))
    k = S.shape[-1]
    norm = torch.linalg.matrix_norm(A).clamp_min(torch.finfo(torch.float64).tiny)
    off = torch.linalg.matrix_norm((U[..., :k] * S[..., None, :]) @ V[..., :k].mT - A)
    found = {"A - U S V^T": (off / norm).max().item()}
    for name, x in (("U", U), ("V", V)):
        gap = x.mT @ x - torch.eye(x.shape[-1], dtype=torch.float64)
        found[name] = torch.linalg.matrix_norm(gap).max().item()
    allowed = 1e-6 * math.sqrt(max(A.shape[-2:]))
    return {name: value / allowed for name, value in found.items()}


@pytest.mark.parametrize("name", MATRICES)
def test_hard_matrices(name: str) -> None:
    for m, n in ((5, 5), (19, 8), (33, 40)):
        A = torch.stack([MATRICES[name](m, n) for _ in range(3)]).float()
        for full in (False, True):
            U, S, V = metalcore.svd(A, full_matrices=full)
            flaws = _flaws(A, U, S, V)
            assert max(flaws.values()) < 1, flaws
            assert (S[..., :-1] >= S[..., 1:]).all()
        assert error(metalcore.svdvals(A), S) <= tolerance("svd", torch.float32, m * n)


@pytest.mark.parametrize("name", ["zeros", "rank 1", "repeated columns", "condition 1e8"])
@pytest.mark.parametrize(
    "size", [(6, 8), (32, 32), (34, 5), (35, 36)], ids=["8", "32", "tall", "threadgroup"]
)
def test_hard_matrices_on_metal(name: str, size: tuple[int, int]) -> None:
    A = torch.stack([MATRICES[name](*size) for _ in range(2)]).float()
    with metalcore.simulate():
        U, S, V = metalcore.svd(A, full_matrices=True)
    flaws = _flaws(A, U, S, V)
    assert max(flaws.values()) < 1, flaws


@pytest.mark.parametrize("size", [(100, 110), (150, 97)], ids=str)
def test_hard_matrices_in_blocks(size: tuple[int, int]) -> None:
    A = torch.stack([make(*size) for make in MATRICES.values()]).float()
    broken = torch.randn(1, *size).index_fill(2, torch.tensor(3), math.nan)
    with metalcore.simulate(checks="none"):
        *found, info = metalcore.svd(torch.cat([A, broken]), full_matrices=True, check=False)
        values = metalcore.svdvals(A)
    assert info.tolist() == [0] * len(A) + [-4]
    assert all(x[-1].isnan().all() for x in found)
    U, S, V = (x[:-1] for x in found)
    assert torch.equal(values, S)
    assert (S.diff() <= 0).all()
    for i, name in enumerate(MATRICES):
        assert max(_flaws(A[i], U[i], S[i], V[i]).values()) < 1, name


def test_float64_is_as_exact_as_it_can_be() -> None:
    A = torch.stack([MATRICES["condition 1e8"](40, 24) for _ in range(5)])
    flaws = _flaws(A, *metalcore.svd(A))
    assert max(flaws.values()) < 1e-8


@pytest.mark.parametrize(
    ("size", "variant"),
    [
        ((2, 8, 8), "interleaved"),
        ((8, 96, 96), "interleaved"),
        ((3, 3), "interleaved"),
        ((40, 40), "lapack"),
        ((2, 600, 20), "lapack"),
        ((600, 260), "gram"),
        ((260, 600), "gram"),
        ((1100, 260), "gram_float32"),
        ((256, 1024), "gram_float32"),
    ],
)
def test_the_trace_names_the_way(size: tuple[int, ...], variant: str) -> None:
    A = torch.randn(size)
    with metalcore.trace() as t:
        U, S, V, _ = torch.ops.metalcore.svd(A, False)
    assert t.records[0].variant == variant
    assert max(_flaws(A, U, S, V).values()) < 1.2
    assert error(metalcore.svdvals(A), S) <= tolerance("svd", torch.float32, max(size))


def test_a_gram_matrix_is_refused_where_it_would_cost_orthogonality() -> None:
    for condition in (1e6, 1e12):
        values = condition ** -torch.linspace(0, 1, 260, dtype=torch.float64)
        Q, P = (torch.linalg.qr(torch.randn(n, 260, dtype=torch.float64))[0] for n in (520, 260))
        A = (Q * values @ P.mT).float()
        with metalcore.trace() as t:
            U, S, V, _ = torch.ops.metalcore.svd(A, False)
        assert t.records[0].variant == "lapack"
        assert max(_flaws(A, U, S, V).values()) < 1.5


@pytest.mark.parametrize(
    ("spectrum", "scale", "variant"),
    [
        (torch.linspace(1, 0.35, 256), 1.0, "gram_float32"),
        (torch.linspace(1, 0.25, 256), 1.0, "gram"),
        (torch.ones(256), 1.0, "gram_float32_lapack"),
        (torch.cat([torch.ones(128), torch.full([128], 0.6)]), 1e6, "gram_float32"),
        # float32 has no squares of these
        (torch.linspace(1, 0.3, 256), 1e25, "gram"),
        (torch.linspace(1, 0.3, 256), 1e-25, "gram"),
        # which the mean and the variance do not show
        (torch.cat([torch.ones(255), torch.tensor([1e-2])]), 1.0, "gram"),
        (torch.cat([torch.ones(255), torch.zeros(1)]), 1.0, "lapack"),
    ],
)
def test_a_gram_matrix_in_float32_is_for_conditions_near_one(
    spectrum: Tensor, scale: float, variant: str
) -> None:
    Q, P = (torch.linalg.qr(torch.randn(n, 256, dtype=torch.float64))[0] for n in (1100, 256))
    A = (Q * (scale * spectrum.double()) @ P.mT).float()
    with metalcore.trace() as t:
        U, S, V, _ = torch.ops.metalcore.svd(A, False)
    assert t.records[0].variant == variant
    assert (S.diff() <= 0).all()
    assert max(_flaws(A, U, S, V).values()) < 1.5


@pytest.mark.parametrize("n", [128, 131, 195, 260])
def test_close_singular_values_keep_their_vectors(n: int) -> None:
    """Runs of them whose vectors are to be made orthogonal, and equal ones, which go to LAPACK."""
    line = torch.linspace(1, 0.1, n, dtype=torch.float64)
    half = n // 2
    for spectrum in (
        line,
        torch.logspace(0, -4.5, n, dtype=torch.float64),
        torch.cat([line[:half], 0.2 + 1e-9 * line[half:]]),
        torch.cat([line[:half], 0.2 + 1e-13 * line[half:]]),
        line.round(decimals=1),
        torch.ones_like(line),
    ):
        Q, P = (torch.linalg.qr(torch.randn(m, n, dtype=torch.float64))[0] for m in (2 * n, n))
        A = (Q * spectrum @ P.mT).float()
        with metalcore.trace() as t:
            U, S, V, _ = torch.ops.metalcore.svd(A, False)
        equal = "_lapack" if spectrum[0] == spectrum[-1] else ""
        assert t.records[0].variant == "gram" + equal
        assert max(_flaws(A, U, S, V).values()) < 1


def test_gradients() -> None:
    check_registration("svd", (torch.randn(2, 4, 3), False))
    check_registration("svdvals", (torch.randn(2, 3, 4),))
    check_registration("svd_solve", (torch.randn(2, 4, 3), torch.randn(2, 4, 1), torch.zeros(2)))


@pytest.mark.parametrize("size", [(5, 3), (3, 5), (4, 4)])
def test_gradients_of_what_does_not_depend_on_signs(size: tuple[int, int]) -> None:
    def parts(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        U, S, V, _ = Op.all["svd"](A, False)
        return U @ V.mT, U * S.sqrt()[..., None, :] @ U.mT, V * S.exp()[..., None, :] @ V.mT

    A = torch.randn(2, *size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(parts, A)
    assert torch.autograd.gradgradcheck(parts, A)


def test_full_matrices_ignore_the_gradient_of_the_columns_that_they_add() -> None:
    A = torch.randn(3, 5, 3, dtype=torch.float64, requires_grad=True)
    U, S, V = metalcore.svd(A, full_matrices=True)
    (found,) = torch.autograd.grad((U[..., :3] * S[..., None, :] @ V.mT).sum() + U.sum() * 0, A)
    torch.testing.assert_close(found, torch.ones_like(A))


def test_values_alone_have_the_gradient_of_torch() -> None:
    A = torch.randn(3, 5, 4, requires_grad=True)
    (found,) = torch.autograd.grad(metalcore.svdvals(A).square().sum(), A)
    torch.testing.assert_close(found, 2 * A.detach())


def test_without_vectors() -> None:
    A = torch.randn(3, 4, 5)
    U, S, V = metalcore.svd(A, compute_uv=False)
    assert U is None
    assert V is None
    torch.testing.assert_close(S, torch.linalg.svdvals(A))


@pytest.mark.parametrize("name", MATRICES)
def test_values_of_one_large_matrix(name: str) -> None:
    for m, n in ((64, 64), (70, 200), (300, 129)):
        A = MATRICES[name](m, n).float()
        with metalcore.trace() as t:
            S = metalcore.svdvals(A)
        assert [r.variant for r in t.records] == ["gram"]
        truth = torch.linalg.svdvals(A.double())
        assert (S.diff() <= 0).all()
        assert (S - truth).abs().amax() <= tolerance("svd", torch.float32, n) * truth[0]
        assert metalcore.matrix_rank(A) == torch.linalg.matrix_rank(A)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", [(3, 4, 4), (2, 270, 4), (40, 40), (70, 70)])
def test_input_that_is_not_finite(bad: float, size: tuple[int, ...]) -> None:
    A = torch.randn(size)
    A.view(-1, *size[-2:])[-1, 0, 1] = bad
    # as torch: inf gives NaN
    for function in (metalcore.svd, metalcore.svdvals) if math.isnan(bad) else ():
        with pytest.raises(LinAlgError, match=rf"^{function.__name__}: .*Look for NaN and inf"):
            function(A)
    U, S, V, info = metalcore.svd(A, check=False)
    assert info.flatten().tolist() == [0] * (info.numel() - 1) + [-4]
    values, info = metalcore.svdvals(A, check=False)
    assert info.flatten().tolist() == [0] * (info.numel() - 1) + [-4]
    for x in (U, S, V, values):
        assert x.flatten()[-1].isnan()
    for matrix in range(len(A) - 1 if A.dim() == 3 else 0):
        assert max(_flaws(A[matrix], U[matrix], S[matrix], V[matrix]).values()) < 1.2


def test_input_that_is_not_finite_on_metal() -> None:
    for size in ((3, 4, 4), (2, 34, 3), (2, 33, 33)):
        A = torch.randn(size)
        A[1, 0, 1] = math.nan
        with metalcore.simulate():
            U, S, V, info = metalcore.svd(A, check=False)
        assert info.tolist()[:2] == [0, -4]
        assert U[1].isnan().all()
        assert S[1].isnan().all()
        assert V[1].isnan().all()
        assert max(_flaws(A[0], U[0], S[0], V[0]).values()) < 1


def test_errors_name_what_came() -> None:
    with pytest.raises(ValueError, match=r"^svd: A must be matrices \[..., M, N\], got \[3\]"):
        metalcore.svd(torch.randn(3))
    with pytest.raises(TypeError, match=r"^svdvals: A must be float32"):
        metalcore.svdvals(torch.ones(3, 3, dtype=torch.int64))


def test_compiles_and_maps() -> None:
    A = torch.randn(3, 5, 4)
    compiled = torch.compile(lambda A: metalcore.svdvals(A), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(A), torch.linalg.svdvals(A))
    mapped = torch.func.vmap(lambda a: metalcore.svd(a)[1])(A)
    torch.testing.assert_close(mapped, torch.linalg.svdvals(A))
