# SPDX-License-Identifier: MIT
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.train.divergence import CASES, arguments, check_transforms, log_probabilities

NAME = "kl_div"


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("log_target", [True, False], ids=["log p", "p"])
def test_matches_reference(backend: Backend, size: tuple[int, ...], log_target: bool) -> None:
    def target(dtype: torch.dtype) -> Tensor:
        t = log_probabilities(backend, *size)
        return (t if log_target else t.exp()).to(dtype)

    for args in arguments(backend, size, log_target, target):
        check_op(backend, NAME, args, reduces_over=max(1, args[0].numel()))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_equals_torch(rows: int, reduction: str) -> None:
    x = torch.randn(rows, 50).log_softmax(-1).requires_grad_()
    p = torch.randn(rows, 50).softmax(-1)
    p[0, :5] = 0
    loss = metalcore.kl_div(x, p, reduction)
    truth = F.kl_div(x.double(), p.double(), reduction=reduction)
    assert error(loss, truth) <= tolerance(NAME, torch.float32, rows * 50)
    (dx,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (loss, truth))
    assert error(dx, expected.double()) <= tolerance(NAME, torch.float32, 1)


def test_derivatives_and_registration() -> None:
    x, t = torch.randn(1, 3).log_softmax(-1), torch.randn(1, 3).softmax(-1)
    check_registration(NAME, (x, t.log(), True, True, 0.5))
    check_registration("kl_div_backward", (x, x, t, False, False, 1.0, True))


def test_compiles_and_maps() -> None:
    check_transforms(NAME, False, torch.randn(3, 40).softmax(-1))


def test_a_half_loss_is_rounded_once(backend: Backend) -> None:
    x = log_probabilities(backend, 20, 1000, dtype=torch.bfloat16)
    loss = metalcore.kl_div(x, x.flip(0), "sum", log_target=True)
    truth = F.kl_div(x.double(), x.flip(0).double(), reduction="sum", log_target=True)
    assert loss.dtype == torch.bfloat16
    assert error(loss, truth) <= tolerance(NAME, torch.bfloat16, 20000)


def test_no_probability_adds_nothing(backend: Backend) -> None:
    x, p = torch.zeros(1, 8).to(backend.device), torch.zeros(1, 8).to(backend.device)
    op = Op.all[NAME]
    assert (op(x, p, False, False, 1.0) == 0).all()


def test_bad_input_is_named() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="kl_div: reduction must be none, sum, mean or batchmean"):
        metalcore.kl_div(x, x, "median")
    with pytest.raises(TypeError, match="kl_div: target must be float32"):
        metalcore.kl_div(x, x.long())
