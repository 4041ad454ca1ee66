# SPDX-License-Identifier: MIT
"""Tokens are chosen as the options say."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from metalcore.serve import options as chosen
from metalcore.serve.options import Options, Sampler

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draws(count: int = 2000, logits: Tensor = LOGITS, **how: Any) -> dict[int, float]:
    """How often each token is drawn, as a share."""
    sampler = Sampler(Options(1, seed=0, **how))
    found = Counter(sampler.choose(logits) for _ in range(count))
    return {token: n / count for token, n in sorted(found.items())}


def near(found: dict[int, float], wanted: list[float]) -> bool:
    return list(found) == list(range(len(wanted))) and all(
        abs(found[i] - share) < 0.05 for i, share in enumerate(wanted)
    )


def test_chances_are_those_of_the_model() -> None:
    assert near(draws(), [0.5, 0.3, 0.15, 0.05])
    hot = (LOGITS / 2).softmax(-1).tolist()
    assert near(draws(temperature=2), hot)
    assert draws(temperature=0) == {0: 1.0}
    assert draws(temperature=1e-30) == {0: 1.0}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert draws(top_p=0) == {0: 1.0}
    assert draws(top_p=0.5) == {0: 1.0}
    assert near(draws(top_p=0.51), [0.5 / 0.8, 0.3 / 0.8])
    assert near(draws(top_p=0.9), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95])


def test_top_k_comes_before_top_p() -> None:
    assert draws(top_k=1) == {0: 1.0}
    assert near(draws(top_k=2), [0.5 / 0.8, 0.3 / 0.8])
    # of the two, 0.6 is the first alone: 0.5 of 0.8
    assert draws(top_k=2, top_p=0.6) == {0: 1.0}
    assert near(draws(top_k=100), [0.5, 0.3, 0.15, 0.05])


def test_a_flat_vocabulary_is_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.1
    wanted = draws(300, logits, top_p=0.9)
    monkeypatch.setattr(chosen, "_LIKELIEST", 8)
    assert draws(300, logits, top_p=0.9) == wanted
    assert set(wanted) <= set(logits.argsort(descending=True)[:470].tolist())


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    def text(seed: int | None) -> list[int]:
        sampler = Sampler(Options(1, seed=seed))
        return [sampler.choose(torch.zeros(1000)) for _ in range(20)]

    assert text(-3) == text(-3) != text(4)
    assert text(None) != text(None)


def test_biases_and_penalties() -> None:
    assert draws(temperature=0, logit_bias={3: 100.0, 0: -100.0}) == {3: 1.0}
    once = Sampler(Options(1, temperature=0, presence_penalty=2))
    # 0.3 is above 0.5 / e^2, and so is 0.15; 0.05 is not
    assert [once.choose(LOGITS) for _ in range(4)] == [0, 1, 2, 0]
    often = Sampler(Options(1, temperature=0, frequency_penalty=1))
    counts = Counter(often.choose(torch.zeros(4)) for _ in range(40))
    assert set(counts.values()) == {10}
    before = LOGITS.clone()
    assert torch.equal(before, LOGITS)


def test_logits_that_are_not_finite_are_refused() -> None:
    for wrong in (torch.full((4,), torch.nan), torch.full((4,), -torch.inf)):
        with pytest.raises(ArithmeticError, match="not finite"):
            Sampler(Options(1)).choose(wrong)
    assert draws(logits=torch.tensor([0.0, -torch.inf])) == {0: 1.0}
