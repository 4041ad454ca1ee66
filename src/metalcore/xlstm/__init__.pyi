from metalcore.ops.xlstm.causal_conv1d import causal_conv1d as causal_conv1d, causal_conv1d_step as causal_conv1d_step
from metalcore.ops.xlstm.mlstm_chunkwise import mlstm_chunkwise as mlstm_chunkwise, mlstm_parallel as mlstm_parallel
from metalcore.ops.xlstm.mlstm_step import mlstm_step as mlstm_step
from metalcore.ops.xlstm.multi_head_norm import multi_head_norm as multi_head_norm
from metalcore.ops.xlstm.slstm import slstm as slstm, slstm_step as slstm_step
