# SPDX-License-Identifier: MIT
"""What a kernel takes of a GPU, by its compiled form."""

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
