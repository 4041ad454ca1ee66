# SPDX-License-Identifier: MIT
"""Fast primitives for PyTorch on Apple GPUs and any CPU. One line per op below."""

from importlib.metadata import version as _version

from metalcore import _native, _policy
from metalcore._trace import Record, trace
from metalcore.nn import (
    FusedAddRMSNorm,
    MetalEmbeddingBag,
    MetalGELU,
    MetalLayerNorm,
    MetalRMSNorm,
    MetalSiLU,
    MetalSoftmax,
    RotaryEmbedding,
)
from metalcore.ops.linalg.cholesky import cholesky
from metalcore.ops.linalg.cholesky_solve import cholesky_solve
from metalcore.ops.linalg.cond import cond
from metalcore.ops.linalg.det import det, slogdet
from metalcore.ops.linalg.eigh import eigh, eigvalsh
from metalcore.ops.linalg.householder import apply_householder, householder_vector
from metalcore.ops.linalg.inv import inv
from metalcore.ops.linalg.lstsq import lstsq
from metalcore.ops.linalg.lu import lu
from metalcore.ops.linalg.matrix_rank import matrix_rank
from metalcore.ops.linalg.orthogonalize import orthogonalize, polar
from metalcore.ops.linalg.pinv import pinv
from metalcore.ops.linalg.qr import qr
from metalcore.ops.linalg.qr_solve import qr_solve
from metalcore.ops.linalg.solve import solve
from metalcore.ops.linalg.svd import svd, svdvals
from metalcore.ops.linalg.trsm import trsm, trsm_batched
from metalcore.ops.train.add_layer_norm import add_layer_norm, fused_add_layernorm
from metalcore.ops.train.add_rms_norm import add_rms_norm, fused_add_rmsnorm
from metalcore.ops.train.cross_entropy import cross_entropy
from metalcore.ops.train.embedding_bag import embedding_bag
from metalcore.ops.train.fused_attention_bwd import fused_attention_bwd
from metalcore.ops.train.fused_swiglu_mlp import fused_mlp_bwd, fused_swiglu_mlp
from metalcore.ops.train.gather import gather, index_select, scatter_add
from metalcore.ops.train.geglu import geglu
from metalcore.ops.train.gelu import bias_gelu, gelu, metal_gelu
from metalcore.ops.train.jsd import jsd
from metalcore.ops.train.kl_div import kl_div
from metalcore.ops.train.layer_norm import layer_norm
from metalcore.ops.train.linear_cross_entropy import linear_cross_entropy
from metalcore.ops.train.linear_preference import linear_dpo, linear_orpo
from metalcore.ops.train.lora_linear import lora_linear
from metalcore.ops.train.rms_norm import RMSNormFunction, rms_norm
from metalcore.ops.train.rope import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_single,
    rope_forward,
    rope_fwd,
)
from metalcore.ops.train.silu import bias_silu, metal_silu, silu
from metalcore.ops.train.soft_cap import soft_cap
from metalcore.ops.train.softmax import fused_softmax, softmax
from metalcore.ops.train.swiglu import swiglu, swiglu_bwd
from metalcore.optim import MetalAdamW
from metalcore.patch.accelerate import (
    accelerate,
    patch_transformers_rmsnorm,
    patch_transformers_rope,
)
from metalcore.patch.comfy import is_patched, patch_comfy, unpatch_comfy
from metalcore.patch.kernel_layers import kernel_mapping, write_kernel_repository
from metalcore.patch.overrides import (
    disable_pytorch_overrides,
    enable_pytorch_overrides,
    get_active_overrides,
    overrides,
)

from metalcore import metal, nn, optim  # isort: skip  (after the schemas that they implement)
from metalcore._simulate import simulate  # isort: skip

__version__ = _version("metalcore")

_native.load()
_policy.tune_cpu_kernels()


def has_metal_kernels() -> bool:
    """Whether ops on `mps` tensors run Metal kernels here."""
    import torch

    return torch.backends.mps.is_available() and bool(metal.launch.PLANS)


__all__ = [
    "FusedAddRMSNorm",
    "MetalAdamW",
    "MetalEmbeddingBag",
    "MetalGELU",
    "MetalLayerNorm",
    "MetalRMSNorm",
    "MetalSiLU",
    "MetalSoftmax",
    "RMSNormFunction",
    "Record",
    "RotaryEmbedding",
    "accelerate",
    "add_layer_norm",
    "add_rms_norm",
    "apply_householder",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_single",
    "bias_gelu",
    "bias_silu",
    "cholesky",
    "cholesky_solve",
    "cond",
    "cross_entropy",
    "det",
    "disable_pytorch_overrides",
    "eigh",
    "eigvalsh",
    "embedding_bag",
    "enable_pytorch_overrides",
    "fused_add_layernorm",
    "fused_add_rmsnorm",
    "fused_attention_bwd",
    "fused_mlp_bwd",
    "fused_softmax",
    "fused_swiglu_mlp",
    "gather",
    "geglu",
    "gelu",
    "get_active_overrides",
    "has_metal_kernels",
    "householder_vector",
    "index_select",
    "inv",
    "is_patched",
    "jsd",
    "kernel_mapping",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "linear_dpo",
    "linear_orpo",
    "lora_linear",
    "lstsq",
    "lu",
    "matrix_rank",
    "metal",
    "metal_gelu",
    "metal_silu",
    "nn",
    "optim",
    "orthogonalize",
    "overrides",
    "patch_comfy",
    "patch_transformers_rmsnorm",
    "patch_transformers_rope",
    "pinv",
    "polar",
    "qr",
    "qr_solve",
    "rms_norm",
    "rope_forward",
    "rope_fwd",
    "scatter_add",
    "silu",
    "simulate",
    "slogdet",
    "soft_cap",
    "softmax",
    "solve",
    "svd",
    "svdvals",
    "swiglu",
    "swiglu_bwd",
    "trace",
    "trsm",
    "trsm_batched",
    "unpatch_comfy",
    "write_kernel_repository",
]
