# SPDX-License-Identifier: MIT
"""Programs of one elementwise kernel."""

from collections.abc import Iterator, Sequence

from metalcore.metal.program import MSL_TYPE, Buffer, Program, Size, Value, round_up

# Chunks of a launch, which kernels count in 32 bits. Larger tensors take several.
MAX_CHUNKS = 2**31


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
    whole = (MSL_TYPE[inputs[0].dtype], width, *variant)
    file = _file(function)
    for chunks, buffers in pieces((*inputs, *results), width):
        launch(p, file, function, whole, (*buffers, chunks, *numbers), chunks)
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
    whole = (MSL_TYPE[y.dtype], width, *variant, bias is not None)
    period = 1 if bias is None else max(1, row.numel // width)
    file = _file(function)
    for chunks, (*read, out) in pieces((*inputs, y), width, period):
        launch(p, file, function, whole, (*read, row, out, chunks, period), chunks)
    return y


def chunk_width(buffers: Sequence[Buffer]) -> int:
    """How many values of all these kernels may read at a time: four or one."""
    return 4 if all(x.numel % 4 == 0 and x.is_aligned for x in buffers) else 1


def pieces(
    buffers: Sequence[Buffer], width: int, period: int = 1
) -> Iterator[tuple[int, Sequence[Buffer]]]:
    """The buffers, or pieces of large ones that begin with multiples of `period` chunks, each with
    the number of its chunks."""
    chunks, most = buffers[0].numel // width, MAX_CHUNKS // period * period
    if chunks <= most:
        yield from [(chunks, buffers)] if chunks else []
        return
    for first in range(0, chunks, most):
        last = min(chunks, first + most)
        yield last - first, [b.view(-1)[first * width : last * width] for b in buffers]


def launch(
    p: Program,
    file: str,
    function: str,
    variant: Sequence[str | int],
    args: Sequence[Value],
    chunks: int,
) -> None:
    """One thread per chunk."""
    threads = p.policy["threads"]
    p.launch(file, function, variant, args, round_up(chunks, threads), threads)


def in_neighbours(p: Program, threads: Size) -> tuple[Size, Size]:
    """The threads, and a group of those that are next to each other."""
    left, group = p.policy["threads"], []
    for size in threads:
        group.append(min(size, left))
        left //= group[-1]
    return threads, (group[0], group[1], group[2])


def _file(function: str) -> str:
    return f"train/{function.removesuffix('_backward')}.metal"
