# SPDX-License-Identifier: MIT
"""patch_comfy: torch's contracts where ComfyUI calls torch, and its end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import metalcore
from metalcore._accuracy import error, tolerance

SDPA, SOLVE, GELU = F.scaled_dot_product_attention, torch.linalg.solve, F.gelu


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    metalcore.unpatch_comfy()
    assert not metalcore.is_patched()
    assert (F.scaled_dot_product_attention, torch.linalg.solve, F.gelu) == (SDPA, SOLVE, GELU)


def test_it_begins_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert not metalcore.is_patched()
    metalcore.unpatch_comfy()
    metalcore.patch_comfy()
    assert metalcore.is_patched()
    assert "torch.linalg.solve" in capsys.readouterr().out
    metalcore.patch_comfy(activations=False, verbose=False)
    assert not capsys.readouterr().out
    assert F.gelu is not GELU
    assert F.scaled_dot_product_attention is SDPA
    metalcore.unpatch_comfy()
    metalcore.patch_comfy(activations=False, verbose=False)
    assert F.gelu is GELU


def test_it_goes_beside_the_overrides() -> None:
    metalcore.enable_pytorch_overrides(linalg=False)
    metalcore.patch_comfy(verbose=False)
    metalcore.disable_pytorch_overrides()
    assert F.gelu is not GELU
    assert metalcore.is_patched()
    metalcore.enable_pytorch_overrides()
    metalcore.unpatch_comfy()
    assert F.gelu is not GELU
    metalcore.disable_pytorch_overrides()


def test_activations_keep_their_arguments() -> None:
    x = torch.randn(3, 40, requires_grad=True)
    allowed = tolerance("gelu", torch.float32, 1)
    kinds: list[dict[str, Any]] = [{}, {"approximate": "none"}, {"approximate": "tanh"}]
    truths = [F.gelu(x, **kind) for kind in kinds]
    silu = F.silu(x)
    metalcore.patch_comfy(verbose=False)
    with metalcore.trace() as t:
        for kind, truth in zip(kinds, truths, strict=True):
            assert error(F.gelu(x, **kind), truth) <= allowed
        assert error(F.silu(x), silu) <= allowed
    assert {"gelu", "silu"} <= set(t.paths)
    with torch.no_grad():
        y = x.clone()
        assert F.silu(y, inplace=True) is y
    assert error(y, silu) <= allowed


def test_solve_keeps_its_arguments() -> None:
    A = torch.randn(6, 4, 4) + 4 * torch.eye(4)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((A, torch.randn(6, 4, 3)), {}),
        ((A, torch.randn(6, 4)), {}),
        ((A, torch.randn(4)), {}),
        ((A, torch.randn(4, 3)), {}),
        ((A[0], torch.randn(6, 4, 3)), {}),
        ((A[0], torch.randn(4)), {}),
        ((A, torch.randn(6, 3, 4)), {"left": False}),
        ((A.double(), torch.randn(6, 4, 1).double()), {"left": True}),
    ]
    truths = [torch.linalg.solve(*args, **named) for args, named in calls]
    metalcore.patch_comfy(verbose=False)
    with metalcore.trace() as t:
        for (args, named), truth in zip(calls, truths, strict=True):
            found = torch.linalg.solve(*args, **named)
            assert found.dtype == truth.dtype
            assert error(found, truth) <= 8 * tolerance("solve", torch.float32, 4)
    assert t.paths["solve"]


def test_attention_keeps_its_arguments() -> None:
    q, k, v = torch.randn(3, 2, 4, 7, 16).unbind()
    mask = torch.rand(7, 7) > 0.3
    options: list[dict[str, Any]] = [
        {"is_causal": True},
        {"attn_mask": mask, "scale": 0.3},
        {"dropout_p": 0.0, "enable_gqa": True},
    ]
    truths = [F.scaled_dot_product_attention(q, k, v, **o) for o in options]
    allowed = tolerance("attention", torch.float32, 23)
    metalcore.patch_comfy(sdpa=True, verbose=False)
    with metalcore.trace() as t:
        for o, truth in zip(options, truths, strict=True):
            assert error(F.scaled_dot_product_attention(q, k, v, **o), truth) <= allowed
        named = F.scaled_dot_product_attention(query=q, key=k, value=v, **options[0])
        assert error(named, truths[0]) <= allowed
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert [r.op for r in t.records] == ["attention"] * 4 + ["scaled_dot_product_attention"]
    assert t.paths["scaled_dot_product_attention"] == {"torch"}
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(q)


def test_the_switch_of_the_original() -> None:
    q = torch.randn(1, 2, 7, 16)
    assert not metalcore.is_slow_metal_sdpa_enabled()
    metalcore.enable_slow_metal_sdpa()
    assert metalcore.is_slow_metal_sdpa_enabled()
    with metalcore.trace() as t:
        F.scaled_dot_product_attention(q, q, q)
    assert set(t.paths) == {"attention"}
    metalcore.disable_slow_metal_sdpa()
    assert F.scaled_dot_product_attention is SDPA
