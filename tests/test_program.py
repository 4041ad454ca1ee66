# SPDX-License-Identifier: MIT
"""Programs: made without tensors, once per kind of arguments, and executed as they say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
import mslsim
from metalcore._op import Op
from metalcore._simulate import CheckedRunner
from metalcore._where import map_tensors
from metalcore.metal import plans, run, source
from metalcore.metal.plans import PLANS, Planned, Spec
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Fill, Launch, Number, Program
from metalcore.metal.run import Backend

F32 = torch.float32


def buffer(*shape: int, dtype: torch.dtype = F32) -> Buffer:
    return Program({}, 0).new(shape, dtype)


GOOD: dict[str, Any] = {
    "file": "train/rms_norm.metal",
    "function": "rms_norm_dweight",
    "variant": ("float",),
    "args": (buffer(2, 4), buffer(4), 2, 4),
    "threads": (32, 1, 1),
    "group": (32, 1, 1),
}
SUM = {
    "function": "rms_norm",
    "variant": ("float", "float", 4, 4, True),
    "args": (*(buffer(64),) * 3, buffer(1), 16, 1e-6, 0.0),
}


def test_a_good_launch_is_made() -> None:
    assert Launch(**GOOD).kernel == "rms_norm_dweight_float"
    assert Launch(**GOOD | SUM).kernel == "rms_norm_float_float_4_4_weight"


BAD = [
    ({"threads": (0, 1, 1)}, "needs a non-empty grid, got (0, 1, 1)"),
    ({"group": (2048, 1, 1)}, "needs 1 to 512 threads per group, got (2048, 1, 1)"),
    (SUM | {"group": (33, 1, 1)}, "because it uses collectives, got (33, 1, 1)"),
    ({"args": (1,) * 32}, "needs at most 31 buffers, got 32"),
    ({"args": GOOD["args"][:3]}, "needs 4 arguments, got 3"),
    ({"args": (buffer(2, 4), buffer(4), 2, 4.0)}, "needs n as uint, got 4.0"),
    ({"args": (buffer(2, 4), buffer(4), True, 4)}, "needs blocks as uint, got True"),
    (
        {"args": (buffer(2, 4, dtype=torch.float16), buffer(4), 2, 4)},
        "needs share as float*, got torch.float16 tensor",
    ),
    (
        {"args": (buffer(4, 2).mT, buffer(4), 2, 4)},
        "needs share as float*, got torch.float32 tensor",
    ),
    ({"args": (None, buffer(4), 2, 4)}, "needs share as float*, got None"),
    ({"variant": ()}, "needs template arguments for <W>, got ()"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[b[1] for b in BAD])
def test_a_bad_launch_names_kernel_and_limit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="the launch needs") as caught:
        Launch(**GOOD | change)
    assert str(caught.value).startswith("rms_norm")
    assert str(caught.value).endswith(message)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "_HERE", tmp_path)
    (tmp_path / "include").mkdir()
    return tmp_path


def test_headers_are_inlined_once_and_lines_keep_their_numbers(folder: Path) -> None:
    (folder / "include" / "a.h").write_text("#pragma once\nint a;\n")
    (folder / "include" / "b.h").write_text('#pragma once\n#include "a.h"\nint b;\n')
    (folder / "k1.metal").write_text('#include "a.h"\n#include "b.h"\nint k;\n')
    assert source.read("k1.metal").splitlines() == [
        '#line 1 "k1.metal"',
        '#line 1 "a.h"',
        "",
        "int a;",
        '#line 2 "k1.metal"',
        '#line 1 "b.h"',
        "",
        '#line 3 "b.h"',
        "int b;",
        '#line 3 "k1.metal"',
        "int k;",
    ]


def test_too_much_threadgroup_memory_is_refused(folder: Path) -> None:
    (folder / "big.metal").write_text(
        "template <int N> kernel void big(device float* x [[buffer(0)]]) {"
        " threadgroup float s[N]; }\n"
    )
    args = ((buffer(1),), (1, 1, 1), (1, 1, 1))
    Launch("big.metal", "big", (8192,), *args)
    with pytest.raises(ValueError, match="at most 32768 bytes of threadgroup memory, got 32772"):
        Launch("big.metal", "big", (8193,), *args)


def test_threadgroup_sizes_must_be_constant(folder: Path) -> None:
    (folder / "open.metal").write_text(
        "kernel void f(device float* x [[buffer(0)]]) { threadgroup float s[N]; }\n"
    )
    with pytest.raises(ValueError, match=r"threadgroup array s must have .* got float \[N\]"):
        Launch("open.metal", "f", (), (buffer(1),), (1, 1, 1), (1, 1, 1))


def test_buffers_must_be_numbered_without_a_gap(folder: Path) -> None:
    (folder / "gap.metal").write_text(
        "kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(2)]]) {}\n"
    )
    with pytest.raises(ValueError, match="without a gap, got 2 for y"):
        source.signature("gap.metal", "f")


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="there is no kernel named nothing"):
        source.signature("train/rms_norm.metal", "nothing")


LIMITED = """
template <int N>
[[max_total_threads_per_threadgroup(32 * N)]] kernel void f(
    device float* x [[buffer(0)]], constant uint& n [[buffer(1)]]) {}
