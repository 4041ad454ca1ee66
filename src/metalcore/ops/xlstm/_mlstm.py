# SPDX-License-Identifier: MIT
"""What an mLSTM computes, in plain torch, and checks of its arguments.

Letters: B entries, H heads, T steps, D size of queries and keys, E size of values, N sequences.

    lf = log sigmoid(f);  m_t = max(lf_t + m_(t-1), i_t)
    C_t = exp(lf_t + m_(t-1) - m_t) C_(t-1) + exp(i_t - m_t) k_t v_t^T,  and n_t likewise of k_t
    h_t = s q_t C_t / (max(|s q_t n_t|, exp(-m_t)) + eps),  s = D^-0.5

C and n are kept scaled by exp(-m), so that nothing overflows. Written out over all steps, with the
sums F of lf and w_j = i_j - F_j, the weight of step j in step t is exp(w_j - c_t), where c_t is the
largest w up to t, m_(-1) included, and m_t = F_t + c_t. With sigmoid gates log sigmoid(i) is in the
place of i, and m is 0.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import (
    dtype_name,
    expect,
    expect_float,
    expect_one_of,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    is_eager,
    refuse,
    shape,
)
from metalcore._op import accumulate, accumulate_dtype

States = tuple[Tensor, Tensor, Tensor]


class Rule(NamedTuple):
    """How an mLSTM is meant, and its gradient."""

    eps: float
    sigmoid: bool
    normalize: bool
    nx: bool


def as_rule(op: str, eps: float, gate: str, normalize: bool, grad: str) -> Rule:
    expect_one_of(op, "gate", gate, ("exp", "sigmoid"))
    expect_one_of(op, "grad", grad, ("exact", "nx"))
    expect(eps >= 0, op, f"eps must not be negative, got {eps}")
    expect(normalize or gate == "sigmoid", op, "normalize=False is for gate='sigmoid' alone")
    return Rule(float(eps), gate == "sigmoid", normalize, grad == "nx")


def expect_inputs(op: str, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> None:
    """q, k [..., D], v [..., E] of one dtype, gates [...]."""
    expect_float(op, q=q, k=k, v=v, i=i, f=f)
    expect_same_device(op, q=q, k=k, v=v, i=i, f=f)
    expect_same_dtype(op, q=q, k=k, v=v)
    expect(q.dim() > 0 and q.shape[-1] > 0, op, f"q must have values, got {shape(q)}")
    expect_shape(op, "k", k, q.shape)
    expect_shape(op, "v", v, (*q.shape[:-1], v.shape[-1]))
    expect_shape(op, "i", i, q.shape[:-1])
    expect_shape(op, "f", f, q.shape[:-1])
    if torch.float64 in (i.dtype, f.dtype) and q.dtype != torch.float64:
        raise TypeError(f"{op}: gates must be no wider than q, {dtype_name(q.dtype)}")


def as_states(
    op: str,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    sigmoid: bool,
    q: Tensor,
    v: Tensor,
    leading: tuple[int, int],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """C [N, H, D, E], n [N, H, D] and m [N, H], in the type of sums; m may come as [N, H, 1]."""
    c, n, m = given
    if sigmoid and m is not None:
        refuse(op, "m_initial must be None with gate='sigmoid', which has no m")
    if c is None and n is None and m is None:
        return None, None, None
    if c is None or n is None or (m is None and not sigmoid):
        refuse(op, "c_initial, n_initial and m_initial must be given together")
    dtype = accumulate_dtype(q)
    expect_float(op, c_initial=c, n_initial=n)
    m = c.new_zeros(leading, dtype=dtype) if m is None else m
    expect_float(op, m_initial=m)
    expect_same_device(op, q=q, c_initial=c, n_initial=n, m_initial=m)
    m = m[..., 0] if m.dim() == 3 and m.shape[2] == 1 else m
    expect_shape(op, "c_initial", c, (*leading, q.shape[-1], v.shape[-1]))
    expect_shape(op, "n_initial", n, (*leading, q.shape[-1]))
    expect_shape(op, "m_initial", m, leading)
    return c.to(dtype), n.to(dtype), m.to(dtype)


def expect_starts(op: str, starts: Tensor, steps: int) -> None:
    """cu_seqlens must go from 0 to the steps there are."""
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: cu_seqlens must be int32 or int64, got {dtype_name(starts.dtype)}")
    if starts.dim() != 1 or starts.numel() == 0:
        refuse(op, f"cu_seqlens must be [sequences + 1], got {shape(starts)}")
    # on a GPU, a look would wait for it
    if starts.is_cpu and is_eager() and type(starts) is Tensor:
        values = starts.tolist()
        if values[0] != 0 or values[-1] != steps or values != sorted(values):
            refuse(op, f"cu_seqlens must ascend from 0 to the {steps} steps, got {values}")


def laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, T, D] in memory as [B, T, H, D], which projections take without a copy."""
    rows = x.to(dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return rows.transpose(1, 2)


def _largest(w: Tensor, initial: Tensor, seen: Tensor) -> Tensor:
    """Of each row of `seen` the largest w, and its initial value."""
    candidates = w[..., None, :].masked_fill(~seen, -torch.inf)
    return torch.cat([initial[..., None], candidates], -1).max(-1).values


def meaning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    eps: float,
    sigmoid: bool,
    normalize: bool,
    nx: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [B, H, T, E] and the last states of N sequences, with a matrix of weights.

    Without `starts`, each entry is a sequence; with them, B is 1.
    """
    B, H, T, D = q.shape
    q_, k_, v_ = (accumulate(x) for x in (q, k, v))
    i_, f_ = (accumulate(x).to(q_.dtype) for x in (i, f))
    number = B if starts is None else len(starts) - 1
    if c is None or n is None or m is None:
        c, n = q_.new_zeros(number, H, D, v.shape[3]), q_.new_zeros(number, H, D)
        m = q_.new_zeros(number, H)
    row = torch.arange(T, device=q.device)
    if starts is None:
        # one sequence per entry: [B, 1, H, ...]
        c0, n0, m0 = c[:, None], n[:, None], m[..., None]
        sequence, bounds = torch.zeros_like(row), row.new_tensor([0, T])
    else:
        c0, n0, m0 = c[None], n[None], m.mT[None]
        bounds = starts.to(row.dtype)
        sequence = torch.bucketize(row, bounds[1:], right=True)
    belongs = sequence == torch.arange(len(bounds) - 1, device=q.device)[:, None]  # [N, T]
    seen = (sequence[:, None] == sequence) & (row[:, None] >= row)  # [T, T]

    total = F.logsigmoid(f_).cumsum(-1)
    w = (F.logsigmoid(i_) if sigmoid else i_) - total
    padded = F.pad(total, (1, 0))
    first, end = padded[..., bounds[:-1]], padded[..., bounds[1:]]  # [B, H, N]
    w0 = m0 - first
    if sigmoid:
        largest, last = -total, -end
    else:
        largest, last = _largest(w, w0[..., sequence], seen), _largest(w, w0, belongs)
        if nx:
            # m is a constant: what these lose by F, m gains
            largest = largest.detach() - (total - total.detach())
            last = last.detach() - (end - end.detach())
    weights = torch.where(seen, w[..., None, :] - largest[..., None], -torch.inf).exp()
    kept = (w0[..., sequence] - largest).exp()
    scaled = q_ * D**-0.5
    A = scaled @ k_.mT * weights
    start = scaled * kept[..., None]
    member = belongs.to(q_.dtype)
    h = A @ v_ + torch.einsum("bhtd,bnhde,nt->bhte", start, c0, member)
    if normalize:
        products = A.sum(-1) + torch.einsum("bhtd,bnhd,nt->bht", start, n0, member)
        m_t = torch.zeros_like(total) if sigmoid else total + largest
        divisor = torch.maximum(products.abs(), (-m_t).exp()) + eps
        h = h / (divisor.detach() if nx else divisor)[..., None]
    # of the last states, [B, H, N, T]
    share = torch.where(belongs, w[..., None, :] - last[..., None], -torch.inf).exp()
    keep = (w0 - last).exp().transpose(1, 2)
    c_last = torch.einsum("bhnt,bhtd,bhte->bnhde", share, k_, v_) + keep[..., None, None] * c0
    n_last = torch.einsum("bhnt,bhtd->bnhd", share, k_) + keep[..., None] * n0
    m_last = torch.zeros_like(end) if sigmoid else end + last
    dense = torch.contiguous_format
    states = (c_last.flatten(0, 1), n_last.flatten(0, 1), m_last.transpose(1, 2).flatten(0, 1))
    c_out, n_out, m_out = (s.clone(memory_format=dense) for s in states)
    return laid_out(h, q.dtype), c_out, n_out, m_out
