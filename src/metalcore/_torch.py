# SPDX-License-Identifier: MIT
"""The private API of torch that metalcore uses, each name with what stands in where it is gone.

A substitute is right and may be slower, or says what does not work. No other file names private API
of torch, but for the parts of an op overload that `_op.py` reads.
"""

import gc
import importlib
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch.autograd import Function

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def _find(module: str, path: str, substitute: Any) -> Any:
    """What `module` has at `path`, such as `_len_torch_dispatch_stack` of `torch._C`."""
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (AttributeError, ImportError):
        return substitute
    return found


def _maybe() -> bool:
    """The substitute for a question that leads to a shortcut: better not take it."""
    return True


def _unknown() -> list[Any]:
    """The substitute for the modes that are entered: there may be one, and it is none of ours."""
    return [None]


# Function transforms and forward mode.

is_transformed: Callable[[], bool] = _find("torch._C", "_are_functorch_transforms_active", _maybe)
"""Whether function transforms (torch.func, vmap) are at work."""


_forward_ad: Any = importlib.import_module("torch.autograd.forward_ad")


def has_dual_level() -> bool:
    """Whether tensors may have tangents: inside `forward_ad.dual_level()` and torch.func.jvp."""
    level: int = getattr(_forward_ad, "_current_level", 0)
    return level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward mode moves x."""
    if not has_dual_level() or not x.is_floating_point():
        return False
    return _forward_ad.unpack_dual(x).tangent is not None


_switch = _find("torch.autograd.forward_ad", "_set_fwd_grad_enabled", nullcontext)


def forward_mode() -> AbstractContextManager[Any]:
    """A block that computes tangents, also where torch switches that off: inside a `jvp`.

    Without it, forward mode over forward mode is as wrong as it is for torch's own Functions.
    """
    block: AbstractContextManager[Any] = _switch(True)
    return block


def apply_directly(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` where no function transform is at work.

    torch's own binds the arguments by `inspect.signature` first, which takes longer than a kernel.
    """
    inherited: Callable[..., Any] = getattr(super(Function, function), "apply", function.apply)
    return inherited


# Dispatch modes, function modes and subclasses.


class _NoModes:
    """The substitute for a dispatch mode, and for a subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "metalcore: trace(), simulate() and DoubleFloat need dispatch modes of torch"
        )


_FakeTensor: type | None = _find("torch._subclasses.fake_tensor", "FakeTensor", None)


def is_fake(x: torch.Tensor) -> bool:
    """Whether `x` has a shape and no data, as compilers have it."""
    if _FakeTensor is None:
        return type(x).__name__ == "FakeTensor"
    return isinstance(x, _FakeTensor)


_tracer: Callable[[], Any] = _find(
    "torch.fx.experimental.proxy_tensor", "get_proxy_mode", lambda: None
)


def is_taken_apart() -> bool:
    """Whether a compiler traces that makes kernels of its own, as inductor does: it takes silu
    apart into simpler ops. `aot_eager` runs ops as they are."""
    tracer = _tracer()
    if tracer is None:
        return False
    # before torch 2.13 the module had the table
    module = sys.modules[type(tracer).__module__]
    older = getattr(module, "CURRENT_DECOMPOSITION_TABLE", {})
    return torch.ops.aten.silu.default in getattr(tracer, "decomposition_table", older)


DispatchMode: Any = _find("torch.utils._python_dispatch", "TorchDispatchMode", _NoModes)
"""A mode that sees whatever torch's dispatcher is asked."""

dispatch_modes: Callable[[], list[Any]] = _find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", _unknown
)
"""The dispatch modes that are entered, ours and others."""

has_dispatch_mode: Callable[[], int | bool] = _find(
    "torch._C", "_len_torch_dispatch_stack", lambda: bool(dispatch_modes())
)
"""Whether a dispatch mode is entered."""


wrapper: Callable[..., Any] = _find("torch", "Tensor._make_wrapper_subclass", _NoModes)
"""`wrapper(cls, shape, dtype=..., device=...)`: a tensor of a subclass, with data elsewhere."""

without_functions: Callable[[], AbstractContextManager[Any]] = _find(
    "torch._C", "DisableTorchFunctionSubclass", nullcontext
)
"""A block in which functions of torch treat a subclass as any tensor."""


def has_kernel(op: str, key: str) -> bool:
    """Whether `op` has a kernel of its own for a dispatch key."""
    ask = _find("torch._C", "_dispatch_has_kernel_for_dispatch_key", None)
    if ask is not None:
        return bool(ask(op, key))
    try:
        torch.library.get_kernel(op, key)
    except RuntimeError:
        return False
    return True


# Linear algebra.


def _check_linalg_errors(info: torch.Tensor, api: str, *, is_matrix: bool) -> None:
    if bool(info.any()):
        batch = "" if is_matrix else f"(Batch element {int(info.flatten().nonzero()[0])}): "
        raise LinAlgError(f"{api}: {batch}The computation failed.")


check_linalg_errors: Callable[..., None] = _find(
    "torch", "_linalg_check_errors", _check_linalg_errors
)
"""`check(info, api, *, is_matrix)` raises LinAlgError as `api` does, such as `linalg.cholesky`,
where `info` is not zero."""


def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether torch has a CPU kernel for products in a half precision here."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", _maybe)
    return torch.backends.mkldnn.is_available() and bool(ask())


