# SPDX-License-Identifier: MIT
"""AWQ, GPTQ and MLX: every weight is the number that their formula gives, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from metalcore.checkpoints import (
    awq_linear,
    from_awq,
    from_gptq,
    from_mlx,
    gptq_linear,
    mlx_linear,
)
from tests.gguf import tiny

INPUTS, OUTPUTS, GROUP = 128, 24, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[..., n] as int32 [..., n * bits / 32], the first value in the lowest bits."""
    per = 32 // bits
    split = values.long().unflatten(-1, (-1, per))[..., list(order or range(per))]
    packed = (split << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def numbers(bits: int = 4, inputs: int = INPUTS) -> tuple[Tensor, Tensor, Tensor]:
    """q [inputs, outputs], zeros and scales [groups, outputs]."""
    torch.manual_seed(0)
    q = torch.randint(0, 1 << bits, (inputs, OUTPUTS))
    zeros = torch.randint(0, 1 << bits, (inputs // GROUP, OUTPUTS))
    return q, zeros, (torch.rand(inputs // GROUP, OUTPUTS) + 0.1).half()


def weight(q: Tensor, zeros: Tensor, scales: Tensor, group: Tensor | None = None) -> Tensor:
    """(q - zero) * scale, [outputs, inputs]."""
    group = torch.arange(len(q)) // GROUP if group is None else group
    return ((q - zeros[group]).float() * scales.float()[group]).mT


def test_awq_is_its_formula() -> None:
    q, zeros, scales = numbers()
    layer = awq_linear(words(q, 4, AWQ_ORDER), words(zeros, 4, AWQ_ORDER), scales)
    assert torch.equal(layer.dequantized(), weight(q, zeros, scales))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_gptq_is_its_formula(bits: int, offset: int, is_ordered: bool) -> None:
    q, zeros, scales = numbers(bits)
    group = torch.arange(INPUTS) // GROUP
    group = group if is_ordered else group[torch.randperm(INPUTS)]
    stored = (zeros - offset) & ((1 << bits) - 1)
    bias = torch.randn(OUTPUTS)
    layer = gptq_linear(
        words(q.mT, bits).mT, words(stored, bits), scales, group.int(), bias,
        bits=bits, zero_offset=offset,
    )  # fmt: skip
    wanted = weight(q, zeros, scales, group)
    assert torch.equal(layer.dequantized(), wanted)
    assert (layer.order is None) == is_ordered
    layer.activation = "float"
    x = torch.randn(3, INPUTS)
    y = x @ wanted.mT + bias
    assert (layer(x) - y).abs().max() < 1e-5 * y.abs().max()


def test_groups_of_gptq_that_are_not_alike_are_refused() -> None:
    q, zeros, scales = numbers()
    group = torch.zeros(INPUTS, dtype=torch.int32)
    with pytest.raises(ValueError, match="equal size"):
        gptq_linear(words(q.mT, 4).mT, words(zeros, 4), scales, group)
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        gptq_linear(words(q.mT, 4).mT, words(zeros, 4), scales, bits=3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_mlx_is_what_mlx_unpacks(bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core")
    torch.manual_seed(0)
    packed = mx.quantize(mx.array(torch.randn(OUTPUTS, INPUTS).tolist()), group, bits)
    made = [torch.tensor(part.tolist(), dtype=torch.int64 if i == 0 else torch.float32)
            for i, part in enumerate(packed)]  # fmt: skip
    layer = mlx_linear(made[0].to(torch.uint32), *made[1:], bits=bits, group_size=group)
    theirs = torch.tensor(mx.dequantize(*packed, group, bits).tolist())
    assert torch.allclose(layer.dequantized(), theirs, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        mlx_linear(made[0].to(torch.uint32), *made[1:], bits=3)


def checkpoint(kind: str, folder: Path) -> Any:
    """A folder of `kind`, and the model that it stands for."""
    model = AutoModelForCausalLM.from_config(tiny.config()).eval().requires_grad_(False)
    tensors = dict(model.state_dict())
    says = model.config.to_dict()
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        at = tensors.pop(name).shape
        torch.manual_seed(len(name))
        q = torch.randint(0, 16, (at[1], at[0]))
        zeros = torch.randint(1, 16, (at[1] // GROUP, at[0]))
        scales = (torch.rand(at[1] // GROUP, at[0]) * 0.01).half()
        prefix = name.removesuffix("weight")
        if kind == "mlx":
            tensors[name] = words(q.mT, 4).view(torch.uint32)
            offsets = -zeros.float() * scales.float()
            tensors[f"{prefix}scales"] = scales.float().mT.contiguous()
            tensors[f"{prefix}biases"] = offsets.mT.contiguous()
        else:
            order = AWQ_ORDER if kind == "awq" else None
            packed = words(q, 4, order) if kind == "awq" else words(q.mT, 4).mT.contiguous()
            tensors[f"{prefix}qweight"] = packed
            tensors[f"{prefix}qzeros"] = words(zeros - int(kind == "gptq"), 4, order)
            tensors[f"{prefix}scales"] = scales
        model.get_parameter(name).copy_(weight(q, zeros, scales))
    key = "quantization" if kind == "mlx" else "quantization_config"
    says[key] = {"bits": 4, "group_size": GROUP, "quant_method": kind}
    (folder / "config.json").write_text(json.dumps(says))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return model


@pytest.mark.parametrize(
    ("kind", "opened"), [("awq", from_awq), ("gptq", from_gptq), ("mlx", from_mlx)]
)
def test_a_folder_opens_as_the_model_that_it_stands_for(
    kind: str, opened: Any, tmp_path: Path
) -> None:
    wanted = checkpoint(kind, tmp_path)
    model = opened(tmp_path)
    for layer in model.modules():
        if hasattr(layer, "activation"):
            layer.activation = "float"
    ids = tiny.lines(tiny.SUMS[:3])
    with torch.no_grad():
        ours, theirs = model(ids).logits, wanted(ids).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    (tmp_path / "config.json").write_text(json.dumps(tiny.config().to_dict()))
    with pytest.raises(ValueError, match="says nothing of quantization"):
        opened(tmp_path)
