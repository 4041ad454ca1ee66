# SPDX-License-Identifier: MIT
"""One step of an mLSTM."""

from typing import Any

import pytest
import torch

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.xlstm.mlstm import inputs, recurrent, states

OP = "mlstm_step"
RULES = [(1e-6, False, True, False), (1e-6, True, True, False), (1e-6, True, False, False)]


def _args(B: int, H: int, D: int, E: int, rule: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    rows = (x[:, :, 0] for x in inputs(B, H, 1, D, E, dtype))
    return *rows, *states(B, H, D, E, dtype), *rule


@pytest.mark.parametrize("rule", RULES, ids=["exp", "sigmoid", "sums"])
@pytest.mark.parametrize("sizes", [(2, 3, 8, 5), (1, 1, 1, 1), (1, 2, 33, 300)], ids=str)
def test_matches_reference(backend: Backend, sizes: Any, rule: Any) -> None:
    is_simulated = backend.name == "sim"
    at = sum(sizes) % len(backend.dtypes)
    for dtype in backend.dtypes[at : at + 1] if is_simulated else backend.dtypes:
        args = _args(*sizes, rule, dtype)
        check_op(backend, OP, args, reduces_over=sum(sizes), differentiable=not is_simulated)


def test_generation_keeps_its_memory() -> None:
    args = inputs(1, 2, 50, 8, 8, torch.float64)
    truth, (c, n, m) = recurrent(*args)
    carried: Any = ()
    for t in range(50):
        h, carried = metalcore.mlstm_step(*(x[:, :, t] for x in args), *carried)
        torch.testing.assert_close(h, truth[:, :, t])
    for x, y in zip(carried, (c, n, m[..., None]), strict=True):
        torch.testing.assert_close(x, y)


def test_derivatives_and_registration() -> None:
    check_registration(OP, _args(1, 1, 2, 2, RULES[0], torch.float64))


def test_the_step_of_mlstm_kernels() -> None:
    native = pytest.importorskip("mlstm_kernels.torch.recurrent.native_step")
    q, k, v, i, f = (x[:, :, 0] for x in inputs(2, 3, 1, 8, 8))
    c, n, m = states(2, 3, 8, 8)
    gates = (i[..., None], f[..., None])
    theirs = native.mlstm_recurrent_step__native(
        q=q, k=k, v=v, i=gates[0], f=gates[1], c=c, n=n, m=m[..., None]
    )
    ours = metalcore.mlstm_step(q, k, v, *gates, c, n, m[..., None])
    for x, y in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        torch.testing.assert_close(x, y)


def test_wrong_arguments() -> None:
    q, k, v, i, f = (x[:, :, 0] for x in inputs(2, 3, 1, 8, 8))
    with pytest.raises(ValueError, match=r"mlstm_step: q must be \[B, H, D\]"):
        metalcore.mlstm_step(q[0], k, v, i, f)
    with pytest.raises(ValueError, match="m_initial must be None with gate='sigmoid'"):
        metalcore.mlstm_step(q, k, v, i, f, m=torch.zeros(2, 3), gate="sigmoid")
