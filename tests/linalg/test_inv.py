# SPDX-License-Identifier: MIT
import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._check import LinAlgError
from tests.backends import Backend


def test_every_size_and_dtype(backend: Backend) -> None:
    for size in (
        (9, 5, 5),
        (2, 3, 17, 17),
        (1, 40, 40),
        (20, 20),
        (1, 70, 70),
        (4, 4),
        (0, 3, 3),
        (2, 0, 0),
    ):
        n = size[-1]
        for dtype in backend.dtypes:
            A = backend.randn(*size) / (1 + n**0.5) + 2 * torch.eye(n, device=backend.device)
            A = A.roll(n // 2, -2).to(dtype)
            with metalcore.trace() as t:
                X = metalcore.inv(A)
            assert {r.path.split(":")[0] for r in t.records} == {backend.path}
            assert X.dtype == dtype
            truth = torch.linalg.inv(A.cpu().double())
            assert error(X, truth) <= tolerance("solve", dtype, n)


def test_large_matrices_and_gradients_are_those_of_torch() -> None:
    for size in ((20, 4, 4), (150, 150)):
        A = torch.randn(size, dtype=torch.float64, requires_grad=True)
        (ours,) = torch.autograd.grad(metalcore.inv(A).square().sum(), A)
        (theirs,) = torch.autograd.grad(torch.linalg.inv(A).square().sum(), A)
        # two float64 algorithms for one problem differ by its condition
        assert error(ours, theirs) <= tolerance("solve", torch.float32, size[-1])
    small = (torch.randn(2, 3, 3, dtype=torch.float64) + 2 * torch.eye(3)).requires_grad_()
    assert torch.autograd.gradcheck(metalcore.inv, small)
    assert torch.autograd.gradgradcheck(metalcore.inv, small)


def test_singular_matrices_are_named(backend: Backend) -> None:
    A = backend.randn(9, 6, 6)
    A[3, :, 2] = 0.0
    with pytest.raises(LinAlgError) as caught:
        metalcore.inv(A)
    assert str(caught.value) == (
        "inv: (Batch element 3): The diagonal element 3 is zero, the inversion could not be "
        "completed because the input matrix is singular. Use metalcore.pinv for singular matrices."
    )
    X, info = metalcore.inv(A, check=False)
    assert info.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0]
    assert X[4].isfinite().all()
    with pytest.raises(LinAlgError, match=r"^inv: .*singular\. Use metalcore.pinv"):
        metalcore.inv(torch.zeros(150, 150, device=backend.device))


def test_compile_and_vmap() -> None:
    A = torch.randn(6, 3, 5, 5)
    compiled = torch.compile(metalcore.inv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A), metalcore.inv(A))
    torch.testing.assert_close(torch.func.vmap(metalcore.inv)(A), metalcore.inv(A))


def test_bad_input_is_named() -> None:
    assert metalcore.inv.__name__ == "inv"
    with pytest.raises(ValueError, match=r"^inv: A must be square .*, N, N\], got \[3, 4\]$"):
        metalcore.inv(torch.randn(3, 4))
