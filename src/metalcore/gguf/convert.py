# SPDX-License-Identifier: MIT
"""A model of transformers, or a GGUF file, as a GGUF file of another type."""

from pathlib import Path
from typing import Any

from metalcore._check import expect
from metalcore._optional import need
from metalcore.gguf.load import load_gguf
from metalcore.gguf.save import Progress, save_gguf


def convert(source: Path, out: Path, scheme: str, progress: Progress | None = None) -> None:
    """Write `source` as a GGUF file.

    Args:
        source: a folder of transformers, or a GGUF file.
        out: the file.
        scheme: the type of its matrices, as for `save_gguf`.
        progress: as for `save_gguf`.
    """
    expect(source.exists(), "quantize", f"there is no {source}")
    expect(source.resolve() != out.resolve(), "quantize", f"{out} would overwrite what it is of")
    if source.is_file():
        model: Any = load_gguf(source)
        save_gguf(model, out, scheme, name=source.stem, progress=progress)
        return
    transformers = need("transformers", "quantize")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    has_tokenizer = any((source / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source) if has_tokenizer else None
    save_gguf(model, out, scheme, tokenizer=tokenizer, name=source.name, progress=progress)
