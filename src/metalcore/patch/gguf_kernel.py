# SPDX-License-Identifier: MIT
"""transformers keeps the weights of some GGUF files packed, if it has a kernel. Here is one.

It asks for four functions, which it otherwise downloads for GPUs alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from metalcore._optional import need
from metalcore.ops.quant._ggml import BY_ID
from metalcore.ops.quant.embedding_ggml import embedding_ggml
from metalcore.ops.quant.matmul_ggml import matmul_ggml, pack_ggml
from metalcore.ops.quant.quantize_ggml import dequantize_ggml

_KERNELS = "transformers.integrations.gguf.kernels"


class GGUFKernel:
    """What transformers asks a kernel for; types are numbers, as in files."""

    GEMV_TYPES = gemv_types = frozenset(BY_ID)

    def __init__(self) -> None:
        # of each weight, for as long as it is there
        self._tiles: Any = WeakIdKeyDictionary()

    def supports(self, ggml_type: int) -> bool:
        return ggml_type in self.gemv_types

    def mul_mat_vec(self, weight: Tensor, x: Tensor, ggml_type: int, out_features: int) -> Tensor:
        """x [rows, columns] times the packed weight, [rows, out_features]."""
        name = BY_ID[ggml_type].name
        return matmul_ggml(x, weight, name, tiles=self._packed(weight, name))

    def mul_mat_id(
        self, blocks: Tensor, x: Tensor, ids: Tensor, ggml_type: int, out_features: int
    ) -> Tensor:
        """Each row of x times those of the packed experts that `ids` [rows, chosen] names."""
        name = BY_ID[ggml_type].name
        y = x.new_empty(*ids.shape, out_features)
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            y[row, place] = matmul_ggml(x[row], blocks[expert], name)
        return y

    def dequantize(
        self, weight: Tensor, ggml_type: int, rows: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """The values of a packed weight, [rows, columns]."""
        return dequantize_ggml(weight, BY_ID[ggml_type].name, dtype).reshape(rows, columns)

    def get_rows(
        self, weight: Tensor, indices: Tensor, ggml_type: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """The values of some rows of a packed weight."""
        return embedding_ggml(indices.long(), weight, BY_ID[ggml_type].name, dtype)

    def _packed(self, weight: Tensor, name: str) -> Tensor | None:
        if weight.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if weight not in self._tiles:
            self._tiles[weight] = pack_ggml(weight, name)
        tiles: Tensor = self._tiles[weight]
        return tiles


class transformers_gguf:  # noqa: N801 - it is called
    """From now on `from_pretrained(..., gguf_file=...)` keeps weights packed on a CPU too.

    For architectures that transformers itself can keep packed; `load_gguf` knows others.

    Example:
        >>> patched = metalcore.patch.transformers_gguf()
        >>> model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
        >>> patched.undo()  # or: with metalcore.patch.transformers_gguf(): ...
    """

    def __init__(self) -> None:
        self._module = need(_KERNELS, "transformers_gguf")
        self._before: dict[str, Any] = {
            name: getattr(self._module, name) for name in ("_gguf_kernel", "kernel_can_read")
        }
        reads: Callable[[Any], bool] = self._before["kernel_can_read"]
        self._module._gguf_kernel = GGUFKernel()
        self._module.kernel_can_read = lambda tensor: tensor.device.type == "cpu" or reads(tensor)

    def undo(self) -> None:
        """transformers is what it was."""
        for name, value in self._before.items():
            setattr(self._module, name, value)
        self._before = {}

    def __enter__(self) -> "transformers_gguf":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
