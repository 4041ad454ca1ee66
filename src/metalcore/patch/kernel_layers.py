# SPDX-License-Identifier: MIT
"""Layers for the `kernels` package: `kernels.kernelize` puts their forward into a model's modules.

A layer has a `forward` and nothing else: at run time `self` is the module of the model, with its
weights and settings.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from metalcore._check import expect
from metalcore.ops.train.cross_entropy import cross_entropy
from metalcore.ops.train.gelu import gelu
from metalcore.ops.train.rms_norm import rms_norm
from metalcore.ops.train.rope import apply_rotary_pos_emb
from metalcore.ops.train.silu import silu
from metalcore.ops.train.swiglu import swiglu

_BACKENDS = {"cpu": "cpu", "mps": "metal"}


class RMSNorm(torch.nn.Module):
    """For modules with `weight`, and `variance_epsilon` or `eps`; transformers marks them so."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        module: Any = self
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return rms_norm(hidden_states, module.weight, eps)


class rotary_pos_emb(torch.nn.Module):  # noqa: N801  (the name that transformers looks for)
    """For functions `(q, k, cos, sin, unsqueeze_dim=1)` that rotate halves."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


class SwiGLUMLP(torch.nn.Module):
    """For modules that compute `down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        y: Tensor = module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))
        return y


class SiluAndMul(torch.nn.Module):
    """For modules that compute `silu(x[..., :d]) * x[..., d:]`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return swiglu(gate, up)


class SiLU(torch.nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return silu(input)


class GeLU(torch.nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input)


class GeluTanh(torch.nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="tanh")


# other ways to write the same
NewGELU = FastGELU = GeluTanh


class CrossEntropyLoss(torch.nn.Module):
    """For `torch.nn.CrossEntropyLoss`; targets that are probabilities are left to torch."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        loss: Any = self
        compute = functional.cross_entropy if target.is_floating_point() else cross_entropy
        y: Tensor = compute(
            input,
            target,
            weight=loss.weight,
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=loss.label_smoothing,
        )
        return y


LAYERS: dict[str, type[torch.nn.Module]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, torch.nn.Module)
}


class Repository(NamedTuple):
    """What `kernels` asks for a layer, in place of a download."""

    layer_name: str

    def load(self) -> type[torch.nn.Module]:
        return LAYERS[self.layer_name]


def kernel_mapping() -> dict[str, dict[str, Repository]]:
    """The layers of metalcore by name and device, for `kernels.use_kernel_mapping`.

    transformers marks its norms, rotary embeddings and activations by these names; mark others by
    `kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")`. All layers train, and work
    with `torch.compile`.

    Example:
        >>> with kernels.use_kernel_mapping(metalcore.kernel_mapping()):
        ...     kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    """
    return {name: {device: Repository(name) for device in _BACKENDS} for name in LAYERS}


def write_kernel_repository(folder: Path | str) -> None:
    """Write a kernel repository whose layers are metalcore's, for `kernels.LocalLayerRepository`
    or to be uploaded; it needs metalcore where it is used.

    Args:
        folder: made if it does not exist; must be empty.

    Example:
        >>> metalcore.write_kernel_repository("repository")
        >>> kernels.LocalLayerRepository(Path("repository"), layer_name="RMSNorm")
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = not any(folder.iterdir())
    expect(free, "write_kernel_repository", f"folder must be empty, {folder} is not")
    for backend in _BACKENDS.values():
        build = folder / "build" / f"torch-{backend}"
        build.mkdir(parents=True)
        metadata = {
            "id": f"metalcore_layers_{backend}",
            "name": "metalcore-layers",
            "version": 1,
            "license": "MIT",
            "backend": {"type": backend},
            "python-depends": [],
        }
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        (build / "__init__.py").write_text(
            '"""Layers of metalcore."""\n\nfrom metalcore.patch import kernel_layers as layers\n\n'
            '__all__ = ["layers"]\n'
        )
