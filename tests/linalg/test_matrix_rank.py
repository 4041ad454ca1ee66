# SPDX-License-Identifier: MIT
import pytest
import torch

import metalcore
from tests.backends import Backend
from tests.linalg.inputs import MATRICES

NAME = "matrix_rank"


@pytest.mark.parametrize("name", ["random", "zeros", "rank 1", "rank n/2", "one zero column"])
def test_equals_torch(backend: Backend, name: str) -> None:
    A = torch.stack([MATRICES[name](9, 6) for _ in range(3)]).float().to(backend.device)
    assert metalcore.matrix_rank(A).cpu().equal(torch.linalg.matrix_rank(A.cpu()))


def test_cut_offs_are_those_of_torch() -> None:
    A = torch.diag_embed(torch.tensor([[1.0, 1e-2, 1e-4], [8.0, 1e-2, 0.0]]))
    for options in (
        {"atol": 1e-3},
        {"rtol": 1e-3},
        {"atol": 1e-3, "rtol": 0.5},
        {"atol": torch.tensor([1e-3, 0.0])},
        {"rtol": torch.tensor([1e-3, 0.5])},
        {"hermitian": True},
    ):
        expected = torch.linalg.matrix_rank(A, **options)
        assert metalcore.matrix_rank(A, **options).equal(expected), options


def test_empty_and_wrong() -> None:
    assert metalcore.matrix_rank(torch.randn(2, 0, 3)).tolist() == [0, 0]
    with pytest.raises(ValueError, match=rf"^{NAME}: A must be square"):
        metalcore.matrix_rank(torch.randn(2, 3), hermitian=True)
