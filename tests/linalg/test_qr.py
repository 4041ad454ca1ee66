# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend, lanes
from tests.check import check_op, check_registration
from tests.linalg.inputs import MATRICES

CASES = [
    # batch, m, n, why
    ((5,), 8, 8, "four matrices per simdgroup"),
    ((2, 3), 7, 5, "tall, odd, two batch dimensions"),
    ((9,), 5, 7, "wide, a group of lanes that is not full"),
    ((3,), 16, 13, "two matrices per simdgroup"),
    ((2,), 32, 32, "one matrix per simdgroup"),
    ((2,), 41, 12, "in threadgroup memory, tall"),
    ((2,), 12, 41, "in threadgroup memory, wide"),
    ((), 67, 33, "panels, without a batch"),
    ((4,), 1, 6, "one row"),
    ((4,), 6, 1, "one column"),
    ((0,), 6, 4, "no matrices"),
    ((3,), 0, 4, "no rows"),
    ((3,), 4, 0, "no columns"),
]


def _matrix(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Well-conditioned, so that Q and R are determined to working precision."""
    m, n = size[-2:]
    noise = backend.randn(*size) / max(1, m, n) ** 0.5
    return (noise + 3 * torch.eye(m, n, device=backend.device)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[tuple[int, ...], int, int, str]) -> None:
    batch, m, n, _ = case
    for i, dtype in enumerate(backend.dtypes):
        A = _matrix(backend, *batch, m, n, dtype=dtype)
        mode = ("reduced", "complete")[i % 2]
        differentiable = m > 0 and n > 0 and (mode == "reduced" or m <= n)
        check_op(backend, "qr", (A, mode), reduces_over=max(m, n), differentiable=differentiable)
    check_op(backend, "qr", (A, "r"), reduces_over=max(m, n), differentiable=False)


@pytest.mark.parametrize("shape", [(6, 8), (31, 17), (34, 20), (67, 33)], ids=str)
def test_hard_matrices(backend: Backend, shape: tuple[int, int]) -> None:
    m, n = shape
    A = torch.stack([make(m, n) for make in MATRICES.values()]).float().to(backend.device)
    Q, R = metalcore.qr(A)
    a, q, r = (x.cpu().double() for x in (A, Q, R))
    allowed = tolerance("qr", torch.float32, max(m, n)) / 2
    assert not r.tril(-1).any()
    for i, name in enumerate(MATRICES):
        assert error(q[i] @ r[i], a[i]) <= allowed, name
        assert error(q[i].mT @ q[i], torch.eye(q.shape[-1])) <= allowed, name


def test_columns_of_any_scale_keep_their_digits(backend: Backend) -> None:
    scale = torch.logspace(-30, 20, 12, dtype=torch.float64)
    for m in (12, 50):
        A = (_matrix(backend, 9, m, 12).cpu() * scale).float().to(backend.device)
        Q, R = metalcore.qr(A)
        product = Q.cpu().double() @ (R.cpu().double() / scale)
        truth = A.cpu().double() / scale
        assert error(product, truth) <= tolerance("qr", torch.float32, m)


def test_equals_torch_in_every_mode(backend: Backend) -> None:
    for m, n in ((12, 12), (20, 9), (9, 20)):
        A = _matrix(backend, 6, m, n)
        for mode in ("reduced", "complete", "r"):
            found = metalcore.qr(A, mode)
            expected = torch.linalg.qr(A.cpu().double(), mode)
            for x, y in zip(found, expected, strict=True):
                assert error(x, y) <= tolerance("qr", torch.float32, max(m, n))


def test_signs_of_columns_that_need_no_reflection(backend: Backend) -> None:
    A = torch.stack([torch.eye(5), -torch.eye(5), torch.randn(5, 5).triu()])
    Q, R = metalcore.qr(A.to(backend.device))
    assert torch.equal(Q.cpu(), torch.eye(5).expand(3, 5, 5))
    assert torch.equal(R.cpu(), A)


def test_nan_stays_in_its_matrix(backend: Backend) -> None:
    for m, n in ((6, 5), (35, 30), (66, 65)):
        A = _matrix(backend, 3, m, n)
        A[1, 2, 3] = float("nan")
        Q, R = metalcore.qr(A)
        assert Q[1].isnan().any()
        for x in (Q[0], Q[2], R[0], R[2]):
            assert x.isfinite().all()


def test_paths() -> None:
    found = []
    for size in ((20, 16, 16), (1, 16, 16), (1, 40, 40), (lanes(), 1000, 10), (2, 200, 200)):
        with metalcore.trace() as t:
            torch.ops.metalcore.qr(torch.randn(size), "reduced")
        found.append(t.records[0].variant)
    assert found == ["interleaved", "interleaved", "lapack", "interleaved", "lapack"]


def test_results_do_not_depend_on_threads_or_neighbours() -> None:
    A = torch.randn(100, 20, 20)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(metalcore.qr(A))
    torch.set_num_threads(before)
    A[1] *= 1e-30
    found.append(metalcore.qr(A))
    for Q, R in found:
        assert torch.equal(Q[2:], found[0][0][2:])
        assert torch.equal(R[2:], found[0][1][2:])


def test_derivatives_and_registration() -> None:
    for m, n, mode in ((4, 2, "reduced"), (2, 3, "complete")):
        check_registration("qr", (torch.randn(2, m, n) + 2 * torch.eye(m, n), mode))


def test_gradient_equals_that_of_torch(backend: Backend) -> None:
    for m, n in ((9, 6), (6, 9)):
        A = _matrix(backend, 3, m, n).requires_grad_()
        exact = A.detach().cpu().double().requires_grad_()
        (metalcore.qr(A)[0] ** 3).sum().backward()
        (torch.linalg.qr(exact)[0] ** 3).sum().backward()
        assert A.grad is not None
        assert exact.grad is not None
        assert error(A.grad, exact.grad) <= tolerance("qr", torch.float32, max(m, n))


def test_compiles_and_maps(device: Backend) -> None:
    A = device.randn(6, 3, 5, 4)
    compiled = torch.compile(metalcore.qr, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(A), metalcore.qr(A), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    for x, y in zip(torch.func.vmap(metalcore.qr)(A), metalcore.qr(A), strict=True):
        torch.testing.assert_close(x, y)


leaf = torch.randn(3, 5, 4, requires_grad=True)
BAD = [
    (
        lambda: metalcore.qr(leaf, "full"),
        ValueError,
        "qr: mode must be one of reduced, complete, r, got 'full'",
    ),
    (
        lambda: metalcore.qr(leaf.long()),
        TypeError,
        "qr: A must be float32, float64, float16 or bfloat16, got int64; convert it with A.float()",
    ),
    (
        lambda: metalcore.qr(torch.randn(4)),
        ValueError,
        "qr: A must be matrices [..., M, N], got [4]",
    ),
    (
        lambda: metalcore.qr(leaf, "r")[1].sum().backward(),
        ValueError,
        'qr: the gradient needs Q, which mode="r" does not compute; use mode="reduced"',
    ),
    (
        lambda: metalcore.qr(leaf, "complete")[0].sum().backward(),
        ValueError,
        'qr: mode="complete" has no gradient for more rows than columns, got [5, 4]; '
        'use mode="reduced"',
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
