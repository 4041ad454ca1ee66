# SPDX-License-Identifier: MIT
"""xLSTM and Mamba of transformers: the same results by our kernels, and as they were afterwards."""

import copy
from typing import Any

import pytest
import torch

import metalcore

transformers = pytest.importorskip("transformers")


def _xlstm() -> Any:
    sizes = {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "num_blocks": 2}
    config = transformers.xLSTMConfig(vocab_size=40, chunk_size=16, **sizes)
    return transformers.xLSTMForCausalLM(config)


def _mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    return transformers.MambaForCausalLM(config)


MODELS = {
    "xlstm": (_xlstm, {"mlstm": 2}, {"mlstm_chunkwise", "mlstm_chunkwise_backward", "mlstm_step"}),
    "mamba": (_mamba, {"conv": 2}, {"causal_conv1d", "causal_conv1d_backward"}),
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def _results(model: Any) -> tuple[Any, ...]:
    tokens = torch.randint(40, (2, 37), generator=torch.Generator().manual_seed(1))
    out = model(tokens, labels=tokens, use_cache=False)
    grads = torch.autograd.grad(out.loss, list(model.parameters()))
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(tokens[:, :5], max_new_tokens=12, **how)
    return text, out.logits.detach(), *grads


@pytest.mark.parametrize("name", list(MODELS))
def test_results_gradients_and_text_are_the_same(name: str) -> None:
    _, counts, ops = MODELS[name]
    model = _model(name)
    plain, classes = _results(model), [type(m) for m in model.modules()]
    with metalcore.accelerate(model) as summary, metalcore.trace() as t:
        ours = _results(model)
        kept = _results(copy.deepcopy(model))
    assert {layer: summary.count(layer) for layer in counts} == counts
    assert ops <= {r.op for r in t.records if r.path.startswith("cpu")}
    assert torch.equal(ours[0], plain[0])
    for a, b, c in zip(plain[1:], ours[1:], kept[1:], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
        assert torch.equal(b, c)
    # as before, to the last bit
    assert [type(m) for m in model.modules()] == classes
    assert all(map(torch.equal, _results(model), plain))


@pytest.mark.parametrize("name", list(MODELS))
def test_parts_may_be_left_out(name: str) -> None:
    layer = next(iter(MODELS[name][1]))
    model = _model(name)
    other = _model(name)
    with metalcore.accelerate(model, **{layer: False}) as summary:
        assert summary.count(layer) == 0
        assert not [m for m in other.modules() if hasattr(type(m), "origin")]


def test_a_layer_that_computes_something_else_is_left_alone() -> None:
    model = _xlstm()
    for block in model.backbone.blocks:
        backend = block.mlstm_layer.mlstm_backend
        backend._inference_fn.keywords["mlstm_step_kernel"].keywords["eps"] = 0.3
        inner = backend._inference_fn

        def doubled(inner: Any = inner, **kwargs: Any) -> Any:
            h, states = inner(**kwargs)
            return 2 * h, states

        backend._inference_fn = doubled
    summary = metalcore.accelerate(model)
    assert summary.count("mlstm") == 0
    assert "computes no mLSTM that metalcore has" in [r.left_alone for r in summary.rows]


def test_what_ours_cannot_do_is_theirs() -> None:
    model = _xlstm().eval()
    with metalcore.accelerate(model):
        backend = model.backbone.blocks[0].mlstm_layer.mlstm_backend
        rows = torch.randn(1, 4, 16, 16)
        gates = torch.randn(1, 4, 16)
        with metalcore.trace() as t, pytest.raises(ValueError, match="Unknown mode"):
            backend(rows, rows, rows, gates, gates, mode="other")
        assert not t.records
        with metalcore.trace() as t:
            h = backend(rows, rows, rows, gates, gates, mode="train", return_last_states=False)
        assert h.shape == rows.shape
        assert t.records[0].op == "mlstm_chunkwise"


@pytest.mark.parametrize("name", list(MODELS))
def test_trains_in_the_simulator_with_equal_losses(name: str) -> None:
    model = _model(name).train()
    tokens = torch.randint(40, (1, 9))

    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(2):
            loss = model(tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain = losses(copy.deepcopy(model))
    metalcore.accelerate(model, rms_norm=False, layer_norm=False, mlp=False, loss=False)
    with metalcore.simulate(), metalcore.trace() as t:
        simulated = losses(model)
    assert {r.path.split(":")[0] for r in t.records} == {"sim"}
    assert simulated == pytest.approx(plain, rel=1e-5)
