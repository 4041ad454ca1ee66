from metalcore.ops.quant.embedding_ggml import embedding_ggml as embedding_ggml
from metalcore.ops.quant.matmul_ggml import matmul_ggml as matmul_ggml, matmul_ggml_q4_0 as matmul_ggml_q4_0, pack_ggml as pack_ggml
from metalcore.ops.quant.matmul_int4 import matmul_int4 as matmul_int4, matmul_int8 as matmul_int8, pack_int4 as pack_int4, pack_int8 as pack_int8
from metalcore.ops.quant.quantize_ggml import dequantize_ggml as dequantize_ggml, dequantize_ggml_q4_0 as dequantize_ggml_q4_0, quantize_ggml as quantize_ggml, quantize_ggml_q4_0 as quantize_ggml_q4_0
from metalcore.ops.quant.quantize_int4 import QuantizedInt4 as QuantizedInt4, QuantizedInt8 as QuantizedInt8, dequantize_int4 as dequantize_int4, dequantize_int8 as dequantize_int8, quantize_int4 as quantize_int4, quantize_int8 as quantize_int8
