# SPDX-License-Identifier: MIT
"""`metalcore run`, `chat`, `quantize` and `finetune` as a new user would try them."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from metalcore import chat as chatting
from metalcore import finetune as tuning
from metalcore.cli import app
from metalcore.gguf.reader import GGUFFile
from metalcore.gguf.save import save_gguf
from tests.gguf import tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(autouse=True)
def _as_loud_as_before() -> Iterator[None]:
    level, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    with warnings.catch_warnings():
        yield
    transformers.logging.set_verbosity(level)
    torch.set_num_threads(threads)


def run(*words: Any, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=input)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_gguf(tiny.trained(), tmp_path / "tiny.gguf", "q8_0", tokenizer=tiny.tokenizer())
    return tmp_path / "tiny.gguf"


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    save_gguf(tiny.trained(), tmp_path / "chatty.gguf", "q8_0", tokenizer=tokenizer)
    return tmp_path / "chatty.gguf"


def test_a_model_writes_its_answer_and_nothing_else(model: Path) -> None:
    found = run("run", model, "-p", "3+4=", "-t", 0, "--paths")
    assert found.exit_code == 0, found.output
    assert found.stdout == "7\n"
    assert "tokens/s" in found.stderr
    assert "MB of memory" in found.stderr
    assert "matmul_ggml: " in found.stderr
    assert "arning" not in found.output
    from_stdin = run("run", model, "-t", 0, input="5+5=")
    assert from_stdin.stdout == "10\n"


def test_the_same_seed_gives_the_same_text(model: Path) -> None:
    texts = [
        run("run", model, "-p", "1", "-t", 9, "-n", 12, "--seed", seed).stdout for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_template_is_used_unless_it_is_not_wanted(chatty: Path) -> None:
    assert run("run", chatty, "-p", "3+4", "-t", 0).stdout == "7\n"
    assert run("run", chatty, "-p", "3+4=", "-t", 0, "--raw").stdout == "7\n"


def test_a_conversation(chatty: Path) -> None:
    found = run("chat", chatty, "-t", 0, input="3+4\n\n/stats\n/reset\n2+2\n/help\n/exit\n")
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines() == ["7", "4"]
    assert "tokens/s" in found.stderr
    assert "Ctrl-C" in found.stderr
    assert run("chat", chatty, input="").exit_code == 0


def test_what_a_conversation_cannot_take_is_said(chatty: Path) -> None:
    long = "1+" * 40
    found = run("chat", chatty, "-t", 0, input=f"/rest\n{long}\n3+4\n/exit\n")
    assert "there is no /rest" in found.stderr
    assert "81 tokens, and the model takes 64" in " ".join(found.stderr.split())
    assert found.stdout.splitlines() == ["7"]


def test_a_model_without_a_template_says_so(model: Path) -> None:
    found = run("chat", model, "-t", 0, input="3+4=\n2+2=\n/quit\n")
    assert "no chat template" in found.stderr
    assert found.stdout.splitlines() == ["7", "4"]


def test_an_interrupt_ends_an_answer_cleanly(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = chatting._Stream.put

    def interrupted(self: Any, value: torch.Tensor) -> None:
        put(self, value)
        if self.count == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(chatting._Stream, "put", interrupted)
    found = run("run", model, "-p", "6+6=", "-t", 0)
    assert found.exit_code == 130
    assert found.stdout == "1\n"
    assert "stopped" in found.stderr
    assert run("chat", model, "-t", 0, input="6+6=\n/exit\n").exit_code == 0


def test_text_of_several_tokens_per_character_is_written_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = chatting._Stream(Bytes())
    stream.put(torch.tensor([[1, 2]]))
    for byte in "aü€".encode():
        stream.put(torch.tensor([byte]))
    stream.finish()
    assert capsys.readouterr().out == "aü€\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "nothing.gguf", "-p", "a"], "does not exist"),
        (["run", "bad.gguf", "-p", "a"], "error: no GGUF file"),
        (["chat", "bad.gguf"], "error: no GGUF file"),
        (["run", "mute.gguf", "-p", "a"], "has no tokenizer"),
        (["run", "tiny.gguf", "-p", ""], "the prompt has no tokens"),
        (["quantize", "nothing", "-o", "b.gguf"], "there is no nothing"),
        (["quantize", "tiny.gguf", "-o", "tiny.gguf"], "would overwrite"),
        (["quantize", "tiny.gguf", "-o", "b.gguf", "--scheme", "q4"], "a scheme is one of"),
        (["finetune", "tiny.gguf", "empty.jsonl"], "has no examples"),
        (["finetune", "tiny.gguf", "wrong.jsonl"], "wrong.jsonl:2 must be a JSON object"),
        (["finetune", "tiny.gguf", "chat.jsonl"], "no chat template"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    words: list[str], says: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path("bad.gguf").write_bytes(b"PK" + bytes(50))
    save_gguf(tiny.trained(), "mute.gguf", "q8_0")
    Path("empty.jsonl").write_text("\n")
    Path("wrong.jsonl").write_text('{"text": "a"}\n{"words": 1}\n')
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    found = run(*words)
    assert found.exit_code in (1, 2)
    assert says in " ".join(found.output.split())
    assert "Traceback" not in found.output


def test_a_folder_and_a_file_are_quantized(tmp_path: Path) -> None:
    tiny.trained().save_pretrained(tmp_path / "folder")
    tiny.tokenizer().save_pretrained(tmp_path / "folder")
    found = run("quantize", tmp_path / "folder", "-o", tmp_path / "a.gguf", "--scheme", "q8_0")
    assert found.exit_code == 0, found.output
    assert "MB" in found.stderr
    again = run("quantize", tmp_path / "a.gguf", "-o", tmp_path / "b.gguf", "--scheme", "q4_K")
    assert again.exit_code == 0, again.output
    assert GGUFFile(tmp_path / "b.gguf").tensors["blk.0.ffn_up.weight"].type.name == "q4_K"
    for file in ("a.gguf", "b.gguf"):
        assert run("run", tmp_path / file, "-p", "3+4=", "-t", 0).stdout == "7\n"


def test_a_model_learns_what_it_could_not_do(model: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "adapter"
    lines = [json.dumps({"prompt": a, "completion": b}) for a, b in tiny.DIFFERENCES]
    data.write_text("\n".join(lines))
    before = run("run", model, "-p", "6-2=", "-t", 0, "-n", 4).stdout
    found = run(
        "finetune", model, data, "-o", out, "--html", tmp_path / "report.html",
        "--steps", 60, "--lr", 1e-2, "--batch-size", len(lines), "--threads", 1,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "Loss" in (tmp_path / "report.html").read_text()
    assert (out / "adapter_model.safetensors").exists()
    wrote = chatting.Writer(model, adapter=out)
    assert before != "4\n"
    assert tiny.right(wrote.model, tiny.DIFFERENCES) > 0.9
    assert run("run", model, "-p", "6-2=", "-t", 0, "--adapter", out).stdout == "4\n"


def test_examples_are_learned_where_they_should_be() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    ask, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    for says, learned in (
        ({"prompt": "1+1=", "completion": "2"}, "2<end>"),
        ({"text": "1+1=2"}, "1+1=2<end>"),
        ({"messages": [ask, answer]}, "2"),
    ):
        example = tuning._example(says, tokenizer)
        kept = [
            t for t, is_learned in zip(example.tokens, example.learned, strict=True) if is_learned
        ]
        assert tokenizer.decode(kept) == learned


def test_batches_show_every_example_before_one_again() -> None:
    examples = [tuning.Example([i + 2, 1], [False, True]) for i in range(5)]
    training = tuning.Training(steps=5, batch_size=2)
    seen = [int(row[0]) for b in tuning.batches(examples, training, 0) for row in b["input_ids"]]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="rank must be positive"):
        tuning.Training(rank=0).check()


def test_a_training_program_is_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])")
    monkeypatch.setattr("sys.argv", ["metalcore"])
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [])
    assert run("run", program, tmp_path / "out", "-p").exit_code == 0
    assert (tmp_path / "out").read_text() == "-p"
