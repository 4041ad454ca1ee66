# SPDX-License-Identifier: MIT
"""Programs of one elementwise kernel."""

from collections.abc import Sequence

from metalcore.metal.program import MSL_TYPE, Buffer, Program, Value, round_up


def elementwise(
    p: Program,
    function: str,
    inputs: Sequence[Buffer],
    *numbers: Value,
    variant: Sequence[str | int] = (),
    outputs: int = 1,
) -> tuple[Buffer, ...]:
    """`function(inputs, outputs, chunks, *numbers)` with one thread per chunk of four values, or of
    one where the buffers do not allow wide accesses. The outputs are like the first input.
    """
    inputs = [p.dense(x) for x in inputs]
    width = chunk_width(inputs)
    results = tuple(p.new_like(inputs[0]) for _ in range(outputs))
    chunks = inputs[0].numel // width
    args = (*inputs, *results, chunks, *numbers)
    _launch(p, function, inputs[0], width, variant, args)
    return results


def with_bias(
    p: Program,
    function: str,
    inputs: Sequence[Buffer],
    bias: Buffer | None,
    variant: Sequence[str | int] = (),
) -> Buffer:
    """`function(inputs, bias, output, chunks, chunks of the bias)`, which knows by its last flag
    whether there is a bias."""
    inputs = [p.dense(x) for x in inputs]
    row = inputs[0] if bias is None else p.dense(bias)
    width = chunk_width((*inputs, row))
    y = p.new_like(inputs[0])
    args: tuple[Value, ...] = (*inputs, row, y, y.numel // width, row.numel // width)
    _launch(p, function, y, width, (*variant, bias is not None), args)
    return y


def chunk_width(buffers: Sequence[Buffer]) -> int:
    """How many values of all these kernels may read at a time: four or one."""
    return 4 if all(x.numel % 4 == 0 and x.is_aligned for x in buffers) else 1


def _launch(
    p: Program,
    function: str,
    first: Buffer,
    width: int,
    variant: Sequence[str | int],
    args: Sequence[Value],
) -> None:
    if first.numel:
        file = f"train/{function.removesuffix('_backward')}.metal"
        threads = p.policy["threads"]
        whole = (MSL_TYPE[first.dtype], width, *variant)
        p.launch(file, function, whole, args, round_up(first.numel // width, threads), threads)
