# SPDX-License-Identifier: MIT
"""Layers of xLSTM. Parameters have the names of transformers' xLSTM and NX-AI's xLSTMLarge, and
what other checkpoints of theirs call them is understood on loading."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metalcore._check import expect
from metalcore.nn import RMSNorm
from metalcore.ops.train.soft_cap import soft_cap
from metalcore.ops.train.swiglu import swiglu
from metalcore.ops.xlstm.causal_conv1d import causal_conv1d
from metalcore.ops.xlstm.mlstm_chunkwise import mlstm_chunkwise
from metalcore.ops.xlstm.mlstm_step import mlstm_step
from metalcore.ops.xlstm.multi_head_norm import multi_head_norm
from metalcore.ops.xlstm.slstm import slstm

State = tuple[Tensor, ...]
"""What a layer remembers: C, n, m of an mLSTM; the steps before of the convolution, then y, c, n, m
of an sLSTM."""


def on_loading(module: nn.Module, rename: Callable[..., None]) -> None:
    """Let `rename(module, state_dict, prefix, ...)` change what `module` is loaded from."""
    register: Any = module.register_load_state_dict_pre_hook
    register(rename)


class HeadNorm(nn.Module):
    """`multi_head_norm` of [B, T, H, D], with its weight."""

    def __init__(
        self, size: int, eps: float, bias: bool = False, weight_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - weight_offset))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x: Tensor) -> Tensor:
        how = {"eps": self.eps, "weight_offset": self.weight_offset}
        return multi_head_norm(x, self.weight, self.bias, **how)  # type: ignore[arg-type]


class MLSTMCell(nn.Module):
    """The mLSTM of all heads, without weights: sequences by chunks, single steps as steps.

    Args:
        num_heads: H.
        eps, chunk_size, gate, normalize, grad: as for `mlstm_chunkwise`.

    Example:
        >>> cell = metalcore.nn.MLSTMCell(4)
        >>> h, state = cell(q, k, v, i, f)
    """

    def __init__(
        self,
        num_heads: int,
        *,
        eps: float = 1e-6,
        chunk_size: int | None = None,
        gate: Literal["exp", "sigmoid"] = "exp",
        normalize: bool = True,
        grad: Literal["exact", "nx"] = "exact",
    ) -> None:
        super().__init__()
        self.num_heads, self.chunk_size = num_heads, chunk_size
        self.rule: dict[str, Any] = {
            "eps": eps,
            "gate": gate,
            "normalize": normalize,
            "grad": grad,
        }

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """h [B, T, H, E] and the next state, of q, k [B, T, H * D], v [B, T, H * E] and gates
        [B, T, H]."""
        heads = (-1, self.num_heads)
        q, k, v = (x.unflatten(2, (heads[1], -1)).transpose(1, 2) for x in (q, k, v))
        i, f = i.transpose(1, 2), f.transpose(1, 2)
        if q.shape[2] == 1:
            row = (x[:, :, 0] for x in (q, k, v, i, f))
            h, state = mlstm_step(*row, *(state or ()), **self.rule)
            return h[:, None], state
        names = ("c_initial", "n_initial", "m_initial")
        given: dict[str, Any] = dict(zip(names, state or (), strict=False))
        how = {"chunk_size": self.chunk_size, "return_last_states": True, **self.rule}
        found: Any = mlstm_chunkwise(q, k, v, i, f, **given, **how)
        return found[0].transpose(1, 2), found[1]

    def extra_repr(self) -> str:
        return f"{self.num_heads}, chunk_size={self.chunk_size}, {self.rule}"


class MLSTMLayer(nn.Module):
    """Queries, keys, values and gates of x, the mLSTM, a norm of each head, an output gate.

    Checkpoints with joint projections (`weight_mode="fused"`) are taken apart on loading.

    Args:
        embedding_dim: size of x.
        num_heads: heads of the mLSTM.
        qk_dim_factor, v_dim_factor: sizes of all queries and of all values, relative to x.
        use_bias: whether projections have a bias; those of the gates i and f always have.
        norm_eps: of the norm.
        gate_soft_cap: i and f are kept within this of 0; None for no limit.
        eps, chunk_size: of the mLSTM.

    Example:
        >>> y, state = metalcore.nn.MLSTMLayer(64, 4)(torch.randn(2, 9, 64))
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        use_bias: bool = False,
        norm_eps: float = 1e-6,
        gate_soft_cap: float | None = 15.0,
        eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.qk_dim, self.v_dim = (
            int(embedding_dim * qk_dim_factor),
            int(embedding_dim * v_dim_factor),
        )
        for name, dim in (("queries", self.qk_dim), ("values", self.v_dim)):
            expect(
                dim > 0 and dim % num_heads == 0,
                "MLSTMLayer",
                f"the size of {name} must be a multiple of {num_heads} heads, got {dim}",
            )
        self.gate_soft_cap = gate_soft_cap
        self.q = nn.Linear(embedding_dim, self.qk_dim, use_bias)
        self.k = nn.Linear(embedding_dim, self.qk_dim, use_bias)
        self.v = nn.Linear(embedding_dim, self.v_dim, use_bias)
        self.ogate_preact = nn.Linear(embedding_dim, self.v_dim, use_bias)
        self.igate_preact = nn.Linear(embedding_dim, num_heads)
        self.fgate_preact = nn.Linear(embedding_dim, num_heads)
        self.cell = MLSTMCell(num_heads, eps=eps, chunk_size=chunk_size)
        self.multihead_norm = HeadNorm(self.v_dim, norm_eps, use_bias)
        self.out_proj = nn.Linear(self.v_dim, embedding_dim, use_bias)
        on_loading(self, _take_apart)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Little is written at first, and heads forget at different rates."""
        for gate in (self.igate_preact, self.fgate_preact):
            nn.init.zeros_(gate.weight)
        nn.init.constant_(self.igate_preact.bias, -10.0)
        with torch.no_grad():
            self.fgate_preact.bias.copy_(torch.linspace(3.0, 6.0, len(self.fgate_preact.bias)))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """y [B, T, embedding_dim] of x, and the next state."""
        i, f = self.igate_preact(x), self.fgate_preact(x)
        if self.gate_soft_cap is not None:
            i, f = soft_cap(i, self.gate_soft_cap), soft_cap(f, self.gate_soft_cap)
        h, state = self.cell(self.q(x), self.k(x), self.v(x), i, f, state)
        gated = torch.sigmoid(self.ogate_preact(x)) * self.multihead_norm(h)
        return self.out_proj(gated), state


def _take_apart(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Joint projections of a checkpoint become single ones."""
    layer: Any = module
    parts = {
        "qkv_opreact": {
            "q": layer.qk_dim,
            "k": layer.qk_dim,
            "v": layer.v_dim,
            "ogate_preact": layer.v_dim,
        },
        "ifgate_preact": dict.fromkeys(("igate_preact", "fgate_preact"), layer.cell.num_heads),
    }
    for joint, single in parts.items():
        for kind in ("weight", "bias"):
            rows = state_dict.pop(f"{prefix}{joint}.{kind}", None)
            if rows is not None:
                for name, part in zip(single, rows.split(list(single.values())), strict=True):
                    state_dict[f"{prefix}{name}.{kind}"] = part


