# SPDX-License-Identifier: MIT
"""What MLX makes of our kernels: the same programs, signatures for all sizes, no evaluation."""

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch

import metalcore
import metalcore.mlx as on_mlx
from metalcore._op import Op
from metalcore.metal import source
from metalcore.metal.plans import PLANS, Planned
from metalcore.metal.program import Buffer, Launch, Number, Program
from metalcore.mlx import _function, _kernel, _simulate, _ways
from metalcore.mlx._partial import together
from tests.mlx.cases import CASES, normal
from tests.mlx.ways import arguments, function, leaves, mapped, needs_text, original


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def described(value: Any) -> Any:
    """A program, so that equal ones are equal."""
    if isinstance(value, Program):
        return described([value.made, value.steps, value.outputs])
    if isinstance(value, Number):
        return ("number", value.slot)
    if isinstance(value, (list, tuple)):
        return [described(v) for v in value]
    if isinstance(value, Buffer):
        return (value.slot, value.shape, value.dtype, value.stride, value.offset)
    if hasattr(value, "__dataclass_fields__"):
        return [
            type(value).__name__,
            *(described(getattr(value, f)) for f in value.__dataclass_fields__),
        ]
    return value


@pytest.mark.parametrize(
    "name",
    ["rms_norm", "softmax", "attention", "cholesky-2", "qr-2", "svd", "matmul_int4"],
)
def test_torch_and_mlx_execute_the_same_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = CASES[name], []
    plan = Planned.program

    def program(self: Planned, *args: Any) -> Program | None:
        found = plan(self, *args)
        made.append((self.op, described(found)))
        return found

    monkeypatch.setattr(Planned, "program", program)
    monkeypatch.setattr(_simulate, "_way", lambda checks: _ways.ByMetal("sim", _stand_in))
    monkeypatch.setattr("metalcore.metal.run._runners", {})
    with metalcore.simulate():
        original(case)(*mapped(case.args, torch.Tensor, lambda t: t.detach()), **case.named)
        by_torch, made[:] = list(made), []
        args, named = arguments(case)
        function(case)(*args, **named)
    assert by_torch
    assert by_torch == made


def _stand_in(*what: Any) -> Any:
    """A kernel that gives zeros."""
    return lambda output_shapes, output_dtypes, **_: [
        mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)
    ]


