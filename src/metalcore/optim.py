# SPDX-License-Identifier: MIT
"""Optimizers with torch.optim's names, arguments and state_dicts."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from metalcore import _native, _shards, _torch, _trace
from metalcore._check import FLOATS, expect, expect_float, expect_positive
from metalcore._op import accumulate_dtype
from metalcore.ops.linalg._muon import newton_schulz
from metalcore.ops.train import adamw_step
from metalcore.ops.train._eight_bit import dequantize, empty_moment, quantize

# Muon takes matrices together up to so many values: products of larger ones gain nothing by it.
_VALUES_TOGETHER = 1 << 18

_CODES = "moments_in_8_bits"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class _Lists(NamedTuple):
    """The tensors of a group on one device, as `adamw_step` takes them."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with one pass over all parameters of a group.

    Moments of float16 and bfloat16 parameters are float32. Checkpoints are those of
    `torch.optim.AdamW` and load in either class.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`.
        foreach, capturable, fused: accepted and checked as torch does; the pass is the same for
            all of them, and steps are counted on the CPU.
        differentiable: leave the step to `torch.optim.AdamW`, which records it for autograd.
        clip_norm: scale all gradients down to this global norm, as
            `torch.nn.utils.clip_grad_norm_` does, but within the step: `p.grad` stays as it is. Of
            DTensors (FSDP2, tensor parallel) it is the norm over all shards.
        process_group: the processes that have the other parts of the parameters, where these are no
            DTensors (ZeRO, FSDP1, pipelines): `clip_norm` needs it there. All of them step.
        state_bits: 32, or 8 for moments in 8 bits with one scale per 128 values, a quarter of the
            memory. Not for float64 parameters. A saved run goes on bit for bit.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that steps too
            small for bfloat16 are not lost.
        seed: of `stochastic_rounding` and of the rounding of moments in 8 bits; shards of DTensors
            and the parts of a `process_group` get different numbers.

    Example:
        >>> optimizer = metalcore.MetalAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
        >>> loss.backward()
        >>> optimizer.step()
    """

    # GradScaler then hands over grad_scale and found_inf, and gradients are unscaled in the step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        clip_norm: float | None = None,
        state_bits: int = 32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        op = type(self).__name__
        expect(state_bits in (8, 32), op, f"state_bits must be 8 or 32, got {state_bits}")
        if clip_norm is not None:
            expect_positive(op, clip_norm=clip_norm)
        plain = clip_norm is None and state_bits == 32 and not stochastic_rounding
        expect(
            plain or not differentiable,
            op,
            "differentiable=True goes without clip_norm, state_bits=8 and stochastic_rounding",
        )
        self.clip_norm, self.state_bits = clip_norm, state_bits
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self.process_group = process_group
        self._is_checked = False
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for `torch.optim.AdamW`."""
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        self._is_checked = False
        if any(map(_torch.is_flattened, params)) or _torch.is_built_for_a_part():
            self._expect_group("FSDP and ZeRO")

    def _expect_group(self, which: str) -> None:
        if self.clip_norm is not None and self.process_group is None:
            raise ValueError(
                f"{type(self).__name__}: clip_norm needs all gradients, and with {which} a process "
                "has a part; give process_group=, the processes that have the others, or clip "
                "before the step"
            )

    def __getstate__(self) -> dict[str, Any]:
        own = ("clip_norm", "state_bits", "stochastic_rounding", "seed", "_is_checked")
        kept = {name: getattr(self, name) for name in own}
        # processes that are met again are others
        return super().__getstate__() | kept | {"process_group": None}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, computes the loss that is returned."""
        if self.defaults["differentiable"]:
            for p in self._params():
                _trace.record_torch_path("adamw_step", p)
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        if not self._is_checked:
            if self.clip_norm is not None and _torch.are_of_a_stage(self._params()):
                self._expect_group("pipelines")
            self._is_checked = True
        work = [
            (group, seed, lists)
            for group in self.param_groups
            for seed, lists in self._lists(group)
        ]
        grads = [p.grad for p in self._params() if p.grad is not None]
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and _shards.is_anywhere(found_inf, grads, self.process_group):
            return
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0 if scale is None else float(scale)
        norm = None
        if self.clip_norm is not None and (grads or self.process_group is not None):
            norm = _shards.norm(grads, self.process_group)
        for group, seed, lists in work:
            beta1, beta2 = group["betas"]
            adamw_step.step(
                *lists,
                float(group["lr"]),
                float(beta1),
                float(beta2),
                group["eps"],
                group["weight_decay"],
                group["maximize"],
                grad_scale,
                None if norm is None else norm.to(lists.params[0].device),
                self.clip_norm or 0.0,
                self.stochastic_rounding,
                seed,
            )

    def _params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _lists(self, group: dict[str, Any]) -> list[tuple[int, _Lists]]:
        """The parameters of `group` that have a gradient, with their state, by device and by the
        seed of their part; of DTensors what is local."""
        found: dict[tuple[torch.device, int], _Lists] = {}
        amsgrad = group["amsgrad"]
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p]
            if not state:
                self._begin(p, state, amsgrad)
            if grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__}: gradients must be dense, got a sparse one; "
                    "torch.optim.SparseAdam takes those"
                )
            key = (p.device, self.seed + _shards.number(p, self.process_group))
            lists = found.get(key)
            if lists is None:
                lists = found[key] = _Lists([], [], [], [], [], [])
            p, grad, state = _shards.local(p, grad, state)
            if p.dtype not in FLOATS or grad.dtype != p.dtype:
                p, grad, state = _real_parts(p, grad.to(p.dtype), state)
            lists.params.append(p)
            lists.grads.append(grad)
            lists.exp_avgs.append(state["exp_avg"])
            lists.exp_avg_sqs.append(state["exp_avg_sq"])
            if amsgrad:
                lists.max_exp_avg_sqs.append(state["max_exp_avg_sq"])
            lists.steps.append(state["step"])
        return [(seed, lists) for (_, seed), lists in found.items()]

    def _begin(self, p: Tensor, state: dict[str, Any], amsgrad: bool) -> None:
        real = _real(_shards.part(p))
        expect_float(type(self).__name__, parameter=real)
        if self.state_bits == 8 and real.dtype == torch.float64:
            raise TypeError(
                f"{type(self).__name__}: state_bits=8 takes float32, float16 and bfloat16 "
                "parameters, got float64; use state_bits=32"
            )
        dtype = p.dtype if p.is_complex() else accumulate_dtype(p)
        step_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        state["step"] = torch.tensor(0.0, dtype=step_dtype, device="cpu")
        for name in _MOMENTS[: 3 if amsgrad else 2]:
            state[name] = (
                empty_moment(real)
                if self.state_bits == 8
                else _shards.whole(_native.zeros_like(_shards.part(p), dtype), p)
            )

    def state_dict(self) -> dict[str, Any]:
        """The state as `torch.optim.AdamW` has it. Moments in 8 bits become float32, and stand
        besides as they are under a key of their own, which torch leaves alone."""
        packed: dict[str, Any] = super().state_dict()
        codes: dict[int, dict[str, Tensor]] = {}
        for key, p in enumerate(self._params()):
            state = packed["state"].get(key, {})
            codes[key] = {n: v for n, v in state.items() if _is_eight_bit(v)}
            if codes[key]:
                expanded = {n: _expanded(v, n, p) for n, v in codes[key].items()}
                packed["state"][key] = {**state, **expanded}
        return packed | ({_CODES: codes} if any(codes.values()) else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of `torch.optim.AdamW`."""
        seen = []
        # torch rounds moments to the dtype of the parameters, so they are taken from the original,
        # as other hooks leave it.
        hook = self.register_load_state_dict_pre_hook(lambda _, loaded: seen.append(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        keys = chain.from_iterable(group["params"] for group in seen[0]["param_groups"])
        for key, p in zip(keys, self._params(), strict=True):
            codes = seen[0].get(_CODES, {}).get(key, {})
            for name, value in seen[0]["state"].get(key, {}).items():
                self.state[p][name] = self._taken(name, value, p, codes.get(name))

    def _taken(self, name: str, value: Any, p: Tensor, codes: Tensor | None) -> Any:
        """An entry of a state_dict as the step wants it; `codes` are its 8 bits, if it had any."""
        if name == "step":
            return torch.as_tensor(value, dtype=torch.float32).detach().cpu().clone()
        if name not in _MOMENTS:
            return value
        if self.state_bits == 8:
            part = _shards.part(_shards.placed(value, p))
            if codes is not None and torch.equal(_expanded(codes, name, part), part):
                return codes.to(p.device, copy=True)
            return quantize(_real(part).to(p.device), name == "exp_avg")
        dtype = p.dtype if p.is_complex() else accumulate_dtype(p)
        return torch.empty_like(p, dtype=dtype).copy_(_shards.placed(value, p))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _real_parts(
    p: Tensor, grad: Tensor, state: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return _real(p), _real(grad), {name: _real(value) for name, value in state.items()}


def _is_eight_bit(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _expanded(value: Tensor, name: str, p: Tensor) -> Tensor:
    real = dequantize(value, name == "exp_avg", _real(_shards.part(p)))
    return _shards.whole(torch.view_as_complex(real) if p.is_complex() else real, p)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with batched products: parameters of one shape, or its transpose, take
    their Newton-Schulz steps together.

    Products are in bfloat16 where that is fast, as torch's are, and else in float32. Checkpoints
    are those of `torch.optim.Muon` and load in either class.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn:
            as for `torch.optim.Muon`: matrices alone.

    Example:
        >>> hidden = [p for p in model.parameters() if p.ndim == 2]
        >>> optimizer = metalcore.MetalMuon(hidden, lr=0.02)
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, computes the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params in _of_one_shape(p for p in group["params"] if p.grad is not None):
                self._step_together(group, params)
        return loss

    def _step_together(self, group: dict[str, Any], params: list[Tensor]) -> None:
        # of a shard nothing can be made orthogonal
        updates = [_shards.gathered(self._momentum(p, group)) for p in params]
        first = _wide(updates[0])[None]
        directions = newton_schulz(
            first if len(updates) == 1 else torch.stack([_wide(u) for u in updates]),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        lr = float(group["lr"])
        for p, direction in zip(params, directions.unbind(), strict=True):
            rows, columns = p.shape
            scale = max(1.0, rows / columns) ** 0.5
            if group["adjust_lr_fn"] == "match_rms_adamw":
                scale = 0.2 * max(rows, columns) ** 0.5
            direction = direction.mT if rows > columns else direction
            own = _shards.part(p)
            own.mul_(1 - lr * group["weight_decay"])
            own.add_(_shards.part(_shards.placed(direction, p)), alpha=-lr * scale)

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """What is to be orthogonalized: the momentum, one step ahead where it is Nesterov's."""
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if grad.is_sparse or grad.is_complex():
            raise RuntimeError(
                f"{type(self).__name__}: gradients must be dense and real, got {grad.layout} "
                f"of {grad.dtype}"
            )
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _wide(x: Tensor) -> Tensor:
    return x.mT if x.shape[0] > x.shape[1] else x


def _of_one_shape(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one shape, but for a transpose, dtype and device; not more than are worth
    taking together."""
    found: dict[Any, list[Tensor]] = {}
    for p in params:
        found.setdefault((tuple(sorted(p.shape)), p.dtype, p.device), []).append(p)
    for alike in found.values():
        count = max(1, _VALUES_TOGETHER // max(1, alike[0].numel()))
        yield from (alike[i : i + count] for i in range(0, len(alike), count))


MetalAdamW = AdamW
MetalMuon = Muon
