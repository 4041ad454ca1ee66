# SPDX-License-Identifier: MIT
"""mlstm_kernels and the models of NX-AI compute with metalcore, where they are installed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore.xlstm.registration import register
from tests.xlstm.mlstm import distance, inputs

# All that mlstm_kernels has for any device, of which `custbw` has a gradient of its own.
NATIVE = [
    "chunkwise--native_autograd",
    "chunkwise--native_custbw",
    "parallel--native_autograd",
    "parallel--native_custbw",
    "parallel--native_stablef_autograd",
    "parallel--native_stablef_custbw",
    "parallel--native_siging_autograd",
    "parallel--native_siging_custbw",
]
OURS = {
    "chunkwise_kernel": "chunkwise--metalcore",
    "sequence_kernel": "native_sequence__metalcore",
    "step_kernel": "metalcore",
}
THEIRS = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}


def _backend(**how: Any) -> Any:
    module = pytest.importorskip("mlstm_kernels.torch.backend_module")
    register()
    register("metalcore_nx", grad="nx")
    return module.mLSTMBackend(module.mLSTMBackendConfig(autocast_kernel_dtype="float32", **how))


def test_all_their_kernels_are_known() -> None:
    kernels = pytest.importorskip("mlstm_kernels.torch")
    found = {name for name in kernels.get_available_mlstm_kernels() if "native" in name}
    assert found == set(NATIVE)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("theirs", NATIVE)
def test_training_equals_their_kernels(theirs: str, normalize: bool) -> None:
    if not normalize and "siging" not in theirs:
        pytest.skip("only sigmoid gates go without a divisor")
    args, seed = inputs(1, 2, 128, 16, 16), torch.randn(1, 2, 128, 16)
    kind, _, name = theirs.partition("--")
    gradient = "metalcore_nx" if "custbw" in name else "metalcore"
    ours = f"{kind}--{gradient}{'_siging' * ('siging' in name)}"

    def results(kernel: str) -> tuple[Tensor, ...]:
        backend = _backend(
            chunkwise_kernel=kernel,
            mode="train",
            return_last_states=False,
            normalize_siging=normalize,
        )
        leaves = [x.clone().requires_grad_() for x in args]
        h = backend(*leaves)
        return h, *torch.autograd.grad(h, leaves, seed)

    with metalcore.trace() as t:
        found = results(ours)
    assert {r.op for r in t.records} == {"mlstm_chunkwise", "mlstm_chunkwise_backward"}
    for x, y in zip(found, results(theirs), strict=True):
        # sums over all steps in float32 are theirs
        assert distance(x, y.double()) <= 1e-5


@pytest.mark.parametrize("T", [1, 40])
def test_inference_at_any_length(T: int) -> None:
    args = inputs(1, 2, T, 16, 16)
    ours, theirs = (_backend(mode="inference", **kernels)(*args) for kernels in (OURS, THEIRS))
    assert distance(ours[0], theirs[0].double()) <= 1e-5
    for x, y in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["native_sequence__native", "native"])
def test_sequences_and_steps_go_on_from_states(name: str) -> None:
    recurrent = pytest.importorskip("mlstm_kernels.torch.recurrent")
    register()
    ours = name.replace("__native", "__metalcore") if "__" in name else "metalcore"
    registry = recurrent.registry_sequence if "__" in name else recurrent.registry_step
    q, k, v, i, f = inputs(2, 3, 9, 16, 8)
    states = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 16), torch.randn(2, 3, 1)
    if "__" in name:
        how = {"return_last_states": True, "dtype_state": torch.float32}
        given = dict(zip(("c_initial", "n_initial", "m_initial"), states, strict=True))
    else:
        how = {"dtype_state": torch.float32}
        q, k, v = (x[:, :, 0] for x in (q, k, v))
        i, f = (x[:, :, :1] for x in (i, f))
        given = dict(zip("cnm", states, strict=True))

    def run(kernel: str) -> tuple[Tensor, ...]:
        held = {key: x.clone() for key, x in given.items()}
        h, last = registry[kernel](q=q, k=k, v=v, i=i, f=f, **held, **how)
        return h, *last

    for x, y in zip(run(ours), run(name), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def _large(kernels: dict[str, str], **how: Any) -> Any:
    """A small one of NX-AI's models, with random weights."""
    xlstm = pytest.importorskip("xlstm.xlstm_large")
    register()
    torch.manual_seed(0)
    config = xlstm.xLSTMLargeConfig(
        embedding_dim=64,
        num_heads=4,
        num_blocks=2,
        vocab_size=40,
        chunk_size=16,
        return_last_states=True,
        autocast_kernel_dtype="float32",
        **kernels,
        **how,
    )
    model = xlstm.xLSTMLarge(config)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def _trained(model: Any) -> tuple[Tensor, Tensor]:
    """Logits and all gradients, some of which are nearly zero: a norm undoes what a gate does."""
    tokens = torch.randint(40, (2, 49), generator=torch.Generator().manual_seed(1))
    logits, _ = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return logits, torch.cat([g.flatten() for g in grads])


def _written(model: Any) -> Tensor:
    prompt = torch.randint(40, (2, 37), generator=torch.Generator().manual_seed(2))
    tokens: Tensor = model.generate(prompt, 30)[0]
    return tokens


@pytest.mark.parametrize("weights", ["single", "fused"])
def test_xlstm_large_trains_and_writes_the_same(weights: str) -> None:
    for run, mode in ((_trained, "train"), (_written, "inference")):
        theirs = run(_large(THEIRS, mode=mode, weight_mode=weights))
        with metalcore.trace() as t:
            ours = run(_large(OURS, mode=mode, weight_mode=weights))
        found = {(r.op, r.path.split(":")[0]) for r in t.records}
        second = "mlstm_chunkwise_backward" if mode == "train" else "mlstm_step"
        assert found == {("mlstm_chunkwise", "cpu"), (second, "cpu")}
        if mode == "inference":
            assert torch.equal(ours, theirs)
            continue
        for x, y in zip(ours, theirs, strict=True):
            assert distance(x, y.detach().double()) <= 1e-5


def test_xlstm_large_is_accelerated_without_names() -> None:
    for run, mode in ((_trained, "train"), (_written, "inference")):
        model = _large(THEIRS, mode=mode)
        theirs = run(model)
        with metalcore.accelerate(model) as summary, metalcore.trace() as t:
            ours = run(model)
        assert summary.count("mlstm") == 2
        assert "mlstm_chunkwise" in {r.op for r in t.records}
        if mode == "inference":
            assert torch.equal(ours, theirs)
            assert torch.equal(run(model), theirs)
            continue
        for x, y, z in zip(ours, theirs, run(model), strict=True):
            assert distance(x, y.detach().double()) <= 1e-5
            assert torch.equal(z, y)
