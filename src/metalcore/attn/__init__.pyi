from metalcore.ops.attention.attention import attention as attention
from metalcore.ops.attention.attention_decode import attention_decode as attention_decode
from metalcore.ops.attention.copy_blocks import copy_blocks as copy_blocks, swap_blocks as swap_blocks
from metalcore.ops.attention.flex_attention import flex_attention as flex_attention
from metalcore.ops.attention.paged_attention import paged_attention as paged_attention
from metalcore.ops.attention.paged_write import paged_write as paged_write
from metalcore.ops.attention.scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention
from metalcore.ops.attention.ring_attention import ring_attention as ring_attention
