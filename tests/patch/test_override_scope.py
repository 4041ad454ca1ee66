# SPDX-License-Identifier: MIT
"""Whom overrides concern: groups, blocks, threads; what compilers see; and how they end."""

import copy
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.patch.overrides import GROUPS
from tests.patch.forced import PLACES, SOFTMAX, ops_of


def test_groups_one_by_one() -> None:
    x = torch.randn(256, 1024)
    none = dict.fromkeys(GROUPS, False)
    metalcore.enable_pytorch_overrides(**{**none, "softmax": True})
    metalcore.enable_pytorch_overrides(**{**none, "activations": True})
    assert list(metalcore.get_active_overrides()) == ["activations", "softmax"]
    metalcore.disable_pytorch_overrides("softmax")
    assert metalcore.get_active_overrides() == {
        "activations": ["torch._C._nn.silu", "torch.nn.functional.gelu"]
    }
    assert ops_of(lambda: F.silu(x)) == {"silu"}
    assert not ops_of(lambda: F.softmax(x, -1))
    assert "softmax" not in vars(Tensor)
    metalcore.enable_pytorch_overrides(**none, all=True)
    assert list(metalcore.get_active_overrides()) == list(GROUPS)
    metalcore.disable_pytorch_overrides()
    assert metalcore.get_active_overrides() == {}
    with pytest.raises(ValueError, match=r"takes activations, .* got 'convolution'"):
        metalcore.disable_pytorch_overrides("convolution")
    with pytest.raises(TypeError, match="convolution"):
        metalcore.enable_pytorch_overrides(convolution=True)  # type: ignore[call-arg]


def test_verbose_names_what_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    metalcore.enable_pytorch_overrides(verbose=True)
    assert "softmax: torch.softmax, torch.Tensor.softmax" in capsys.readouterr().out


def test_blocks_nest_and_end_with_errors() -> None:
    x = torch.randn(256, 1024)
    with metalcore.overrides(softmax=False):
        with suppress(ZeroDivisionError), metalcore.overrides():
            assert ops_of(lambda: F.softmax(x, -1))
            raise ZeroDivisionError
        assert not ops_of(lambda: F.softmax(x, -1))
        assert ops_of(lambda: F.silu(x))
        assert "softmax" not in metalcore.get_active_overrides()
    assert not ops_of(lambda: F.silu(x))
    metalcore.enable_pytorch_overrides()
    with metalcore.overrides():
        pass
    assert ops_of(lambda: F.silu(x))


def test_a_change_for_all_inside_a_block_is_refused() -> None:
    with metalcore.overrides(linalg=False):
        for change in (metalcore.enable_pytorch_overrides, metalcore.disable_pytorch_overrides):
            with pytest.raises(RuntimeError, match="leave the block first"):
                change()
    metalcore.enable_pytorch_overrides()


def test_a_block_concerns_its_own_thread() -> None:
    x = torch.randn(256, 1024)
    inside, done = threading.Event(), threading.Event()
    seen: dict[str, set[str]] = {}

    def holder() -> None:
        with metalcore.overrides():
            inside.set()
            done.wait()
            seen["holder"] = ops_of(lambda: F.silu(x))

    thread = threading.Thread(target=holder)
    thread.start()
    inside.wait()
    seen["other"] = ops_of(lambda: F.silu(x))
    assert metalcore.get_active_overrides() == {}
    metalcore.enable_pytorch_overrides()
    seen["enabled"] = ops_of(lambda: F.silu(x))
    metalcore.disable_pytorch_overrides()
    seen["disabled"] = ops_of(lambda: F.silu(x))
    done.set()
    thread.join()
    assert seen == {"other": set(), "enabled": {"silu"}, "disabled": set(), "holder": {"silu"}}


def test_a_block_that_another_thread_leaves() -> None:
    x = torch.randn(8, 32)

    def steps() -> Iterator[set[str]]:
        with metalcore.overrides():
            yield ops_of(lambda: torch.softmax(x, -1))

    running = steps()
    assert next(running) == {"softmax"}
    with ThreadPoolExecutor(1) as other:
        other.submit(running.close).result()
    assert not ops_of(lambda: torch.softmax(x, -1))
    assert not metalcore.get_active_overrides()
    metalcore.enable_pytorch_overrides()
    metalcore.disable_pytorch_overrides()