def has_bfloat16_instructions() -> bool:
    """Whether products in bfloat16 are ahead of float32 on this CPU: elsewhere torch emulates."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return multiplies_fast(torch.bfloat16)
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(_find("torch.cpu", ask, lambda: False)() for ask in asks)


# Parameters of which other processes have parts.


def is_flattened(p: torch.Tensor) -> bool:
    """Whether `p` is a part of a parameter that FSDP has flattened."""
    return any(getattr(p, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))


def are_of_a_stage(params: Iterable[torch.Tensor]) -> bool:
    """Whether a stage of a pipeline has one of `params`: other processes have other parameters."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    stage = getattr(module, "_PipelineStageBase", None)
    wanted = {id(p) for p in params}
    return stage is not None and any(
        id(p) in wanted
        for x in gc.get_objects()
        # by type: to ask some objects for their class is an error
        if stage in type(x).__mro__
        for p in x.submod.parameters()
    )


def is_built_for_a_part() -> bool:
    """Whether ZeroRedundancyOptimizer, somewhere above the caller, builds an optimizer for those
    parameters that are this process's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ == "ZeroRedundancyOptimizer":
            return True
        frame = frame.f_back
    return False


# What a function of torch is known by, for those who replace it.

nn_functions: Any = _find("torch._C", "_nn", SimpleNamespace())
"""Where torch.nn.functional looks up `silu` and `cross_entropy_loss`."""

function_modes: Callable[[], list[Any]] = _find(
    "torch.overrides", "_get_current_function_mode_stack", _unknown
)
"""The function modes that are entered."""

has_function_mode: Callable[[], int | bool] = _find(
    "torch._C", "_len_torch_function_stack", lambda: bool(function_modes())
)
"""Whether a function mode is entered."""


def sets_device_only(mode: Any) -> bool:
    """Whether a function mode is that of `with torch.device(...)` and of the default device."""
    kind = type(mode)
    return f"{kind.__module__}.{kind.__name__}" == "torch.utils._device.DeviceContext"


def optional_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """The names by which None may be given to a function of torch, in place of nothing."""
    name = function.__name__.removesuffix("_")
    packets = (getattr(torch.ops.aten, prefix + name, None) for prefix in ("linalg_", ""))
    packet = next((p for p in packets if p is not None), None)
    if packet is None:
        return frozenset()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    arguments = [a for schema in schemas for a in schema.arguments]
    names = {a.name for a in arguments if str(a.type).startswith("Optional")}
    return frozenset(names | ({"out"} if any(a.is_out for a in arguments) else set()))


def pass_for(replacement: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Let TorchScript take `replacement` for the builtin that `original` is, if it is one.

    It is known by its id from then on, so it must stay alive.
    """
    builtins = _find("torch.jit", "_builtins", None)
    builtin = None if builtins is None else builtins._find_builtin(original)
    if builtin is not None:
        builtins._register_builtin(replacement, builtin)
    return builtin is not None


def forget(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let Dynamo know `original` again: it looks functions up by name, once, and met another."""
    dynamo = sys.modules.get("torch._dynamo.trace_rules")
    known = getattr(dynamo, "get_torch_obj_rule_map", None)
    if known is not None and known.cache_info().currsize and replacement in known():
        known()[original] = known().pop(replacement)


# Where torch looks ops up.

_state = threading.local()


@contextmanager
def defining() -> Iterator[None]:
    """A block that defines an op: torch asks whether it is there, and it need not be."""
    _state.defines = True
    try:
        yield
    finally:
        _state.defines = False


def watch_namespace(name: str, load: Callable[[], None]) -> None:
    """Let `torch.ops.<name>` call `load` where an op is asked for that is not there yet.

    Where that cannot be watched, everything is loaded at once.
    """
    base: Any = _find("torch._ops", "_OpNamespace", None)
    if base is None:
        load()
        return

    class Namespace(base):  # type: ignore[misc]
        # compilers look ops up by it
        __module__ = base.__module__

        def __getattr__(self, op: str) -> Any:
            if not (op.startswith("__") or getattr(_state, "defines", False)):
                load()
            return super().__getattr__(op)

    setattr(torch.ops, name, Namespace(name))


# Graphs of what a function computes.


@contextmanager
def as_compilers_see_it() -> Iterator[None]:
    """A block in which `torch.compiler.is_compiling()`, and tensors have shapes but no data. No
    mode that was entered sees it."""
    before = getattr(torch.compiler, "_is_compiling_flag", None)
    if before is None:
        raise RuntimeError("metalcore.mlx: this torch does not let functions be traced")
    setattr(torch.compiler, "_is_compiling_flag", True)  # noqa: B010
    try:
        with without_modes(), fake_mode():
            yield
    finally:
        setattr(torch.compiler, "_is_compiling_flag", before)  # noqa: B010


fake_mode: Callable[[], Any] = _find("torch._subclasses.fake_tensor", "FakeTensorMode", _NoModes)
"""A mode in which tensors have shapes and no data."""

without_modes: Callable[[], Any] = _find(
    "torch.utils._python_dispatch", "_disable_current_modes", nullcontext
)
"""A block without the dispatch modes that are entered."""


def writes(target: Any) -> bool:
    """Whether an op of a graph writes to an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
