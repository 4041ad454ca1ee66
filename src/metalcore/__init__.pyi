# What `metalcore` offers. A name is loaded when it is first asked for.
from metalcore import attn as attn, decode as decode, linalg as linalg, metal as metal, nn as nn, ops as ops, optim as optim, patch as patch, precise as precise, quant as quant, train as train, xlstm as xlstm
from metalcore._quantized_layers import GGMLEmbedding as GGMLEmbedding, GGMLLinear as GGMLLinear, Int4Linear as Int4Linear, Int8Linear as Int8Linear
from metalcore._simulate import simulate as simulate
from metalcore._trace import Record as Record, trace as trace
from metalcore.attn import *
from metalcore.decode import *
from metalcore.checkpoints import from_awq as from_awq, from_gptq as from_gptq, from_mlx as from_mlx
from metalcore.gguf.format import GGUFError as GGUFError
from metalcore.gguf.load import load_gguf as load_gguf
from metalcore.gguf.save import save_gguf as save_gguf
from metalcore.linalg import *
from metalcore.metal.run import has_metal_kernels as has_metal_kernels
from metalcore.patch.accelerate import accelerate as accelerate
from metalcore.patch.batching import continuous_batching as continuous_batching
from metalcore.patch.decoder import Decoder as Decoder, decoder as decoder
from metalcore.patch.decode_rows import Rows as Rows
from metalcore.patch.cache import PagedCache as PagedCache, QuantizedCache as QuantizedCache
from metalcore.patch.kernel_layers import kernel_mapping as kernel_mapping, write_kernel_repository as write_kernel_repository
from metalcore.patch.overrides import disable_pytorch_overrides as disable_pytorch_overrides, enable_pytorch_overrides as enable_pytorch_overrides, get_active_overrides as get_active_overrides, overrides as overrides
from metalcore.quant import *
from metalcore.patch.quantize import quantize_model as quantize_model
from metalcore.train import *
from metalcore.xlstm import *

# Names of the original: programs written for it run unchanged.
from metalcore.nn import FusedAddRMSNorm as FusedAddRMSNorm, RotaryEmbedding as RotaryEmbedding
from metalcore.ops.train.add_layer_norm import fused_add_layernorm as fused_add_layernorm
from metalcore.ops.train.add_rms_norm import fused_add_rmsnorm as fused_add_rmsnorm
from metalcore.ops.train.rms_norm import RMSNormFunction as RMSNormFunction
from metalcore.ops.train.rope import apply_rotary_pos_emb_single as apply_rotary_pos_emb_single
from metalcore.patch.accelerate import patch_transformers_rmsnorm as patch_transformers_rmsnorm, patch_transformers_rope as patch_transformers_rope
from metalcore.patch.comfy import is_patched as is_patched, patch_comfy as patch_comfy, unpatch_comfy as unpatch_comfy
from metalcore.patch.overrides import disable_slow_metal_sdpa as disable_slow_metal_sdpa, enable_slow_metal_sdpa as enable_slow_metal_sdpa, is_slow_metal_sdpa_enabled as is_slow_metal_sdpa_enabled
MetalEmbeddingBag = nn.EmbeddingBag
MetalGELU = nn.GELU
MetalLayerNorm = nn.LayerNorm
MetalRMSNorm = nn.RMSNorm
MetalSiLU = nn.SiLU
MetalSoftmax = nn.Softmax
fused_softmax = softmax
metal_gelu = gelu
metal_scaled_dot_product_attention = scaled_dot_product_attention
metal_silu = silu
rope_forward = apply_rotary_pos_emb
rope_fwd = apply_rotary_pos_emb
trsm_batched = trsm

__version__: str
