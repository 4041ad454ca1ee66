# SPDX-License-Identifier: MIT
import copy
import pickle
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import metalcore
from metalcore._op import Op
from metalcore.metal.plans import Planned
from metalcore.ops.train._eight_bit import dequantize, quantize
from tests.backends import Backend
from tests.check import check_op

# more tensors than a launch has slots; odd sizes, an empty one, more than one threadgroup
CPU = torch.device("cpu")
SIZES = ((7, 33), (1,), (3000,), (0,), (4, 4), (130,), (5,), (2, 2), (128,))


def _arguments(dtype: torch.dtype, device: torch.device, bits: int = 32, **changes: Any) -> Any:
    def randn(size: tuple[int, ...], kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size).to(device, kind)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    m = [randn(s, wide) * 0.1 for s in SIZES]
    v = [randn(s, wide).square() * 0.01 for s in SIZES]
    most = [x * 1.5 for x in v] if changes.pop("amsgrad", False) else []
    if bits == 8:
        m = [quantize(x, True) for x in m]
        v, most = ([quantize(x, False) for x in xs] for xs in (v, most))
    values = {
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "maximize": False,
        "grad_scale": 1.0,
        "grad_norm": None,
        "max_norm": 0.0,
        "stochastic": False,
        "seed": 7,
    } | changes
    params, grads = ([randn(s, dtype) for s in SIZES] for _ in range(2))
    steps = [torch.tensor(3.0 + k % 2) for k in range(len(SIZES))]
    return params, grads, m, v, most, steps, *values.values()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_matches_reference(backend: Backend, amsgrad: bool) -> None:
    for dtype in backend.dtypes:
        args = _arguments(dtype, backend.device, amsgrad=amsgrad)
        check_op(backend, "adamw_step", args, reduces_over=1, differentiable=False)


def test_scaled_clipped_and_maximized(backend: Backend) -> None:
    for dtype in backend.dtypes:
        norm = torch.tensor(150.0, device=backend.device)
        changes = {"maximize": True, "grad_scale": 4.0, "grad_norm": norm, "max_norm": 2.0}
        args = _arguments(dtype, backend.device, amsgrad=dtype == torch.float16, **changes)
        check_op(backend, "adamw_step", args, reduces_over=1, differentiable=False)


def test_a_list_is_planned_once_whatever_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, planned = Planned.program, []
    monkeypatch.setattr(Planned, "program", lambda *given: planned.append(given) or plan(*given))
    args = _arguments(torch.float32, CPU, grad_scale=3.0)
    expected = copy.deepcopy(args)
    for given in args[:4]:
        given[4] = torch.stack((given[4], given[4]), 2)[:, :, 0]
    for seed in (1, 2, 3):
        with metalcore.simulate():
            Op.all["adamw_step"](*args[:-1], seed)
        Op.all["adamw_step"].meaning(*expected[:-1], seed)
    assert len(planned) == 1
    torch.testing.assert_close(args[:6], expected[:6])


def test_norm_of_many_gradients(backend: Backend) -> None:
    for dtype in backend.dtypes:
        grads = [torch.randn(s).to(backend.device, dtype) for s in (*SIZES, (40000,))]
        check_op(backend, "adamw_norm", (grads,), reduces_over=40000, differentiable=False)
    grads[2][5] = float("nan")
    assert Op.all["adamw_norm"](grads).isnan()