def test_threads_that_come_and_go() -> None:
    x, problems = torch.randn(40, 1024), []

    def work() -> None:
        for _ in range(30):
            with metalcore.overrides():
                if ops_of(lambda: F.silu(x)) != {"silu"}:
                    problems.append("not replaced")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


def test_what_others_put_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(256, 1024)
    metalcore.enable_pytorch_overrides()
    ours = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda *args, **named: ours(*args, **named))
    theirs = torch.softmax
    metalcore.disable_pytorch_overrides()
    assert torch.softmax is theirs
    assert not ops_of(lambda: torch.softmax(x, -1))
    metalcore.enable_pytorch_overrides()
    assert torch.softmax is theirs
    assert ops_of(lambda: torch.softmax(x, -1)) == {"softmax"}
    monkeypatch.undo()
    metalcore.disable_pytorch_overrides()


def test_what_others_put_back_is_replaced_again() -> None:
    metalcore.enable_pytorch_overrides()
    torch.softmax = SOFTMAX
    metalcore.disable_pytorch_overrides()
    metalcore.enable_pytorch_overrides()
    assert torch.softmax is not SOFTMAX


def test_methods_that_others_set_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = Tensor.softmax
    theirs = lambda self, dim: inherited(self, dim)  # noqa: E731
    monkeypatch.setattr(Tensor, "softmax", theirs, raising=False)
    with metalcore.overrides():
        assert Tensor.softmax is not theirs
    assert vars(Tensor)["softmax"] is theirs


def test_names_survive_pickle_and_copies() -> None:
    metalcore.enable_pytorch_overrides()
    for function in (torch.softmax, F.gelu, Tensor.softmax, torch.linalg.svd):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
    assert torch.softmax.__name__ == "softmax"
    assert torch.softmax.__doc__ == SOFTMAX.__doc__


def test_torchscript_and_fx_find_torchs_functions() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, -1) + F.gelu(x) + F.silu(x) + F.rms_norm(x, [4])

    x = torch.randn(3, 4)
    truth = Model()(x)
    metalcore.enable_pytorch_overrides()
    assert torch.equal(torch.jit.script(Model())(x), truth)
    graph = torch.fx.symbolic_trace(Model()).graph
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    assert SOFTMAX in targets
    ours = [p._replacement for p in PLACES if p._replacement is not None]
    assert not targets & set(ours)


def _compiled(x: Tensor, A: Tensor, bags: Tensor, target: Tensor) -> Tensor:
    y = F.silu(x) + F.gelu(x, approximate="tanh") + torch.softmax(x, dim=-1) + x.softmax(-1)
    y = y + F.rms_norm(x, x.shape[-1:]) + F.layer_norm(x, x.shape[-1:])
    z = torch.linalg.svdvals(A).sum() + torch.linalg.solve(A, A).sum() + torch.linalg.inv(A).sum()
    z = z + torch.linalg.qr(A, mode="r").R.abs().sum()
    bag = F.embedding_bag(bags, x, mode="sum").sum()
    return y.sum() + z + bag + F.cross_entropy(x, target)


def test_compiled_code_has_no_graph_break() -> None:
    x, A = torch.randn(8, 32, requires_grad=True), torch.randn(5, 4, 4) + 4 * torch.eye(4)
    args = (x, A, torch.zeros(3, 5, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    truth = torch.autograd.grad(_compiled(*args), x)[0]
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(_compiled, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        with metalcore.overrides():
            found = torch.autograd.grad(compiled(*args), x)[0]
        assert error(found, truth) <= tolerance("softmax", torch.float32, 32)


def test_compiling_after_disable_where_the_compiler_met_ours() -> None:
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    x = torch.randn(3, 4)
    metalcore.enable_pytorch_overrides()
    # as if the compiler were imported only now
    get_torch_obj_rule_map.cache_clear()
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: torch.softmax(x, -1) + F.silu(x), backend="aot_eager", fullgraph=True
        )
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1) + F.silu(x))
        metalcore.disable_pytorch_overrides()