class SLSTMLayer(nn.Module):
    """Convolution, gates of each head, the sLSTM, a norm of each head.

    It takes the state_dict of NX-AI's `sLSTMLayer`, of its vanilla and its CUDA cell; there, the
    weight called igate is that of f and the other way round.

    Args:
        embedding_dim: size of x and of the result.
        num_heads: heads of the sLSTM.
        conv1d_kernel_size: steps that the gates i and f see; 0 for no convolution.
        norm_eps: of the norm.
        gradient_clip: as for `slstm`.

    Example:
        >>> y, state = metalcore.nn.SLSTMLayer(64, 4)(torch.randn(2, 9, 64))
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        conv1d_kernel_size: int = 4,
        norm_eps: float = 1e-5,
        gradient_clip: float | None = None,
    ) -> None:
        super().__init__()
        expect(
            embedding_dim % num_heads == 0,
            "SLSTMLayer",
            f"embedding_dim must be a multiple of {num_heads} heads, got {embedding_dim}",
        )
        size = embedding_dim // num_heads
        self.num_heads, self.gradient_clip = num_heads, gradient_clip
        self.conv1d = None
        if conv1d_kernel_size:
            self.conv1d = nn.Conv1d(
                embedding_dim, embedding_dim, conv1d_kernel_size, groups=embedding_dim
            )
        for gate in "ifzo":
            weight = torch.randn(num_heads, size, size) * (2 / 5 / embedding_dim) ** 0.5
            self.register_parameter(f"{gate}gate", nn.Parameter(weight))
        self.recurrent_kernel = nn.Parameter(torch.zeros(num_heads, size, 4, size))
        bias = torch.zeros(num_heads, 4, size)
        bias[:, 1] = torch.linspace(3.0, 6.0, size)
        self.bias = nn.Parameter(bias)
        self.group_norm = HeadNorm(embedding_dim, norm_eps, weight_offset=1.0)
        on_loading(self, _rename)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """y [B, T, embedding_dim] of x, and the next state."""
        seen, before = x, x.new_zeros(x.shape[0], 0, x.shape[2])
        if self.conv1d is not None:
            seen, before = causal_conv1d(
                x,
                self.conv1d.weight,
                self.conv1d.bias,
                activation="silu",
                initial_state=None if state is None else state[0],
                return_last_state=True,
            )
        heads, own = (t.unflatten(2, (self.num_heads, -1)) for t in (seen, x))
        weights: Any = self
        gates = torch.stack(
            [
                torch.einsum("bthd,hed->bthe", source, getattr(weights, f"{gate}gate"))
                for gate, source in zip("ifzo", (heads, heads, own, own), strict=True)
            ],
            2,
        )
        found: Any = slstm(
            gates,
            self.recurrent_kernel,
            self.bias,
            states=None if state is None else state[1:],  # type: ignore[arg-type]
            return_last_states=True,
            gradient_clip=self.gradient_clip,
        )
        y, states = found
        return self.group_norm(y), (before, *states)


def _rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """NX-AI's names and layouts."""
    layer: Any = module
    cell = f"{prefix}slstm_cell."
    kernel = state_dict.pop(f"{cell}_recurrent_kernel_", None)
    if kernel is None:
        return
    heads, size = layer.recurrent_kernel.shape[:2]
    by_gates = kernel.shape[1:] == (4 * size, size) and size > 1
    bias = state_dict.pop(f"{cell}_bias_")
    if by_gates:
        kernel = kernel.view(heads, 4, size, size).permute(0, 3, 1, 2)
        bias = bias.view(4, heads, size).transpose(0, 1)
    state_dict[f"{prefix}recurrent_kernel"] = kernel.reshape(heads, size, 4, size)
    state_dict[f"{prefix}bias"] = bias.reshape(heads, 4, size)
    for ours, theirs in zip("ifzo", "fizo", strict=True):
        state_dict[f"{prefix}{ours}gate"] = state_dict.pop(f"{prefix}{theirs}gate.weight")
    for kind in ("weight", "bias"):
        if f"{prefix}conv1d.conv.{kind}" in state_dict:
            state_dict[f"{prefix}conv1d.{kind}"] = state_dict.pop(f"{prefix}conv1d.conv.{kind}")


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, embedding_dim: int, size: int, use_bias: bool) -> None:
        super().__init__()
        self.size = size
        self.proj_up_gate = nn.Linear(embedding_dim, size, use_bias)
        self.proj_up = nn.Linear(embedding_dim, size, use_bias)
        self.proj_down = nn.Linear(size, embedding_dim, use_bias)
        on_loading(self, self._take_apart)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj_down(swiglu(self.proj_up_gate(x), self.proj_up(x)))
        return y

    @staticmethod
    def _take_apart(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for kind in ("weight", "bias"):
            rows = state_dict.pop(f"{prefix}proj_up_gate_z.{kind}", None)
            if rows is not None:
                gate, up = rows.split(module.size)
                state_dict[f"{prefix}proj_up_gate.{kind}"] = gate
                state_dict[f"{prefix}proj_up.{kind}"] = up


class XLSTMBlock(nn.Module):
    """A norm and an mLSTM or sLSTM layer, a norm and a feed-forward layer, each added to x.

    Args:
        embedding_dim, num_heads: of the layer.
        kind: "mlstm" or "slstm".
        ffn_dim: size within the feed-forward layer; None for 8/3 of x, rounded up to 64.
        use_bias, norm_eps: of all parts.
        layer: further arguments of `MLSTMLayer` or `SLSTMLayer`.

    Example:
        >>> y, state = metalcore.nn.XLSTMBlock(64, 4)(torch.randn(2, 9, 64))
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        kind: Literal["mlstm", "slstm"] = "mlstm",
        ffn_dim: int | None = None,
        use_bias: bool = False,
        norm_eps: float = 1e-6,
        **layer: Any,
    ) -> None:
        super().__init__()
        expect(kind in ("mlstm", "slstm"), "XLSTMBlock", f"kind must be mlstm or slstm, got {kind}")
        self.kind = kind
        if kind == "mlstm":
            self.norm_mlstm = RMSNorm(embedding_dim, norm_eps)
            self.mlstm_layer = MLSTMLayer(
                embedding_dim, num_heads, use_bias=use_bias, norm_eps=norm_eps, **layer
            )
        else:
            self.norm_slstm = RMSNorm(embedding_dim, norm_eps)
            self.slstm_layer = SLSTMLayer(embedding_dim, num_heads, norm_eps=norm_eps, **layer)
        self.norm_ffn = RMSNorm(embedding_dim, norm_eps)
        size = ffn_dim if ffn_dim is not None else -(-8 * embedding_dim // 192) * 64
        self.ffn = FeedForward(embedding_dim, size, use_bias)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """y of x, [B, T, embedding_dim], and the next state."""
        if self.kind == "mlstm":
            y, state = self.mlstm_layer(self.norm_mlstm(x), state)
        else:
            y, state = self.slstm_layer(self.norm_slstm(x), state)
        x = x + y
        return x + self.ffn(self.norm_ffn(x)), state
