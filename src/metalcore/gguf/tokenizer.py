# SPDX-License-Identifier: MIT
"""The tokenizer that a GGUF file describes, as one of transformers; and the way back."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from metalcore._check import expect
from metalcore._optional import need
from metalcore.gguf.format import ARRAY, STRING, GGUFError
from metalcore.gguf.reader import GGUFFile
from metalcore.gguf.writer import Value

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# where text is cut before its pieces are merged, by `tokenizer.ggml.pre`
_CUTS = {
    "llama-bpe": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_CUTS |= {"llama3": _LLAMA3, "llama-v3": _LLAMA3, "deepseek-r1-qwen": _CUTS["qwen2"]}
# what ends an answer, beside the token that ends a text
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def tokenizer_of(file: GGUFFile) -> Any:
    """The tokenizer that the file describes.

    Args:
        file: a file with `tokenizer.ggml.tokens`.

    Returns:
        A `PreTrainedTokenizerFast` of transformers, with the chat template of the file.
    """
    found = _Vocabulary(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            made = _byte_level(found)
        case "llama":
            made = _sentence_pieces(found, file.architecture.startswith("gemma"))
        case _:
            raise GGUFError(f"tokenizers of the kind {kind!r} are not known; gpt2 and llama are", 0)
    tokenizers = need("tokenizers", "load_gguf")
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(found.tokens, found.types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    if added:
        made.add_tokens(added)
    if found.starts_with_bos:
        bos = found.special["bos_token"]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, found.ids[bos])]
        )
    wrap = need("transformers", "load_gguf").PreTrainedTokenizerFast
    template = file.metadata.get("tokenizer.chat_template")
    result = wrap(tokenizer_object=made, clean_up_tokenization_spaces=False, **found.special)
    if isinstance(template, str):
        result.chat_template = template
    return result


def ends_of(file: GGUFFile) -> list[int]:
    """The tokens after which a model has nothing more to say."""
    says = file.metadata
    tokens = says.get("tokenizer.ggml.tokens", [])
    found = [says.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds = says.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    found += [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    ]
    return sorted({token for token in found if type(token) is int and 0 <= token < len(tokens)})


class _Vocabulary:
    """What the file says, checked."""

    def __init__(self, file: GGUFFile) -> None:
        says = file.metadata
        self.tokens: list[str] = says["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.types = self._as_many(says.get("tokenizer.ggml.token_type"), _NORMAL)
        self.scores = self._as_many(says.get("tokenizer.ggml.scores"), 0.0)
        self.merges = [
            tuple(merge.split(" ", 1)) for merge in says.get("tokenizer.ggml.merges", ())
        ]
        if any(len(merge) != 2 for merge in self.merges):
            raise GGUFError("a merge of tokenizer.ggml.merges is no pair", 0)
        self.pre = says.get("tokenizer.ggml.pre", "default")
        self.space_first = bool(says.get("tokenizer.ggml.add_space_prefix", True))
        self.special: dict[str, str] = {}
        for key, name in _SPECIAL.items():
            token = says.get(f"tokenizer.ggml.{key}_token_id")
            if token is None:
                continue
            if type(token) is not int or not 0 <= token < len(self.tokens):
                raise GGUFError(f"the {key} token is {token} of {len(self.tokens)}", 0)
            self.special[f"{name}_token"] = self.tokens[token]
        by_default = says.get("tokenizer.ggml.model") == "llama" or self.pre in (
            "llama-bpe",
            "llama3",
            "llama-v3",
        )
        wanted = says.get("tokenizer.ggml.add_bos_token", by_default)
        self.starts_with_bos = bool(wanted) and "bos_token" in self.special

    def _as_many(self, values: Any, otherwise: float) -> list[Any]:
        values = [otherwise] * len(self.tokens) if values is None else values
        if len(values) != len(self.tokens):
            raise GGUFError(f"{len(values)} properties of {len(self.tokens)} tokens", 0)
        return list(values)


def _byte_level(found: _Vocabulary) -> Any:
    tokenizers = need("tokenizers", "load_gguf")
    pre = tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            found.ids, found.merges, ignore_merges=found.pre in ("llama-bpe", "llama3", "llama-v3")
        )
    )
    cut = _CUTS.get(found.pre)
    if cut is None:
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        if found.pre == "qwen2":
            made.normalizer = tokenizers.normalizers.NFC()
        made.pre_tokenizer = pre.Sequence(
            [
                pre.Split(tokenizers.Regex(cut), behavior="isolated"),
                pre.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _sentence_pieces(found: _Vocabulary, is_gemma: bool) -> Any:
    tokenizers = need("tokenizers", "load_gguf")
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    # Gemma merges in the order of its vocabulary, the others by score
    rank = [-float(i) for i in range(len(found.tokens))] if is_gemma else found.scores
    merges = found.merges or _merges(found.ids, dict(zip(found.tokens, rank, strict=True)))
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            found.ids,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=found.special.get("unk_token"),
        )
    )
    first = found.space_first and not is_gemma
    steps = [normalizers.Prepend(_SPACE)] if first else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ending = [decoders.Strip(" ", 1, 0)] if first else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    return made


def _merges(ids: Mapping[str, int], rank: Mapping[str, float]) -> list[tuple[str, str]]:
    """Of which two parts each token may come, the highest rank first.

    Sentence pieces have no merges: what is merged is what is a token, by its score.
    """
    found: list[tuple[float, int, str, str]] = []
    for token in ids:
        parts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(ids[a], ids[b], a, b) for a, b in parts if a in ids and b in ids]
        found += [(-rank[token], ids[token], a, b) for _, _, a, b in sorted(pairs)]
    found.sort(key=lambda merge: merge[:2])
    return [(a, b) for _, _, a, b in found]


# -- the way back


def metadata_of(tokenizer: Any) -> dict[str, Any]:
    """What a file says of a tokenizer of transformers.

    Args:
        tokenizer: a fast one that merges: byte-level, or sentence pieces.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    expect(
        model["type"] == "BPE",
        "save_gguf",
        f"the tokenizer must merge pairs (BPE), got {model['type']}",
    )
    ids: dict[str, int] = dict(model["vocab"])
    added = {token["content"]: token for token in described["added_tokens"]}
    ids |= {content: token["id"] for content, token in added.items()}
    tokens = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)]
    for token, i in ids.items():
        tokens[i] = token
    is_bytes = not model.get("byte_fallback", False)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    says: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if is_bytes else "llama",
        "tokenizer.ggml.pre": _pre(described) if is_bytes else "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_type(t, added, is_bytes) for t in tokens],
    }
    if not is_bytes:
        says["tokenizer.ggml.scores"] = [-float(i) for i in range(len(tokens))]
    # llama.cpp wants them of a byte-level tokenizer, also where there are none
    if merges or is_bytes:
        says["tokenizer.ggml.merges"] = Value(merges, ARRAY, STRING)
    for key, name in _SPECIAL.items():
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            says[f"tokenizer.ggml.{key}_token_id"] = token_id
    bos = tokenizer.bos_token_id
    says["tokenizer.ggml.add_bos_token"] = bos is not None and bos in tokenizer("a").input_ids[:1]
    if not is_bytes:
        says["tokenizer.ggml.add_space_prefix"] = "Prepend" in json.dumps(described["normalizer"])
    if isinstance(tokenizer.chat_template, str):
        says["tokenizer.chat_template"] = tokenizer.chat_template
    return says


def _pre(described: Mapping[str, Any]) -> str:
    """The name of how text is cut."""
    cuts = {step.get("pattern", {}).get("Regex") for step in _steps(described["pre_tokenizer"])}
    return next((name for name, cut in _CUTS.items() if cut in cuts), "gpt-2")


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: Iterable[Mapping[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps


def _type(token: str, added: Mapping[str, Any], is_bytes: bool) -> int:
    if token in added:
        return _CONTROL if added[token]["special"] else _USER_DEFINED
    is_byte = not is_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return _BYTE if is_byte else _NORMAL
