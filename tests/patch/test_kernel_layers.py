# SPDX-License-Identifier: MIT
"""The `kernels` package puts our layers into models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from kernels import Mode
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.patch.kernel_layers import LAYERS
from tests.backends import Backend

MODES = [Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE]
WIDTH, LENGTH = 32, 9


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


def _marked(layer: nn.Module, name: str) -> nn.Module:
    """`layer` as of a class that asks for the layer `name`."""
    marked: Any = type("Marked", (type(layer),), {})
    kernels.replace_kernel_forward_from_hub(marked, name)
    layer.__class__ = marked
    return layer


def _kernelize(model: nn.Module, mapping: Any, mode: Mode = Mode.TRAINING) -> nn.Module:
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        return kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def _marked_mlp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "kernel_layer_name", "SwiGLUMLP", raising=False)
    yield
    # one object for all models
    vars(modeling_llama.apply_rotary_pos_emb).pop("forward", None)


def _local(folder: Path) -> Any:
    metalcore.write_kernel_repository(folder)
    return {name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=name)} for name in LAYERS}


@pytest.mark.usefixtures("_marked_mlp")
@pytest.mark.parametrize("where", ["in the package", "local repository"])
def test_a_llama_computes_the_same(where: str, backend: Backend, tmp_path: Path) -> None:
    model = _llama()
    mapping = metalcore.kernel_mapping() if where == "in the package" else _local(tmp_path)
    tokens = torch.randint(50, (2, LENGTH))
    expected = model(tokens, labels=tokens)
    expected.loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    ours = _kernelize(model, mapping)
    with metalcore.trace() as t:
        found = ours(tokens, labels=tokens)
        found.loss.backward()
    calls = [r.op for r in t.records]
    # two norms per layer and one at the end
    assert [calls.count(op) for op in ("rms_norm", "swiglu", "rope")] == [5, 2, 2 * 2]
    # small inputs may be left to torch on the CPU
    assert {r.path.split(":")[0] for r in t.records} - {"torch"} == {backend.path}
    allowed = tolerance("rms_norm", torch.float32, WIDTH)
    assert error(found.logits, expected.logits) <= allowed
    for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
        assert error(parameter.grad, gradient) <= 4 * allowed


@pytest.mark.usefixtures("_marked_mlp")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_gets_our_layers(mode: Mode) -> None:
    ours = _kernelize(_llama(), metalcore.kernel_mapping(), mode)
    norm: Any = ours.get_submodule("model.norm")
    assert norm.forward.__func__ is LAYERS["RMSNorm"].forward


def test_layers_of_your_own_classes() -> None:
    x = torch.randn(3, 2 * WIDTH)
    layer = _marked(SiluAndMul(), "SiluAndMul")
    ours = _kernelize(layer, metalcore.kernel_mapping())
    with metalcore.trace() as t:
        found = ours(x)
    assert set(t.paths) == {"swiglu"}
    assert error(found, SiluAndMul()(x)) <= tolerance("swiglu", torch.float32, 1)


@pytest.mark.parametrize("probabilities", [False, True])
def test_the_loss(probabilities: bool) -> None:
    x = torch.randn(70, 50, requires_grad=True)
    target = torch.rand(70, 50).softmax(-1) if probabilities else torch.randint(50, (70,))
    ignored = -100 if probabilities else 3
    loss = nn.CrossEntropyLoss(torch.rand(50), ignore_index=ignored, label_smoothing=0.1)
    expected = torch.autograd.grad(loss(x, target), x)[0]
    ours = _kernelize(_marked(loss, "CrossEntropyLoss"), metalcore.kernel_mapping())
    with metalcore.trace() as t:
        found = torch.autograd.grad(ours(x, target), x)[0]
    assert ("cross_entropy" in t.paths) == (not probabilities)
    assert error(found, expected) <= tolerance("cross_entropy", torch.float32, 50)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="write_kernel_repository: folder must be empty"):
        metalcore.write_kernel_repository(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
