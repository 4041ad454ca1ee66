# SPDX-License-Identifier: MIT
"""Layers whose weights stay packed. They are frozen; gradients go through them to what is before.

A CPU multiplies by tiles, which are made of the weights when a layer first computes and are no part
of its state: what is saved are the bytes of the file format.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metalcore._check import expect
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.embedding_ggml import embedding_ggml
from metalcore.ops.quant.matmul_ggml import matmul_ggml, pack_ggml
from metalcore.ops.quant.matmul_int4 import matmul_int4, matmul_int8, pack_int4, pack_int8
from metalcore.ops.quant.quantize_ggml import dequantize_ggml, quantize_ggml
from metalcore.ops.quant.quantize_int4 import (
    QuantizedInt4,
    QuantizedInt8,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
)


def frozen(weight: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(weight, requires_grad=False)


def row_bytes(columns: int, type: str) -> int:
    """Bytes of a row of `columns` values."""
    expect(type in FORMATS, "type", f"must be one of {', '.join(FORMATS)}, got {type!r}")
    form = FORMATS[type]
    expect(
        columns % form.values == 0,
        type,
        f"rows must be multiples of {form.values} values, got {columns}",
    )
    return columns // form.values * form.bytes


NOT_KEPT = ("_tiles", "_tiles_of", "release_weight")


class _Tiles:
    """The tiles of a layer's weight, made when they are first asked for."""

    weight: Tensor

    def _make_tiles(self) -> Tensor:
        raise NotImplementedError

    def tiles(self) -> Tensor | None:
        if self.weight.device.type != "cpu" or torch.compiler.is_compiling():
            return vars(self).get("_tiles")
        made, of = vars(self).get("_tiles"), vars(self).get("_tiles_of")
        if made is None or of != (self.weight.data_ptr(), self.weight._version):
            made = self._make_tiles()
            self.set_tiles(made)
            self.forget_weight()
        return made

    def set_tiles(self, tiles: Tensor) -> None:
        """Multiply by these, for as long as the weight is what it is now."""
        vars(self)["_tiles"] = tiles
        vars(self)["_tiles_of"] = (self.weight.data_ptr(), self.weight._version)

    def forget_weight(self) -> None:
        """Give back the memory of a weight that is a view of a file, which has it still."""
        release = vars(self).get("release_weight")
        # a weight that was written to is no longer what its file has
        if release is not None and self.weight._version == 0:
            release()

    def __getstate__(self) -> dict[str, Any]:
        # copies and pickles make their own tiles, and are views of no file
        return {k: v for k, v in vars(self).items() if k not in NOT_KEPT}


