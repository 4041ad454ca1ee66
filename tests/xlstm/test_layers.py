# SPDX-License-Identifier: MIT
"""Layers and the language model: what they compute, write, and are loaded from."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore.nn import XLSTM, MLSTMCell, MLSTMLayer, SLSTMLayer, XLSTMBlock
from tests.xlstm.mlstm import inputs, recurrent


def _small(**how: Any) -> XLSTM:
    torch.manual_seed(0)
    model = XLSTM(40, 32, num_heads=4, num_blocks=2, slstm_at=[1], ffn_dim=48, **how)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def test_the_cell_is_the_recurrence() -> None:
    q, k, v, i, f = inputs(2, 3, 9, 4, 5, torch.float64)
    truth, (c, n, m) = recurrent(q, k, v, i, f)
    rows = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    args = (*rows, i.mT, f.mT)
    cell = MLSTMCell(3)
    h, last = cell(*args)
    torch.testing.assert_close(h, truth.transpose(1, 2))
    for x, y in zip(last, (c, n, m[..., None]), strict=True):
        torch.testing.assert_close(x, y)
    state = None
    for t in range(9):
        y, state = cell(*(x[:, t : t + 1] for x in args), state)
        torch.testing.assert_close(y, h[:, t : t + 1])
    assert "3, chunk_size" in repr(cell)


@pytest.mark.parametrize("layer", [MLSTMLayer(32, 4), SLSTMLayer(32, 4), XLSTMBlock(32, 4)])
def test_layers_may_be_cut_and_stepped(layer: torch.nn.Module) -> None:
    for p in layer.double().parameters():
        p.data += 0.2 * torch.randn_like(p)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    whole, _ = layer(x)
    first, state = layer(x[:, :5])
    rest, state = layer(x[:, 5:8], state)
    end, _ = layer(x[:, 8:], state)
    torch.testing.assert_close(torch.cat([first, rest, end], 1), whole)


def test_losses_and_logits_are_those_of_all_tokens() -> None:
    model = _small().double()
    tokens = torch.randint(40, (2, 20))
    logits, _ = model(tokens[:, :-1])
    assert logits.abs().max() < 30
    truth = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model.loss(tokens), truth)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_writing_goes_on_where_it_ended(temperature: float) -> None:
    model = _small()
    prompt = torch.randint(40, (2, 7))
    how: Any = {"temperature": temperature}

    def seed() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    whole = model.generate(prompt, 12, generator=seed(), **how)
    generator = seed()
    first, states = model.generate(prompt, 5, generator=generator, return_states=True, **how)
    rest = model.generate(first[:, -1:], 7, generator=generator, states=states, **how)
    assert torch.equal(torch.cat([first[:, :-1], rest], 1), whole)
    if temperature == 0:
        logits, _ = model(whole[:, :-1])
        assert torch.equal(logits[:, 6:].argmax(-1), whole[:, 7:])
    with pytest.raises(ValueError, match="generate: tokens must be"):
        model.generate(prompt[:, :0], 3)


def test_memory_of_writing_does_not_grow() -> None:
    model = _small()
    _, states = model.generate(torch.randint(40, (1, 50)), 3, return_states=True)
    _, later = model.generate(torch.randint(40, (1, 1)), 70, states=states, return_states=True)
    assert [[s.shape for s in state] for state in states] == [
        [s.shape for s in state] for state in later
    ]


def _transformers(**how: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "num_blocks": 2}
    config = transformers.xLSTMConfig(vocab_size=40, chunk_size=16, **sizes, **how)
    model = transformers.xLSTMForCausalLM(config).eval()
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def _joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What weight_mode="fused" has, which transformers cannot initialise."""
    found = dict(state)
    joint = {
        "mlstm_layer.qkv_opreact": ("q", "k", "v", "ogate_preact"),
        "mlstm_layer.ifgate_preact": ("igate_preact", "fgate_preact"),
        "ffn.proj_up_gate_z": ("proj_up_gate", "proj_up"),
    }
    for block in range(2):
        for name, parts in joint.items():
            base = f"backbone.blocks.{block}.{name.split('.')[0]}."
            for kind in ("weight", "bias"):
                rows = [found.pop(f"{base}{p}.{kind}", None) for p in parts]
                if rows[0] is not None:
                    found[f"backbone.blocks.{block}.{name}.{kind}"] = torch.cat(rows)
    return found


@pytest.mark.parametrize("mode", ["single", "fused"])
def test_loads_what_transformers_saves(mode: str) -> None:
    theirs = _transformers()
    ours = XLSTM.from_config(theirs.config)
    state = theirs.state_dict()
    ours.load_state_dict(state if mode == "single" else _joined(state))
    tokens = torch.randint(40, (2, 37))
    torch.testing.assert_close(ours(tokens)[0], theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = theirs.generate(tokens[:, :5], max_new_tokens=12, **how)
    assert torch.equal(ours.generate(tokens[:, :5], 12), text)


def test_loads_the_names_of_xlstm_large() -> None:
    ours, other = _small(), _small()
    state = ours.state_dict()
    state["embedding.weight"] = state.pop("backbone.embeddings.weight")
    for p in other.parameters():
        p.data.zero_()
    other.load_state_dict(state)
    tokens = torch.randint(40, (1, 9))
    assert torch.equal(other(tokens)[0], ours(tokens)[0])


@pytest.mark.parametrize("cell", ["vanilla", "cuda"])
def test_loads_the_names_of_nx_ai_for_the_slstm(cell: str) -> None:
    """Their weights, computed by their formula."""
    H, D = 2, 4
    E = H * D
    kernel, bias = torch.randn(H, D, 4, D) / 4, torch.randn(H, 4, D)
    gates = {g: torch.randn(H, D, D) for g in "ifzo"}
    conv, shift, norm = torch.randn(E, 1, 4), torch.randn(E), torch.randn(E)
    if cell == "vanilla":
        stored = kernel.permute(0, 2, 3, 1).reshape(H, 4 * D, D), bias.transpose(0, 1).flatten()
    else:
        stored = kernel.reshape(H, D, 4 * D), bias.flatten()
    state = {
        "slstm_cell._recurrent_kernel_": stored[0],
        "slstm_cell._bias_": stored[1],
        **{f"{g}gate.weight": w for g, w in gates.items()},
        "conv1d.conv.weight": conv,
        "conv1d.conv.bias": shift,
        "group_norm.weight": norm,
    }
    layer = SLSTMLayer(E, H)
    layer.load_state_dict(state)
    x = torch.randn(3, 6, E)
    seen = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), conv, shift, groups=E).mT)

    def per_head(y: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bthd,hod->btho", y.unflatten(2, (H, D)), weight)

    # there, the gate called f is given as i
    order = (per_head(seen, gates["f"]), per_head(seen, gates["i"]))
    raw = torch.stack([*order, per_head(x, gates["z"]), per_head(x, gates["o"])], 2)
    y: Any = metalcore.slstm(raw, kernel, bias)
    truth = F.group_norm(y.flatten(0, 1).flatten(1), H, 1 + norm, eps=1e-5).view(3, 6, E)
    torch.testing.assert_close(layer(x)[0], truth, rtol=1e-4, atol=1e-5)


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="MLSTMLayer: the size of queries must be a multiple"):
        MLSTMLayer(20, 4)
    with pytest.raises(ValueError, match="SLSTMLayer: embedding_dim must be a multiple of 3"):
        SLSTMLayer(32, 3)
    with pytest.raises(ValueError, match="kind must be mlstm or slstm"):
        XLSTMBlock(32, 4, kind="lstm")  # type: ignore[arg-type]
