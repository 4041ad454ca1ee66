from metalcore.ops.attention.attention import attention as attention
from metalcore.ops.attention.attention_decode import attention_decode as attention_decode
