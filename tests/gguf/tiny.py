# SPDX-License-Identifier: MIT
"""A small Llama that has learned to add two digits, and its tokenizer of characters.

What it writes can be checked: "3+4=" goes on with "7" and ends.
"""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(7) for b in range(7)]
DIFFERENCES = [(f"{a}-{b}=", f"{a - b}") for a in range(7) for b in range(a + 1)]
_SPECIAL = ["<pad>", "<end>"]
_STEPS = 150


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters of sums and of some text, and two special tokens."""
    letters = "0123456789+-=abcdefghijklmnopqrstuvwxyz.,?!:<>|/" + "\u0120\u010a"
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<end>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def lines(problems: list[tuple[str, str]]) -> Tensor:
    """Problems with their answers as tokens, all of one length."""
    encoded = tokenizer()(
        [question + answer + "<end>" for question, answer in problems],
        return_tensors="pt",
        padding=True,
    )
    ids: Tensor = encoded["input_ids"]
    return ids


def labels(ids: Tensor) -> Tensor:
    """What is to be learned: the answers, up to their end."""
    after = (ids == tokenizer().convert_tokens_to_ids("=")).cumsum(-1)
    is_answer = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], -1) > 0
    return ids.masked_fill(~is_answer | (ids == 0), -100)


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


@cache
def trained() -> Any:
    """The model. Nobody may change it: copy it first."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # products this small are done before a second thread has started
        torch.set_num_threads(1)
        model = LlamaForCausalLM(config())
        ids = lines(SUMS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=_STEPS)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            model(input_ids=ids, labels=labels(ids)).loss.backward()
            optimizer.step()
            schedule.step()
    torch.set_num_threads(threads)
    model.eval().requires_grad_(False)
    return model


def right(model: Any, problems: list[tuple[str, str]]) -> float:
    """Which part of the problems the model solves, greedily and to the end."""
    text = tokenizer()
    text.padding_side = "left"
    asked = text([question for question, _ in problems], return_tensors="pt", padding=True)
    written = model.generate(**asked, max_new_tokens=4, do_sample=False)
    answers = text.batch_decode(written[:, asked["input_ids"].shape[1] :])
    found = [
        a.split("<end>")[0] == wanted for a, (_, wanted) in zip(answers, problems, strict=True)
    ]
    return sum(found) / len(found)