def test_rounding_by_chance_and_8_bits_match_their_definition(backend: Backend) -> None:
    """Both are random by a formula, so that all backends agree."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for bits, amsgrad in ((32, False), (8, False), (8, dtype == torch.float32)):
            args = _arguments(dtype, backend.device, bits, amsgrad=amsgrad, stochastic=True)
            expected = copy.deepcopy(args)
            # one tensor is not aligned, another is a view with strides
            args[0][4] = args[0][4].repeat_interleave(2, 1)[:, ::2]
            args[0][2] = torch.cat((args[0][2][:1], args[0][2]))[1:]
            Op.all["adamw_step"](*args)
            Op.all["adamw_step"].meaning(*expected)
            for a, b in zip(args[0], expected[0], strict=True):
                # the last bits of a sum may decide
                off = (a.double() - b.double()).abs() > 1e-6
                assert off.sum() <= 0.01 * a.numel()
                torch.testing.assert_close(a.float(), b.float(), rtol=0.008, atol=1e-6)
            for moments, same in zip(args[2:5], expected[2:5], strict=True):
                for a, b in zip(moments, same, strict=True):
                    assert (a != b).sum() <= 0.01 * a.numel() or bits == 32


def test_registration() -> None:
    args = [a[:2] if isinstance(a, list) else a for a in _arguments(torch.float64, CPU)]
    torch.library.opcheck(torch.ops.metalcore.adamw_step.default, tuple(args))
    torch.library.opcheck(torch.ops.metalcore.adamw_norm.default, (args[1],))


def test_compiles() -> None:
    args = [a[:2] if isinstance(a, list) else a for a in _arguments(torch.float32, CPU)]
    same = copy.deepcopy(args)
    torch.compile(Op.all["adamw_step"], fullgraph=True, backend="aot_eager")(*args)
    Op.all["adamw_step"](*same)
    for a, b in zip(args[0] + args[2], same[0] + same[2], strict=True):
        assert torch.equal(a, b)


def _twins(
    dtype: torch.dtype, ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], Any, Any]:
    start = [torch.randn(s).to(dtype) for s in SIZES] + [torch.randn(2, 3, 4, 4).to(dtype)]
    start[-1] = start[-1].to(memory_format=torch.channels_last)
    a, b = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    groups = [[{"params": x[:3]}, {"params": x[3:], "weight_decay": 0.2}] for x in (a, b)]
    return a, b, metalcore.MetalAdamW(groups[0], **ours), torch.optim.AdamW(groups[1], **theirs)


def _set_gradients(*models: list[Tensor], scale: float = 1.0) -> None:
    for k, same in enumerate(zip(*models, strict=True)):
        grad = torch.randn_like(same[0]) * scale
        for p in same:
            # now and then a parameter has no gradient
            p.grad = None if (k + int(grad.sum() * 10)) % 5 == 0 else grad.clone()


SETTINGS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, torch.tensor(0.01, dtype=torch.float64)]),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        "eps": st.floats(1e-12, 1e-2),
        "weight_decay": st.floats(0, 0.5),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)


@hypothesis.given(SETTINGS, st.sampled_from([{}, {"foreach": False}, {"fused": True}]))
@hypothesis.settings(max_examples=5, phases=[hypothesis.Phase.generate])
def test_200_steps_equal_torch_in_float64(settings: dict[str, Any], way: dict[str, bool]) -> None:
    torch.manual_seed(0)
    a, b, ours, theirs = _twins(torch.float64, settings | way, settings | way)
    for _ in range(200):
        _set_gradients(a, b)
        ours.step()
        theirs.step()
    with metalcore.trace() as t:
        ours.step()
    theirs.step()
    assert {r.path.split(":")[0] for r in t.records} == {"cpu"}
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_half_parameters_drift_no_further_than_those_of_torch() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        a, b, ours, theirs = _twins(dtype, {}, {})
        exact = [p.detach().float().requires_grad_() for p in a]
        truth = torch.optim.AdamW(exact)
        for _ in range(50):
            _set_gradients(a, b)
            for p, q in zip(exact, a, strict=True):
                p.grad = None if q.grad is None else q.grad.float()
            for optimizer in (ours, theirs, truth):
                optimizer.step()
        assert all(s["exp_avg"].dtype == torch.float32 for s in ours.state.values())
        off = [sum((p.float() - q).norm() for p, q in zip(x, exact, strict=True)) for x in (a, b)]
        assert off[0] <= off[1]


def test_state_dicts_load_in_both_classes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b, ours, theirs = _twins(dtype, {"amsgrad": True}, {"amsgrad": True})
        _set_gradients(a, b)
        ours.step()
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        again = metalcore.MetalAdamW(a, amsgrad=True)
        again.param_groups = [dict(g) for g in ours.param_groups]
        again.load_state_dict(pickle.loads(pickle.dumps(theirs.state_dict())))
        for p, state in ours.state.items():
            for name, value in again.state[p].items():
                assert value.dtype == torch.float32
                torch.testing.assert_close(value, state[name].to(dtype).float(), rtol=0, atol=0)
        again.load_state_dict(ours.state_dict())
        assert all(
            torch.equal(v, again.state[p][n]) for p, s in ours.state.items() for n, v in s.items()
        )


def test_8_bit_states_take_a_quarter_and_train_as_well() -> None:
    torch.manual_seed(1)
    x, target = torch.randn(64, 32), torch.randn(64, 8)
    losses = {}
    for bits in (32, 8):
        torch.manual_seed(2)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 96), torch.nn.GELU(), torch.nn.Linear(96, 8)
        )
        optimizer = metalcore.MetalAdamW(model.parameters(), lr=3e-3, state_bits=bits)
        for _ in range(80):
            loss = torch.nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[bits] = loss.item()
        losses[f"bytes {bits}"] = sum(
            s[n].nbytes for s in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")
        )
    assert losses["bytes 8"] <= 0.3 * losses["bytes 32"]
    assert losses[8] <= 1.1 * losses[32]
    # checkpoints are torch's, and nothing is lost by saving and loading one
    saved = optimizer.state_dict()
    torch.optim.AdamW(model.parameters()).load_state_dict(copy.deepcopy(saved))
    again = metalcore.MetalAdamW(model.parameters(), state_bits=8)
    again.load_state_dict(saved)
    for p in model.parameters():
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            a, b = (dequantize(o.state[p][name], signed, p) for o in (optimizer, again))
            assert torch.equal(a, b)


def test_second_moments_follow_small_changes_in_8_bits() -> None:
    p = torch.zeros(1 << 14, requires_grad=True)
    optimizer = metalcore.MetalAdamW([p], state_bits=8)
    p.grad = torch.ones_like(p)
    for _ in range(300):
        optimizer.step()
    v = dequantize(optimizer.state[p]["exp_avg_sq"], False, p).mean()
    assert abs(v / (1 - 0.999**300) - 1) < 0.02


def test_stochastic_rounding_keeps_small_steps_and_repeats() -> None:
    found = []
    for seed in (1, 1, 2):
        p = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
        p.grad = torch.ones_like(p)
        settings = {"lr": 1e-4, "weight_decay": 0.0, "stochastic_rounding": True, "seed": seed}
        optimizer = metalcore.MetalAdamW([p], **settings)
        for _ in range(20):
            optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert abs(found[0].float().mean() - (1 - 20e-4)) < 2e-4


def test_clipping_equals_clip_grad_norm() -> None:
    a, b, ours, theirs = _twins(torch.float64, {"clip_norm": 0.5}, {})
    for scale in (1.0, 1e-4):
        _set_gradients(a, b, scale=scale)
        torch.nn.utils.clip_grad_norm_(b, 0.5)
        ours.step()
        theirs.step()
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_grad_scaler_unscales_in_the_step_and_skips_infinities() -> None:
    a, b, ours, theirs = _twins(torch.float32, {}, {"fused": True})
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for bad in (False, True, False):
        _set_gradients(a, b, scale=1024.0)
        for model, optimizer, scaler in zip((a, b), (ours, theirs), scalers, strict=True):
            scaler.scale(torch.ones(1))
            if bad:
                next(p for p in model if p.grad is not None and p.numel()).grad[...] = float("inf")
            before = [p.detach().clone() for p in model]
            scaler.step(optimizer)
            assert bad == all(map(torch.equal, before, model))
            scaler.update()
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)
            if not bad:
                torch.testing.assert_close(x.grad, y.grad)
    steps = [[float(s["step"]) for s in o.state.values()] for o in (ours, theirs)]
    assert steps[0] == steps[1]


def test_complex_parameters() -> None:
    start = torch.randn(5, 3, dtype=torch.complex64)
    a, b = (start.clone().requires_grad_() for _ in range(2))
    ours, theirs = metalcore.MetalAdamW([a], amsgrad=True), torch.optim.AdamW([b], amsgrad=True)
    for _ in range(3):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(a, b)


def test_differentiable_steps_are_left_to_torch() -> None:
    p = torch.randn(4, requires_grad=True)
    x = p.clone()
    x.grad = (p * 2).detach()
    optimizer = metalcore.MetalAdamW([torch.nn.Parameter(torch.ones(1))], differentiable=True)
    optimizer.param_groups[0]["params"] = [x]
    with metalcore.trace() as t:
        optimizer.step()
    assert t.paths == {"adamw_step": {"torch"}}
    assert x.requires_grad


def test_survives_deepcopy_and_pickle() -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = metalcore.MetalAdamW([p], clip_norm=1.0, seed=3)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (twin.clip_norm, twin.seed, twin.state_bits) == (1.0, 3, 32)
        twin.step()
    assert metalcore.MetalAdamW is metalcore.optim.AdamW


def test_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p = torch.randn(100_000, requires_grad=True)
        p.grad = torch.randn(100_000)
        metalcore.MetalAdamW([p], state_bits=8, clip_norm=1.0).step()
        found.append(p.detach())
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


weight = torch.ones(3, requires_grad=True)
BAD = [
    (
        lambda: metalcore.MetalAdamW([weight], momentum=0.9),
        TypeError,
        "AdamW.__init__() got an unexpected keyword argument 'momentum'",
    ),
    (
        lambda: metalcore.MetalAdamW([weight], betas=(1.5, 0.9)),
        ValueError,
        "Invalid beta parameter at index 0: 1.5",
    ),
    (
        lambda: metalcore.MetalAdamW([weight], state_bits=4),
        ValueError,
        "AdamW: state_bits must be 8 or 32, got 4",
    ),
    (
        lambda: metalcore.MetalAdamW([weight], clip_norm=0.0),
        ValueError,
        "AdamW: clip_norm must be greater than 0, got 0.0",
    ),
    (
        lambda: metalcore.MetalAdamW([weight], differentiable=True, state_bits=8),
        ValueError,
        "AdamW: differentiable=True goes without clip_norm, state_bits=8 and stochastic_rounding",
    ),
    (
        lambda: _step_with(torch.ones(3, dtype=torch.float64), state_bits=8),
        TypeError,
        "AdamW: state_bits=8 takes float32, float16 and bfloat16 parameters, got float64; "
        "use state_bits=32",
    ),
    (
        lambda: _step_with(torch.ones(3), torch.ones(3).to_sparse()),
        RuntimeError,
        "AdamW: gradients must be dense, got a sparse one; torch.optim.SparseAdam takes those",
    ),
]


def _step_with(p: Tensor, grad: Tensor | None = None, **settings: Any) -> None:
    p.requires_grad_()
    p.grad = torch.ones_like(p) if grad is None else grad
    metalcore.MetalAdamW([p], **settings).step()


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_bad_input_is_named(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
