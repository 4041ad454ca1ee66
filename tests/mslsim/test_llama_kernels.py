# SPDX-License-Identifier: MIT
"""The largest threadgroup of llama.cpp's kernels, against what Apple's compiler reported.

llama.cpp prints it for each pipeline; these are from logs of M1 and M2 class GPUs in its issues
12022 and 11228 and in whisper.cpp's 2571. The source is that of llama-cpp-python 0.3.7, of the same
weeks; it is fetched for this test and not part of the repository.
"""

from functools import cache

import mslsim
from mslsim.fit import GROUPS, MARGIN, Fit, largest_group
from tests.mslsim.llama_source import folder, text

RELEASE = "llama-cpp-python==0.3.7"
REPORTED = {
    1024: "mul_mv_f16_f32 mul_mv_f16_f32_1row mul_mv_f16_f32_l4 mul_mv_f16_f16 mul_mv_q8_0_f32"
    " mul_mv_iq4_nl_f32 mul_mv_id_f32_f32 mul_mv_id_f16_f32 mul_mv_id_q8_0_f32 rope_norm_f32"
    " rope_neox_f16 im2col_f16 soft_max_f32_4 rms_norm silu gelu get_rows_q4_0",
    896: "mul_mv_iq4_xs_f32",
    832: "mul_mv_q4_1_f32 mul_mv_id_q4_0_f32 mul_mv_id_q4_1_f32 mul_mv_ext_q4_0_f32_r1_2",
    768: "mul_mv_iq3_xxs_f32 mul_mv_ext_f16_f32_r1_5",
    704: "mul_mv_ext_q4_0_f32_r1_3 mul_mv_ext_q5_0_f32_r1_2 mul_mv_ext_q5_0_f32_r1_3",
    640: "mul_mv_iq2_xs_f32 mul_mv_iq3_s_f32 mul_mv_iq2_s_f32 mul_mv_ext_q4_0_f32_r1_4"
    " mul_mv_ext_q4_0_f32_r1_5 mul_mv_ext_q4_1_f32_r1_4",
    576: "mul_mv_q5_1_f32 mul_mv_q2_K_f32 mul_mv_iq1_m_f32 mul_mv_id_q5_0_f32 mul_mv_id_q5_1_f32"
    " mul_mv_id_q2_K_f32 mul_mv_id_q3_K_f32 mul_mv_id_q4_K_f32",
    448: "mul_mv_iq1_s_f32",
}
APPLE = {f"kernel_{name}": group for group, names in REPORTED.items() for name in names.split()}
STEPS = list(GROUPS.values())


@cache
def fits() -> dict[str, Fit]:
    include = [str(folder(RELEASE))]
    return mslsim.fits(text(RELEASE), APPLE, name="ggml-metal.metal", include=include)


def _steps_apart(name: str) -> int:
    return abs(STEPS.index(fits()[name].largest_group) - STEPS.index(APPLE[name]))


def test_estimates_are_what_apples_compiler_reported():
    apart = [_steps_apart(name) for name in APPLE]
    assert len(apart) == 42
    assert sum(n == 0 for n in apart) >= 37
    assert sum(n <= 2 for n in apart) >= 41


def test_with_the_margin_nearly_every_limit_is_known():
    """No kernel is thought to take larger groups than it does, but for one: it looks up its values
    in a table, with all rows at once."""
    over = {name for name, fit in fits().items()
            if largest_group(fit.half_registers * MARGIN) > APPLE[name]}  # fmt: skip
    assert over <= {"kernel_mul_mv_iq1_s_f32"}
