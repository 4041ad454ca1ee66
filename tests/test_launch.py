# SPDX-License-Identifier: MIT
from pathlib import Path
from typing import Any

import pytest
import torch

from metalcore.metal import launch, source
from metalcore.metal.launch import PLANS, Launch

GOOD: dict[str, Any] = {
    "file": "train/rms_norm.metal",
    "function": "rms_norm_dweight",
    "variant": "float",
    "args": (torch.zeros(2, 4), torch.zeros(4), 2, 4),
    "threads": (32, 1, 1),
    "group": (32, 1, 1),
}
SUM = {
    "function": "rms_norm",
    "variant": "float_float_4",
    "args": (*(torch.zeros(64),) * 3, torch.zeros(1), 16, 1e-6, 0.0, 1),
}


def test_a_good_launch_is_made() -> None:
    assert Launch(**GOOD).kernel == "rms_norm_dweight_float"
    assert Launch(**GOOD | SUM).kernel == "rms_norm_float_float_4"


BAD = [
    ({"threads": (0, 1, 1)}, "needs a non-empty grid, got (0, 1, 1)"),
    ({"group": (2048, 1, 1)}, "needs 1 to 1024 threads per group, got (2048, 1, 1)"),
    (SUM | {"group": (33, 1, 1)}, "because it uses collectives, got (33, 1, 1)"),
    ({"args": (1,) * 32}, "needs at most 31 buffers, got 32"),
    ({"args": GOOD["args"][:3]}, "needs 4 arguments, got 3"),
    ({"args": (torch.zeros(2, 4), torch.zeros(4), 2, 4.0)}, "needs n as long, got 4.0"),
    ({"args": (torch.zeros(2, 4), torch.zeros(4), True, 4)}, "needs blocks as long, got True"),
    (
        {"args": (torch.zeros(2, 4).half(), torch.zeros(4), 2, 4)},
        "needs share as float*, got torch.float16 tensor",
    ),
    (
        {"args": (torch.zeros(4, 2).T, torch.zeros(4), 2, 4)},
        "needs share as float*, got torch.float32 tensor",
    ),
    ({"args": (None, torch.zeros(4), 2, 4)}, "needs share as float*, got None"),
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
        "kernel void big(device float* x [[buffer(0)]]) { threadgroup float s[8193]; }\n"
    )
    with pytest.raises(ValueError, match="at most 32768 bytes of threadgroup memory, got 32772"):
        Launch("big.metal", "big", "float", (torch.zeros(1),), (1, 1, 1), (1, 1, 1))


def test_threadgroup_sizes_must_be_constant(folder: Path) -> None:
    (folder / "open.metal").write_text(
        "kernel void f(device float* x [[buffer(0)]]) { threadgroup float s[N]; }\n"
    )
    with pytest.raises(ValueError, match=r"threadgroup array s must have .* got float \[N\]"):
        source.signature("open.metal", "f").threadgroup_bytes  # noqa: B018


def test_buffers_must_be_numbered_without_a_gap(folder: Path) -> None:
    (folder / "gap.metal").write_text(
        "kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(2)]]) {}\n"
    )
    with pytest.raises(ValueError, match="without a gap, got 2 for y"):
        source.signature("gap.metal", "f")


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="there is no kernel named nothing"):
        source.signature("train/rms_norm.metal", "nothing")


class FakeLibrary:
    """Stands for torch's shader library: records the calls."""

    def __init__(self, text: str | bytes) -> None:
        self.text = text
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, kernel: str) -> Any:
        return lambda *args, **options: self.calls.append((kernel, args, options))


def test_run_compiles_once_and_calls_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeLibrary] = []

    def compiler(text: str) -> FakeLibrary:
        made.append(FakeLibrary(text))
        return made[-1]

    monkeypatch.setattr(torch.mps, "compile_shader", compiler)
    monkeypatch.setattr(source, "metallib", lambda: None)
    source.library.cache_clear()
    launch.run(Launch(**GOOD))
    launch.run(Launch(**GOOD))
    source.library.cache_clear()
    assert len(made) == 1
    assert made[0].text == source.read("train/rms_norm.metal")
    kernel, args, options = made[0].calls[0]
    assert kernel == "rms_norm_dweight_float"
    assert args == GOOD["args"]
    assert options == {"threads": (32, 1, 1), "group_size": (32, 1, 1)}


def test_a_built_metallib_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "metalcore.metallib"
    file.write_bytes(b"MTLB")
    made: list[FakeLibrary] = []

    def loader(data: bytes) -> FakeLibrary:
        made.append(FakeLibrary(data))
        return made[-1]

    monkeypatch.setattr(torch.mps, "load_metallib", loader, raising=False)
    monkeypatch.setattr(source, "metallib", lambda: file)
    source.library.cache_clear()
    launch.run(Launch(**GOOD))
    source.library.cache_clear()
    assert [library.text for library in made] == [b"MTLB"]


def test_plans_decline_what_metal_has_no_type_for() -> None:
    for name, plan in PLANS.items():
        values = {"threads": 256}
        from metalcore._op import Op

        for sample in Op.all[name].samples:
            assert plan(values, *sample(torch.float64).args) is None, name
