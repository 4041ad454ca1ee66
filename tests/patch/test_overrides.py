# SPDX-License-Identifier: MIT
"""Overrides: what they take, what they leave to torch, whom they concern, and how they end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.patch.overrides import GROUPS
from tests.backends import Backend
from tests.patch.forced import SOFTMAX, ops_of


def test_all_spellings_and_existing_modules_are_taken(backend: Backend) -> None:
    x, w = backend.randn(8, 32), backend.randn(32)
    silu, gelu = nn.SiLU(), nn.GELU("tanh")
    softmax, rms, layer = nn.Softmax(-1), nn.RMSNorm(32), nn.LayerNorm(32)
    loss, bag = nn.CrossEntropyLoss(), nn.EmbeddingBag(9, 32, mode="mean")
    target, bags = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 4, dtype=torch.int64)
    from torch.nn.functional import cross_entropy, layer_norm, rms_norm
    from torch.nn.functional import silu as imported

    metalcore.enable_pytorch_overrides()
    spellings: dict[str, list[Callable[[], Any]]] = {
        "silu": [lambda: silu(x), lambda: imported(x), lambda: F.silu(x)],
        "gelu": [lambda: gelu(x), lambda: F.gelu(x, approximate="tanh")],
        "softmax": [
            *(lambda: softmax(x), lambda: F.softmax(x, -1), lambda: x.softmax(1)),
            *(lambda: torch.softmax(x, dim=-1), lambda: torch.special.softmax(x, -1)),
            lambda: torch.softmax(x.bfloat16(), -1, dtype=torch.float32),
        ],
        "rms_norm": [lambda: rms(x), lambda: rms_norm(x, (32,), w), lambda: F.rms_norm(x, [32])],
        "layer_norm": [lambda: layer(x), lambda: layer_norm(x, (8, 32))],
        "cross_entropy": [lambda: loss(x, target), lambda: cross_entropy(x, target)],
    }
    if backend.name != "mps":
        spellings["embedding_bag"] = [lambda: bag(bags)]
    for op, calls in spellings.items():
        for call in calls:
            assert op in ops_of(call), (op, call)


def test_linear_algebra_has_torchs_types(backend: Backend) -> None:
    X = backend.randn(4, 5, 5)
    A = X @ X.mT + torch.eye(5, device=backend.device)
    for name in (
        *("svd", "svdvals", "qr", "cholesky", "cholesky_ex", "eigh", "eigvalsh", "inv", "inv_ex"),
        *("pinv", "solve", "solve_ex", "lstsq"),
    ):
        args = (A, X) if name in ("solve", "solve_ex", "lstsq") else (A,)
        truth = getattr(torch.linalg, name)(*args)
        with metalcore.overrides(), metalcore.trace() as t:
            found = getattr(torch.linalg, name)(*args)
        assert any(r.path.startswith(backend.path) for r in t.records), name
        assert type(found) is type(truth), name
        shapes = [(x.shape, x.dtype) for x in found], [(x.shape, x.dtype) for x in truth]
        assert shapes[0] == shapes[1], name
    with metalcore.overrides():
        U, S, Vh = torch.linalg.svd(A)
        b = torch.linalg.solve(A, X[..., 0])
        assert "solve" in ops_of(lambda: A.inverse())
        assert "solve" in ops_of(lambda: torch.inverse(A))
    allowed = tolerance("svd", torch.float32, 25)
    assert error(U * S[:, None] @ Vh, A) <= allowed
    assert error(torch.einsum("bij,bj->bi", A, b), X[..., 0]) <= 64 * allowed


@pytest.mark.parametrize(
    "function",
    [
        F.silu,
        lambda x: F.gelu(x),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: torch.softmax(x, -1),
        lambda x: F.rms_norm(x, (6,)),
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.cross_entropy(x, torch.tensor([0, 5, 3, 1])),
        lambda x: torch.linalg.svdvals(x.view(2, 2, 6)),
        lambda x: torch.linalg.qr(x.view(2, 2, 6))[1].abs(),
        lambda x: torch.linalg.cholesky(x[None] @ x.T + torch.eye(4).to(x)),
        lambda x: torch.linalg.eigvalsh(x[None] @ x.T),
        lambda x: torch.linalg.inv(x[None] @ x.T + torch.eye(4).to(x)),
        lambda x: torch.linalg.solve(x[None] @ x.T + torch.eye(4).to(x), x[None]),
        lambda x: torch.linalg.pinv(x[None]),
    ],
)
def test_second_derivatives(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def derivatives() -> list[Tensor]:
        y = function(x)
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return [y, first, *torch.autograd.grad(first.cos().sum(), x)]

    truth = derivatives()
    with metalcore.overrides():
        assert ops_of(lambda: function(x))
        found = derivatives()
    allowed = tolerance("svd", torch.float32, 25)
    for a, b in zip(found, truth, strict=True):
        assert error(a, b) <= allowed


def test_results_are_laid_out_as_torchs() -> None:
    x = torch.randn(2, 6, 4, 8)
    views = [
        *(x, x.transpose(1, 2), x.to(memory_format=torch.channels_last), x[..., ::2], x[:, :, 1:]),
        *(x.chunk(2, -1)[0], x[:1].expand(3, -1, -1, -1), x.permute(3, 1, 0, 2)[::2], x[0, 0]),
    ]
    for v in views:
        for function in (
            F.silu,
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: F.softmax(x, -1),
            lambda x: F.rms_norm(x, x.shape[-1:]),
            lambda x: F.layer_norm(x, x.shape[-1:]),
        ):
            truth = function(v)
            with metalcore.overrides():
                found = function(v)
            assert found.stride() == truth.stride(), (v.shape, v.stride())
            assert error(found, truth) <= tolerance("softmax", torch.float32, 8)


def test_what_is_unusual_is_torchs() -> None:
    x, A = torch.randn(8, 32), torch.eye(4).expand(3, 4, 4).contiguous()

    class Mine(Tensor):
        pass

    class Mode(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    metalcore.enable_pytorch_overrides()
    out = torch.empty(8, 32)
    bags, table = torch.tensor([[0, 1, 1]]), torch.randn(4, 5, requires_grad=True)
    untaken: list[Callable[[], Any]] = [
        lambda: torch.softmax(x, -1, out=out),
        lambda: torch.softmax(x, 0),
        lambda: torch.softmax(x, axis=-1),
        lambda: F.silu(x.clone(), inplace=True),
        lambda: torch._C._nn.silu(x, out=out),
        lambda: F.silu(x.as_subclass(Mine)),
        lambda: F.softmax(torch.ones(2, 3, dtype=torch.int64), -1, dtype=torch.float32),
        lambda: torch.linalg.svd(A, driver=None, out=tuple(torch.empty(0) for _ in range(3))),
        lambda: torch.linalg.solve(A, A, left=False),
        lambda: torch.linalg.solve(A, A[:1]),
        lambda: torch.linalg.inv(A + 0j),
        lambda: torch.vmap(lambda x: torch.softmax(x, -1))(x),
        lambda: torch.func.grad(lambda x: F.silu(x).sum())(x),
        lambda: torch.func.jvp(F.silu, (x,), (x,)),
        lambda: torch.jit.trace(lambda x: F.silu(x), x, check_trace=False),
        lambda: F.cross_entropy(x, torch.softmax(x, 0)),
        lambda: F.silu(torch.randn(3, 5, device="meta")),
        lambda: F.embedding_bag(bags, table, mode="sum", scale_grad_by_freq=True),
    ]
    for call in untaken:
        assert not ops_of(call), call
    with Mode() as mode:
        torch.softmax(x, -1)
        F.silu(x)
    # and, before each, what is asked for the size
    assert SOFTMAX in mode.seen
    assert F.silu in mode.seen
    with FlopCounterMode(display=False) as flops:
        torch.softmax(x @ x.T, -1)
    assert flops.get_total_flops() == 2 * 8 * 8 * 32
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(F.silu(dual)).tangent is not None
    with torch.device("cpu"):
        assert ops_of(lambda: torch.softmax(x, -1)) == {"softmax"}


def test_bad_calls_are_refused_in_torchs_words() -> None:
    x, A = torch.randn(8, 32), torch.zeros(3, 4, 4)
    table = torch.randn(5, 8, requires_grad=True)
    calls: list[Callable[[], Any]] = [
        lambda: torch.softmax(),
        lambda: torch.softmax(x),
        lambda: torch.softmax(x, 5),
        lambda: torch.softmax(x, "last"),
        lambda: torch.softmax(x, axis="last"),
        lambda: F.gelu(),
        lambda: F.gelu(x, approximate="cos"),
        lambda: F.silu(x.to_sparse()),
        lambda: F.rms_norm(x, (31,)),
        lambda: F.layer_norm(x, (32,), torch.ones(31)),
        lambda: F.layer_norm(x, (32,), torch.ones(32).double()),
        lambda: F.layer_norm(x, (32,), [1.0] * 32),  # type: ignore[arg-type]
        lambda: F.rms_norm(x, (32,), 1.0),  # type: ignore[arg-type]
        lambda: F.cross_entropy(x, torch.full((8,), 32)),
        lambda: F.cross_entropy(x, torch.zeros(7, dtype=torch.int64)),
        lambda: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64), label_smoothing=2.0),
        lambda: F.embedding_bag(torch.full((2, 2), 5), table, mode="sum"),
        lambda: F.embedding_bag(torch.full((2, 2), -1), table, mode="mean"),
        lambda: F.embedding_bag(torch.zeros(3, dtype=torch.int64), table, torch.tensor([1, 2])),
        lambda: torch.linalg.cholesky(A),
        lambda: torch.linalg.cholesky(),
        lambda: torch.linalg.inv(A),
        lambda: torch.linalg.inv(A[..., :3]),
        lambda: torch.linalg.inv(A.half()),
        lambda: torch.linalg.solve(A, A),
        lambda: torch.linalg.solve(A),
        lambda: torch.linalg.solve(A, A[..., :2, :]),
        lambda: torch.linalg.qr(A, "full"),
        lambda: torch.linalg.eigh(A, "X"),
        lambda: torch.linalg.svd(torch.full((3, 4, 4), torch.nan)),
        lambda: torch.linalg.eigh(torch.full((3, 4, 4), torch.nan)),
        lambda: torch.linalg.pinv(torch.full((3, 4, 4), torch.nan)),
    ]
    for call in calls:
        said = []
        for overridden in (False, True):
            if overridden:
                metalcore.enable_pytorch_overrides()
            with pytest.raises(Exception) as problem:  # noqa: PT011  (whatever torch raises)
                call()
            said.append((type(problem.value), str(problem.value)))
            metalcore.disable_pytorch_overrides()
        assert said[0] == said[1]


def test_what_fails_without_an_error_gives_what_torch_gives() -> None:
    A = torch.eye(4).repeat(3, 1, 1)
    A[1, 2, 2] = -1
    truth = torch.linalg.cholesky_ex(A), torch.linalg.inv_ex(torch.zeros(3, 4, 4))
    with metalcore.overrides():
        found = torch.linalg.cholesky_ex(A), torch.linalg.inv_ex(torch.zeros(3, 4, 4))
    for a, b in zip(found, truth, strict=True):
        assert torch.equal(a[0].nan_to_num(), b[0].nan_to_num())
        assert torch.equal(a[1], b[1])


def test_a_result_may_be_changed_in_place_as_torchs_may() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    metalcore.enable_pytorch_overrides()
    for function in (
        F.silu,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.rms_norm(x, (6,)),
        lambda x: F.layer_norm(x, (6,)),
        lambda x: torch.linalg.pinv(x[None]),
    ):
        y = function(x)
        y.mul_(2)
        y.sum().backward()


def test_dtypes_under_autocast() -> None:
    x = torch.randn(8, 32)
    target = torch.zeros(8, dtype=torch.int64)
    A = torch.eye(4).repeat(3, 1, 1)
    functions = [
        *(F.silu, F.gelu, lambda x: F.softmax(x, -1), lambda x: F.rms_norm(x, (32,))),
        lambda x: F.layer_norm(x, (32,)),
        *(lambda x: F.cross_entropy(x, target), lambda x: torch.linalg.inv(A.to(x.dtype))),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for function in functions:
            with torch.autocast("cpu", torch.bfloat16):
                truth = function(x.to(dtype))
                with metalcore.overrides():
                    found = function(x.to(dtype))
            assert found.dtype == truth.dtype
            assert error(found, truth) <= 8 * tolerance("softmax", torch.bfloat16, 32)


def test_small_half_gradients_are_not_lost() -> None:
    x = torch.randn(64, 500).half().requires_grad_()
    with metalcore.overrides():
        (F.cross_entropy(x, torch.zeros(64, dtype=torch.int64)) * 2.0**14).backward()
    assert (x.grad != 0).float().mean() > 0.99


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "maximize": True},
        {"foreach": True, "weight_decay": 0.3},
        {"lr": torch.tensor(0.01)},
        {"fused": True},
        {"capturable": False, "betas": (0.5, 0.7), "eps": 1e-3},
    ],
    ids=str,
)
def test_adamw_takes_the_same_steps(options: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        starts = [torch.randn(s).to(dtype) for s in ((5, 7), (3,), (64, 9))]
        ended = []
        for overridden in (False, True):
            params = [nn.Parameter(s.clone()) for s in starts]
            optimizer = torch.optim.AdamW(params, **options)
            torch.manual_seed(1)
            with metalcore.overrides(all=overridden, **dict.fromkeys(GROUPS, overridden)):
                for _ in range(3):
                    for p in params:
                        p.grad = torch.randn(p.shape).to(dtype)
                    with metalcore.trace() as t:
                        optimizer.step()
            taken = overridden and dtype != torch.bfloat16 and not {"lr", "fused"} & set(options)
            assert ("adamw_step" in t.paths) is taken
            assert type(optimizer) is torch.optim.AdamW
            state = optimizer.state_dict()["state"]
            ended.append([*params, *(state[i][k] for i in range(3) for k in sorted(state[i]))])
        for a, b in zip(*ended, strict=True):
            assert a.dtype == b.dtype
            assert error(a, b) <= tolerance("adamw_step", dtype, 9)


def test_a_step_with_other_arguments_is_refused_by_torch() -> None:
    from torch.optim.adamw import adamw

    p, moments = [torch.randn(5)], [[torch.zeros(5)] for _ in range(2)]
    numbers = {"beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.0, "eps": 1e-8}
    args = (p, p, *moments, [], [torch.tensor(0.0)])
    with metalcore.overrides(), torch.no_grad():
        with pytest.raises(TypeError, match="maximize"):
            adamw(*args, **numbers, amsgrad=False)  # type: ignore[call-arg]
        adamw(*args, **numbers, amsgrad=False, maximize=False)


def test_adam_is_taken_only_without_weight_decay() -> None:
    p = nn.Parameter(torch.randn(5))
    p.grad = torch.randn(5)
    with metalcore.overrides():
        assert ops_of(torch.optim.Adam([p]).step) == {"adamw_step"}
        assert not ops_of(torch.optim.Adam([p], weight_decay=0.1).step)


def test_what_is_ours_is_what_the_policy_says(write_policy: Callable[[str], Path]) -> None:
    write_policy("""
        [silu]
        float32 = { from = 1000 }
        float32_recorded = { from = 2000 }
        [softmax]
        float32 = { up_to = [16, 64], from = [inf, 1000] }
        [qr]
        float32 = { up_to = [8, 16], from = [5, 1] }
        float32_alone = { up_to = [8, 16], from = [inf, 1] }
        [cholesky]
        float32 = { from = 1 }
    """)
    metalcore.enable_pytorch_overrides()
    x, A = torch.randn(1500), torch.randn(5, 8, 8)
    assert not ops_of(lambda: F.silu(x[:999]))
    assert ops_of(lambda: F.silu(x[:1000])) == {"silu"}
    assert not ops_of(lambda: F.silu(x.clone().requires_grad_()))
    assert not ops_of(lambda: F.softmax(x.view(-1, 10), -1))
    assert ops_of(lambda: F.softmax(x.view(-1, 50), -1)) == {"softmax"}
    assert not ops_of(lambda: torch.linalg.qr(A[:4]))
    assert ops_of(lambda: torch.linalg.qr(A)) == {"qr"}
    assert not ops_of(lambda: torch.linalg.qr(A[0]))
    assert ops_of(lambda: torch.linalg.qr(torch.randn(16, 9))) == {"qr"}
    # what is quick in torch is not worth the question for small batches
    eyes = torch.eye(4).expand(300, 4, 4)
    assert not ops_of(lambda: torch.linalg.cholesky(eyes[:200]))
    assert ops_of(lambda: torch.linalg.cholesky(eyes)) == {"cholesky"}
    # without a number
    assert ops_of(lambda: F.silu(x[:5].double())) == {"silu"}
    assert ops_of(lambda: torch.linalg.svd(A[0])) == {"svd"}


@pytest.mark.parametrize("name", ["eigvalsh", "svdvals", "svd"])
def test_large_matrices_with_nan_are_refused_in_torchs_words(name: str) -> None:
    A = torch.randn(130, 130)
    A = A + A.mT
    truth = getattr(torch.linalg, name)(A.double())
    metalcore.enable_pytorch_overrides()
    decompose = getattr(torch.linalg, name)
    assert ops_of(lambda: decompose(A)) == {name}
    if name != "svd":
        assert error(decompose(A), truth) <= tolerance(name, torch.float32, 130)
    with pytest.raises(torch.linalg.LinAlgError, match=f"linalg.{name[:3]}"):
        decompose(A.index_fill(0, torch.tensor([3]), torch.nan))
