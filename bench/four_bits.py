# SPDX-License-Identifier: MIT
"""Products with weights of 4 bits by others: the same numbers, in the form that each wants.

Each takes blocks of q4_0, whose values are (q - 8) * scale for 32 neighbours; ggml, of any type.
"""

import ctypes
from pathlib import Path
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


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("memory", ctypes.c_void_p),
        ("without_data", ctypes.c_bool),
    )


class _Ggml:
    """The functions of ggml's C interface, in the libraries that llama-cpp-python brings."""

    def __init__(self) -> None:
        import llama_cpp

        folder = Path(llama_cpp.__file__).parent / "lib"
        self._libraries = [ctypes.CDLL(str(p)) for p in sorted(folder.glob("libggml*.so"))]

    def __getattr__(self, name: str) -> Any:
        """A function that takes and returns pointers and whole numbers."""
        function = next(f for f in (getattr(x, name, None) for x in self._libraries) if f)

        def call(*args: Any) -> Any:
            wide = [ctypes.c_int64(a) if isinstance(a, int) else a for a in args]
            function.restype = ctypes.c_void_p
            found = function(*wide)
            return found if found is None else ctypes.c_void_p(found)

        return call


def ggml(type: int, x: Tensor, blocks: Tensor, *_: Tensor) -> Function:
    """llama.cpp's product: weights rearranged where it has a kernel for that, 8-bit activations."""
    lib = _Ggml()
    (M, K), N = x.shape, len(blocks)

    def context() -> Any:
        return lib.ggml_init(_Parameters(1 << 20, None, without_data=True))

    def fill(tensor: Any, data: Tensor) -> None:
        lib.ggml_backend_tensor_set(tensor, ctypes.c_void_p(data.data_ptr()), 0, data.nbytes)

    backend = lib.ggml_backend_cpu_init()
    lib.ggml_backend_cpu_set_n_threads(backend, torch.get_num_threads())
    device = lib.ggml_backend_get_device(backend)
    extra = lib.ggml_backend_reg_get_proc_address(
        lib.ggml_backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts"
    )
    places = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(extra.value)(device)

    weights = context()
    w = lib.ggml_new_tensor_2d(weights, type, K, N)
    lib.ggml_backend_alloc_ctx_tensors_from_buft(weights, ctypes.c_void_p(places[0]))
    fill(w, blocks)
    work = context()
    given = lib.ggml_new_tensor_2d(work, 0, K, M)
    found = lib.ggml_mul_mat(work, w, given)
    graph = lib.ggml_new_graph(work)
    lib.ggml_build_forward_expand(graph, found)
    lib.ggml_backend_alloc_ctx_tensors(work, backend)
    fill(given, x.float())
    data = (ctypes.c_float * (M * N)).from_address(lib.ggml_get_data(found).value)
    y = torch.frombuffer(data, dtype=torch.float32).view(M, N)
    compute = lib.ggml_backend_graph_compute

    def run(*_: Tensor) -> Tensor:
        compute(backend, graph)
        return y

    return run
