# SPDX-License-Identifier: MIT
"""`metalcore run MODEL.gguf` and `metalcore chat MODEL.gguf`: a model writes."""

import logging
import resource
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from metalcore._check import expect
from metalcore._optional import need
from metalcore._trace import trace
from metalcore.gguf.load import load_gguf
from metalcore.patch.accelerate import accelerate

_HELP = "/help  /reset forgets the conversation  /stats  /exit (or Ctrl-D); Ctrl-C stops an answer"


@dataclass
class Sampling:
    """How the next token is chosen. A temperature of 0 takes the likeliest."""

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 40
    repetition_penalty: float = 1.0
    seed: int | None = None

    def arguments(self) -> dict[str, Any]:
        expect(self.max_tokens >= 1, "run", f"max_tokens must be positive, got {self.max_tokens}")
        found: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "repetition_penalty": self.repetition_penalty,
            "do_sample": self.temperature > 0,
        }
        if self.temperature > 0:
            found |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return found


@dataclass
class Written:
    """An answer, and how it came about."""

    text: str
    prompt_tokens: int
    tokens: int
    first_seconds: float
    seconds: float
    was_stopped: bool = False

    def __str__(self) -> str:
        later = self.seconds - self.first_seconds
        speed = f"{(self.tokens - 1) / later:.1f} tokens/s" if self.tokens > 1 else "one token"
        first = f"{self.prompt_tokens} tokens of prompt in {self.first_seconds:.2f} s"
        stopped = ", stopped" if self.was_stopped else ""
        return f"{self.tokens} tokens, {speed}; {first}; {memory()} of memory{stopped}"


def memory() -> str:
    """The most memory that this process had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes on a Mac, KiB elsewhere
    return f"{peak * (1 if sys.platform == 'darwin' else 1024) / 1e6:.0f} MB"


class Writer:
    """A model, its tokenizer, and where its text goes.

    Args:
        path: a GGUF file.
        adapter: a folder that peft saved, as `metalcore finetune` does.
        device: where to.
        fast: with metalcore's layers, and steps that are recorded.
        tiles: a folder for rearranged weights, as for `load_gguf`.
    """

    def __init__(
        self,
        path: Path,
        *,
        adapter: Path | None = None,
        device: str = "cpu",
        fast: bool = True,
        tiles: Path | None = None,
        console: Console | None = None,
    ) -> None:
        quiet()
        self.console = console or Console(stderr=True)
        start = time.perf_counter()
        with self.console.status(f"loading {escape(path.name)}"):
            self._load(path, adapter, device, fast, tiles)
        self.load_seconds = time.perf_counter() - start

    def _load(
        self, path: Path, adapter: Path | None, device: str, fast: bool, tiles: Path | None
    ) -> None:
        model = load_gguf(path, device=device, tiles=tiles)
        self.tokenizer: Any = model.tokenizer
        expect(self.tokenizer is not None, "run", f"{path.name} has no tokenizer")
        if adapter is not None:
            model = need("peft", "run --adapter").PeftModel.from_pretrained(model, adapter)
        if fast:
            accelerate(model, decode=True)
        self.model: Any = model.eval()

    @property
    def context(self) -> int:
        """So many tokens the model was made for."""
        found: int = self.model.config.get_text_config().max_position_embeddings
        return found

    def write(self, ids: Tensor, sampling: Sampling) -> Written:
        """Go on with the tokens `ids` [1, n]; the text is printed as it comes."""
        out = _Stream(self.tokenizer)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        ids = ids.to(self.model.device)
        start, stopped = time.perf_counter(), False
        try:
            with torch.inference_mode():
                self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=out,
                    **sampling.arguments(),
                )
        except KeyboardInterrupt:
            stopped = True
        seconds = time.perf_counter() - start
        out.finish()
        first = (out.first or time.perf_counter()) - start
        return Written(out.text, ids.shape[1], out.count, first, seconds, stopped)

    def paths(self) -> str:
        """What computes each op, seen in a prompt of one token and the step after it."""
        token = torch.tensor([[self.tokenizer.eos_token_id or 0]], device=self.model.device)
        mask = torch.ones_like(token)
        with torch.inference_mode(), trace() as seen:
            self.model.generate(
                input_ids=token, attention_mask=mask, min_new_tokens=2, max_new_tokens=2
            )
        found: dict[str, set[str]] = {}
        for record in seen.records:
            said = f"{record.path} {record.variant}".strip()
            found.setdefault(record.op, set()).add(said)
        return "\n".join(f"{op}: {', '.join(sorted(how))}" for op, how in sorted(found.items()))

    def encode(self, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        expect(ids.numel() > 0, "run", "the prompt has no tokens")
        return ids

    def encode_messages(self, messages: list[dict[str, str]]) -> Tensor:
        """A conversation as the model's chat template writes it; without one, lines."""
        if self.tokenizer.chat_template is None:
            return self.encode("".join(message["content"] for message in messages))
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        return ids


