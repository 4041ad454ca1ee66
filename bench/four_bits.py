# SPDX-License-Identifier: MIT
"""Products with weights of 4 bits by others: the same numbers, in the form that each wants.

Each takes blocks of q4_0, whose values are (q - 8) * scale for 32 neighbours.
"""

from typing import Any

import torch
from torch import Tensor

from .harness import Function

_VALUES, _BYTES, _ZERO = 32, 18, 8


def _parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The quants [N, K] and the scales [N, K / 32] of blocks."""
    rows = blocks.unflatten(-1, (-1, _BYTES))
    scales = rows[..., :2].contiguous().view(torch.float16)[..., 0]
    packed = rows[..., 2:]
    # value i is in the low half of byte i, value i + 16 in the high half
    return torch.cat([packed & 15, packed >> 4], -1).flatten(-2), scales


def torch_int4(x: Tensor, blocks: Tensor, *_: Tensor) -> Function:
    """torch's own kernel, which is one for bfloat16; its scales are bfloat16 too."""
    quants, scales = _parts(blocks)
    aten = torch.ops.aten
    pack = getattr(aten, "_convert_weight_to_int4pack_for_cpu")  # noqa: B009 - private
    multiply = getattr(aten, "_weight_int4pack_mm_for_cpu")  # noqa: B009 - private
    weight = pack(quants.int(), 1)
    pairs = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1)
    factors = pairs.contiguous().to(x.dtype)
    return lambda x, *_: multiply(x, weight, _VALUES, factors)


def onnxruntime(x: Tensor, blocks: Tensor, *_: Tensor) -> Function:
    """MatMulNBits with activations of 8 bits; float32 in and out."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    quants, scales = _parts(blocks)
    (M, K), N = x.shape, len(blocks)
    # neighbours share a byte
    packed = (quants[:, ::2] | quants[:, 1::2] << 4).view(N, K // _VALUES, _VALUES // 2)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
        K=K, N=N, bits=4, block_size=_VALUES, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [M, K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [M, N])],
        [
            numpy_helper.from_array(packed.numpy(), "w"),
            numpy_helper.from_array(scales.float().flatten().numpy(), "s"),
        ],
    )
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {"x": x.float().numpy()}
    return lambda *_: torch.from_numpy(session.run(None, given)[0])