class GGMLLinear(_Tiles, nn.Linear):
    """A linear layer whose weight is in blocks of ggml, as GGUF files have them.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`; `dtype` is that
            of the bias. Inputs may have any floating point type.
        type: of the blocks, such as "q4_K".
        activation: how precisely a CPU takes the input, as for `matmul_ggml`.

    `weight` is uint8 [out_features, bytes of a row] and is not trained.

    Example:
        >>> layer = metalcore.nn.GGMLLinear.of(torch.nn.Linear(256, 64), "q4_K")
        >>> y = layer(torch.randn(2, 256))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        type: str = "q4_K",
        activation: str = "auto",
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.scheme, self.activation = type, activation
        size = (out_features, row_bytes(in_features, type))
        self.weight = frozen(torch.zeros(size, dtype=torch.uint8, device=device))
        made = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)

    @classmethod
    def of(cls, linear: nn.Linear, type: str = "q4_K") -> "GGMLLinear":
        """The same layer as `linear`, quantized."""
        return cls.from_blocks(quantize_ggml(linear.weight.detach(), type), type, linear.bias)

    @classmethod
    def from_blocks(cls, blocks: Tensor, type: str, bias: Tensor | None = None) -> "GGMLLinear":
        """A layer of blocks [out_features, bytes of a row], which are not copied."""
        form = FORMATS[type]
        columns = blocks.shape[-1] // form.bytes * form.values
        made = cls(columns, blocks.shape[0], False, "meta", type=type)
        made.weight = frozen(blocks)
        made.register_parameter("bias", None if bias is None else frozen(bias.detach()))
        return made

    def forward(self, x: Tensor) -> Tensor:
        return matmul_ggml(
            x,
            self.weight,
            self.scheme,
            self.bias,
            activation=self.activation,
            tiles=self.tiles(),
        )

    def _make_tiles(self) -> Tensor:
        return pack_ggml(self.weight, self.scheme)

    def tile_size(self) -> torch.Size:
        """Of `tiles()`, without making them."""
        return pack_ggml(self.weight.to("meta"), self.scheme).shape

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer computes with, [out_features, in_features]."""
        return dequantize_ggml(self.weight, self.scheme, dtype)

    def reset_parameters(self) -> None:
        """Packed weights have no random values."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, type={self.scheme}"


class GGMLEmbedding(nn.Embedding):
    """An embedding whose table is in blocks of ggml; only the rows that are asked for are unpacked.

    Args:
        num_embeddings, embedding_dim, padding_idx, device: as for `torch.nn.Embedding`.
        type: of the blocks.
        dtype: of the result.
        scale: what the rows are multiplied by; Gemma has one.

    Example:
        >>> table = metalcore.nn.GGMLEmbedding.of(torch.nn.Embedding(100, 64), "q8_0")
        >>> rows = table(torch.tensor([3, 99]))
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        type: str = "q4_K",
        scale: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.scheme, self.scale = type, scale
        size = (num_embeddings, row_bytes(embedding_dim, type))
        self.weight = frozen(torch.zeros(size, dtype=torch.uint8, device=device))
        # it goes where the module goes, and says which type the rows have
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)
        self._like: Tensor

    @classmethod
    def of(cls, embedding: nn.Embedding, type: str = "q4_K") -> "GGMLEmbedding":
        """The same table as `embedding`, quantized."""
        weight = embedding.weight.detach()
        made = cls.from_blocks(quantize_ggml(weight, type), type, weight.dtype)
        made.padding_idx = embedding.padding_idx
        return made

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        type: str,
        dtype: torch.dtype = torch.float32,
        scale: float | None = None,
    ) -> "GGMLEmbedding":
        """A table of blocks [num_embeddings, bytes of a row], which are not copied."""
        form = FORMATS[type]
        columns = blocks.shape[-1] // form.bytes * form.values
        made = cls(blocks.shape[0], columns, None, "meta", type=type, scale=scale)
        made.weight = frozen(blocks)
        made._like = torch.empty(0, dtype=dtype, device=blocks.device)
        return made

    def forward(self, indices: Tensor) -> Tensor:
        rows = embedding_ggml(indices, self.weight, self.scheme, self._like.dtype)
        if self.scale is None:
            return rows
        # rounded to the type of the rows first, as Gemma does
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The table that the layer computes with, without `scale`."""
        return dequantize_ggml(self.weight, self.scheme, dtype)

    def reset_parameters(self) -> None:
        """Packed weights have no random values."""

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.scheme}"


class _GroupLinear(_Tiles, nn.Linear):
    """What layers of 4 and of 8 bits in groups have in common."""

    bits: ClassVar[int]
    biases: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group_size: int = 64,
        symmetric: bool = False,
        activation: str = "auto",
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.activation = group_size, activation
        self.scheme = f"int{self.bits}"

        def zeros(*size: int, dtype: torch.dtype | None = dtype) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        columns = -(-in_features * self.bits // 8)
        groups = -(-in_features // group_size)
        self.weight = frozen(zeros(out_features, columns, dtype=torch.uint8))
        self.scales = frozen(zeros(out_features, groups))
        offsets = None if symmetric else frozen(zeros(out_features, groups))
        self.register_parameter("biases", offsets)
        self.register_parameter("bias", nn.Parameter(zeros(out_features)) if bias else None)
        self.register_buffer("order", None)

    @classmethod
    def of(cls, linear: nn.Linear, group_size: int = 64, **options: Any) -> "_GroupLinear":
        """The same layer as `linear`, quantized; options as for `quantize_int4`."""
        quantize = quantize_int4 if cls.bits == 4 else quantize_int8
        made = quantize(linear.weight.detach(), group_size, **options)
        return cls.from_quantized(made, linear.bias)

    @classmethod
    def from_quantized(
        cls,
        q: QuantizedInt4 | QuantizedInt8,
        bias: Tensor | None = None,
        order: Tensor | None = None,
    ) -> "_GroupLinear":
        """A layer of a quantized weight, which is not copied.

        `order` says which input each column belongs to, where groups are not of neighbours.
        """
        made = cls(q.columns, q.packed.shape[0], False, "meta", group_size=q.group_size)
        made.weight, made.scales = frozen(q.packed), frozen(q.scale)
        made.register_parameter("biases", None if q.bias is None else frozen(q.bias))
        made.register_parameter("bias", None if bias is None else frozen(bias.detach()))
        made.order = order
        return made

    @property
    def quantized(self) -> QuantizedInt4 | QuantizedInt8:
        """The weight as functions take it."""
        kind = QuantizedInt4 if self.bits == 4 else QuantizedInt8
        return kind(self.weight, self.scales, self.biases, self.group_size, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        multiply: Any = matmul_int4 if self.bits == 4 else matmul_int8
        made: Tensor = multiply(
            x, self.quantized, self.bias, activation=self.activation, tiles=self.tiles()
        )
        return made

    def _make_tiles(self) -> Tensor:
        pack: Any = pack_int4 if self.bits == 4 else pack_int8
        made: Tensor = pack(self.quantized)
        return made

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer computes with, [out_features, in_features]."""
        unpack: Any = dequantize_int4 if self.bits == 4 else dequantize_int8
        made: Tensor = unpack(self.quantized, dtype)
        return made if self.order is None else made[:, self.order.argsort()]

    def reset_parameters(self) -> None:
        """Packed weights have no random values."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"


class Int4Linear(_GroupLinear):
    """A linear layer whose weight has 4 bits, with a scale and an offset per group.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`; any sizes.
        group_size: a multiple of 32, up to 256.
        symmetric: no offsets.
        activation: how precisely a CPU takes the input, as for `matmul_ggml`.

    `weight` is uint8, `scales` and `biases` are [out_features, groups]; none is trained.

    Example:
        >>> layer = metalcore.nn.Int4Linear.of(torch.nn.Linear(100, 64), group_size=32)
        >>> y = layer(torch.randn(2, 100))
    """

    bits = 4


class Int8Linear(_GroupLinear):
    """A linear layer whose weight has 8 bits; otherwise as `Int4Linear`.

    Example:
        >>> layer = metalcore.nn.Int8Linear.of(torch.nn.Linear(100, 64))
        >>> y = layer(torch.randn(2, 100))
    """

    bits = 8


class GGMLExperts(nn.Module):
    """The experts of a layer, each of them three packed matrices.

    Args:
        blocks: of "gate", "up" and "down" the packed weights [experts, rows, bytes of a row], which
            are not copied, and their type.
        activation: of the gate.
    """

    def __init__(
        self, blocks: Mapping[str, tuple[Tensor, str]], activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        for part, (packed, type) in blocks.items():
            made = [GGMLLinear.from_blocks(one, type) for one in packed.unbind()]
            self.add_module(part, nn.ModuleList(made))
        self.activation = activation

    def layers(self, part: str) -> list[GGMLLinear]:
        """The matrices of all experts for a part."""
        return list(self.get_submodule(part).children())  # type: ignore[arg-type]

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [tokens, width] through the experts `chosen` [tokens, k], added up by `shares`."""
        gate, up, down = (self.layers(part) for part in ("gate", "up", "down"))
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            rows = x[token]
            hidden = self.activation(gate[expert](rows)) * up[expert](rows)
            part = down[expert](hidden) * shares[token, place, None]
            y = y.index_add(0, token, part.to(y.dtype))
        return y
