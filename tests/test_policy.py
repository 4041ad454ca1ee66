# SPDX-License-Identifier: MIT
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore import _native, _policy
from metalcore.metal.plans import PLANS, Spec

Write = Callable[[str], Path]


def test_packaged_values(write_policy: Write) -> None:
    assert _policy.policy("rms_norm", "metal")["threads"] == 512
    assert _policy.policy("rms_norm", "nothing") == {}
    assert _policy.policy("no_such_op", "metal") == {}


def test_a_user_file_overrides_single_values(write_policy: Write) -> None:
    write_policy("[rms_norm.metal]\nthreads = 256\n")
    values = _policy.policy("rms_norm", "metal")
    assert values["threads"] == 256
    assert values["simdgroups"] == 8
    program = PLANS["rms_norm"].program((Spec.contiguous((2, 8192)), None, 1e-6, 0.0))
    assert program is not None
    assert [launch.group for launch in program.launches] == [(256, 1, 1)]


def test_rows_are_whole_with_any_number_of_threads(write_policy: Write) -> None:
    write_policy("[rms_norm.metal]\nthreads = 32\n")
    x = torch.randn(3, 1001)
    with metalcore.simulate():
        y = metalcore.rms_norm(x)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (1001,)))


def test_compiled_kernels_have_numbers_of_their_own(write_policy: Write) -> None:
    built_in = _native.knobs()["qr"]["interleaved_up_to"]
    assert _policy.policy("qr", "cpu")["interleaved_up_to"] == built_in > 0
    write_policy("[qr.cpu]\ninterleaved_up_to = 7\n")
    assert _native.knobs()["qr"]["interleaved_up_to"] == 7
    write_policy("")
    assert _native.knobs()["qr"]["interleaved_up_to"] == built_in


def test_what_depends_on_numbers_is_told(write_policy: Write) -> None:
    seen = []
    _policy.when_changed(lambda: seen.append(_policy.policy("gelu", "metal")["threads"]))
    write_policy("[gelu.metal]\nthreads = 64\n")
    _policy._told.pop()
    assert seen == [64]


def test_an_unknown_key_is_an_error(write_policy: Write) -> None:
    write_policy("[rms_norm.metal]\nthraeds = 512\n")
    with pytest.raises(ValueError, match=r"rms_norm: .* sets thraeds, which is none of threads"):
        _policy.policy("rms_norm", "metal")
    with pytest.raises(ValueError, match=r"qr: .*\[qr.cpu\] sets panel, which is none of \w+"):
        write_policy("[qr.cpu]\npanel = 8\n")


def test_a_value_of_another_type_is_an_error(write_policy: Write) -> None:
    write_policy('[rms_norm.metal]\nthreads = "many"\n')
    with pytest.raises(ValueError, match=r"threads must be of type int, got 'many'"):
        _policy.policy("rms_norm", "metal")
