# SPDX-License-Identifier: MIT
"""Two small language models learn the same with our ops as in plain torch, step by step.

The learning rate is one at which training does not amplify rounding much: in float32 the curves
stay within 4e-7 of each other (at three times the rate within 5e-5), so the allowed 1e-5 is passed
neither by rounding nor by a gradient that is a little wrong.
"""

from statistics import fmean

import pytest
import torch

import metalcore
from metalcore._text import batches
from tests.backends import Backend
from tests.convergence.models import OURS, PLAIN, Gpt, Llama, Model, Size, train

STEPS, WARMUP, LR = 100, 10, 1e-3
LAST = 10

each_model = pytest.mark.parametrize("model", [Llama, Gpt], ids=["llama", "gpt"])


@each_model
def test_float32_losses_are_the_same_at_every_step(backend: Backend, model: type[Model]) -> None:
    # on the CPU large enough for its kernels, in the simulator as few and as small as will do
    simulated, full = (40, 16, 2, 8, 10 * LR), (STEPS, 64, 8, 64, LR)
    steps, width, batch, time, lr = simulated if backend.name == "sim" else full
    data, vocabulary = batches(steps, batch, time, str(backend.device))
    size = Size(vocabulary, width, 2, time)
    expected = train(model(PLAIN, size, 0, torch.float32, backend.device), data, lr, WARMUP)
    with metalcore.trace() as t:
        found = train(model(OURS, size, 0, torch.float32, backend.device), data, lr, WARMUP)
    assert max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) <= 1e-5
    assert fmean(found[-LAST:]) < 0.8 * found[0]
    paths = {op: {path.split(":")[0] for path in taken} for op, taken in t.paths.items()}
    assert paths == {op: {backend.path} for op in model.ops}


@each_model
def test_bfloat16_learns_no_worse(model: type[Model]) -> None:
    data, vocabulary = batches(STEPS, 4, 32, "cpu")
    size = Size(vocabulary, 32, 2, 32)
    last: dict[str, list[float]] = {"plain": [], "ours": []}
    for seed in range(2):
        for name, parts in (("plain", PLAIN), ("ours", OURS)):
            losses = train(model(parts, size, seed, torch.bfloat16), data, LR, WARMUP)
            assert losses[-1] < 0.6 * losses[0]
            last[name].append(fmean(losses[-LAST:]))
    # losses are rounded to bfloat16: a mean over 20 of them is known to half an eps over sqrt(20)
    margin = 0.5 * torch.finfo(torch.bfloat16).eps / (2 * LAST) ** 0.5
    assert fmean(last["ours"]) <= (1 + margin) * fmean(last["plain"])


@pytest.mark.parametrize(
    ("model", "compiler"), [(Llama, "aot_eager"), (Gpt, "inductor")], ids=["llama", "gpt"]
)
def test_compiled_it_learns_the_same(
    model: type[Model], compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, vocabulary = batches(5, 2, 16, "cpu")
    size = Size(vocabulary, 32, 2, 16, layers=1)
    expected = train(model(OURS, size, 0, torch.float32), data, LR, WARMUP)
    compiled = model(OURS, size, 0, torch.float32)
    step = torch.compile(compiled.loss, fullgraph=True, backend=compiler)
    monkeypatch.setattr(compiled, "loss", step)
    found = train(compiled, data, LR, WARMUP)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
