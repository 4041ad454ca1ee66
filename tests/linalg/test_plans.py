# SPDX-License-Identifier: MIT
"""Plans of matrices that are too large for kernels."""

import pytest

from metalcore.metal.plans import PLANS, Spec


@pytest.mark.parametrize("op", ["cholesky", "svdvals", "eigh"])
def test_a_matrix_of_more_values_than_32_bits_count_is_refused(op: str) -> None:
    flags = () if op == "svdvals" else (False,)
    with pytest.raises(ValueError, match="up to 4294967295 values, got 65536 x 65536"):
        PLANS[op].program((Spec.contiguous((1, 2**16, 2**16)), *flags))
