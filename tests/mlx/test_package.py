# SPDX-License-Identifier: MIT
"""The package: what it says, what it loads, and what it exchanges with torch."""

import ast
import inspect
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import metalcore
import metalcore.mlx
from metalcore.mlx import _table, precise
from tests.mlx.ways import SIMULATED

PACKAGE = Path(str(metalcore.mlx.__file__)).parent


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_metalcore_does_not_load_mlx() -> None:
    program = "import sys, metalcore; metalcore.rms_norm; print('mlx' in sys.modules)"
    assert run(program) == "False"


def test_without_mlx_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None\n"
        "import metalcore\n"
        "try:\n    metalcore.mlx\nexcept ImportError as e:\n    print(e)"
    )
    assert run(program) == "metalcore.mlx: needs mlx: pip install mlx"


def test_names() -> None:
    assert metalcore.mlx is sys.modules["metalcore.mlx"]
    assert {"qr", "rope", "accelerate", "nn", "to_torch"} <= set(dir(metalcore.mlx))
    assert {"sum", "dot"} <= set(dir(precise))
    for place in (metalcore.mlx, precise):
        with pytest.raises(AttributeError, match="no_such_name"):
            place.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("stub", "table"), [("__init__.pyi", _table.FUNCTIONS), ("precise.pyi", _table.PRECISE)]
)
def test_the_stub_has_every_function_as_it_is(stub: str, table: Any) -> None:
    found = {
        node.name: [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.parse((PACKAGE / stub).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    made = {name: list(inspect.signature(_table.made(name, table)).parameters) for name in table}
    assert found == made


@pytest.mark.parametrize("name", _table.FUNCTIONS)
def test_docstrings_speak_of_arrays(name: str) -> None:
    text = str(getattr(metalcore.mlx, name).__doc__)
    assert all(part in text for part in ("Args:", "stream:", "Returns:", "Example:"))
    assert "metalcore.mlx." in text
    assert "ensor" not in text


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_exchange(dtype: torch.dtype) -> None:
    x = (10 * torch.randn(3, 5)).to(dtype)
    for given in (x, x.T, x[1:, ::2], x[:0]):
        array = metalcore.mlx.from_torch(given)
        assert array.shape == tuple(given.shape)
        back = metalcore.mlx.to_torch(array)
        assert back.dtype == dtype
        assert torch.equal(back, given)


def test_exchange_shares_memory_where_mlx_does() -> None:
    array = mx.zeros((4,))
    tensor = metalcore.mlx.to_torch(array)
    tensor[2] = 5
    assert np.array(array).tolist() == [0, 0, 5, 0]
    reversed_array = mx.arange(4)[::-1]
    assert metalcore.mlx.to_torch(reversed_array).tolist() == [3, 2, 1, 0]


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(ValueError, match="softmax"):
        metalcore.mlx.softmax(mx.ones((2, 3)), axis=5, stream=mx.cpu)
    with pytest.raises(TypeError, match="no_such"):
        metalcore.mlx.softmax(mx.ones((2, 3)), no_such=1)
    q = mx.ones((1, 1, 2, 4))
    with pytest.raises(ValueError, match='mask must be "causal" or an array'):
        metalcore.mlx.scaled_dot_product_attention(q, q, q, mask="all", stream=mx.cpu)


def test_what_has_no_gradient_says_so() -> None:
    def loss(x: mx.array) -> mx.array:
        return metalcore.mlx.quantize_int4(x, 32, stream=mx.cpu).scale.sum()

    with pytest.raises(RuntimeError, match=r"quantize_int4: has no gradient; wrap its arguments"):
        mx.eval(mx.grad(loss)(mx.ones((2, 64))))


def test_compile_and_vmap() -> None:
    with mx.stream(mx.cpu):
        x, w = mx.random.normal((3, 4, 16)), mx.random.normal((16,))
        truth = mx.fast.rms_norm(x, w, 1e-6)

        def norm(x: mx.array, w: mx.array) -> mx.array:
            return metalcore.mlx.rms_norm(x, w, 1e-6)

        with metalcore.trace() as t:
            found = [mx.compile(norm)(x, w), mx.vmap(norm, in_axes=(1, None), out_axes=1)(x, w)]
            mx.eval(found)
        assert t.paths["rms_norm"] == {"mlx"}
        each = mx.grad(lambda x, w: (norm(x, w) ** 2).sum(), argnums=1)
        by_vmap = mx.vmap(each, in_axes=(0, None))(x, w)
        one_by_one = mx.stack([each(x[i], w) for i in range(3)])
        for a, b in zip([*found, by_vmap], [truth, truth, one_by_one], strict=True):
            assert mx.allclose(a, b, 1e-5, 1e-5)


@SIMULATED
def test_vmap_of_all_functions(simulated: bool) -> None:
    with mx.stream(mx.cpu), metalcore.simulate() if simulated else nullcontext():
        mx.random.seed(1)
        A, b = mx.random.normal((4, 6, 5)), mx.random.normal((6,))
        Q, R = metalcore.mlx.vmap(metalcore.mlx.qr)(A)
        assert mx.allclose(Q @ R, A, 1e-4, 1e-5)

        def loss(A: mx.array, b: mx.array) -> mx.array:
            # what every sample shares is batched too
            norm = metalcore.mlx.rms_norm(b, None, 1e-6).sum()
            return metalcore.mlx.lstsq(A, b)[0].sum() * norm

        each = metalcore.mlx.vmap(mx.grad(loss), (0, None))(A, b)
        truth = mx.stack([mx.grad(loss)(A[i], b) for i in range(4)])
        assert mx.allclose(each, truth, 1e-3, 1e-4)
        whole = mx.grad(lambda A: metalcore.mlx.vmap(loss, [1, None])(A, b).sum())(A.swapaxes(0, 1))
        assert mx.allclose(whole.swapaxes(0, 1), truth, 1e-3, 1e-4)
    with pytest.raises(ValueError, match="vmap: one argument at least"):
        metalcore.mlx.vmap(metalcore.mlx.silu, [None])(b)


def test_what_is_of_tensors_alone_is_refused() -> None:
    A = mx.eye(3)
    with pytest.raises(TypeError, match="precision"):
        metalcore.mlx.solve(A, A, precision="float64")
    assert "precision:" not in str(metalcore.mlx.solve.__doc__)
