# SPDX-License-Identifier: MIT
"""The mLSTM of xLSTM models: the module of transformers or mlstm_kernels that calls kernels."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._check import FLOATS
from metalcore.ops.xlstm.mlstm_chunkwise import mlstm_chunkwise
from metalcore.ops.xlstm.mlstm_step import mlstm_step
from metalcore.patch.probe import agrees, ask, stand_in
from metalcore.patch.swap import Swapped, restore, swap

_STATES = ("c_initial", "n_initial", "m_initial")
# of a probe: B, H, D, E
_SIZES = (1, 2, 4, 6)


class How(NamedTuple):
    """What the module calls q, k, v, i and f."""

    names: tuple[str, ...]


class MLSTM(Swapped):
    """A module of q, k, v [B, H, T, D], gates [B, H, T] and perhaps states, whose `config` says
    which mode it is in and what eps is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: How = self.origin.how
        given = dict(zip((*how.names, *_STATES, "return_last_states", "mode"), args, strict=False))
        given |= kwargs
        config: Any = self.config  # type: ignore[attr-defined]
        mode = given.pop("mode", None) or config.mode
        returns_states = given.pop("return_last_states", None)
        states = [given.pop(name, None) for name in _STATES]
        inputs = [given.pop(name, None) for name in how.names]
        if given or mode not in ("train", "inference") or not _fit(inputs, states):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if mode == "inference":
            returns_states = True
        elif returns_states is None:
            returns_states = config.return_last_states
        eps: float = config.eps
        if returns_states and inputs[0].shape[2] == 1:
            h, last = mlstm_step(*(x[:, :, 0] for x in inputs), *states, eps=eps)
            return h[:, :, None], last
        return mlstm_chunkwise(
            *inputs,
            **dict(zip(_STATES, states, strict=True)),
            return_last_states=returns_states,
            eps=eps,
        )


def _fit(inputs: list[Any], states: list[Any]) -> bool:
    """Whether all is there, in one dtype but for the states and gates."""
    tensors = [*inputs, *(s for s in states if s is not None)]
    return (
        all(type(x) is Tensor and x.dtype in FLOATS for x in tensors)
        and inputs[0].dim() == 4
        and len({x.dtype for x in inputs[:3]}) == 1
        and all(x.dtype in (inputs[0].dtype, torch.float32) for x in tensors)
        and len({s is None for s in states}) == 1
    )


def is_candidate(module: nn.Module) -> bool:
    """Whether it holds kernels of chunks and of steps, and takes states."""
    if isinstance(module, MLSTM):
        return True
    kernels = ("chunkwise_kernel_fn", "step_kernel_fn", "config")
    return all(hasattr(module, name) for name in kernels) and _names(module) is not None


def _names(module: nn.Module) -> tuple[str, ...] | None:
    own = list(inspect.signature(type(module).forward).parameters)
    return tuple(own[1:6]) if tuple(own[6:9]) == _STATES else None


def recognise(module: nn.Module) -> tuple[type[Swapped], How] | str:
    """The kind and variant that compute what `module` does, or why there is none."""
    if "forward" in vars(module):
        return "its forward was replaced already"
    names = _names(module)
    assert names is not None
    answers = ask(lambda: _answers(module, names))
    if answers and _agree(How(names), answers):
        return MLSTM, How(names)
    return "computes no mLSTM that metalcore has"


Asked = tuple[nn.Module, dict[str, Any], tuple[Tensor, ...]]


def _answers(module: nn.Module, names: tuple[str, ...]) -> list[Asked]:
    """A step and a few steps with states, of float32, which the plain kernels take."""
    B, H, D, E = _SIZES
    answers = []
    for steps in (1, 5):
        shapes = ((B, H, steps, D), (B, H, steps, D), (B, H, steps, E), *((B, H, steps),) * 2)
        given: dict[str, Any] = {n: torch.randn(s) for n, s in zip(names, shapes, strict=True)}
        states = (torch.randn(B, H, D, E), torch.randn(B, H, D), torch.randn(B, H, 1))
        given |= dict(zip(_STATES, states, strict=True)) | {"mode": "inference"}
        probe = stand_in(module)
        answers.append((probe, given, _flat(probe.forward(**given))))
    return answers


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    h, last = outputs
    return h, *last


def _agree(how: How, answers: list[Asked]) -> bool:
    same = True
    for probe, given, theirs in answers:
        swap(probe, MLSTM, how)
        with torch.no_grad():
            ours = _flat(probe.forward(**given))
        same = same and agrees("mlstm_chunkwise", theirs, ours, sum(_SIZES))
        restore(probe)
    return same
