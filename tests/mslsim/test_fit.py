# SPDX-License-Identifier: MIT
"""What a kernel takes of a GPU, by its compiled form."""

import numpy as np
import pytest

import mslsim
from mslsim.fit import GROUPS, largest_group

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
# Keeps N values over a barrier.
KEPT = (
    HEAD
    + """
template <typename T, int N>
kernel void kept(device T* x [[buffer(0)]], constant uint& n [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  T values[N];
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = x[i + n * k];
  threadgroup_barrier(mem_flags::mem_device);
#pragma unroll
  for (int k = 0; k < N; ++k) x[i + n * k] = values[N - 1 - k] * values[k];
}
"""
)


def one(body, parameters="constant long& n [[buffer(1)]]"):
    text = HEAD + (
        f"kernel void k(device long* x [[buffer(0)]], {parameters},\n"
        f"              uint i [[thread_position_in_grid]]) {{\n{body}\n}}\n"
    )
    return mslsim.fits(text)["k"]


def kept(type, count):
    name = f"kept<{type}, {count}>"
    instance = f'template [[host_name("k")]] [[kernel]] decltype({name}) {name};\n'
    return mslsim.fits(KEPT + instance)["k"]


def test_the_largest_group_falls_with_registers():
    assert [largest_group(r) for r in (1, 104, 105, 128, 256, 300)] == [
        1024, 1024, 896, 832, 384, 384,
    ]  # fmt: skip
    assert list(GROUPS.values()) == sorted(GROUPS.values(), reverse=True)


@pytest.mark.parametrize("count", [8, 16, 24])
def test_values_that_are_kept_take_registers(count):
    few, many = kept("float", count), kept("float", count + 8)
    assert 2 * count <= few.half_registers <= 2 * count + 24
    assert many.half_registers - few.half_registers == pytest.approx(16, abs=4)
    # two bytes each
    assert kept("half", count).half_registers < few.half_registers


def test_what_does_not_fit_is_spilled():
    assert kept("float", 40).spills == 0
    assert kept("float", 200).spills > 0
    assert kept("float", 200).largest_group == 384


def test_a_margin_counts_as_registers():
    fit = kept("float", 40)
    assert fit.largest_group == 1024
    assert fit.fits(1024, margin=1) and not fit.fits(1024) and fit.fits(896)


def test_what_all_threads_share_takes_no_registers():
    shared = one("x[i] = n * n * n * n + n / 3;")
    assert shared.half_registers == one("x[i] = n;").half_registers


def test_long_divisions_are_told_by_line():
    assert one("x[i] = long(i) / n;").divisions == (("source.metal", 5),)
    assert one("x[i] =\n  x[i] % n;").divisions == (("source.metal", 6),)
    # by a constant; of numbers that are the same for all; of 32 bits
    for body in ("x[i] /= 7;", "x[i] = n / (n + 1);", "x[i] = i / uint(n);"):
        assert one(body).divisions == ()


def test_code_grows_with_what_is_unrolled():
    loop = "for (int k = 0; k < 64; ++k) { x[i] = x[i] * x[k] + k; }"
    rolled, unrolled = one("#pragma unroll(1)\n" + loop), one("#pragma unroll\n" + loop)
    assert rolled.code_bytes < 500 < unrolled.code_bytes
    assert rolled.loop[1] == 6 and 0 < rolled.loop_bytes < rolled.code_bytes
    assert unrolled.loop_bytes == 0


def test_a_kernel_can_be_chosen():
    two = KEPT + "".join(
        f'template [[host_name("k{n}")]] [[kernel]] decltype(kept<half, {n}>) kept<half, {n}>;\n'
        for n in (8, 16)
    )
    assert set(mslsim.fits(two)) == {"k8", "k16"}
    assert set(mslsim.fits(two, ["k16"])) == {"k16"}


def lint(text, **options):
    return [(f.kind, f.kernel, f.line) for f in mslsim.lint(text, registers=True, **options)]


