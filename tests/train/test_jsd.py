# SPDX-License-Identifier: MIT
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.train.divergence import CASES, arguments, check_transforms, log_probabilities

NAME = "jsd"


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_matches_reference(backend: Backend, size: tuple[int, ...], beta: float) -> None:
    def target(dtype: torch.dtype) -> Tensor:
        return log_probabilities(backend, *size, dtype=dtype)

    for args in arguments(backend, size, beta, target):
        check_op(backend, NAME, args, reduces_over=max(1, args[0].numel()))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_is_made_of_kullback_leibler_divergences(backend: Backend, beta: float) -> None:
    x, y = log_probabilities(backend, 6, 50), log_probabilities(backend, 6, 50)
    q, p = x.cpu().double(), y.cpu().double()
    m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    parts = [F.kl_div(m, t, reduction="batchmean", log_target=True) for t in (p, q)]
    truth = beta * parts[0] + (1 - beta) * parts[1]
    if beta in (0.0, 1.0):
        a, b = (q, p) if beta == 0.0 else (p, q)
        truth = F.kl_div(a, b, reduction="batchmean", log_target=True)
    loss = metalcore.jsd(x, y, beta)
    assert error(loss, truth) <= tolerance(NAME, torch.float32, 300)


def test_batchmean_is_over_all_rows() -> None:
    x, y = torch.randn(2, 3, 8).log_softmax(-1), torch.randn(2, 3, 8).log_softmax(-1)
    whole = metalcore.jsd(x, y, reduction="sum")
    torch.testing.assert_close(metalcore.jsd(x, y), whole / 6)
    torch.testing.assert_close(metalcore.jsd(x, y, reduction="mean"), whole / 48)
    assert metalcore.jsd(x, y, reduction="none").shape == (2, 3, 8)


def test_no_probability_adds_nothing(backend: Backend) -> None:
    x = log_probabilities(backend, 2, 8)
    y = log_probabilities(backend, 2, 8)
    y[0, 0] = -float("inf")
    x[1, 1] = -float("inf")
    leaf = x.clone().requires_grad_()
    loss = metalcore.jsd(leaf, y, 0.3)
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_derivatives_and_registration() -> None:
    x, y = torch.randn(1, 3).log_softmax(-1), torch.randn(1, 3).log_softmax(-1)
    check_registration(NAME, (x, y, 0.3, True, 0.5))
    check_registration("jsd_backward", (x, x, y, 0.3, False, 1.0, True))


def test_compiles_and_maps() -> None:
    check_transforms(NAME, 0.3, torch.randn(3, 40).log_softmax(-1))


def test_bad_input_is_named() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="jsd: beta must be from 0 to 1, got 2"):
        metalcore.jsd(x, x, 2.0)
