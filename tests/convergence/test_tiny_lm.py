# SPDX-License-Identifier: MIT
"""A tiny language model learns the same with and without our ops."""

import torch

from metalcore import demo, trace
from metalcore._accuracy import error, tolerance
from metalcore._tiny_lm import Decoder, batches
from tests.backends import Backend

STEPS = 25
WIDTH = 64


def _losses(model: torch.nn.Module, data: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in data:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_loss_curve_is_the_same(backend: Backend) -> None:
    data, vocabulary = batches(STEPS, batch=2, time=32, device=str(backend.device))
    torch.manual_seed(0)
    plain = Decoder(vocabulary, width=WIDTH, heads=2, layers=2, hidden=96).to(backend.device)
    ours = demo.with_metalcore(plain)
    with trace() as t:
        found = _losses(ours, data)
    expected = _losses(plain, data)
    assert {path.split(":")[0] for paths in t.paths.values() for path in paths} == {backend.path}
    assert found[-1] < 0.9 * found[0]
    # rounding differs a little more with each step
    allowed = STEPS * tolerance("rms_norm", torch.float32, WIDTH)
    assert error(torch.tensor(found), torch.tensor(expected)) <= allowed
