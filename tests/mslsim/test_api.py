# SPDX-License-Identifier: MIT
"""The calling side: arguments, options, errors, isolation."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import mslsim

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
SCALE = (
    HEAD
    + """
kernel void scale(device float* x [[buffer(0)]], constant float& by [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  x[i] *= by;
}
"""
)


@pytest.fixture(params=["none", "all"])
def checks(request):
    return request.param


def test_arrays_are_changed_in_place(checks):
    x = np.arange(100, dtype=np.float32)
    mslsim.compile_shader(SCALE, checks).scale(x, 3.0, threads=100, group_size=32)
    np.testing.assert_array_equal(x, 3 * np.arange(100))


def test_torch_tensors_are_changed_in_place(checks):
    torch = pytest.importorskip("torch")
    x = torch.arange(100.0)
    mslsim.compile_shader(SCALE, checks).scale(x, 3.0)
    assert torch.equal(x, 3 * torch.arange(100.0))


def test_a_view_starts_at_its_offset(checks):
    x = np.ones(10, np.float32)
    mslsim.compile_shader(SCALE, checks).scale(x[4:], 5.0, threads=3, group_size=3)
    assert x.tolist() == [1, 1, 1, 1, 5, 5, 5, 1, 1, 1]


def test_two_views_of_one_array_share_memory(checks):
    source = (
        HEAD
        + """
    kernel void copy(device const float* from [[buffer(0)]], device float* to [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) { to[i] = from[i]; }"""
    )
    x = np.arange(8, dtype=np.float32)
    mslsim.compile_shader(source, checks).copy(x[:4], x[4:], threads=4, group_size=4)
    assert x.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


STRUCT = (
    HEAD
    + """
struct Shape { uint rows; float scale; long big; };
kernel void fill(device float* out [[buffer(0)]], constant Shape& s [[buffer(1)]],
                 constant bool& negative [[buffer(2)]], device const float* none [[buffer(3)]],
                 constant short& k [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  out[i] = (negative ? -1.0f : 1.0f) * (s.rows + s.scale + s.big + k);
}
"""
)


def test_scalars_structs_and_unbound_buffers(checks):
    out = np.zeros(4, np.float32)
    shape = np.array([(2, 0.5, 10)], [("r", "u4"), ("s", "f4"), ("b", "i8")]).tobytes()
    library = mslsim.compile_shader(STRUCT, checks)
    library.fill(out, shape, True, None, np.int16(7), threads=4, group_size=4)
    assert out.tolist() == [-19.5] * 4
    library.fill(out, shape, False, None, 7, threads=4, group_size=4, arg_casts={4: "int16"})
    assert out.tolist() == [19.5] * 4


@pytest.mark.parametrize(
    ("kind", "most", "past"), [("uint", 2**32 - 1, 2**32), ("int", -1, 2**31), ("uint", 3, -1)]
)
def test_a_python_int_is_passed_to_a_short_one_that_holds_it(kind, most, past):
    source = (
        HEAD
        + f"""
    kernel void fill(device long* out [[buffer(0)]], constant {kind}& n [[buffer(1)]]) {{
      out[0] = n;
    }}"""
    )
    library = mslsim.compile_shader(source, "none")
    out = np.zeros(1, np.int64)
    library.fill(out, most, threads=1, group_size=1)
    assert out[0] == most
    with pytest.raises(mslsim.LaunchError, match=f"do not hold {past}"):
        library.fill(out, past, threads=1, group_size=1)


def test_a_python_float_for_a_half_needs_a_cast():
    source = (
        HEAD
        + """
    kernel void fill(device float* out [[buffer(0)]], constant half& n [[buffer(1)]]) {
      out[0] = n;
    }"""
    )
    library = mslsim.compile_shader(source, "none")
    out = np.zeros(1, np.float32)
    with pytest.raises(mslsim.LaunchError, match="arg_casts"):
        library.fill(out, 3.0, threads=1, group_size=1)
    library.fill(out, 3.0, threads=1, group_size=1, arg_casts={1: "half"})
    assert out[0] == 3


@pytest.mark.parametrize(
    "group, threads, text",
    [((2048, 1, 1), 4096, "1024 threads"), ((64, 32, 1), 64, "1024 threads"), (0, 5, "empty")],
)
def test_limits_of_a_launch(group, threads, text):
    library = mslsim.compile_shader(SCALE, "none")
    with pytest.raises(mslsim.LaunchError, match=text):
        library.scale(np.ones(4, np.float32), 1.0, threads=threads, group_size=group)


def test_what_no_kernel_can_take_is_refused():
    library = mslsim.compile_shader(SCALE, "none")
    with pytest.raises(TypeError, match="argument 1 must be"):
        library.scale(np.ones(4, np.float32), "two", threads=4, group_size=4)
    with pytest.raises(mslsim.LaunchError, match="no buffer"):
        library.scale(np.ones(4, np.float32), 1.0, 2.0, threads=4, group_size=4)
    with pytest.raises(AttributeError, match="scale"):
        library.scail  # noqa: B018
    with pytest.raises(ValueError, match="checks must be"):
        mslsim.compile_shader(SCALE, {"speed"})


def test_function_constants(checks):
    source = (
        HEAD
        + """
    constant int stride [[function_constant(0)]];
    constant bool given [[function_constant(1)]];
    kernel void fill(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      out[i] = i * stride + (is_function_constant_defined(given) ? 100 : 0);
    }"""
    )
    out = np.zeros(4, np.int32)
    mslsim.compile_shader(source, checks, constants={0: 3}).fill(out, threads=4, group_size=4)
    assert out.tolist() == [0, 3, 6, 9]


def test_dynamic_threadgroup_memory(checks):
    source = (
        HEAD
        + """
    kernel void reverse(device float* x [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
                        uint t [[thread_position_in_threadgroup]],
                        uint n [[threads_per_threadgroup]]) {
      a[t] = x[t];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      x[t] = a[n - 1 - t];
    }"""
    )
    x = np.arange(50, dtype=np.float32)
    library = mslsim.compile_shader(source, checks)
    library.reverse(x, threads=50, group_size=50, threadgroup_memory={0: 200})
    np.testing.assert_array_equal(x, np.arange(50)[::-1])


def test_defines_and_includes(tmp_path, checks):
    (tmp_path / "step.h").write_text("#define STEP (2 * BASE)\n")
    source = (
        HEAD
        + '#include "step.h"\n'
        + """
    kernel void fill(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      out[i] = STEP;
    }"""
    )
    out = np.zeros(2, np.int32)
    options = {"include": [str(tmp_path)], "defines": {"BASE": 4}}
    mslsim.compile_shader(source, checks, **options).fill(out, threads=2, group_size=2)
    assert out.tolist() == [8, 8]
    # A changed header is noticed.
    (tmp_path / "step.h").write_text("#define STEP (3 * BASE)\n")
    mslsim.compile_shader(source, checks, **options).fill(out, threads=2, group_size=2)
    assert out.tolist() == [12, 12]


def test_the_grid_may_end_inside_a_threadgroup(checks):
    source = (
        HEAD
        + """
    kernel void count(device uint* out [[buffer(0)]], uint2 at [[thread_position_in_grid]],
                      uint2 size [[threads_per_threadgroup]], uint2 grid [[threads_per_grid]]) {
      out[at.y * grid.x + at.x] = size.x * 10 + size.y;
    }"""
    )
    out = np.zeros((3, 5), np.uint32)
    mslsim.compile_shader(source, checks).count(out, threads=(5, 3), group_size=(4, 2))
    assert out.tolist() == [[42, 42, 42, 42, 12]] * 2 + [[41, 41, 41, 41, 11]]


RACE = (
    HEAD
    + """
kernel void reverse(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  const float v = x[63 - t];
  x[t] = v;
}
"""
)


def test_findings_raise_or_are_collected():
    x = np.arange(64, dtype=np.float32)
    with pytest.raises(mslsim.KernelError, match=r"source\.metal:\d+: race in reverse"):
        mslsim.compile_shader(RACE).reverse(x, threads=64, group_size=64)
    library = mslsim.compile_shader(RACE, on_finding="collect", name="k.metal")
    report = library.reverse(x, threads=64, group_size=64)
    (finding,) = report.findings
    assert (finding.kind, finding.kernel, finding.file) == ("race", "reverse", "k.metal")
    assert len(finding.threads) == 2 and finding.threadgroup == 0
    assert "threads" not in str(finding) or finding.line


def test_a_chosen_check_runs_alone():
    x = np.arange(64, dtype=np.float32)
    assert mslsim.run(RACE, "reverse", (x.copy(),), 64, 64, checks={"bounds"}).ok
    assert not mslsim.run(RACE, "reverse", (x,), 64, 64, checks={"schedule"}).ok


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_a_race_is_found_in_any_order(order):
    x = np.arange(64, dtype=np.float32)
    report = mslsim.run(RACE, "reverse", (x,), 64, 64, order=order)
    assert "race" in {f.kind for f in report.findings}


CRASH = (
    HEAD
    + """
kernel void wild(device float* x [[buffer(0)]], constant ulong& at [[buffer(1)]],
                 uint t [[thread_position_in_threadgroup]]) {
  threadgroup_barrier(mem_flags::mem_none);
  device float* p = (device float*)at;
  x[t] = p[t];
}
"""
)


def test_a_barrier_is_needed_where_its_absence_is_a_race():
    source = """#include <metal_stdlib>
using namespace metal;
kernel void k(device float* y [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[t] = y[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = shared[63 - t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
"""
    kernel = mslsim.compile_shader(source, name="k.metal", on_finding="collect").k

    def findings(line):
        y = np.arange(64, dtype=np.float32)
        report = kernel(y, threads=64, group_size=64, without_barrier_at=("k.metal", line))
        return {(f.kind, f.line) for f in report.findings}

    assert findings(6) == {("race", 7)}
    assert findings(8) == set()
    unchecked = mslsim.compile_shader(source, "none").k
    with pytest.raises(ValueError, match="race check, which is off"):
        unchecked(np.zeros(64, np.float32), threads=64, without_barrier_at=("k.metal", 6))


def test_a_crash_stays_in_the_worker():
    x = np.zeros(32, np.float32)
    report = mslsim.run(CRASH, "wild", (x, np.uint64(4096)), 32, 32)
    assert [f.kind for f in report.findings] == ["crash"]
    y = np.ones(4, np.float32)
    assert mslsim.run(SCALE, "scale", (y, 2.0), 4, 4).ok
    assert y.tolist() == [2] * 4


def test_deep_stacks_do_not_reach_the_neighbour():
    source = (
        HEAD
        + """
    kernel void deep(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
      float big[8192];
      for (uint i = 0; i < 8192; ++i) big[(i * 7) % 8192] = i * x[t];
      threadgroup_barrier(mem_flags::mem_none);
      x[t] = big[uint(x[t]) % 8192];
    }"""
    )
    x = np.ones(64, np.float32)
    assert mslsim.run(source, "deep", (x,), 64, 64).ok
    assert (x == x[0]).all()


def test_counters():
    source = (
        HEAD
        + """
    kernel void copy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                     constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      threadgroup_barrier(mem_flags::mem_none);
      if (i < n) y[i] = x[i] + x[i];
    }"""
    )
    x, y = np.ones(256, np.float32), np.zeros(256, np.float32)
    report = mslsim.run(source, "copy", (x, y, np.uint32(256)), 256, 64)
    assert report.ok
    counters = report.counters
    assert counters["buffers"]["y"]["written"] == 1024
    assert counters["buffers"]["x"]["distinct_read"] == 1024
    assert counters["barriers_per_thread"] == 1
    assert counters["lines_per_simdgroup_access"] == 1
    assert report.efficiency(2048) == pytest.approx(1.0)


def test_strided_access_touches_many_lines():
    source = (
        HEAD
        + """
    kernel void gather(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) { y[i] = x[i * 32]; }"""
    )
    x, y = np.ones(1024, np.float32), np.zeros(32, np.float32)
    report = mslsim.run(source, "gather", (x, y), 32, 32)
    assert report.counters["lines_per_simdgroup_access"] == (32 + 1) / 2


def test_compile_errors_name_the_line():
    source = HEAD + "kernel void k(device float* x [[buffer(0)]]) {\n  x[0] = nothing;\n}\n"
    with pytest.raises(mslsim.CompileError) as error:
        mslsim.compile_shader(source, "none", name="bad.metal")
    assert [(f.kind, f.file, f.line) for f in error.value.findings] == [("compile", "bad.metal", 4)]


def test_the_package_imports_nothing_of_its_users():
    for root, _, files in os.walk(os.path.dirname(mslsim.__file__)):
        for name in files:
            if name.endswith(".py"):
                with open(os.path.join(root, name)) as file:
                    assert "metalcore" not in file.read()


@pytest.mark.parametrize("compiler", ["clang++-19", "zig"])
def test_either_compiler_finds_a_race(compiler, tmp_path):
    if compiler != "zig" and shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    program = (
        "import numpy, mslsim\n"
        "text = 'kernel void k(device int* y [[buffer(0)]], uint i [[thread_position_in_grid]])'\n"
        "text += '{ y[i / 2] = i; }'\n"
        "y = numpy.zeros(32, numpy.int32)\n"
        "report = mslsim.run(text, 'k', [y], 32, 32)\n"
        "print([f.kind for f in report.findings], mslsim.compiler.toolchain().is_zig)\n"
    )
    env = os.environ | {"MSLSIM_CXX": compiler, "MSLSIM_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.stdout == f"['race'] {compiler == 'zig'}\n", run.stderr


def test_a_compiler_that_is_none_is_named(tmp_path):
    env = os.environ | {"MSLSIM_CXX": "true", "MSLSIM_CACHE": str(tmp_path)}
    program = "import mslsim; mslsim.compile_shader('kernel void k() {}').k"
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert "MSLSIM_CXX=true is no clang++ >= 19" in run.stderr
