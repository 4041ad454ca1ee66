from metalcore.ops.attention.attention import attention as attention
