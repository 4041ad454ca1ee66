# SPDX-License-Identifier: MIT
"""Programs are made of shapes alone, and every size has its kernels."""

from typing import Any

import pytest

from metalcore.metal.plans import PLANS, Spec

F32 = Spec.contiguous

CASES: list[tuple[str, tuple[Any, ...], str]] = [
    # op, arguments, kernels
    ("qr", (F32((5, 8, 7)), "reduced"), "qr_simdgroup_8_4"),
    ("qr", (F32((41, 12)), "complete"), "qr_threadgroup_7680_256_64"),
    ("qr", (F32((2, 1000, 512)), "r"), "qr_scale_32 + qr_panel_32 + qr_finish"),
    ("qr", (F32((0, 4, 4)), "reduced"), "empty"),
    ("cholesky", (F32((5, 9, 9)), False), "cholesky_simdgroup_16_4"),
    ("cholesky", (F32((40, 40)), True), "cholesky_threadgroup_64"),
    (
        "cholesky",
        (F32((2, 300, 300)), True),
        "cholesky_threadgroup_64 + cholesky_panel_64 + cholesky_finish",
    ),
    ("trsm", (F32((8, 8)), F32((8, 2)), True, False, False), "trsm_rows_8_1_16_4_lower"),
    (
        "trsm",
        (F32((64, 64)), F32((64, 2)), False, True, True),
        "trsm_rows_32_2_16_1_transpose_unit",
    ),
    (
        "trsm",
        (F32((70, 70)), F32((70, 20)), False, False, False),
        "trsm_columns_16 + trsm_columns_64",
    ),
    ("cholesky_solve", (F32((9, 2)), F32((9, 9)), False), "cholesky_solve_rows_16_1_16_4"),
    ("cholesky_solve", (F32((9, 20)), F32((9, 9)), True), "cholesky_solve_columns_16_upper"),
    (
        "cholesky_solve",
        (F32((128, 20)), F32((128, 128)), False),
        "trsm_columns_64_lower + trsm_columns_64_lower_transpose",
    ),
    ("lu", (F32((3, 4, 9)),), "lu_simdgroup_16_4 + lu_permutation_float"),
    ("lu", (F32((40, 64)),), "lu_threadgroup + lu_permutation_float"),
    (
        "lu",
        (F32((2, 200, 70)),),
        "lu_panel_32 + lu_columns_32 + lu_finish + lu_permutation_float",
    ),
    ("solve", (F32((9, 9)), F32((9, 70)), False), "solve_simdgroup_16_4"),
    ("solve", (F32((40, 40)), F32((40, 1)), False), "solve_threadgroup"),
    (
        "solve",
        (F32((9, 9)), F32((9, 70)), True),
        "lu_simdgroup_16_4 + trsm_columns_16_lower_unit + trsm_columns_16"
        " + solve_residual + solve_add",
    ),
    ("det", (F32((9, 9)),), "det_simdgroup_16_4"),
    ("det", (F32((2, 40, 40)),), "det_threadgroup"),
    ("det", (F32((70, 70)),), "lu_panel_32 + lu_columns_32 + lu_finish + det_of_factors"),
    ("det", (F32((2, 0, 0)),), "empty"),
    ("householder_vector", (F32((3, 40)),), "householder_vector_float"),
    (
        "apply_householder",
        (F32((40, 9)), F32((40,)), F32(()), True),
        "apply_householder_left_float",
    ),
    (
        "apply_householder",
        (F32((40, 9)), F32((9,)), F32(()), False),
        "apply_householder_right_float",
    ),
]


@pytest.mark.parametrize(("op", "args", "kernels"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_is_made_without_a_tensor(op: str, args: tuple[Any, ...], kernels: str) -> None:
    program = PLANS[op].program(args)
    assert program is not None
    assert program.kernels == kernels
