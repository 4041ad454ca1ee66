# SPDX-License-Identifier: MIT
"""metalcore works where torch lacks a private name that it uses."""

import json
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "metalcore" / "_torch.py"
NAMES = [
    *re.findall(r'_find\(\s*"([\w.]+)", "(\w+)"', SOURCE.read_text()),
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch.autograd.function", "_SingleLevelFunction"),
]

# A process per name, forked from one that has loaded torch.
PROGRAM = """
import importlib, json, os, sys, traceback
import torch, torch._dynamo, torch.nn.functional as F
from torch.func import grad, jvp, vmap

import_module = importlib.import_module

class Without:
    def __init__(self, module, name):
        self.module, self.name = module, name

    def __getattr__(self, name):
        if name == self.name:
            raise AttributeError(name)
        return getattr(self.module, name)

def hide(module, name):
    def find(wanted, package=None):
        found = import_module(wanted, package)
        asks = sys._getframe(1).f_globals["__name__"] == "metalcore._torch"
        return Without(found, name) if asks and wanted == module else found

    importlib.import_module = find

def use(name):
    import metalcore
    from metalcore import _torch
    x, w = torch.randn(3, 8, dtype=torch.double), torch.randn(8, dtype=torch.double)
    ours, theirs = lambda x: metalcore.rms_norm(x, w, 1e-6), lambda x: F.rms_norm(x, (8,), w, 1e-6)
    close = torch.testing.assert_close
    close(ours(x), theirs(x))
    close(grad(lambda x: ours(x).sin().sum())(x), grad(lambda x: theirs(x).sin().sum())(x))
    close(vmap(ours)(x), theirs(x))
    close(jvp(ours, (x,), (x.flip(0),)), jvp(theirs, (x,), (x.flip(0),)))
    leaf = x.clone().requires_grad_()
    for f in (ours, torch.compile(ours, backend="eager")):
        (found,) = torch.autograd.grad(f(leaf).sin().sum(), leaf)
        close(found, grad(lambda x: theirs(x).sin().sum())(x))
    A = torch.randn(40, 5, 5)
    close(metalcore.inv(A), torch.linalg.inv(A), rtol=1e-3, atol=1e-3)
    try:
        metalcore.cholesky(-torch.eye(3).expand(4, 3, 3))
        raise AssertionError("not positive definite")
    except torch.linalg.LinAlgError as error:
        assert str(error).startswith("cholesky: "), error
    with metalcore.overrides():
        close(F.silu(torch.ones(1 << 20)), torch.full((1 << 20,), 0.7310586))
    h = torch.ones(64, 64, dtype=torch.bfloat16)
    metalcore.lora_linear(h, h, h[:2], h[:, :2])
    if name == "_dispatch_has_kernel_for_dispatch_key":  # asked of every op: it takes seconds
        from metalcore import info
        info.table()
    try:
        with metalcore.trace() as t:
            metalcore.rms_norm(torch.randn(50, 3000))
        assert t.records, t
    except RuntimeError as error:
        assert "need dispatch modes" in str(error), error

found = {}
for module, name in json.loads(sys.argv[1]):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        try:
            if name == "_SingleLevelFunction":
                from metalcore import _torch
                _torch.apply_directly = lambda function: function.apply
            else:
                hide(module, name)
            use(name)
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-20000:])
            status = 1
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    status = os.waitpid(child, 0)[1]
    found[name] = text or (status and f"status {status}") or ""
print(json.dumps(found))
"""


def test_there_are_names() -> None:
    assert ("torch._C", "_are_functorch_transforms_active") in NAMES


def test_everything_works_without_each() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(NAMES)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    assert found.keys() == {name for _, name in NAMES}
    assert {name: error for name, error in found.items() if error} == {}
