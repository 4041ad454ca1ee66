# SPDX-License-Identifier: MIT
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend

STORY = "linear_preference"


def _plain_log_p(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    log_p = F.linear(hidden, weight, bias).log_softmax(-1)
    own = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return torch.where(target == -100, 0, own)


def _plain_dpo(log_p: Tensor, log_r: Tensor, target: Tensor) -> Tensor:
    (a, b), (c, d) = log_p.sum(-1).chunk(2), log_r.sum(-1).chunk(2)
    margin = 0.2 * ((a - b) - (c - d))
    return -(0.9 * F.logsigmoid(margin) + 0.1 * F.logsigmoid(-margin)).mean()


def _plain_orpo(log_p: Tensor, log_r: Tensor, target: Tensor) -> Tensor:
    counts = (target != -100).sum(-1)
    mean = log_p.sum(-1) / counts
    odds = mean.exp() / (1 - mean.exp())
    chosen, rejected = odds.chunk(2)
    likelihood = -log_p[:2].sum() / counts[:2].sum()
    return likelihood - 0.2 * torch.log(torch.sigmoid(torch.log(chosen / rejected))).mean()


def _dpo(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ref: Tensor) -> Tensor:
    return metalcore.linear_dpo(
        hidden,
        weight,
        target,
        bias,
        ref_hidden=ref,
        ref_weight=weight.detach(),
        ref_bias=bias.detach(),
        beta=0.2,
        label_smoothing=0.1,
    )


def _orpo(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ref: Tensor) -> Tensor:
    return metalcore.linear_orpo(hidden, weight, target, bias, beta=0.2)


@pytest.mark.parametrize(
    ("loss", "plain"), [(_dpo, _plain_dpo), (_orpo, _plain_orpo)], ids=["dpo", "orpo"]
)
def test_equals_the_plain_composition(
    backend: Backend, loss: Callable[..., Tensor], plain: Callable[..., Tensor]
) -> None:
    target = torch.randint(0, 20, (4, 5))
    target[0, 3:] = -100
    for dtype in backend.dtypes:
        sizes = ((4, 5, 6), (20, 6), (20,))
        leaves = [backend.randn(*s, dtype=dtype).requires_grad_() for s in sizes]
        ref = backend.randn(4, 5, 6, dtype=dtype)
        doubles = [x.detach().cpu().double().requires_grad_() for x in leaves]
        found = loss(*leaves, target.to(ref.device), ref)
        log_r = _plain_log_p(ref.cpu().double(), *(d.detach() for d in doubles[1:]), target)
        truth = plain(_plain_log_p(*doubles, target), log_r, target)
        allowed = tolerance(STORY, dtype, 20)
        assert error(found, truth) <= allowed
        grads = torch.autograd.grad(found, leaves)
        for a, b in zip(grads, torch.autograd.grad(truth, doubles), strict=True):
            assert error(a, b) <= allowed


def test_without_a_reference_it_is_left_out() -> None:
    hidden, weight = torch.randn(2, 3, 4), torch.randn(9, 4)
    target = torch.randint(0, 9, (2, 3))
    a, b = _plain_log_p(hidden, weight, torch.zeros(9), target).sum(-1)
    loss = metalcore.linear_dpo(hidden, weight, target)
    torch.testing.assert_close(loss, -F.logsigmoid(0.1 * (a - b)))


def test_compiles_without_graph_breaks(device: Backend) -> None:
    hidden, weight = device.randn(2, 3, 4).requires_grad_(), device.randn(9, 4)
    target = torch.randint(0, 9, (2, 3), device=hidden.device)

    def loss(hidden: Tensor) -> Tensor:
        return metalcore.linear_orpo(hidden, weight, target)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), loss(hidden))
    (found,), (expected,) = (torch.autograd.grad(f(hidden), hidden) for f in (compiled, loss))
    torch.testing.assert_close(found, expected)


def test_bad_input_is_named() -> None:
    hidden, weight, target = torch.randn(3, 2, 4), torch.randn(9, 4), torch.zeros(3, 2).long()
    with pytest.raises(ValueError, match=r"linear_dpo: hidden must be \[2 B, T, H\]"):
        metalcore.linear_dpo(hidden, weight, target)
    with pytest.raises(ValueError, match="linear_dpo: ref_hidden and ref_weight come together"):
        metalcore.linear_dpo(hidden[:2], weight, target[:2], ref_hidden=hidden)
