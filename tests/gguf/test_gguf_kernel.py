# SPDX-License-Identifier: MIT
"""transformers' own packed layers compute with metalcore, until it is undone."""

import pytest
import torch
from transformers.integrations.gguf import kernels, utils
from transformers.integrations.gguf.dequant import GGML_BLOCK

import metalcore.patch
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import dequantize_ggml, quantize_ggml
from metalcore.patch.gguf_kernel import GGUFKernel


@pytest.mark.parametrize("type", [t for t, f in FORMATS.items() if f.id in GGML_BLOCK])
def test_packed_layers_of_transformers_run_on_a_cpu(type: str) -> None:
    torch.manual_seed(0)
    number, blocks = FORMATS[type].id, quantize_ggml(torch.randn(12, 256), type)
    weight = dequantize_ggml(blocks, type)
    linear = utils.GgufLinear(256, 12, number)
    table = utils.GgufEmbedding(12, 256, number)
    linear.weight.copy_(blocks)
    table.weight.copy_(blocks)
    with metalcore.patch.transformers_gguf():
        kernel = kernels.get_gguf_kernel()
        assert isinstance(kernel, GGUFKernel)
        assert kernel.supports(number)
        # one kernel for few rows, another for many
        for rows in (1, 8, 20):
            x = torch.randn(rows, 256)
            wanted = x @ weight.mT
            assert (linear(x) - wanted).abs().max() < 1e-3 * wanted.abs().max()
        indices = torch.tensor([[3, 0], [11, 3]])
        assert torch.equal(table(indices), weight[indices])


def test_packed_experts_of_transformers_run_on_a_cpu() -> None:
    torch.manual_seed(0)
    up, down = torch.randn(4, 512, 256), torch.randn(4, 256, 256)
    number = FORMATS["q8_0"].id
    experts = utils.GgufExperts(4, 256, 256, number, number, torch.nn.functional.silu)
    for parameter, values in ((experts.gate_up_proj, up), (experts.down_proj, down)):
        parameter.copy_(quantize_ggml(values, "q8_0"))
    x, chosen = torch.randn(5, 256), torch.tensor([[0, 1], [3, 2], [1, 0], [2, 2], [0, 3]])
    shares = torch.rand(5, 2)
    with metalcore.patch.transformers_gguf():
        found = experts(x, chosen, shares)
    wanted = torch.zeros_like(x)
    up, down = (dequantize_ggml(p, "q8_0") for p in (experts.gate_up_proj, experts.down_proj))
    for row in range(5):
        for place in range(2):
            gate, value = (up[chosen[row, place]] @ x[row]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * value
            wanted[row] += shares[row, place] * (down[chosen[row, place]] @ hidden)
    assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_undo_leaves_transformers_as_it_was() -> None:
    before = kernels._gguf_kernel, kernels.kernel_can_read
    patched = metalcore.patch.transformers_gguf()
    assert kernels.kernel_can_read(torch.zeros(1))
    patched.undo()
    patched.undo()
    assert (kernels._gguf_kernel, kernels.kernel_can_read) == before
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        metalcore.patch.nothing  # noqa: B018
