# SPDX-License-Identifier: MIT
"""metalcore among the kernels of the package mlstm_kernels, which NX-AI's models choose from."""

from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from metalcore.ops.xlstm.mlstm_chunkwise import mlstm_chunkwise
from metalcore.ops.xlstm.mlstm_step import mlstm_step


def register(name: str = "metalcore", *, grad: Literal["exact", "nx"] = "exact") -> None:
    """Add the mLSTM to all registries of mlstm_kernels.

    Their configurations then take `chunkwise--metalcore`, `parallel--metalcore` and, of sigmoid
    gates, `chunkwise--metalcore_siging` for `chunkwise_kernel`, `native_sequence__metalcore` for
    `sequence_kernel` and `metalcore` for `step_kernel`. Sequences may be of any length, and are
    computed in their own dtype: a kernel dtype that is asked for is not rounded to.

    Args:
        name: what to call it there.
        grad: "nx" for the gradient that their kernels train with, which is not that of h.

    Example:
        >>> metalcore.xlstm.registration.register()
    """

    def over_sequence(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool = False,
        eps: float = 1e-6,
        chunk_size: int = 64,
        **_kernel: Any,
    ) -> Any:
        return mlstm_chunkwise(
            *(q, k, v, i, f),
            c_initial=c_initial,
            n_initial=n_initial,
            m_initial=m_initial,
            return_last_states=return_last_states,
            eps=eps,
            chunk_size=min(256, max(16, chunk_size)),
            grad=grad,
        )

    def with_sigmoid_gates(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool = False,
        eps: float = 1e-6,
        normalize: bool = True,
        **_kernel: Any,
    ) -> Any:
        return mlstm_chunkwise(
            *(q, k, v, i, f),
            c_initial=c_initial,
            n_initial=n_initial,
            return_last_states=return_last_states,
            eps=eps,
            gate="sigmoid",
            normalize=normalize,
            grad=grad,
        )

    def step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c: Tensor | None = None,
        n: Tensor | None = None,
        m: Tensor | None = None,
        eps: float = 1e-6,
        **_kernel: Any,
    ) -> Any:
        return mlstm_step(q, k, v, i, f, c, n, m, eps=eps, grad=grad)

    kernels = {
        "chunkwise": ("registry", {name: over_sequence, f"{name}_siging": with_sigmoid_gates}),
        "parallel": ("registry", {name: over_sequence, f"{name}_siging": with_sigmoid_gates}),
        "recurrent": ("registry_sequence", {f"native_sequence__{name}": over_sequence}),
    }
    for module, (registry, functions) in kernels.items():
        getattr(import_module(f"mlstm_kernels.torch.{module}"), registry).update(functions)
    import_module("mlstm_kernels.torch.recurrent").registry_step[name] = step