"""


def _limited(folder: Path, size: int, n: Any = 1) -> Launch:
    (folder / "limited.metal").write_text(LIMITED)
    return Launch("limited.metal", "f", (4,), (buffer(1), n), (size, 1, 1), (size, 1, 1))


def test_a_group_larger_than_the_kernel_declares_is_refused(folder: Path) -> None:
    assert _limited(folder, 128).group == (128, 1, 1)
    with pytest.raises(ValueError, match="f_4: the launch needs 1 to 128 threads per group"):
        _limited(folder, 160)


@pytest.mark.parametrize("n", [-1, 2**32, 1.0, True, Number(3)])
def test_a_uint_takes_what_32_bits_hold(folder: Path, n: Any) -> None:
    assert _limited(folder, 32, 2**32 - 1).args[1] == 2**32 - 1
    with pytest.raises(ValueError, match="needs n as uint"):
        _limited(folder, 32, n)


def test_a_grid_must_not_be_more_than_a_kernel_can_count(folder: Path) -> None:
    (folder / "limited.metal").write_text(LIMITED)
    with pytest.raises(ValueError, match="needs a grid that uint counts"):
        Launch("limited.metal", "f", (4,), (buffer(1), 1), (2**32, 1, 1), (32, 1, 1))


def test_a_group_larger_than_the_gpu_has_registers_for_is_refused(folder: Path) -> None:
    p = Program({}, 0)
    (folder / "limited.metal").write_text(LIMITED)
    p.launch("limited.metal", "f", (4,), (p.new((1,)), 1), 128, 128)

    def compiler(limit: int) -> Any:
        return lambda text: SimpleNamespace(f_4=SimpleNamespace(max_threads_per_threadgroup=limit))

    run.Runner(p, Backend("sim", compiler(128)), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"f_4: .* groups of 128 threads.* for 96"):
        run.Runner(p, Backend("sim", compiler(96)), torch.device("cpu"))
    source.kernel.cache_clear()


@pytest.mark.parametrize("file", source.files())
def test_every_kernel_declares_its_largest_group(file: str) -> None:
    unlimited = [name for name, s in source.signatures(file).items() if s.threads_limit is None]
    assert unlimited == []


@pytest.mark.parametrize("name", sorted(PLANS))
def test_every_op_is_planned_without_a_tensor(name: str) -> None:
    for sample in Op.all[name].samples:
        for dtype in MSL_TYPE:
            args = [map_tensors(Spec.of, a) for a in sample(dtype).args]
            assert not any(isinstance(a, Tensor) for a in plans.flat(args))
            program = PLANS[name].program(args)
            assert program is not None
            assert program.steps
        args = sample(torch.float64).args
        if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in plans.flat(list(args))):
            assert PLANS[name].program(args) is None


def test_views_of_buffers_are_those_of_tensors() -> None:
    t = torch.arange(120).view(2, 3, 4, 5)
    b = Buffer(0, tuple(t.shape), t.dtype, t.stride())
    pairs: list[tuple[Buffer, Tensor]] = [
        (b.mT, t.mT),
        (b[1:, :, 2], t[1:, :, 2]),
        (b[0, 1][1:3, 2:], t[0, 1][1:3, 2:]),
        (b.view(6, -1), t.view(6, -1)),
        (b.diagonal(), t.diagonal(dim1=-2, dim2=-1)),
        (b[:, :, :, :1].expand(2, 3, 4, 7), t[:, :, :, :1].expand(2, 3, 4, 7)),
        (b[0, 0, 0].expand(6, 5), t[0, 0, 0].expand(6, 5)),
        (b.transpose(0, 2), t.transpose(0, 2)),
    ]
    for view, same in pairs:
        assert view.shape == tuple(same.shape)
        assert view.offset == same.storage_offset()
        assert torch.equal(t.as_strided(view.shape, view.stride, view.offset), same)
        assert view.is_contiguous == same.is_contiguous()
    assert b[0, 1].mT.memory().shape == (20,)
    with pytest.raises(ValueError, match="no view of the shape"):
        b.mT.view(120)


def test_a_plan_may_not_look_at_a_number() -> None:
    number = Number(3)
    for look in (bool, float, int, lambda n: n < 1, lambda n: n == 1.0):
        with pytest.raises(TypeError, match="may not look at a number"):
            look(number)


class FakeLibrary:
    """Stands for torch's shader library: records the calls."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, kernel: str) -> Any:
        return lambda *args, **options: self.calls.append((kernel, args, options))


