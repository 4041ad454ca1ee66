# SPDX-License-Identifier: MIT
"""Arguments for every function of `metalcore.mlx`, small ones and such as take several launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import metalcore

Loss = Callable[[Any], Any]


class Case(NamedTuple):
    """How a function is called, how long its sums are, and by which op's tolerance."""

    function: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    reduces_over: int
    op: str
    loss: Loss | None = None
    """What the results determine, where they are not unique: of arrays as of tensors."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def positive(batch: int, n: int) -> Tensor:
    a = normal(batch, n, n)
    return a @ a.mT / n + torch.eye(n)


def symmetric(batch: int, n: int) -> Tensor:
    """Of eigenvalues 1 to n: how exact eigenvectors are depends on the gaps."""
    Q = torch.linalg.qr(normal(batch, n, n))[0]
    return (Q * torch.arange(1.0, n + 1)) @ Q.mT


def spread(batch: int, m: int, n: int) -> Tensor:
    """Of singular values 1 to n."""
    U, V = (torch.linalg.qr(normal(batch, k, n))[0] for k in (m, n))
    return (U * torch.arange(1.0, n + 1)) @ V.mT


def _transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def of_eigh(results: Any) -> Any:
    values, vectors = results
    return [values, (vectors * values[..., None, :]) @ _transposed(vectors)]


def of_svd(results: Any) -> Any:
    U, S, V = results
    return [S, (U * S[..., None, :]) @ _transposed(V)]


def cases() -> dict[str, Case]:
    """All of them, by a name each."""
    torch.manual_seed(1)
    found: dict[str, Case] = {}

    def add(
        function: str, *args: Any, over: int = 64, op: str = "", loss: Loss | None = None, **n: Any
    ) -> None:
        name, number = function, 2
        while name in found:
            name, number = f"{function}-{number}", number + 1
        found[name] = Case(function, args, n, over, op or function.split(".")[-1], loss)

    row, long, weight = normal(4, 64), normal(3, 2500), normal(64)
    labels = torch.randint(0, 100, (8,))
    add("rms_norm", row, weight, eps=1e-6)
    add("rms_norm", normal(3, 7), normal(7), eps=1e-6, over=7)
    add("rms_norm", normal(3, 1), normal(1), eps=1.0, over=1)
    add("rms_norm", long, normal(2500), eps=1e-6, weight_offset=1.0, over=2500)
    add("add_rms_norm", row, normal(4, 64), weight, eps=1e-6)
    add("layer_norm", row, weight, normal(64))
    add("layer_norm", normal(2, 3, 9), over=9)
    add("add_layer_norm", row, normal(4, 64), weight, normal(64))
    add("softmax", row)
    add("softmax", normal(2, 9, 9), causal=True, scale=0.5, over=9)
    add("silu", normal(5, 33), over=1)
    add("gelu", normal(5, 33), over=1)
    add("gelu", normal(8), approximate="tanh", over=1)
    add("bias_silu", normal(5, 33), normal(33), over=5)
    add("bias_gelu", normal(5, 33), normal(33), over=5)
    add("swiglu", row, normal(4, 64), over=1)
    add("geglu", row, normal(4, 64), over=1)
    add("soft_cap", 20 * row, 15.0, over=1)
    cos, sin = normal(1, 8, 16), normal(1, 8, 16)
    add(
        "apply_rotary_pos_emb",
        normal(1, 2, 8, 16),
        normal(1, 1, 8, 16),
        cos,
        sin,
        over=4,
        op="rope",
    )
    add("apply_rotary_pos_emb_single", normal(1, 2, 8, 16), cos, sin, over=4, op="rope")
    add("cross_entropy", normal(8, 100), labels, over=100)
    add("cross_entropy", normal(8, 100), labels, label_smoothing=0.1, softcap=5.0, over=100)
    add("linear_cross_entropy", normal(8, 16), normal(100, 16), labels, over=100)
    add("kl_div", normal(4, 50).log_softmax(-1), normal(4, 50).softmax(-1), over=200)
    add("jsd", normal(4, 50).log_softmax(-1), normal(4, 50).log_softmax(-1), over=200)
    add("lora_linear", normal(4, 16), normal(8, 16), normal(2, 16), normal(8, 2), scale=2.0)
    q, k, v = normal(1, 4, 17, 32), normal(1, 2, 17, 32), normal(1, 2, 17, 32)
    add("attention", q, k, v, causal=True, op="attention")
    add("attention", q, k, v, window=(4, 4), softcap=10.0, op="attention")
    add("scaled_dot_product_attention", q, k, v, mask="causal", op="attention")
    add("scaled_dot_product_attention", q, k, v, mask=normal(17, 17) > 0, op="attention")
    lengths = torch.tensor([5, 17])
    add("attention_decode", normal(2, 4, 1, 32), *normal(2, 2, 2, 17, 32), lengths=lengths)
    int4, int8 = (f(normal(24, 64), 32) for f in (metalcore.quantize_int4, metalcore.quantize_int8))
    blocks = metalcore.quantize_ggml(normal(24, 256), "q4_K")
    add("matmul_int4", normal(3, 64), int4, activation="float")
    add("matmul_int8", normal(3, 64), int8, activation="float", op="matmul_int4")
    add("matmul_ggml", normal(3, 256), blocks, "q4_K", activation="float", over=256)
    add("embedding_ggml", torch.tensor([3, 0, 23]), blocks, "q4_K", over=1)
    add("quantize_int4", normal(24, 64), 32, over=1)
    add("quantize_int8", normal(24, 64), 32, over=1)
    add("dequantize_int4", int4, over=32)
    add("dequantize_int8", int8, over=32)
    add("quantize_ggml", normal(4, 64), "q4_0", over=1)
    add("dequantize_ggml", blocks, "q4_K", over=1)
    heads = [normal(1, 2, 20, n) for n in (16, 16, 8)]
    gates = (normal(1, 2, 20), normal(1, 2, 20) + 2)
    add("mlstm_chunkwise", *heads, *gates, over=320, chunk_size=16)
    add("mlstm_parallel", *heads, *gates, over=320, op="mlstm_chunkwise")
    state = (normal(1, 2, 16, 8), normal(1, 2, 16), normal(1, 2))
    one = [x[:, :, 0] for x in (*heads, *gates)]
    add("mlstm_step", *one, *state)
    add("causal_conv1d", normal(2, 10, 8), normal(8, 4), normal(8), activation="silu")
    add("causal_conv1d", normal(2, 10, 8), normal(8, 4))
    add(
        "causal_conv1d_step",
        normal(2, 8),
        normal(2, 3, 8),
        normal(8, 4),
        over=4,
        op="causal_conv1d",
    )
    add("multi_head_norm", normal(2, 5, 3, 16), normal(48), op="layer_norm")
    small, one_sided = positive(3, 8), normal(3, 8, 2)
    large = positive(1, 150)
    add("cholesky", small)
    add("cholesky", large, over=150)
    add("cholesky_solve", one_sided, torch.linalg.cholesky(small))
    add("trsm", torch.linalg.cholesky(small), one_sided)
    add("trsm", torch.linalg.cholesky(large), normal(1, 150, 20), over=150)
    add("solve", normal(3, 8, 8) + 4 * torch.eye(8), one_sided)
    add("solve", large, normal(1, 150, 2), over=150)
    add("inv", small, op="solve")
    add("det", small)
    add("slogdet", small, op="det")
    add("lu", normal(3, 8, 8))
    add("lu", normal(1, 80, 80), over=80)
    add("qr", normal(3, 9, 8))
    add("qr", normal(2, 70, 66), over=70)
    add("qr_solve", normal(3, 9, 8), normal(3, 9, 2), op="qr")
    add("eigh", symmetric(3, 8), loss=of_eigh)
    add("eigh", symmetric(1, 70), over=70, loss=of_eigh)
    add("eigvalsh", symmetric(3, 8), op="eigh")
    add("svd", spread(3, 9, 8), loss=of_svd)
    add("svd", spread(1, 70, 60), over=70, loss=of_svd)
    add("svdvals", spread(3, 9, 8), op="svd")
    add("lstsq", normal(3, 9, 4), normal(3, 9, 2), op="svd", loss=lambda r: [r[0], r[1], r[3]])
    add("pinv", normal(3, 9, 4), op="svd")
    add("orthogonalize", normal(3, 40, 8), op="qr")
    add("orthogonalize", normal(1, 500, 40), over=500, op="orthogonalize")
    add("polar", normal(3, 20, 8), op="svd")
    add("precise.sum", normal(4, 100), dim=-1, over=1, op="precise_sum")
    add("precise.mean", normal(4, 100), over=1, op="precise_sum")
    add("precise.dot", normal(4, 100), normal(4, 100), over=1, op="precise_dot")
    add("precise.norm", normal(100), over=1, op="precise_dot")
    add("precise.cumsum", normal(2, 100), over=1, op="precise_cumsum")
    return found


CASES = cases()
