# SPDX-License-Identifier: MIT
"""What attention refuses, by name."""

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore

x = torch.randn(2, 4, 5, 8)
packed = {"cu_seqlens_q": torch.tensor([0, 2, 4]), "cu_seqlens_k": torch.tensor([0, 1, 4])}
BAD: list[tuple[tuple[Tensor, ...], dict[str, Any], type[Exception], str]] = [
    ((x, x, x.long()), {}, TypeError, "v must be float32, float64, float16 or bfloat16, got int64"),
    ((x, x, x.double()), {}, TypeError, "q float32 and k float32 and v float64"),
    ((x[0, 0], x, x), {}, ValueError, "q, k and v must all be [B, H, T, D] or [H, T, D]"),
    ((x, x[:, :, :3], x), {}, ValueError, "k and v must have the same entries, heads and keys"),
    ((x, x[..., :4], x), {}, ValueError, "q and k must have the same B and D"),
    ((x, x[:1], x[:1]), {}, ValueError, "q and k must have the same B and D"),
    ((x, x[:, :3], x[:, :3]), {}, ValueError, "the 4 heads of q must be a multiple of the 3 of k"),
    ((x, x, x), {"window": 0}, ValueError, "window must be at least 1, the key itself, got 0"),
    ((x, x, x), {"window": (-2, 0)}, ValueError, "window must be (left, right), -1 for no limit"),
    (
        (x, x, x),
        {"window": (1, 1), "causal": True},
        ValueError,
        "window must not reach ahead with causal=True, got (1, 1)",
    ),
    (
        (x, x, x),
        {"mask": torch.ones(5, 5).int()},
        TypeError,
        "mask must be bool, float32 or the dtype of q, float32; got int32",
    ),
    (
        (x, x, x),
        {"mask": torch.ones(5, 4)},
        ValueError,
        "mask must broadcast to the scores, [2, 4, 5, 5]; got [5, 4]",
    ),
    (
        (x, x, x),
        {"alibi_slopes": torch.ones(3)},
        ValueError,
        "alibi_slopes must have the shape [4] or [2, 4], got [3]",
    ),
    ((x, x, x), {"sinks": torch.ones(2, 4)}, ValueError, "sinks must have the shape [4], got"),
    ((x, x, x), {"softcap": 0.0}, ValueError, "softcap must be greater than 0, got 0.0"),
    ((x, x, x), {"softcap": nan}, ValueError, "softcap must be greater than 0, got nan"),
    ((x, x, x), {"scale": inf}, ValueError, "scale must be finite, got inf"),
    ((x, x, x), packed, ValueError, "q, k and v must all be [T, H, D] with cu_seqlens"),
    (
        (x[0], x[0], x[0]),
        {"cu_seqlens_q": torch.tensor([0, 4])},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must be given together",
    ),
    (
        (x[0], x[0], x[0]),
        packed | {"cu_seqlens_k": torch.tensor([0.0, 4.0])},
        TypeError,
        "cu_seqlens_k must be int32 or int64, got float32",
    ),
    (
        (x[0], x[0], x[0]),
        packed | {"cu_seqlens_k": torch.tensor([0, 5, 4])},
        ValueError,
        "cu_seqlens_k must ascend from 0 to the 4 rows, got [0, 5, 4]",
    ),
    (
        (x[0], x[0], x[0]),
        packed | {"cu_seqlens_k": torch.tensor([0, 4])},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must be of as many sequences; got 2 and 1",
    ),
    (
        (x, x.to("meta"), x),
        {},
        ValueError,
        "tensors must be on one device, got q on cpu and k on meta",
    ),
]


@pytest.mark.parametrize(("tensors", "others", "kind", "message"), BAD, ids=[b[3] for b in BAD])
def test_bad_input_is_named(
    tensors: tuple[Tensor, ...], others: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        metalcore.attention(*tensors, **others)
    assert str(caught.value).startswith("attention: ")
    assert message in str(caught.value)


def test_calls_past_the_checks_are_named_too() -> None:
    numbers = (1.0, None, None, None)
    starts = torch.tensor([0, 9])
    for args, message in (
        ((x, x[..., :3], x, *(None,) * 5), "the shapes or dtypes of q, k, v do not go together"),
        ((x, x, x, torch.ones(1, 1, 5, 3), *(None,) * 4), "mask must broadcast"),
        ((x, x, x, None, torch.ones(3), *(None,) * 3), "alibi_slopes must have a number"),
        ((x, x, x, None, None, torch.ones(3), None, None), "sinks must have a number"),
        ((x[:1], x[:1], x[:1], *(None,) * 3, starts, starts), "cu_seqlens must go from 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.metalcore.attention(*args, *numbers)