@needs_text
@pytest.mark.parametrize("n", [1, 7, 8, 1000])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_signatures_for_all_sizes(rows: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    generated = _simulate.generated

    def listened(*args: Any, **how: Any) -> str:
        texts.append(generated(*args, **how))
        return texts[-1]

    monkeypatch.setattr(_simulate, "generated", listened)
    x, weight = mx.ones((rows, n)), mx.ones((n,))
    with metalcore.simulate():
        y = on_mlx.rms_norm(x, weight, 1e-6)
    assert y.shape == (rows, n)
    assert len(texts) == (rows > 0)
    for text in texts:
        kernel = re.search(r"void custom_kernel_(\w+)\((.*?)\) \{", text, re.DOTALL)
        assert kernel is not None
        assert kernel[1].startswith("rms_norm")
        declared = [line.strip().rstrip(",") for line in kernel[2].strip().splitlines()]
        buffers = [line for line in declared if "[[buffer" in line]
        assert buffers[0].startswith("const device float* x_given")
        assert buffers[1].startswith("const device float* weight_given")
        assert [re.sub(r"\W*\[\[.*", "", b).split()[-1] for b in buffers[-2:]] == [
            "y_given",
            "rstd_given",
        ]
        assert all(b.startswith("device float*") for b in buffers[-2:])
        scalars = buffers[2:-2]
        assert scalars
        assert all(re.match(r"const constant (uint32_t|float)& ", s) for s in scalars)
        assert not re.search(r"_given_(shape|strides|ndim)", kernel[2])
        numbers = [int(i) for i in re.findall(r"\[\[buffer\((\d+)\)\]\]", kernel[2])]
        assert numbers == list(range(len(buffers)))


@needs_text
@pytest.mark.parametrize(
    ("count", "space"), [(0, "constant"), (1, "constant"), (7, "constant"), (8, "device")]
)
def test_what_mlx_calls_small(count: int, space: str) -> None:
    """What `_kernel.LEAST` stands on."""
    kernel = _kernel.metal_kernel(
        name="twice", input_names=["x"], output_names=["y"], source="y[0] = 2 * x[0];"
    )
    how = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    text = _simulate.generated(
        kernel, [mx.zeros((count,))], **how, grid=(1, 1, 1), threadgroup=(1, 1, 1)
    )
    assert f"const {space} float* x" in text


def test_every_kernel_has_a_text_for_mlx() -> None:
    for op in PLANS:
        for sample in Op.all[op].samples:
            program = PLANS[op].program(sample(torch.float32).args)
            assert program is not None
            for launch in program.launches:
                text = _kernel.text(launch.file, launch.function, launch.variant)
                _holds(launch, text)


def _holds(launch: Launch, text: _kernel.Text) -> None:
    declared = source.signature(launch.file, launch.function)
    assert text.name == launch.kernel
    assert len(text.inputs) + len(text.outputs) == len(declared.parameters) == len(launch.args)
    for p in declared.parameters:
        assert re.search(rf"\b{p.name} = .*{p.name}_given", text.body), p.name
    assert not re.search(r"\bconstant (long|float) ?\*", text.header + text.body)


@needs_text
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_evaluated_on_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLX exports a function only if nothing in it looks at a value: here the real metal_kernel is
    asked, with all that a GPU would be given, forward and backward."""

    def compiled(*what: Any) -> Any:
        return partial(_kernel.compiled(*what), stream=mx.gpu)

    monkeypatch.setattr(_function, "on_gpu", lambda stream: True)
    monkeypatch.setattr(_ways, "METAL_WAY", _ways.ByMetal("metal", compiled))
    case = CASES[name]
    value = arguments(case)
    arrays = leaves(value, mx.array)
    wanted = [i for i, a in enumerate(arrays) if mx.issubdtype(a.dtype, mx.floating)]
    call = function(case)

    def loss(*given: mx.array) -> mx.array:
        rest = iter(given)
        args, named = mapped(value, mx.array, lambda _: next(rest))
        results = leaves(call(*args, **named), mx.array)
        return sum((r.sum() for r in results if mx.issubdtype(r.dtype, mx.floating)), mx.array(0.0))

    gradient = mx.grad(loss, argnums=wanted) if wanted and case.function in DIFFERENTIABLE else loss

    def built(*given: mx.array) -> None:
        gradient(*given)
        # MLX cannot write custom functions to a file
        raise _Built

    with pytest.raises(_Built):
        mx.export_function(str(tmp_path / "function.mlxfn"), built, *arrays)


class _Built(Exception):
    pass


DIFFERENTIABLE = {
    *("rms_norm", "attention", "qr", "svd", "solve", "mlstm_chunkwise", "linear_cross_entropy"),
    *("layer_norm", "softmax", "swiglu", "eigh", "cholesky", "causal_conv1d", "matmul_int4"),
}


def test_export_lets_nobody_look(tmp_path: Path) -> None:
    """What the test above stands on."""
    with pytest.raises(ValueError, match="eval"):
        mx.export_function(str(tmp_path / "f.mlxfn"), lambda x: mx.eval(x + 1), mx.ones((2,)))


@needs_text
def test_rows_of_kernels_keep_their_names_in_traces() -> None:
    with metalcore.trace() as t, metalcore.simulate():
        on_mlx.softmax(on_mlx.from_torch(normal(2, 8)))
    assert [(r.op, r.device) for r in t.records] == [("softmax", "mlx")]
    assert t.records[0].variant.startswith("softmax")


def test_what_a_kernel_leaves_alone_is_known_whatever_it_writes() -> None:
    """Zeros, ones and NaN are numbers like any other."""
    written = mx.array([0.0, 1.0, math.nan, -0.0])
    before = mx.array([7.0, 8.0, 9.0, 10.0])
    for untouched in range(4):
        here = mx.arange(4) == untouched
        of_zeros, of_ones = (mx.where(here, mx.array(v), written) for v in (0.0, 1.0))
        truth = mx.where(here, before, written)
        assert mx.array_equal(together(of_zeros, of_ones, before), truth, equal_nan=True)