class _Stream:
    """Prints whole characters as tokens come; `generate` calls it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text, self.first = "", 0.0
        self._is_prompt = True

    @property
    def count(self) -> int:
        return len(self.tokens)

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.first = self.first or time.perf_counter()
        self.tokens += value.flatten().tolist()
        whole = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        # a character of several tokens is not whole yet
        if not whole.endswith("\ufffd"):
            self._print(whole)

    def end(self) -> None:
        pass

    def finish(self) -> None:
        self._print(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        print(flush=True)

    def _print(self, whole: str) -> None:
        print(whole[len(self.text) :], end="", flush=True)
        self.text = whole


def quiet() -> None:
    """Nothing is said that the user did not ask for."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    need("transformers", "run").logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers|peft|torch")


def run(writer: Writer, prompt: str, sampling: Sampling, *, raw: bool, paths: bool) -> int:
    """Write one answer to `prompt`; what was measured goes to stderr."""
    if raw or writer.tokenizer.chat_template is None:
        ids = writer.encode(prompt)
    else:
        ids = writer.encode_messages([{"role": "user", "content": prompt}])
    written = writer.write(ids, sampling)
    console = writer.console
    console.print(f"{written}; loaded in {writer.load_seconds:.2f} s", style="dim", highlight=False)
    if paths:
        console.print(escape(writer.paths()), style="dim", highlight=False)
    return 130 if written.was_stopped else 0


def chat(writer: Writer, sampling: Sampling, *, system: str | None = None) -> int:
    """Talk until the user leaves."""
    console = writer.console
    if writer.tokenizer.chat_template is None:
        console.print(
            "This model has no chat template: it goes on with what you write.", style="yellow"
        )
    console.print(_HELP, style="dim", highlight=False)
    begin = [{"role": "system", "content": system}] if system else []
    messages = list(begin)
    last: Written | None = None
    while True:
        try:
            said = _ask(console).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        match said:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/help":
                console.print(_HELP, style="dim", highlight=False)
                continue
            case "/reset":
                messages = list(begin)
                continue
            case "/stats":
                console.print(f"{last}\n{writer.paths()}" if last else "nothing yet", style="dim")
                continue
            case command if command.startswith("/"):
                console.print(f"there is no {escape(command)}: {_HELP}", style="yellow")
                continue
        if writer.tokenizer.chat_template is None:
            messages = []
        messages.append({"role": "user", "content": said})
        ids = writer.encode_messages(messages)
        if ids.shape[1] >= writer.context:
            messages.pop()
            long = f"{ids.shape[1]} tokens, and the model takes {writer.context}"
            console.print(f"that is too long: {long}; /reset forgets", style="yellow")
            continue
        last = writer.write(ids, sampling)
        messages.append({"role": "assistant", "content": last.text})


def _ask(console: Console) -> str:
    """A line of the user's; where both ends are a terminal, arrows edit it and bring earlier ones
    back."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return console.input("[bold]> [/]")
    with suppress(ImportError):
        # input() uses it from now on; some Pythons are without
        import readline  # noqa: F401
    # what is between \1 and \2 takes no room on the screen
    return input("\1\x1b[1m\2> \1\x1b[0m\2")
