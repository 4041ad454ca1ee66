# SPDX-License-Identifier: MIT
"""Checkpoints of AWQ, GPTQ and MLX as models: their numbers are rearranged, never changed.

All of them store w = (q - zero) * scale or w = q * scale + bias, in groups along the inputs. They
differ in where the bits are.
"""

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._check import expect
from metalcore._empty import without_weights
from metalcore._optional import need
from metalcore._quantized_layers import Int4Linear, Int8Linear
from metalcore.ops.quant._groups import packed_bits
from metalcore.ops.quant.quantize_int4 import QuantizedInt4, QuantizedInt8

Linear = Int4Linear | Int8Linear
# AWQ: the column that each nibble of a word belongs to, lowest first
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_linear(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Linear:
    """A layer of AWQ: w = (q - zero) * scale, in 4 bits.

    Args:
        qweight: int32 [inputs, outputs / 8].
        qzeros: int32 [groups, outputs / 8].
        scales: [groups, outputs].
        bias: [outputs], or none.
    """
    place = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        return _nibbles(words, 4)[..., place].flatten(-2)

    return _linear(columns(qweight).mT, columns(qzeros).mT, scales.mT, bias, None, 4)


def gptq_linear(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    zero_offset: int = 1,
) -> Linear:
    """A layer of GPTQ: w = (q - zero) * scale; groups may be of inputs that are no neighbours.

    Args:
        qweight: int32 [inputs * bits / 32, outputs].
        qzeros: int32 [groups, outputs * bits / 32].
        scales: [groups, outputs].
        g_idx: int32 [inputs], the group of each input, where they were ordered by importance.
        bias: [outputs], or none.
        bits: 4 or 8.
        zero_offset: what the file leaves out of its zeros: 1, and 0 of the format "gptq_v2".
    """
    expect(bits in (4, 8), "gptq_linear", f"bits must be 4 or 8, got {bits}")
    q = _nibbles(qweight.mT, bits).flatten(-2)
    zeros = _nibbles(qzeros, bits).flatten(-2).mT
    zeros = (zeros.int() + zero_offset) & ((1 << bits) - 1)
    order = None
    if g_idx is not None:
        g_idx = g_idx.long()
        ordered = torch.arange(len(g_idx)) // -(-len(g_idx) // scales.shape[0])
        if not torch.equal(g_idx.cpu(), ordered):
            order = g_idx.argsort(stable=True)
            expect(
                bool((g_idx[order].cpu() == ordered).all()),
                "gptq_linear",
                "the groups of g_idx must be of equal size",
            )
            q = q[:, order]
    return _linear(q, zeros, scales.mT, bias, order, bits)


def mlx_linear(
    weight: Tensor,
    scales: Tensor,
    biases: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 64,
) -> Linear:
    """A layer of MLX: w = q * scale + bias. Nothing is copied.

    Args:
        weight: uint32 [outputs, inputs * bits / 32].
        scales, biases: [outputs, groups].
        bias: [outputs], or none.
        bits: 4 or 8.
        group_size: 32, 64 or 128.
    """
    expect(bits in (4, 8), "mlx_linear", f"bits must be 4 or 8, got {bits}")
    packed = weight.contiguous().view(torch.uint8)
    columns = packed.shape[-1] * 8 // bits
    if bits == 4:
        made = QuantizedInt4(packed, scales, biases, group_size, columns)
        return Int4Linear.from_quantized(made, bias)  # type: ignore[return-value]
    made8 = QuantizedInt8(packed, scales, biases, group_size, columns)
    return Int8Linear.from_quantized(made8, bias)  # type: ignore[return-value]


def _nibbles(words: Tensor, bits: int) -> Tensor:
    """int32 [...] as uint8 [..., 32 / bits], the lowest bits first."""
    shift = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def _linear(
    q: Tensor, zeros: Tensor, scales: Tensor, bias: Tensor | None, order: Tensor | None, bits: int
) -> Linear:
    """q [outputs, inputs], zeros and scales [outputs, groups]."""
    inputs = q.shape[1]
    group_size = inputs // scales.shape[1]
    # float32, in which zero * scale is exact
    scale = scales.float().contiguous()
    offset = -zeros.float() * scale
    packed = packed_bits(q.contiguous(), bits)
    if bits == 4:
        made = QuantizedInt4(packed, scale, offset, group_size, inputs)
        return Int4Linear.from_quantized(made, bias, order)  # type: ignore[return-value]
    made8 = QuantizedInt8(packed, scale, offset, group_size, inputs)
    return Int8Linear.from_quantized(made8, bias, order)  # type: ignore[return-value]


# -- folders


def from_awq(folder: str | PathLike[str], *, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers from a checkpoint of AWQ, with its weights in 4 bits.

    Args:
        folder: with `config.json` and safetensors files.
        dtype: of what is not quantized.

    Returns:
        The model, ready to generate or to train adapters on.

    Example:
        >>> model = metalcore.from_awq("Llama-3.2-1B-AWQ")
    """

    def layer(config: Mapping[str, Any], t: Mapping[str, Tensor]) -> Linear:
        expect(config.get("bits", 4) == 4, "from_awq", f"bits must be 4, got {config.get('bits')}")
        version = str(config.get("version", "gemm")).lower()
        expect(version == "gemm", "from_awq", f"the layout must be gemm, got {version}")
        return awq_linear(t["qweight"], t["qzeros"], t["scales"], t.get("bias"))

    return _open("from_awq", Path(folder), "qweight", layer, dtype)


def from_gptq(folder: str | PathLike[str], *, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers from a checkpoint of GPTQ, also one with `desc_act`.

    Args:
        folder: with `config.json` and safetensors files.
        dtype: of what is not quantized.

    Returns:
        The model, ready to generate or to train adapters on.

    Example:
        >>> model = metalcore.from_gptq("Llama-3.2-1B-GPTQ")
    """

    def layer(config: Mapping[str, Any], t: Mapping[str, Tensor]) -> Linear:
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        return gptq_linear(
            t["qweight"],
            t["qzeros"],
            t["scales"],
            t.get("g_idx"),
            t.get("bias"),
            bits=config["bits"],
            zero_offset=offset,
        )

    return _open("from_gptq", Path(folder), "qweight", layer, dtype)


def from_mlx(folder: str | PathLike[str], *, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers from a checkpoint of mlx-lm in 4 or 8 bits.

    Args:
        folder: with `config.json` and safetensors files.
        dtype: of what is not quantized; embeddings are unpacked to it.

    Returns:
        The model, ready to generate or to train adapters on.

    Example:
        >>> model = metalcore.from_mlx("Llama-3.2-1B-4bit")
    """

    def layer(config: Mapping[str, Any], t: Mapping[str, Tensor]) -> Linear:
        mode = config.get("mode", "affine")
        expect(mode == "affine", "from_mlx", f"the mode must be affine, got {mode}")
        return mlx_linear(
            t["weight"],
            t["scales"],
            t["biases"],
            t.get("bias"),
            bits=config["bits"],
            group_size=config["group_size"],
        )

    return _open("from_mlx", Path(folder), "scales", layer, dtype)


Layer = Callable[[Mapping[str, Any], Mapping[str, Tensor]], Linear]


def _open(op: str, folder: Path, mark: str, layer: Layer, dtype: torch.dtype) -> Any:
    """A model whose layers with a tensor called `mark` are made by `layer`, the others as usual."""
    transformers = need("transformers", op)
    says = json.loads((folder / "config.json").read_text())
    quantization = says.pop("quantization_config", None) or says.get("quantization")
    says.pop("quantization", None)
    expect(bool(quantization), op, f"{folder / 'config.json'} says nothing of quantization")
    tensors = _tensors(op, folder)
    config = transformers.AutoConfig.for_model(**says)
    with without_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in list(model.named_modules()):
        own = {k[len(name) + 1 :]: k for k in tensors if k.startswith(f"{name}.")}
        own = {k: v for k, v in own.items() if "." not in k}
        if mark not in own:
            continue
        made = layer({**quantization, **_override(quantization, name)}, _take(tensors, own, dtype))
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(made.dequantized(dtype))
        else:
            model.set_submodule(name, made)
    for name, parameter in tensors.items():
        holder, part = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(holder, part, nn.Parameter(parameter.to(dtype)))
    if config.tie_word_embeddings:
        model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    expect(not missing, op, f"the files have no weights for {missing[:5]}")
    return model.eval()


def _override(quantization: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """mlx-lm may have other numbers for single layers."""
    own = quantization.get(name)
    return own if isinstance(own, dict) else {}


def _take(
    tensors: dict[str, Tensor], own: Mapping[str, str], dtype: torch.dtype
) -> dict[str, Tensor]:
    taken = {part: tensors.pop(name) for part, name in own.items()}
    if "bias" in taken:
        taken["bias"] = taken["bias"].to(dtype)
    return taken


def _tensors(op: str, folder: Path) -> dict[str, Tensor]:
    load = need("safetensors.torch", op).load_file
    files = sorted(folder.glob("*.safetensors"))
    expect(bool(files), op, f"there are no safetensors files in {folder}")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load(str(file))
    return found
