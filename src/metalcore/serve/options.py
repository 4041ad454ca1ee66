# SPDX-License-Identifier: MIT
"""What a request may ask for, and the token that its options choose."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Enough for nearly every top_p; more of the vocabulary is sorted only when it is not.
_LIKELIEST = 1024


@dataclass(frozen=True)
class Options:
    """How an answer is written. A temperature of 0 takes the likeliest token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Sampler:
    """Chooses the tokens of one answer."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token by `logits` [vocabulary].

        Raises:
            ArithmeticError: they are not numbers.
        """
        logits = self._adjusted(logits.detach().float().cpu())
        likeliest = int(logits.argmax())
        if not torch.isfinite(logits[likeliest]):
            raise ArithmeticError("the model gave logits that are not finite")
        token = likeliest if self.options.temperature == 0 else self._draw(logits)
        self._counts[token] += 1
        return token

    def _adjusted(self, logits: Tensor) -> Tensor:
        o = self.options
        penalties = o.frequency_penalty or o.presence_penalty
        if not o.logit_bias and not (penalties and self._counts):
            return logits
        logits = logits.clone()
        for token, bias in o.logit_bias.items():
            logits[token] += bias
        if penalties:
            for token, count in self._counts.items():
                logits[token] -= count * o.frequency_penalty + o.presence_penalty
        return logits

    def _draw(self, logits: Tensor) -> int:
        o = self.options
        # the largest becomes 0 first, so that a tiny temperature makes no infinity
        chances = ((logits - logits.max()) / o.temperature).softmax(-1)
        if o.top_k is None and o.top_p >= 1:
            return int(torch.multinomial(chances, 1, generator=self._generator))
        kept, tokens = self._nucleus(chances)
        return int(tokens[torch.multinomial(kept, 1, generator=self._generator)])

    def _nucleus(self, chances: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens that `top_k` and `top_p` leave, and their chances."""
        o = self.options
        most = len(chances) if o.top_k is None else min(o.top_k, len(chances))
        wanted = o.top_p * (float(chances.topk(most).values.sum()) if o.top_k is not None else 1.0)
        kept, tokens = chances.topk(min(most, _LIKELIEST))
        if len(kept) < most and float(kept.sum()) < wanted:
            kept, tokens = chances.topk(most)
        # a token stays while those before it are less than the share
        before = kept.cumsum(-1) - kept
        count = max(1, int((before < wanted).sum()))
        return kept[:count], tokens[:count]