def instances(*counts, head=""):
    name = "kept<float, {}>"
    text = KEPT.replace("kernel void", f"{head} kernel void")
    for n in counts:
        e = name.format(n)
        text += f'template [[host_name("k{n}")]] [[kernel]] decltype({e}) {e};\n'
    return text


KERNEL_LINE = 5


def test_the_largest_group_that_a_kernel_declares_must_fit():
    head = "[[max_total_threads_per_threadgroup(1024)]]"
    text = instances(16, 40, 60, head=head)
    assert lint(text) == [("fit", "k40", KERNEL_LINE), ("fit", "k60", KERNEL_LINE)]
    may, does = mslsim.lint(text, registers=True)
    assert "may not start" in may.message and "does not start" in does.message
    assert lint(text.replace("1024", "512")) == []
    assert lint(text.replace("1024", "8 * N")) == []


def test_spills_and_long_code_are_found_at_the_kernel():
    assert lint(instances(200)) == [("spills", "k200", KERNEL_LINE)]
    assert lint(instances(3000))[-1] == ("code", "k3000", KERNEL_LINE)


def test_loops_that_do_not_fit_the_instruction_cache_are_found():
    text = HEAD + (
        "kernel void k(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],\n"
        "              uint i [[thread_position_in_grid]]) {\n"
        "  for (uint j = 0; j < n; ++j) {\n"
        "#pragma unroll\n"
        "    for (int k = 0; k < 600; ++k) x[i] += x[i] * x[k + j] + k;\n"
        "  }\n}\n"
    )
    assert lint(text) == [("code", "k", 7)]


DIVIDES = HEAD + (
    "kernel void k(device long* x [[buffer(0)]], constant long& n [[buffer(1)]],\n"
    "              uint i [[thread_position_in_grid]]) {\n"
    "  x[i] /= n;%s\n"
    "}\n"
)


def test_a_comment_with_a_reason_lets_a_finding_pass():
    assert lint(DIVIDES % "") == [("division64", "k", 5)]
    reason = "// mslsim: allow(division64): this is the test of it"
    assert lint(DIVIDES % f"  {reason}") == []
    assert lint(DIVIDES.replace("  x[i]", f"  {reason}\n\n  x[i]") % "") == []
    # of another kind, or on another line
    assert ("division64", "k", 5) in lint(DIVIDES % "  // mslsim: allow(spills): other")
    assert ("division64", "k", 5) in lint(f"{DIVIDES % ''}{reason}\n")


@pytest.mark.parametrize("end", ["", ":", ":  "])
def test_a_comment_without_a_reason_is_a_finding(end):
    found = lint(DIVIDES % f"  // mslsim: allow(division64){end}")
    assert found == [("allow", "", 5), ("division64", "k", 5)]


def test_a_comment_for_an_unknown_finding_is_one():
    assert lint(DIVIDES % "  // mslsim: allow(race): never")[0] == ("allow", "", 5)


def test_comments_in_included_files_count(tmp_path):
    (tmp_path / "half.h").write_text(
        "inline long part(long a, long b) {\n"
        "  return a / b;  // mslsim: allow(division64): once\n}\n"
    )
    text = '#include "half.h"\n' + (DIVIDES % "").replace("x[i] /= n", "x[i] = part(x[i], n)")
    assert lint(text, include=[str(tmp_path)]) == []


def test_a_run_with_more_threads_than_fit_is_a_finding():
    x = np.zeros(60 * 1024, np.float32)
    for group, kinds in ((384, []), (1024, ["fit"])):
        report = mslsim.run(
            instances(60), "k60", [x, np.uint32(1024)], group, group, checks={"limits"}
        )
        assert [f.kind for f in report.findings] == kinds


def test_what_is_slow_is_a_finding_of_a_run_if_asked_for():
    args = [np.ones(32, np.int64), 3]
    assert mslsim.run(DIVIDES % "", "k", args, 32, 32).ok
    report = mslsim.run(DIVIDES % "", "k", args, 32, 32, checks={"cost"})
    assert [f.kind for f in report.findings] == ["division64"]
