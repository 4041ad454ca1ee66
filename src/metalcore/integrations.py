# SPDX-License-Identifier: MIT
"""metalcore in the training programs of others: transformers' Trainer, and those made of it."""

import logging
import runpy
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, trainer

from metalcore.patch.accelerate import Summary, accelerate

_log = logging.getLogger(__name__)


class MetalcoreCallback(TrainerCallback):
    """Accelerates the model of a `Trainer`, or of a trainer of TRL.

    It does so as soon as there is a model, because mixed precision wraps its forward later. What
    `accelerate` did is logged, and kept in `summaries`.

    Args:
        undo: give the model its own layers again when the training ends.
        parts: which parts to replace, as for `accelerate`.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[MetalcoreCallback()]).train()
    """

    def __init__(self, *, undo: bool = False, **parts: bool) -> None:
        self.undo = undo
        self.parts = parts
        self.summaries: list[Summary] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._accelerate(state, kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # a model that was made since, or that an earlier training ended for
        self._accelerate(state, kwargs.get("model"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.undo:
            while self.summaries:
                self.summaries.pop().undo()

    def _accelerate(self, state: Any, model: Any) -> None:
        if model is None:
            return
        summary = accelerate(model, **self.parts)
        if not any(row.by for row in summary.rows):
            return
        self.summaries.append(summary)
        if state.is_local_process_zero:
            _log.info("metalcore computes these layers now:\n%s", summary)


def accelerate_every_trainer() -> None:
    """From now on every `Trainer`, and every trainer of TRL, has a `MetalcoreCallback`.

    Example:
        >>> accelerate_every_trainer()
        >>> trl.SFTTrainer(model, args, train_dataset=data).train()
    """
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    if MetalcoreCallback not in callbacks:
        callbacks.append(MetalcoreCallback)


def run_program(words: list[str]) -> None:
    """Run `script.py ...` or `-m module ...` as Python would, with every trainer accelerated."""
    accelerate_every_trainer()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
