# SPDX-License-Identifier: MIT
from tests.reach import EXAMPLES, ROOT, reached_by

UNIT_TESTS = set(reached_by([]))


def reached(*files: str) -> set[str]:
    found = set(reached_by(files))
    assert found >= UNIT_TESTS
    assert all((ROOT / test).exists() for test in found)
    return found - UNIT_TESTS


def test_unit_tests_run_with_every_change() -> None:
    assert {"tests/test_reach.py", "tests/test_layout.py"} <= UNIT_TESTS
    assert reached("LICENSE") == set()


def test_a_file_of_an_op_reaches_its_tests_and_those_of_its_users() -> None:
    for file in ("csrc/cpu/linalg/svd.cpp", "tests/linalg/test_svd.py"):
        assert reached(file) == {"tests/linalg/test_svd.py"}
    # these are formulas over the op
    users = {"tests/linalg/test_pinv.py", "tests/linalg/test_cond.py"}
    assert reached("src/metalcore/ops/linalg/svd.py") > users


def test_a_header_reaches_the_ops_that_include_it_at_any_depth() -> None:
    ops = ("eigh", "svd")
    file = "csrc/cpu/linalg/tridiagonal_values.h"
    assert reached(file) == {f"tests/linalg/test_{op}.py" for op in ops}


def test_what_most_ops_need_reaches_an_op_of_each_family() -> None:
    for file in ("csrc/cpu/common/simd.h", "src/metalcore/_op.py", "tests/check.py"):
        assert reached(file) == EXAMPLES


def test_other_folders_reach_their_own_tests() -> None:
    assert reached("src/metalcore/patch/mlp.py") == {"tests/patch"}
    assert "tests/mslsim/test_kernels.py" in reached("src/mslsim/build.py")
