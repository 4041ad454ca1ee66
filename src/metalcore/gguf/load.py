# SPDX-License-Identifier: MIT
"""A GGUF file as a model of transformers whose weights stay packed."""

import logging
from collections.abc import Iterator
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._check import expect_one_of, refuse
from metalcore._empty import without_weights
from metalcore._optional import need
from metalcore._quantized_layers import GGMLEmbedding, GGMLExperts, GGMLLinear
from metalcore.gguf import architectures
from metalcore.gguf.architectures import Architecture
from metalcore.gguf.format import GGUFError
from metalcore.gguf.reader import GGUFFile
from metalcore.gguf.tiles import map_tiles
from metalcore.gguf.tokenizer import ends_of, tokenizer_of
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import dequantize_ggml

_log = logging.getLogger(__name__)
_FLOATS = ("f32", "f16", "bf16")


def load_gguf(
    path: str | PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    keep: str = "packed",
    tiles: str | PathLike[str] | None = None,
) -> Any:
    """A model of transformers from a GGUF file, with its weights as they are in the file.

    On a CPU the weights are views of the file: the model takes the memory of the file, and loading
    it takes no time. Only norms, biases and rows whose order differs are copied.

    Args:
        path: a file of llama, mistral, qwen2, qwen3, qwen3moe, gemma2, gemma3 or phi3.
        device: where to.
        dtype: of norms, biases and hidden states; default float32, on a GPU float16.
        keep: "packed", or "float" for plain weights, which take 4 to 8 times the memory.
        tiles: a folder for the rearranged weights that a CPU multiplies by. The first load writes a
            file of the model's size, later ones map it: they make nothing, and share its memory.

    Returns:
        The model, ready to generate; `model.tokenizer` is its tokenizer, None if the file has none.

    Raises:
        GGUFError: the file breaks a rule of the format, or is of a model that is not known.

    Example:
        >>> model = metalcore.load_gguf("model.gguf")
        >>> tokens = model.tokenizer("Hello", return_tensors="pt")
        >>> print(model.tokenizer.decode(model.generate(**tokens)[0]))
    """
    expect_one_of("load_gguf", "keep", keep, ["packed", "float"])
    transformers = need("transformers", "load_gguf")
    device = torch.device(device)
    if tiles is not None and (device.type != "cpu" or keep != "packed"):
        refuse("load_gguf", "tiles are for packed weights on a CPU")
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
    file = GGUFFile(path)
    architecture = architectures.of_file(file)
    numbers = architectures.config_of(file, architecture)
    config = transformers.AutoConfig.for_model(architecture.model_type, **numbers)
    with without_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    _Filling(file, architecture, model, dtype, keep == "packed").fill()
    model.tokenizer = tokenizer_of(file) if "tokenizer.ggml.tokens" in file.metadata else None
    ends = ends_of(file)
    if ends:
        model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = _padding(config)
    model.gguf_metadata = {
        key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")
    }
    model = model.to(device).eval()
    if tiles is not None:
        map_tiles(model, file, tiles)
    return model


def _padding(config: Any) -> int | None:
    """Some token to fill up with, so that generating says nothing of it."""
    pad: int | None = (
        config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    )
    return pad


