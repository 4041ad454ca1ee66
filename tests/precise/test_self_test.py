# SPDX-License-Identifier: MIT
"""A device that spoils sums of two floats is found out before it computes with them."""

import pytest
import torch

import mslsim
from metalcore.metal.precise import _self_test

CPU = torch.device("cpu")


def _simulated(contract: str) -> object:
    return lambda text: mslsim.compile_shader(text, "none", contract=contract)


@pytest.mark.parametrize("contract", ["on", "fast"])
def test_kernels_are_error_free_however_much_is_fused(contract: str) -> None:
    assert _self_test.is_error_free(_simulated(contract), CPU)  # type: ignore[arg-type]


def test_a_missing_pragma_is_found_out() -> None:
    text = _self_test.text().replace("#pragma METAL fp contract(off)\n", "")
    assert text != _self_test.text()
    assert _self_test.is_error_free(_simulated("off"), CPU, text)  # type: ignore[arg-type]
    assert not _self_test.is_error_free(_simulated("fast"), CPU, text)  # type: ignore[arg-type]


def test_sums_that_are_not_the_nearest_are_found_out() -> None:
    wrong = "const float sum = x + y;"
    chopped = (
        "const float near = x + y; const float sum = as_type<float>(as_type<uint>(near) & ~1u);"
    )
    text = _self_test.text()
    assert wrong in text
    assert not _self_test.is_error_free(_simulated("on"), CPU, text.replace(wrong, chopped))  # type: ignore[arg-type]


def test_such_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _self_test.expect_error_free.cache_clear()
    monkeypatch.setattr(_self_test, "is_error_free", lambda *_: False)
    with pytest.raises(RuntimeError, match="sums of two floats are not error-free on this GPU"):
        _self_test.expect_error_free()
    _self_test.expect_error_free.cache_clear()
