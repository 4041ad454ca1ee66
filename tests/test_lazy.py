# SPDX-License-Identifier: MIT
"""`import metalcore` loads next to nothing, and everything is there all the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore import _lazy
from metalcore._op import Op

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    """What a new process prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_loads_neither_ops_nor_what_prints_or_patches() -> None:
    code = "import metalcore, sys; print(*(m for m in sys.modules if m.startswith('metalcore.')))"
    assert set(python(code + "; print('rich' in sys.modules)").split()) == {
        *("metalcore._check", "metalcore._installed", "metalcore._lazy", "metalcore._native"),
        *("metalcore._policy", "metalcore._torch"),
        "False",
    }


def test_an_op_loads_its_own_module() -> None:
    code = "import metalcore, sys; metalcore.qr; print(*sys.modules)"
    modules = python(code).split()
    assert "rich" not in modules
    loaded = [m for m in modules if m.startswith("metalcore.ops.")]
    assert "metalcore.ops.linalg.qr" in loaded
    assert not [m for m in loaded if m.startswith("metalcore.ops.train")]


def test_every_name_of_the_stubs_is_there() -> None:
    for package in ("metalcore", *(f"metalcore.{family}" for family in _lazy.FAMILIES)):
        module = sys.modules.get(package) or getattr(metalcore, package.split(".")[1])
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert set(module.__all__) <= set(dir(module))
    assert metalcore.linalg.qr is metalcore.qr
    assert metalcore.fused_softmax is metalcore.softmax is metalcore.train.softmax
    assert metalcore.MetalRMSNorm is metalcore.nn.RMSNorm
    with pytest.raises(AttributeError, match="module 'metalcore' has no attribute 'nothing'"):
        metalcore.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("family", _lazy.FAMILIES)
def test_a_family_loads_all_its_ops(family: str) -> None:
    folder = {"attn": "attention"}.get(family, family)
    files = [*(ROOT / "src/metalcore/ops" / folder).glob("[!_]*.py")]
    _lazy.load_families()
    assert files
    assert {f"metalcore.ops.{folder}.{file.stem}" for file in files} <= set(sys.modules)


def test_torch_knows_every_op_at_once(tmp_path: Path) -> None:
    print_shape = "print(*{}(torch.ones(2, 3, 3))[0].shape)"
    code = "import torch, metalcore; op = lambda A: torch.ops.metalcore.qr(A, 'reduced')\n"
    assert python(code + print_shape.format("op")) == "2 3 3\n"
    assert python(code + "print(hasattr(torch.ops.metalcore, 'nothing'))") == "False\n"

    class Factors(torch.nn.Module):
        def forward(self, A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return metalcore.rms_norm(A), A

    file = tmp_path / "factors.pt2"
    torch.export.save(torch.export.export(Factors(), (torch.ones(2, 3, 3),)), file)
    load = f"import torch, metalcore; f = torch.export.load({str(file)!r}).module()\n"
    assert python(load + print_shape.format("f")) == "2 3 3\n"


def test_an_unknown_op_is_not_there() -> None:
    with pytest.raises(KeyError, match="nothing"):
        Op.all["nothing"]


def test_types_are_known_to_checkers(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "import torch\nimport metalcore\n"
        "reveal_type(metalcore.qr)\nreveal_type(metalcore.linalg.qr)\n"
        "reveal_type(metalcore.fused_softmax)\nreveal_type(metalcore.MetalAdamW)\n"
        "metalcore.softmax('x')\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "mypy", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    qr = "def (A: torch._tensor.Tensor, mode: str ="
    assert run.stdout.count(qr) == 2, run.stdout
    assert "def (x: torch._tensor.Tensor, dim: int =, *," in run.stdout
    assert "-> metalcore.optim.AdamW" in run.stdout
    assert run.stdout.count("error:") == 1
    assert 'Argument 1 to "softmax" has incompatible type "str"' in run.stdout
