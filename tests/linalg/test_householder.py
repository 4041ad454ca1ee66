# SPDX-License-Identifier: MIT
"""householder_vector and apply_householder, the ops of "householder"."""

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration


@pytest.mark.parametrize("size", [(5, 9), (2, 3, 40), (33,), (4, 1), (0, 6)], ids=str)
def test_vector_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x = backend.randn(*size, dtype=dtype)
        check_op(backend, "householder_vector", (x,), reduces_over=size[-1])


@pytest.mark.parametrize(
    "size", [(5, 9, 7), (2, 3, 6, 40), (33, 35), (0, 4, 3), (3, 0, 4)], ids=str
)
def test_apply_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    *batch, m, n = size
    for left in (True, False):
        for dtype in backend.dtypes:
            A, v = backend.randn(*size, dtype=dtype), backend.randn(*batch, m if left else n)
            args = (A, v.to(dtype), backend.randn(*batch, dtype=dtype), left)
            # the gradient of tau is a sum over all of A
            check_op(
                backend,
                "apply_householder",
                args,
                reduces_over=max(m, n),
                gradient_reduces_over=m * n,
            )


def test_columns_beyond_one_block() -> None:
    A, v, tau = torch.randn(2, 3, 1100), torch.randn(2, 3), torch.randn(2)
    check_op(Backend("cpu"), "apply_householder", (A, v, tau, True), reduces_over=3)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30, 1e37])
def test_a_vector_of_any_scale_is_reflected_onto_its_axis(backend: Backend, scale: float) -> None:
    x = (backend.randn(4, 37).double() * scale).float()
    v, tau = metalcore.householder_vector(x)
    y = metalcore.apply_householder(x[..., None], v, tau)[..., 0].cpu().double() / scale
    exact = x.cpu().double() / scale
    assert error(v[:, 0].cpu(), torch.ones(4)) == 0
    expected = torch.zeros(4, 37, dtype=torch.float64)
    expected[:, 0] = -exact.norm(dim=-1).copysign(exact[:, 0])
    assert error(y, expected) <= tolerance("householder_vector", torch.float32, 37)


def test_multiples_of_the_axis_stay(backend: Backend) -> None:
    x = torch.zeros(3, 5, device=backend.device)
    x[1, 0], x[2, 0] = 2.0, -3.0
    v, tau = metalcore.householder_vector(x)
    assert torch.equal(v.cpu(), torch.eye(5)[:1].expand(3, 5))
    assert torch.equal(tau.cpu(), torch.zeros(3))


def test_a_nan_gives_nan(backend: Backend) -> None:
    x = backend.randn(2, 5)
    x[1, 3] = float("nan")
    v, tau = metalcore.householder_vector(x)
    assert tau[1].isnan()
    assert v[1, 1:].isnan().all()
    assert v[0].isfinite().all()


def test_batches_broadcast(backend: Backend) -> None:
    A, v, tau = backend.randn(4, 1, 5, 6), backend.randn(3, 6), backend.randn(3)
    Y = metalcore.apply_householder(A, v, tau, side="right")
    a, u, t = (x.cpu().double() for x in (A, v, tau))
    H = torch.eye(6) - t[:, None, None] * u[:, :, None] * u[:, None, :]
    assert error(Y, a @ H) <= tolerance("apply_householder", torch.float32, 6)


def test_derivatives_and_registration() -> None:
    check_registration("householder_vector", (torch.randn(2, 4),))
    check_registration(
        "apply_householder", (torch.randn(3, 2), torch.randn(3), torch.rand(()), True)
    )


def test_compiles_and_maps(device: Backend) -> None:
    def reflect(A: Tensor) -> Tensor:
        return metalcore.apply_householder(A, *metalcore.householder_vector(A[..., 0]))

    A = device.randn(3, 4, 5)
    compiled = torch.compile(reflect, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A), reflect(A), rtol=0, atol=0)
    torch.testing.assert_close(torch.func.vmap(reflect)(A), reflect(A))


A34 = torch.randn(3, 4)
BAD = [
    (
        lambda: metalcore.householder_vector(torch.randn(3, 0)),
        "householder_vector: x must not be empty, got [3, 0]",
    ),
    (
        lambda: metalcore.apply_householder(A34, torch.randn(4), torch.rand(())),
        "apply_householder: v must have 3 elements for the left side of A [3, 4], got [4]",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[b[1][:50] for b in BAD])
def test_bad_input_is_named(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="householder") as caught:
        call()
    assert str(caught.value) == message
