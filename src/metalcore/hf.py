# SPDX-License-Identifier: MIT
"""metalcore as a quantization method of transformers: `import metalcore.hf` registers it.

`from_pretrained(..., quantization_config=MetalcoreConfig("q4_K"))` quantizes while it loads, one
layer at a time. What is saved has the packed weights, and loads again without arguments.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from metalcore._check import expect
from metalcore._quantized_layers import GGMLLinear, Int4Linear, Int8Linear
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import quantize_ggml
from metalcore.ops.quant.quantize_int4 import quantize_int4, quantize_int8

_GROUPS = {"int4": Int4Linear, "int8": Int8Linear}


@register_quantization_config("metalcore")
class MetalcoreConfig(QuantizationConfigMixin):
    """How to quantize the linear layers of a model of transformers.

    Args:
        scheme: "int4", "int8", or a type of ggml such as "q4_K".
        group_size: of int4 and int8.
        skip: patterns of layers that stay as they are.

    Example:
        >>> config = metalcore.hf.MetalcoreConfig("q4_K")
        >>> model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    """

    def __init__(
        self,
        scheme: str = "q4_K",
        group_size: int = 64,
        skip: tuple[str, ...] | list[str] = ("lm_head",),
        **_: Any,
    ) -> None:
        known = (*_GROUPS, *FORMATS)
        expect(scheme in known, "MetalcoreConfig", f"scheme is one of {known}, got {scheme!r}")
        self.quant_method = "metalcore"  # type: ignore[assignment]
        self.scheme, self.group_size, self.skip = scheme, group_size, list(skip)

    def empty(self, linear: nn.Linear) -> nn.Linear:
        """A layer like `linear` for packed weights, without any."""
        sizes = (linear.in_features, linear.out_features, linear.bias is not None, "meta")
        if self.scheme in _GROUPS:
            return _GROUPS[self.scheme](
                *sizes, dtype=linear.weight.dtype, group_size=self.group_size
            )
        return GGMLLinear(*sizes, dtype=linear.weight.dtype, type=self.scheme)

    def takes(self, name: str, module: nn.Module) -> bool:
        """Whether a layer of the model is to be quantized."""
        if type(module) is not nn.Linear or any(re.search(p, name) for p in self.skip):
            return False
        return self.scheme in _GROUPS or module.in_features % FORMATS[self.scheme].values == 0


class _Quantize(ConversionOps):
    """A float weight as the parameters of its packed layer."""

    def __init__(self, config: MetalcoreConfig) -> None:
        self.config = config

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        full_layer_name: str | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        ((key, value),) = input_dict.items()
        weight = value[0] if isinstance(value, list) else value
        name = full_layer_name or key
        if self.config.scheme in FORMATS:
            made = {name: quantize_ggml(weight, self.config.scheme)}
        else:
            quantize = quantize_int4 if self.config.scheme == "int4" else quantize_int8
            q = quantize(weight, self.config.group_size)
            assert q.bias is not None
            prefix = name.removesuffix("weight")
            made = {name: q.packed, f"{prefix}scales": q.scale, f"{prefix}biases": q.bias}
        if model is not None:
            # the placeholder was float, so that the loader did not round the weight to bytes
            layer, _part = get_module_from_name(model, name)
            layer.weight = nn.Parameter(
                torch.empty_like(made[name], device="meta"), requires_grad=False
            )
        return made


@register_quantizer("metalcore")
class MetalcoreQuantizer(HfQuantizer):
    """What transformers asks while it loads, saves and trains a model of `MetalcoreConfig`."""

    requires_calibration = False

    @property
    def _config(self) -> MetalcoreConfig:
        found = self.quantization_config
        assert isinstance(found, MetalcoreConfig)
        return found

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        config = self._config
        for name, module in list(model.named_modules()):
            if not config.takes(name, module):
                continue
            made = config.empty(module)
            if not self.pre_quantized:
                made.weight = nn.Parameter(
                    torch.empty_like(module.weight, device="meta"), requires_grad=False
                )
            model.set_submodule(name, made)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        module, part = get_module_from_name(model, param_name)
        packed = (GGMLLinear, Int4Linear, Int8Linear)
        return isinstance(module, packed) and part == "weight" and not self.pre_quantized

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self._config)

    def is_serializable(self, **_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
