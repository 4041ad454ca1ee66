from metalcore.ops.train.add_layer_norm import add_layer_norm as add_layer_norm
from metalcore.ops.train.add_rms_norm import add_rms_norm as add_rms_norm
from metalcore.ops.train.cross_entropy import cross_entropy as cross_entropy
from metalcore.ops.train.embedding_bag import embedding_bag as embedding_bag
from metalcore.ops.train.fused_attention_bwd import fused_attention_bwd as fused_attention_bwd
from metalcore.ops.train.fused_swiglu_mlp import fused_mlp_bwd as fused_mlp_bwd, fused_swiglu_mlp as fused_swiglu_mlp
from metalcore.ops.train.gather import gather as gather, index_select as index_select, scatter_add as scatter_add
from metalcore.ops.train.geglu import geglu as geglu
from metalcore.ops.train.gelu import bias_gelu as bias_gelu, gelu as gelu
from metalcore.ops.train.jsd import jsd as jsd
from metalcore.ops.train.kl_div import kl_div as kl_div
from metalcore.ops.train.layer_norm import layer_norm as layer_norm
from metalcore.ops.train.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from metalcore.ops.train.linear_preference import linear_dpo as linear_dpo, linear_orpo as linear_orpo
from metalcore.ops.train.lora_linear import lora_linear as lora_linear
from metalcore.ops.train.rms_norm import rms_norm as rms_norm
from metalcore.ops.train.rope import apply_rotary_pos_emb as apply_rotary_pos_emb
from metalcore.ops.train.silu import bias_silu as bias_silu, silu as silu
from metalcore.ops.train.soft_cap import soft_cap as soft_cap
from metalcore.ops.train.softmax import softmax as softmax
from metalcore.ops.train.swiglu import swiglu as swiglu, swiglu_bwd as swiglu_bwd
from metalcore.optim import MetalAdamW as MetalAdamW, MetalMuon as MetalMuon
