# SPDX-License-Identifier: MIT
"""A language model of xLSTM blocks, which writes in constant memory."""

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from metalcore._check import expect, shape
from metalcore.nn import RMSNorm
from metalcore.ops.train.linear_cross_entropy import linear_cross_entropy
from metalcore.ops.train.soft_cap import soft_cap
from metalcore.xlstm.layers import State, XLSTMBlock, on_loading

States = tuple[State, ...]
"""Of each block."""
# Steps of a prompt that are read at a time.
_PROMPT = 4096


class Backbone(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        num_heads: int,
        num_blocks: int,
        slstm_at: Collection[int],
        norm_eps: float,
        mlstm: dict[str, Any],
        slstm: dict[str, Any],
        **block: Any,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, embedding_dim)
        self.blocks = nn.ModuleList(
            XLSTMBlock(
                embedding_dim,
                num_heads,
                kind="slstm" if at in slstm_at else "mlstm",
                norm_eps=norm_eps,
                **block,
                **(slstm if at in slstm_at else mlstm),
            )
            for at in range(num_blocks)
        )
        self.out_norm = RMSNorm(embedding_dim, norm_eps)

    def forward(self, tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        x = self.embeddings(tokens)
        found = []
        for at, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[at])
            found.append(state)
        return self.out_norm(x), tuple(found)


class XLSTM(nn.Module):
    """A language model of xLSTM blocks, with the names of transformers' `xLSTMForCausalLM`.

    `load_state_dict` takes state_dicts of that and of NX-AI's `xLSTMLarge`, with single or joint
    projections.

    Args:
        vocab_size, embedding_dim, num_heads, num_blocks: sizes.
        slstm_at: which blocks are of the sLSTM; all others are of the mLSTM.
        ffn_dim: size within feed-forward layers; None for 8/3 of x, rounded up to 64.
        use_bias, norm_eps: of all parts.
        output_logit_soft_cap: logits are kept within this of 0; None for no limit.
        mlstm, slstm: further arguments of `MLSTMLayer` and `SLSTMLayer`.

    Example:
        >>> model = metalcore.nn.XLSTM(256, 64, num_heads=4, num_blocks=2)
        >>> model.loss(tokens).backward()
        >>> tokens = model.generate(tokens[:, :8], max_new_tokens=32)
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        *,
        num_heads: int = 4,
        num_blocks: int = 2,
        slstm_at: Collection[int] = (),
        ffn_dim: int | None = None,
        use_bias: bool = False,
        norm_eps: float = 1e-6,
        output_logit_soft_cap: float | None = 30.0,
        mlstm: dict[str, Any] | None = None,
        slstm: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = Backbone(
            vocab_size,
            embedding_dim,
            num_heads,
            num_blocks,
            frozenset(slstm_at),
            norm_eps,
            mlstm or {},
            slstm or {},
            ffn_dim=ffn_dim,
            use_bias=use_bias,
        )
        self.lm_head = nn.Linear(embedding_dim, vocab_size, bias=False)
        self.output_logit_soft_cap = output_logit_soft_cap
        on_loading(self, _rename)
        for weight in (self.backbone.embeddings.weight, self.lm_head.weight):
            nn.init.normal_(weight, std=(2 / 5 / embedding_dim) ** 0.5)

    @classmethod
    def from_config(cls, config: Any) -> "XLSTM":
        """The model, with random weights, that a config of transformers or NX-AI describes."""
        dim = getattr(config, "hidden_size", None) or config.embedding_dim
        blocks = getattr(config, "num_hidden_layers", None) or config.num_blocks
        multiple = config.ffn_round_up_to_multiple_of
        return cls(
            config.vocab_size,
            dim,
            num_heads=config.num_heads,
            num_blocks=blocks,
            ffn_dim=int(-(-dim * config.ffn_proj_factor // multiple) * multiple),
            use_bias=config.use_bias,
            norm_eps=config.norm_eps,
            output_logit_soft_cap=config.output_logit_soft_cap,
            mlstm={
                "qk_dim_factor": config.qk_dim_factor,
                "v_dim_factor": config.v_dim_factor,
                "gate_soft_cap": config.gate_soft_cap,
                "eps": config.eps,
            },
        )

    def forward(self, tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        """Logits [B, T, vocab_size] in float32 (float64) of tokens [B, T], and the next states."""
        hidden, states = self.backbone(tokens, states)
        return self._logits(hidden), states

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        cap = self.output_logit_soft_cap
        return logits if cap is None else soft_cap(logits, cap)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of each token [B, T] after those before it; without all logits at a
        time."""
        hidden, _ = self.backbone(tokens[:, :-1])
        cap = self.output_logit_soft_cap
        return linear_cross_entropy(hidden, self.lm_head.weight, tokens[:, 1:], softcap=cap)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        states: States | None = None,
        return_states: bool = False,
    ) -> Tensor | tuple[Tensor, States]:
        """Go on with tokens, step by step; time and memory per token do not grow.

        Args:
            tokens: [B, T], at least one.
            max_new_tokens: how many to add.
            temperature: 0 for the likeliest token, else what logits are divided by for a choice.
            generator: of random numbers, for a temperature.
            states: what came before tokens; None for nothing.
            return_states: also return the states before the last token.

        Returns:
            [B, T + max_new_tokens].

        Example:
            >>> text = model.generate(prompt, 100, temperature=0.8)
        """
        op = "generate"
        expect(
            tokens.dim() == 2 and tokens.shape[1] > 0, op, f"tokens must be [B, T], got "
            f"{shape(tokens)}",
        )  # fmt: skip
        expect(temperature >= 0, op, f"temperature must not be negative, got {temperature}")
        length = tokens.shape[1]
        written = tokens.new_empty(tokens.shape[0], length + max_new_tokens)
        written[:, :length] = tokens
        first = 0
        for at in range(length, length + max_new_tokens):
            # the prompt in parts, then the last token alone
            for start in range(first, at, _PROMPT):
                part = written[:, start : min(at, start + _PROMPT)]
                hidden, states = self.backbone(part, states)
            first = at
            logits = self._logits(hidden[:, -1:])[:, 0]
            if temperature == 0:
                written[:, at] = logits.argmax(-1)
            else:
                chances = torch.softmax(logits / temperature, -1)
                written[:, at] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        return (written, cast(States, states)) if return_states else written


def _rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """NX-AI's xLSTMLarge has its embedding beside the backbone."""
    weight = state_dict.pop(f"{prefix}embedding.weight", None)
    if weight is not None:
        state_dict[f"{prefix}backbone.embeddings.weight"] = weight