def test_a_kind_of_arguments_is_planned_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeLibrary] = []
    planned: list[Any] = []
    plan = PLANS["rms_norm"].program
    monkeypatch.setattr(
        Planned, "program", lambda self, args, cores: planned.append(args) or plan(args, cores)
    )

    def compiler(text: str) -> FakeLibrary:
        made.append(FakeLibrary(text))
        return made[-1]

    x, weight = torch.randn(3, 40), torch.randn(40)
    with metalcore.simulate(compiler=compiler):
        for eps in (1e-6, 1e-5):
            metalcore.rms_norm(x, weight, eps)
        assert (len(planned), len(made)) == (1, 1)
        metalcore.rms_norm(torch.randn(4, 40), weight, 1e-6)
        assert (len(planned), len(made)) == (2, 1)
    name = "rms_norm_simdgroup_float_float_4_4_weight"
    assert f'host_name("{name}")' in made[0].text
    assert "kernel void rms_norm_backward" not in made[0].text
    kernels, args, options = zip(*made[0].calls, strict=True)
    assert set(kernels) == {name}
    assert [a[7] for a in args] == [1e-6, 1e-5, 1e-6]
    three, four = ((32 * rows, 1, 1) for rows in (3, 4))
    assert [o["threads"] for o in options] == [three, three, four]
    assert [o["group_size"] for o in options] == [three, three, four]


def test_programs_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_KEPT", 2)
    with metalcore.simulate(compiler=FakeLibrary):
        for rows in range(1, 6):
            metalcore.rms_norm(torch.randn(rows, 40))
    kept = [len(k) for (_, by), k in run._runners.items() if by.compiler is FakeLibrary]
    assert kept == [2]


def _update(folder: Path, read: str, *, made: bool = False) -> Tensor:
    """Double the first four of six values in place, by a kernel that reads `read`."""
    (folder / "twice.metal").write_text(
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void twice(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],"
        f" uint i [[thread_position_in_grid]]) {{ y[i] = {read}[i] * 2; }}\n"
    )
    p = Program({}, 1)
    x = p.new((6,)) if made else Buffer(0, (6,), F32, (1,))
    if made:
        p.fill(x[:3], 1.0)
    p.launch("twice.metal", "twice", (), (x, x), 4, 4)
    p.outputs = x
    source.signatures.cache_clear()
    source.read.cache_clear()
    backend = Backend("sim", mslsim.compile_shader)
    found: Tensor = CheckedRunner(p, backend, torch.device("cpu"))((torch.arange(6.0),))
    source.kernel.cache_clear()
    return found


def test_an_update_in_place_keeps_what_it_does_not_write(folder: Path) -> None:
    assert _update(folder, "x").tolist() == [0, 2, 4, 6, 4, 5]


def test_a_kernel_that_reads_what_it_is_to_write_is_found_out(folder: Path) -> None:
    with pytest.raises(mslsim.KernelError, match="uninitialized"):
        _update(folder, "y")


def test_a_program_that_reads_what_no_step_wrote_is_found_out(folder: Path) -> None:
    with pytest.raises(mslsim.KernelError, match="uninitialized"):
        _update(folder, "x", made=True)


def test_library_steps_do_what_they_say() -> None:
    p = Program({}, 3)
    a, b, steps = (Buffer(i, s, F32, t) for i, s, t in [
        (0, (2, 3, 4), (12, 4, 1)), (1, (2, 4, 3), (12, 3, 1)), (2, (), ()),
    ])  # fmt: skip
    product = p.new((2, 3, 3))
    p.matmul(product, a, b)
    p.matmul(product, b.mT, a.mT, alpha=-2.0, beta=0.5)
    values, order = p.sort(a)
    again = p.new_like(a)
    p.gather(again, a, 2, order)
    eye = p.identity(p.new((2, 3)))
    half = p.dense(a.mT, torch.float16)
    p.fill(steps, p.number(lambda step: float(step) + 1, steps))
    seen: list[Tensor] = []
    p.check(seen.append, eye)
    p.outputs = (product, values, order, again, eye, half)
    x, y, count = torch.randn(2, 3, 4), torch.randn(2, 4, 3), torch.tensor(4.0)
    runner = run.Runner(p, run.METAL, torch.device("cpu"))
    found = runner((x, y, count))
    expected = 0.5 * (x @ y) - 2 * (y.mT @ x.mT)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1:3], tuple(torch.sort(x, stable=True)))
    assert torch.equal(found[3], found[1])
    assert torch.equal(found[4], torch.eye(2, 3))
    assert torch.equal(found[5], x.mT.half())
    assert found[5].is_contiguous()
    assert count.item() == 5.0
    assert seen[0] is found[4]
    assert isinstance(p.steps[-1], Fill)
    assert runner.kernels == "empty"


def test_arguments_have_the_names_of_the_schema() -> None:
    with pytest.raises(AttributeError, match="the op has no argument weigth"):
        Arguments({"weight": 1}).weigth  # noqa: B018
