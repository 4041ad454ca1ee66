# SPDX-License-Identifier: MIT
"""mlstm_kernels computes with metalcore, where it is installed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore.xlstm.registration import register
from tests.xlstm.mlstm import distance, inputs


def _backend(**kernels: Any) -> Any:
    module = pytest.importorskip("mlstm_kernels.torch.backend_module")
    register(grad="nx")
    return module.mLSTMBackend(
        module.mLSTMBackendConfig(autocast_kernel_dtype="float32", **kernels)
    )


@pytest.mark.parametrize("kind", ["chunkwise", "parallel"])
def test_training_equals_their_kernels(kind: str) -> None:
    args, seed = inputs(1, 2, 128, 16, 16), torch.randn(1, 2, 128, 16)

    def grads(kernel: str) -> tuple[Tensor, ...]:
        backend = _backend(
            chunkwise_kernel=f"{kind}--{kernel}", mode="train", return_last_states=False
        )
        leaves = [x.clone().requires_grad_() for x in args]
        h = backend(*leaves)
        return h, *torch.autograd.grad(h, leaves, seed)

    with metalcore.trace() as t:
        ours = grads("metalcore")
    assert {r.op for r in t.records} == {"mlstm_chunkwise", "mlstm_chunkwise_backward"}
    for x, y in zip(ours, grads("native_custbw"), strict=True):
        # sums over all steps in float32 are theirs
        assert distance(x, y.double()) <= 1e-5


@pytest.mark.parametrize("T", [1, 40])
def test_inference_at_any_length(T: int) -> None:
    args = inputs(1, 2, T, 16, 16)

    def run(kernel: str, **kernels: str) -> Any:
        backend = _backend(chunkwise_kernel=f"chunkwise--{kernel}", mode="inference", **kernels)
        return backend(*args)

    ours = run("metalcore", sequence_kernel="native_sequence__metalcore", step_kernel="metalcore")
    theirs = run("native_autograd", sequence_kernel="native_sequence__native", step_kernel="native")
    assert distance(ours[0], theirs[0].double()) <= 1e-5
    for x, y in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
