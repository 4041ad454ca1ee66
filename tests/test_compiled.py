# SPDX-License-Identifier: MIT
"""What is in a compiled graph: the meaning of what a compiler fuses, our kernels for the rest."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import metalcore
from metalcore import _trace
from metalcore._accuracy import error, tolerance
from metalcore._op import Composition, Op
from metalcore.patch.swap import Swapped
from tests.patch.families import allowed, build, gradients, text

Graphs = Counter[str]


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "left_to_compiler", set())


def backend(graphs: Graphs, *, fuses: bool = True) -> Any:
    """A compiler that counts what it is given, forward and backward, and runs it as it is."""

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    table: Any = select_decomp_table() if fuses else {}
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=table)


def kernels(graphs: Graphs) -> set[str]:
    names = [n.split(".") for n in graphs if n.startswith("metalcore")]
    assert {n[0] for n in names} <= {"metalcore_kernels"}, graphs
    return {n[1] for n in names}


def compiled(function: Callable[..., Any], how: Any, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(function, backend=how, fullgraph=True, **options)
    return made


COS, SIN = metalcore.RotaryEmbedding(8)(seq_len=3)


def rotated(x: Tensor, y: Tensor) -> Tensor:
    q, k = x.view(2, -1, 3, 8), y.view(2, -1, 3, 8)
    a, b = metalcore.apply_rotary_pos_emb(q, k, COS, SIN)
    return a * b


FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda x, y: metalcore.rms_norm(x, y[0], 1e-6),
    "add_rms_norm": lambda x, y: metalcore.add_rms_norm(x, y, y[0], 1e-6)[0],
    "layer_norm": lambda x, y: metalcore.layer_norm(x, (24,), y[0], y[1], 1e-5),
    "add_layer_norm": lambda x, y: metalcore.add_layer_norm(x, y, y[0], y[1])[0],
    "softmax": lambda x, y: metalcore.softmax(x, -1) * y,
    "soft_cap": lambda x, y: metalcore.soft_cap(x, 3.0) * y,
    "silu": lambda x, y: metalcore.silu(x) * y,
    "gelu": lambda x, y: metalcore.gelu(x, "tanh") * y,
    "swiglu": metalcore.swiglu,
    "geglu": metalcore.geglu,
    "rope": rotated,
}


def results(function: Callable[..., Tensor], rows: int) -> list[Tensor]:
    torch.manual_seed(rows)
    leaves = [torch.randn(rows, 24, requires_grad=True) for _ in range(2)]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("op", FUSED)
def test_what_a_compiler_fuses_is_left_to_it(op: str) -> None:
    graphs: Graphs = Counter()
    fused = compiled(FUSED[op], backend(graphs), dynamic=True)
    for rows in (4, 6):
        for found, truth in zip(results(fused, rows), results(FUSED[op], rows), strict=True):
            assert error(found, truth) <= tolerance(op, torch.float32, 24)
    assert not kernels(graphs)
    said = " ".join(metalcore.trace().summary().split())
    assert said.endswith(f"the compiler computes {op}")


@pytest.mark.parametrize("op", ["rms_norm", "swiglu"])
def test_a_compiler_that_fuses_nothing_gets_our_kernels(op: str) -> None:
    graphs: Graphs = Counter()
    results(compiled(FUSED[op], backend(graphs, fuses=False)), 4)
    assert kernels(graphs) == {op, f"{op}_backward"}


def test_what_no_compiler_can_do_is_ours() -> None:
    target = torch.arange(4)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return metalcore.linear_cross_entropy(hidden, weight, target)

    graphs: Graphs = Counter()
    found, truth = (results(f, 4) for f in (compiled(loss, backend(graphs)), loss))
    assert kernels(graphs) == {"cross_entropy"}
    for a, b in zip(found, truth, strict=True):
        assert error(a, b) <= tolerance("linear_cross_entropy", torch.float32, 24)


def test_an_accelerated_model_compiles_to_what_the_plain_one_does() -> None:
    model, tokens = build(), text()
    out, plain = gradients(model, tokens)
    with metalcore.accelerate(model):
        assert any(isinstance(m, Swapped) for m in model.modules())
        graphs: Graphs = Counter()
        forward = compiled(model, backend(graphs))
        model.zero_grad()
        found = forward(tokens, labels=tokens)
        found.loss.backward()
        assert kernels(graphs) == {"attention", "attention_backward"}  # no compiler has these
        assert error(found.loss, out.loss) <= allowed()
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert error(p.grad, plain[name]) <= allowed(), name
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_of_our_autograd_is_entered(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: Counter[str] = Counter()
    for op in (*Composition.all.values(), *Op.all.values()):

        def counted(*args: Any, op: Composition = op, record: Any = op._recorded) -> Any:
            entered[op.name] += 1
            return record(*args)

        monkeypatch.setattr(op, "_recorded", counted)
    model, tokens = build().eval(), text()
    with metalcore.accelerate(model):
        model(tokens)
        assert entered["attention"]  # with gradients it is
        entered.clear()
        graphs: Graphs = Counter()
        forward = compiled(model, backend(graphs))
        with mode():
            found = forward(tokens).logits
            assert error(found, model(tokens).logits) <= allowed()
        assert kernels(graphs) == {"attention"}
        assert not entered
    torch._dynamo.reset()


def test_inductor_compiles_the_meaning() -> None:
    norm = partial(metalcore.rms_norm, eps=1e-6)
    x, weight = torch.randn(4, 40, requires_grad=True), torch.randn(40)
    fused = compiled(lambda x: norm(x * 2, weight) + 1, "inductor")
    limit = tolerance("rms_norm", torch.float32, 40)
    assert error(fused(x), norm(x * 2, weight) + 1) <= limit
    (found,) = torch.autograd.grad(fused(x).square().sum(), x)
    (truth,) = torch.autograd.grad((norm(x * 2, weight) + 1).square().sum(), x)
    assert error(found, truth) <= limit
