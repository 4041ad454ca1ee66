# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration

CASES = [
    # shape, why
    ((5, 7, 7), "several matrices per simdgroup"),
    ((3, 3, 12, 12), "two batch dimensions"),
    ((2, 20, 20), "one matrix per simdgroup"),
    ((2, 40, 40), "one matrix per threadgroup"),
    ((1, 70, 70), "panels"),
    ((4, 1, 1), "one value"),
    ((6, 6), "one matrix, without a batch"),
    ((0, 6, 6), "no matrices"),
    ((3, 0, 0), "no rows: the product of nothing is one"),
]


def _matrices(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Determinants of about one, with an odd number of swaps for some sizes."""
    n = size[-1]
    A = backend.randn(*size) / (2 + 2 * n**0.5) + torch.eye(n, device=backend.device)
    return A.roll(n // 2, -2).to(dtype)


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        check_op(
            backend, "det", (_matrices(backend, *size, dtype=dtype),), reduces_over=size[-1] ** 2
        )


def test_public_functions_follow_torch(backend: Backend) -> None:
    for size in ((20, 5, 5), (1, 66, 66)):
        A = backend.randn(*size)
        exact = A.cpu().double()
        sign, logabsdet = metalcore.slogdet(A)
        assert torch.equal(sign.cpu().double(), torch.linalg.slogdet(exact).sign)
        assert (logabsdet.cpu() - torch.linalg.slogdet(exact).logabsdet).abs().max() < 1e-4
        if size[-1] < 20:
            assert error(metalcore.det(A), torch.linalg.det(exact)) < 1e-4


def test_a_singular_matrix_has_determinant_zero(backend: Backend) -> None:
    A = _matrices(backend, 9, 6, 6)
    A[4, :, 2] = 0.0
    A[5] = float("nan")
    assert metalcore.det(A)[4] == 0
    sign, logabsdet = metalcore.slogdet(A)
    assert sign[4] == 0
    assert logabsdet[4] == -torch.inf
    for x in (metalcore.det(A), sign, logabsdet):
        assert x.isnan().nonzero().tolist() == [[5]]


def test_no_product_on_the_way_leaves_the_range(backend: Backend) -> None:
    A = torch.diag(torch.tensor([1e30, 1e30, 1e-30, 1e-30, 3.0])).expand(9, 5, 5)
    assert error(metalcore.det(A.to(backend.device)), torch.full((9,), 3.0)) < 1e-5
    _, logabsdet = metalcore.slogdet(1e-20 * torch.eye(40, device=backend.device).expand(5, 40, 40))
    truth = torch.linalg.slogdet(1e-20 * torch.eye(40).double()).logabsdet.expand(5)
    assert error(logabsdet, truth) <= tolerance("det", torch.float32, 40)


def test_gradient_of_singular_matrices() -> None:
    A = torch.randn(9, 4, 4, dtype=torch.float64)
    A[3, 2] = A[3, 0] * 2
    A[4, :, 1] = 0
    A[5] = 0
    A.requires_grad_()
    assert torch.autograd.gradcheck(metalcore.det, A)
    (ours,) = torch.autograd.grad(metalcore.det(A).sum(), A)
    (theirs,) = torch.autograd.grad(torch.linalg.det(A).sum(), A, create_graph=True)
    torch.testing.assert_close(ours, theirs)


def test_registration() -> None:
    check_registration("det", (_matrices(Backend("cpu"), 2, 3, 3),))


def test_sign_has_no_gradient() -> None:
    for n in (3, 200):
        sign, logabsdet = metalcore.slogdet(torch.randn(n, n, requires_grad=True))
        assert not sign.requires_grad
        assert logabsdet.requires_grad


def test_paths_of_the_cpu_kernel() -> None:
    device, found = Backend("cpu"), []
    for size in ((20, 16, 16), (3, 140, 140), (70, 70)):
        with metalcore.trace() as t:
            torch.ops.metalcore.det(device.randn(*size))
        found.append(t.records[0].variant)
    assert found == ["interleaved", "lapack", "lapack"]


def test_compile_and_vmap() -> None:
    A = torch.randn(6, 3, 5, 5)
    for function in (metalcore.det, lambda A: metalcore.slogdet(A)[1]):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(A), function(A))
        torch.testing.assert_close(torch.func.vmap(function)(A), function(A))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"^det: A must be square .*, N, N\], got \[3, 4\]$"):
        metalcore.det(torch.randn(3, 4))
    with pytest.raises(TypeError, match=r"^slogdet: A must be float32, .* got int64"):
        metalcore.slogdet(torch.zeros(3, 3, dtype=torch.int64))
