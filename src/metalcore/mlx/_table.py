# SPDX-License-Identifier: MIT
"""The functions that MLX gets: where each is from, and an example. Nothing is written twice."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import getdoc
from typing import Any, NamedTuple

from metalcore.mlx._function import Function, signature_of


class Entry(NamedTuple):
    """A function of tensors, by the module that has it; how it is called with arrays."""

    module: str
    example: str
    has_gradient: bool = True


# What functions of tensors take and those of arrays do not: DoubleFloats are tensors.
_LEFT_OUT = ("precision",)
_RENAMED = {"dim": "axis", "keepdim": "keepdims", "unsqueeze_dim": "unsqueeze_axis"}


def _of(family: str, has_gradient: bool = True, **examples: str) -> dict[str, Entry]:
    """Functions that have a module of their name."""
    return {
        name: Entry(f"metalcore.ops.{family}.{name}", example, has_gradient)
        for name, example in examples.items()
    }


def _in(module: str, has_gradient: bool = True, **examples: str) -> dict[str, Entry]:
    return {name: Entry(module, example, has_gradient) for name, example in examples.items()}


FUNCTIONS: Mapping[str, Entry] = {
    **_of(
        "train",
        rms_norm="y = metalcore.mlx.rms_norm(x, weight, eps=1e-6)",
        add_rms_norm="y, sum = metalcore.mlx.add_rms_norm(x, residual, weight, eps=1e-6)",
        add_layer_norm="y, sum = metalcore.mlx.add_layer_norm(x, residual, weight, bias)",
        softmax="p = metalcore.mlx.softmax(scores, axis=-1, causal=True)",
        silu="y = metalcore.mlx.silu(x)",
        gelu='y = metalcore.mlx.gelu(x, approximate="tanh")',
        swiglu="y = metalcore.mlx.swiglu(gate, up)",
        geglu="y = metalcore.mlx.geglu(gate, up)",
        soft_cap="y = metalcore.mlx.soft_cap(x, 30.0)",
        cross_entropy="loss = metalcore.mlx.cross_entropy(logits, targets)",
        linear_cross_entropy="loss = metalcore.mlx.linear_cross_entropy(hidden, weight, targets)",
        kl_div="loss = metalcore.mlx.kl_div(log_probabilities, targets)",
        jsd="loss = metalcore.mlx.jsd(logits, targets)",
        lora_linear="y = metalcore.mlx.lora_linear(x, weight, A, B, scale=2.0)",
    ),
    **_in("metalcore.ops.train.silu", bias_silu="y = metalcore.mlx.bias_silu(x, bias)"),
    **_in("metalcore.ops.train.gelu", bias_gelu="y = metalcore.mlx.bias_gelu(x, bias)"),
    **_in(
        "metalcore.ops.train.rope",
        apply_rotary_pos_emb="q, k = metalcore.mlx.apply_rotary_pos_emb(q, k, cos, sin)",
        apply_rotary_pos_emb_single="q = metalcore.mlx.apply_rotary_pos_emb_single(q, cos, sin)",
    ),
    **_in(
        "metalcore.mlx._meanings",
        layer_norm="y = metalcore.mlx.layer_norm(x, weight, bias, eps=1e-5)",
        scaled_dot_product_attention=(
            'y = metalcore.mlx.scaled_dot_product_attention(q, k, v, mask="causal")'
        ),
    ),
    **_of(
        "attention",
        attention="y = metalcore.mlx.attention(q, k, v, causal=True, window=512)",
    ),
    **_of(
        "attention",
        has_gradient=False,
        attention_decode="y = metalcore.mlx.attention_decode(q, keys, values, lengths=lengths)",
    ),
    **_of(
        "quant",
        matmul_int4="y = metalcore.mlx.matmul_int4(x, metalcore.mlx.quantize_int4(weight))",
        matmul_ggml='y = metalcore.mlx.matmul_ggml(x, blocks, "q4_K")',
        embedding_ggml='y = metalcore.mlx.embedding_ggml(tokens, blocks, "q6_K")',
    ),
    **_in(
        "metalcore.ops.quant.matmul_int4",
        matmul_int8="y = metalcore.mlx.matmul_int8(x, metalcore.mlx.quantize_int8(weight))",
    ),
    **_in(
        "metalcore.ops.quant.quantize_int4",
        has_gradient=False,
        quantize_int4="q = metalcore.mlx.quantize_int4(weight, group_size=64)",
        quantize_int8="q = metalcore.mlx.quantize_int8(weight, group_size=64)",
    ),
    **_in(
        "metalcore.ops.quant.quantize_int4",
        dequantize_int4="weight = metalcore.mlx.dequantize_int4(q)",
        dequantize_int8="weight = metalcore.mlx.dequantize_int8(q)",
    ),
    **_in(
        "metalcore.ops.quant.quantize_ggml",
        has_gradient=False,
        quantize_ggml='blocks = metalcore.mlx.quantize_ggml(weight, "q4_K")',
        dequantize_ggml='weight = metalcore.mlx.dequantize_ggml(blocks, "q4_K")',
    ),
    **_of(
        "xlstm",
        mlstm_chunkwise="h = metalcore.mlx.mlstm_chunkwise(q, k, v, i, f)",
        mlstm_step="h, (c, n, m) = metalcore.mlx.mlstm_step(q, k, v, i, f, c, n, m)",
        causal_conv1d='y = metalcore.mlx.causal_conv1d(x, weight, bias, activation="silu")',
        multi_head_norm="y = metalcore.mlx.multi_head_norm(x, weight)",
    ),
    **_in(
        "metalcore.ops.xlstm.mlstm_chunkwise",
        mlstm_parallel="h = metalcore.mlx.mlstm_parallel(q, k, v, i, f)",
    ),
    **_in(
        "metalcore.ops.xlstm.causal_conv1d",
        causal_conv1d_step="y, state = metalcore.mlx.causal_conv1d_step(x, state, weight)",
    ),
    **_of(
        "linalg",
        cholesky="L = metalcore.mlx.cholesky(A)",
        cholesky_solve="X = metalcore.mlx.cholesky_solve(B, metalcore.mlx.cholesky(A))",
        det="d = metalcore.mlx.det(A)",
        eigh="L, Q = metalcore.mlx.eigh(A)",
        inv="X = metalcore.mlx.inv(A)",
        lstsq="X, residuals, rank, S = metalcore.mlx.lstsq(A, B)",
        lu="P, L, U = metalcore.mlx.lu(A)",
        orthogonalize="Q = metalcore.mlx.orthogonalize(A)",
        pinv="X = metalcore.mlx.pinv(A)",
        qr="Q, R = metalcore.mlx.qr(A)",
        qr_solve="X = metalcore.mlx.qr_solve(A, B)",
        solve="X = metalcore.mlx.solve(A, B)",
        svd="U, S, V = metalcore.mlx.svd(A)",
        trsm="X = metalcore.mlx.trsm(L, B)",
    ),
    **_in("metalcore.ops.linalg.det", slogdet="sign, log = metalcore.mlx.slogdet(A)"),
    **_in("metalcore.ops.linalg.eigh", eigvalsh="L = metalcore.mlx.eigvalsh(A)"),
    **_in("metalcore.ops.linalg.orthogonalize", polar="U = metalcore.mlx.polar(A)"),
    **_in("metalcore.ops.linalg.svd", svdvals="S = metalcore.mlx.svdvals(A)"),
}

PRECISE: Mapping[str, Entry] = {
    **_of(
        "precise",
        sum="s = metalcore.mlx.precise.sum(x, axis=-1)",
        dot="s = metalcore.mlx.precise.dot(x, y)",
        cumsum="s = metalcore.mlx.precise.cumsum(x)",
    ),
    **_in("metalcore.ops.precise.sum", mean="m = metalcore.mlx.precise.mean(x, axis=0)"),
    **_in("metalcore.ops.precise.dot", norm="n = metalcore.mlx.precise.norm(x)"),
}


def original(name: str, table: Mapping[str, Entry] = FUNCTIONS) -> Callable[..., Any]:
    """The function of tensors."""
    function: Callable[..., Any] = getattr(import_module(table[name].module), name)
    return function


def made(name: str, table: Mapping[str, Entry] = FUNCTIONS) -> Callable[..., Any]:
    """The function of arrays."""
    function, entry = original(name, table), table[name]
    # values of matrices alone take less work; a gradient, if one is asked for, does it again
    is_recorded = not entry.module.startswith("metalcore.ops.linalg.")
    computed = Function(function, entry.has_gradient, is_recorded)
    signature = signature_of(function, _RENAMED, _LEFT_OUT)
    back = {theirs: ours for ours, theirs in _RENAMED.items()}

    def call(*args: Any, stream: Any = None, **named: Any) -> Any:
        if not named:
            return computed(*args, stream=stream)
        if not named.keys().isdisjoint((*_RENAMED, *_LEFT_OUT)):
            signature.bind(*args, **named)  # raises: it is another's word
        return computed(*args, stream=stream, **{back.get(n, n): v for n, v in named.items()})

    call.__name__ = call.__qualname__ = name
    call.__module__ = "metalcore.mlx" if table is FUNCTIONS else "metalcore.mlx.precise"
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _documented(str(getdoc(function)), entry.example)
    return call


def _documented(text: str, example: str) -> str:
    """The words that the function has for tensors, in MLX's."""
    words = re.sub(r"\n*Example:\n.*", "", text, flags=re.DOTALL)
    for name in _LEFT_OUT:
        words = re.sub(rf"\n    {name}: .*(?:\n     .*)*", "", words)
    for ours, theirs in _RENAMED.items():
        words = re.sub(rf"\b{ours}\b", theirs, words)
    words = words.replace("tensor", "array").replace("Tensor", "array")
    words = re.sub(
        r"\n\n+Returns:", "\n    stream: where it is computed.\n\nReturns:", words, count=1
    )
    return f"{words}\n\nExample:\n    >>> {example}\n"