class _Filling:
    """Puts the tensors of a file into a model that has none."""

    def __init__(
        self, file: GGUFFile, architecture: Architecture, model: Any, dtype: torch.dtype, pack: bool
    ) -> None:
        self.file, self.architecture, self.model = file, architecture, model
        self.dtype, self.pack = dtype, pack
        self.unpacked: set[str] = set()
        self.modules = architectures.module_names(architecture, model.config.num_hidden_layers)

    def fill(self) -> None:
        used = set(architectures.ROPE_TENSORS)
        for name, path in self.modules.items():
            weight, bias = f"{name}.weight", f"{name}.bias"
            if weight not in self.file.tensors:
                if name == "output":
                    continue
                raise GGUFError(f"there is no tensor {weight}", 0)
            used |= {weight, bias}
            self._fill_module(name, path)
        for i in range(self.model.config.num_hidden_layers):
            used |= self._fill_experts(i)
        if "output.weight" not in self.file.tensors:
            self._tie()
        left = sorted(set(self.file.tensors) - used)
        if left:
            raise GGUFError(f"tensors that a {self.architecture.name} has not: {left[:5]}", 0)
        missing = [name for name, value in _tensors(self.model) if value.is_meta]
        if missing:
            raise GGUFError(f"the file has no weights for {missing[:5]}", 0)
        if self.unpacked:
            _log.warning(
                "load_gguf: weights of type %s became %s: there are no kernels for them",
                ", ".join(sorted(self.unpacked)),
                self.dtype,
            )

    def _fill_module(self, name: str, path: str) -> None:
        info = self.file.tensors[f"{name}.weight"]
        module = self.model.get_submodule(path)
        self._expect_shape(info.name, info.shape, module)
        bias = self._bias(name, module)
        if isinstance(module, nn.Linear | nn.Embedding) and self._stays_packed(info.name):
            in_file = self.file.packed(info.name)
            blocks = self._in_order(name, in_file)
            if isinstance(module, nn.Linear):
                made: nn.Module = GGMLLinear.from_blocks(blocks, info.type.name, bias)
                if blocks is in_file:
                    # products read the tiles, so one of the two need not be in memory
                    vars(made)["release_weight"] = partial(self.file.release, info.name)
                else:
                    self.file.release(info.name)
            else:
                scale = getattr(module, "scalar_embed_scale", None)
                made = GGMLEmbedding.from_blocks(blocks, info.type.name, self.dtype, scale)
            self.model.set_submodule(path, made)
            return
        weight = self._in_order(name, self._float(info.name))
        if path.endswith("norm"):
            weight = weight - self.architecture.norm_offset
        trained = module.weight.requires_grad
        # a copy: what is a view of the file cannot be trained
        module.weight = nn.Parameter(weight.to(self.dtype, copy=True), requires_grad=trained)
        if bias is not None:
            module.bias = nn.Parameter(bias)

    def _fill_experts(self, layer: int) -> set[str]:
        """Experts are one tensor per matrix in a file; the names of those."""
        names = architectures.expert_names(self.architecture, layer)
        if not names:
            return set()
        path = f"model.layers.{layer}.{self.architecture.experts}"
        module = self.model.get_submodule(path)
        count, width, _ = module.down_proj.shape
        inner = module.down_proj.shape[-1]
        for part, name in names.items():
            wanted = (count, width, inner) if part == "down" else (count, inner, width)
            found = self.file.tensors[name].shape if name in self.file.tensors else None
            if found != wanted:
                raise GGUFError(f"{name} is {found}, the model has {wanted}", 0)
        if all(map(self._stays_packed, names.values())):
            blocks = {
                part: (self.file.packed(name), self.file.tensors[name].type.name)
                for part, name in names.items()
            }
            self.model.set_submodule(path, GGMLExperts(blocks, module.act_fn))
            return {*names.values()}
        gate, up, down = (self._float(name).to(self.dtype) for name in names.values())
        module.gate_up_proj = nn.Parameter(torch.cat([gate, up], 1))
        module.down_proj = nn.Parameter(down.clone())
        return {*names.values()}

    def _stays_packed(self, name: str) -> bool:
        return self.pack and self.file.tensors[name].type.name in FORMATS

    def _expect_shape(self, name: str, shape: tuple[int, ...], module: Any) -> None:
        wanted = tuple(module.weight.shape)
        if shape != wanted:
            start = self.file.tensors[name].start
            raise GGUFError(f"{name} is {list(shape)}, the model has {list(wanted)}", start)

    def _bias(self, name: str, module: Any) -> Tensor | None:
        info = self.file.tensors.get(f"{name}.bias")
        wanted = getattr(module, "bias", None)
        if (info is None) != (wanted is None):
            says = "no" if info is None else "a"
            raise GGUFError(f"the file has {says} bias for {name}, and the model differs", 0)
        if info is None or wanted is None:
            return None
        if info.shape != tuple(wanted.shape):
            raise GGUFError(f"{info.name} is {list(info.shape)}", info.start)
        return self._in_order(name, self._float(info.name)).to(self.dtype, copy=True)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows of queries and keys in the order of transformers."""
        kind = name.rsplit(".", 1)[-1]
        if not self.architecture.is_rotated or kind not in ("attn_q", "attn_k"):
            return rows
        config = self.model.config
        heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
        return architectures.unrotated_rows(rows, heads)

    def _float(self, name: str) -> Tensor:
        kind = self.file.tensors[name].type.name
        if kind in _FLOATS:
            return self.file.tensor(name)
        if kind in FORMATS:
            return dequantize_ggml(self.file.packed(name), kind)
        if self.pack:
            self.unpacked.add(kind)
        gguf = need("gguf", f"load_gguf of {kind}")
        stored = gguf.GGMLQuantizationType(self.file.tensors[name].type.number)
        return torch.from_numpy(gguf.dequantize(self.file.packed(name).numpy(), stored))

    def _tie(self) -> None:
        """The output is the embedding, and there is one of it in memory."""
        embedding = self.model.get_input_embeddings()
        if isinstance(embedding, GGMLEmbedding):
            head = GGMLLinear.from_blocks(embedding.weight, embedding.scheme)
            head.weight = embedding.weight
            self.model.set_output_embeddings(head)
        else:
            self.model.get_output_embeddings().weight = embedding.weight


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
