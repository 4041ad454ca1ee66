# SPDX-License-Identifier: MIT
"""Trainers of transformers accelerate their model when they are asked to."""

import copy
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, trainer
from transformers.utils import generic
from typer.testing import CliRunner

import metalcore
from metalcore import cli
from metalcore._accuracy import error
from metalcore.integrations import MetalcoreCallback, accelerate_every_trainer
from metalcore.patch.swap import Swapped
from tests.patch.families import allowed, build, text

STEPS = 2
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@pytest.fixture(autouse=True)
def _trainers_are_themselves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    # `mlx-cpu` without `mlx` has headers alone, and transformers takes it for the whole
    monkeypatch.setattr(generic, "_is_mlx_available", False)


def make(folder: Path, model: nn.Module | None, callbacks: list[Any], **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        bf16=more.pop("bf16", False),
    )
    torch.manual_seed(1)
    data: Any = [{"input_ids": t, "labels": t} for t in torch.cat([text() for _ in range(STEPS)])]
    return Trainer(model, arguments, train_dataset=data, callbacks=callbacks, **more)


def losses(made: Trainer) -> torch.Tensor:
    made.train()
    return torch.tensor([entry["loss"] for entry in made.state.log_history if "loss" in entry])


def is_accelerated(model: Any) -> bool:
    return any(isinstance(m, Swapped) for m in model.modules())


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_with_the_callback_takes_the_same_steps(
    bf16: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    plain = losses(make(tmp_path, copy.deepcopy(model), [], bf16=bf16))
    callback = MetalcoreCallback(undo=True)
    with caplog.at_level(logging.INFO, "metalcore.integrations"):
        made = make(tmp_path, model, [callback], bf16=bf16)
    assert "linear_cross_entropy" in caplog.text
    assert is_accelerated(model)
    with metalcore.trace() as t:
        found = losses(made)
    # mixed precision wraps the forward of the model: the loss was there before
    assert Counter(r.op for r in t.records)["cross_entropy_"] == STEPS
    assert len(plain) == STEPS
    assert error(found, plain) <= allowed(torch.bfloat16 if bf16 else torch.float32)
    assert not is_accelerated(model)


def test_a_model_that_is_made_later_is_accelerated_with_the_parts_that_are_wanted(
    tmp_path: Path,
) -> None:
    callback = MetalcoreCallback(loss=False, rope=False, attention=False)
    made = make(tmp_path, None, [callback], model_init=lambda: build())
    with metalcore.trace() as t:
        made.train()
    assert is_accelerated(made.model)
    assert {r.op for r in t.records if "backward" not in r.op} == {"rms_norm", "swiglu"}


def test_every_trainer(tmp_path: Path) -> None:
    accelerate_every_trainer()
    accelerate_every_trainer()
    made = make(tmp_path, build(), [])
    kinds = Counter(type(c) for c in made.callback_handler.callbacks)
    assert kinds[MetalcoreCallback] == 1
    assert is_accelerated(made.model)


@pytest.mark.parametrize("as_module", [True, False])
def test_a_program_is_run_with_every_trainer_accelerated(
    as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "program_of_mine.py"
    script.write_text(
        "import sys\nfrom transformers import trainer\n"
        "names = [c.__name__ for c in trainer.DEFAULT_CALLBACKS]\n"
        "print(__name__, sys.argv[1:], names[-1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    program = ["-m", "program_of_mine"] if as_module else [str(script)]
    found = CliRunner().invoke(cli.app, ["run", *program, "--config", "sft.yaml", "-h"])
    assert found.exit_code == 0, found.output
    assert found.output == "__main__ ['--config', 'sft.yaml', '-h'] MetalcoreCallback\n"
