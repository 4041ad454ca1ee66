# SPDX-License-Identifier: MIT
"""What users do with a model goes on working after `accelerate`."""

import copy
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error
from metalcore.patch.swap import Swapped
from tests.patch.families import (
    FAMILIES,
    LAYERS,
    VOCABULARY,
    WIDTH,
    allowed,
    build,
    gradients,
    text,
)

NORMS = 2 * LAYERS + 1


def ops_of(model: Any, tokens: Tensor) -> Counter[str]:
    with metalcore.trace() as t:
        gradients(model, tokens)
    return Counter(r.op for r in t.records)


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == truth.keys()
    for name, grad in truth.items():
        assert error(found[name], grad) <= limit, name


def test_bfloat16_has_a_float32_loss_and_as_good_gradients() -> None:
    model, tokens = build(), text()
    truth, true_grads = gradients(model, tokens)
    model = model.to(torch.bfloat16)
    plain, plain_grads = gradients(model, tokens)
    with metalcore.accelerate(model):
        out, grads = gradients(model, tokens)
        assert ops_of(model, tokens)["cross_entropy_"] == 1
        values = out.logits.detach().clone()
    assert out.loss.dtype == torch.float32
    assert (values.dtype, values.shape) == (plain.logits.dtype, plain.logits.shape)
    assert error(out.loss, truth.loss) <= allowed(torch.bfloat16)
    for name, true in true_grads.items():
        assert grads[name].dtype == torch.bfloat16
        assert error(grads[name], true) <= allowed(torch.bfloat16), name
    # one rounding in the place of several is no worse
    ours, theirs = (
        sum(error(found[name], true) for name, true in true_grads.items())
        for found in (grads, plain_grads)
    )
    assert ours <= 1.1 * theirs


def test_autocast() -> None:
    model, tokens = build(), text()
    with torch.autocast("cpu", torch.bfloat16):
        plain, plain_grads = gradients(model, tokens)
        with metalcore.accelerate(model):
            out, grads = gradients(model, tokens)
            calls = ops_of(model, tokens)
    assert (calls["rms_norm"], calls["rope"], calls["cross_entropy_"]) == (NORMS, 2 * LAYERS, 1)
    assert out.loss.dtype == plain.loss.dtype == torch.float32
    assert out.logits.dtype == plain.logits.dtype
    assert error(out.loss, plain.loss) <= allowed(torch.bfloat16)
    for name, grad in plain_grads.items():
        assert grads[name].dtype == grad.dtype
        assert error(grads[name], grad) <= allowed(torch.bfloat16), name


def test_norms_in_float32_of_a_bfloat16_model_keep_their_result_type() -> None:
    model = build().to(torch.bfloat16)
    norm = model.model.norm.float()
    x = torch.randn(2, 3, WIDTH, dtype=torch.bfloat16)
    plain = norm(x)
    with metalcore.accelerate(model):
        assert norm(x).dtype == plain.dtype
        assert torch.equal(norm(x), plain)


def test_gradient_checkpointing() -> None:
    model, tokens = build().train(), text()
    _, plain = gradients(model, tokens)
    with metalcore.accelerate(model):
        model.gradient_checkpointing_enable()
        _, grads = gradients(model, tokens)
        calls = ops_of(model, tokens)
    assert calls["rope"] == 3 * LAYERS  # forward, again, backward
    assert_close(grads, plain, allowed())


def test_copies_are_accelerated_and_independent() -> None:
    model, tokens = build(), text()
    out, _ = gradients(model, tokens)
    with metalcore.accelerate(model):
        copied = copy.deepcopy(model)
        assert ops_of(copied, tokens) == ops_of(model, tokens)
        assert_close(gradients(copied, tokens)[1], gradients(model, tokens)[1], 0.0)
        mlp = pickle.loads(pickle.dumps(model.model.layers[0].mlp))
        x = torch.randn(3, WIDTH)
        assert isinstance(mlp, Swapped)
        assert torch.equal(mlp(x), model.model.layers[0].mlp(x))
    # what was undone is the model, not its copy
    assert isinstance(copied.model.norm, Swapped)
    assert error(gradients(copied, tokens)[0].loss, out.loss) <= allowed()
    assert copied.lm_head.weight is not model.lm_head.weight


def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model, tokens = build(), text()
    model.save_pretrained(tmp_path / "plain")
    with metalcore.accelerate(model):
        model.save_pretrained(tmp_path / "ours")
        torch.save(model.state_dict(), tmp_path / "ours.pt")
    for file in ("config.json", "model.safetensors"):
        plain, ours = ((tmp_path / kind / file).read_bytes() for kind in ("plain", "ours"))
        assert plain == ours
    loaded = type(model).from_pretrained(tmp_path / "ours")
    assert type(loaded) is type(model)
    loaded.load_state_dict(torch.load(tmp_path / "ours.pt"))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer_takes_the_same_steps(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": t, "labels": t} for t in torch.cat([text() for _ in range(3)])]

    def losses(model: nn.Module, name: str) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            logging_strategy="steps",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = build()
    plain = losses(copy.deepcopy(model), "plain")
    with metalcore.accelerate(model), metalcore.trace() as t:
        ours = losses(model, "ours")
    assert len(plain) == 3
    assert Counter(r.op for r in t.records)["cross_entropy_"] == 3
    assert error(torch.tensor(ours), torch.tensor(plain)) <= allowed()


@pytest.mark.parametrize("before", [True, False])
def test_adapters(before: bool) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(accelerated: bool) -> Any:
        torch.manual_seed(0)
        model: Any = build()
        if accelerated and before:
            metalcore.accelerate(model, rope=False)
        targets = ["q_proj", "gate_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, config)
        if accelerated and not before:
            metalcore.accelerate(model, rope=False)
        return model

    tokens = text()
    out, plain = gradients(adapted(False), tokens)
    model = adapted(True)
    found, grads = gradients(model, tokens)
    assert plain
    assert all("lora" in name for name in plain)
    assert error(found.loss, out.loss) <= allowed()
    assert_close(grads, plain, allowed())
    calls = ops_of(model, tokens)
    expected = (NORMS, LAYERS, 1)
    assert (calls["rms_norm"], calls["swiglu"], calls["cross_entropy_"]) == expected


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("targets", "copied"),
    [(["q_proj"], None), (["lm_head"], None), (["q_proj"], ["lm_head", "norm"])],
)
def test_adapters_are_merged_and_undone_in_any_order(
    targets: list[str], copied: list[str] | None, before: bool
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, target_modules=targets, modules_to_save=copied, init_lora_weights=False
    )
    model, tokens = build(), text()
    summaries = [metalcore.accelerate(model)] if before else []
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    summaries.append(metalcore.accelerate(adapted))
    # the wrapper around the model has no loss of its own
    assert {r.cls for s in summaries for r in s.rows if r.layer == "loss"} == {"LlamaForCausalLM"}
    merged = adapted.merge_and_unload().requires_grad_()
    summaries.append(metalcore.accelerate(merged))
    (row,) = [r for r in summaries[-1].rows if r.layer == "loss"]
    assert row.by or row.left_alone == "it is accelerated already"
    assert ops_of(merged, tokens)["cross_entropy_"] == 1
    found, grads = gradients(merged, tokens)
    for summary in summaries:
        summary.undo()
    assert not [n for n, m in merged.named_modules() if isinstance(m, Swapped)]
    assert not ops_of(merged, tokens)
    out, plain = gradients(merged, tokens)
    assert error(found.loss, out.loss) <= allowed()
    assert_close(grads, plain, allowed())


def test_an_output_layer_that_is_not_plain_is_left_alone() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["lm_head"])
    model = get_peft_model(build(), config)
    summary = metalcore.accelerate(model, rope=False)
    (row,) = [r for r in summary.rows if r.layer == "loss"]
    reason = "its output layer is a peft.tuners.lora.layer.Linear, not a torch.nn.Linear"
    assert row.left_alone == reason
    tokens = text()
    assert ops_of(model, tokens)["cross_entropy_"] == 0


def test_compiled_models_have_no_graph_break() -> None:
    model, tokens = build(), text()
    out, plain = gradients(model, tokens)
    with metalcore.accelerate(model):
        torch._dynamo.reset()
        called: Counter[str] = Counter()

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            called.update(str(node.target) for node in graph.graph.nodes)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        compiled = torch.compile(model, fullgraph=True, backend=backend)
        found = compiled(tokens, labels=tokens)
        model.zero_grad()
        found.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        assert type(found.logits) is Tensor
        assert error(found.logits, out.logits) <= allowed()
        assert_close(grads, plain, allowed())  # type: ignore[arg-type]
        for op, count in (
            ("rms_norm", NORMS),
            ("rope", LAYERS),
            ("attention", LAYERS),
            ("swiglu", LAYERS),
        ):
            assert called[f"metalcore.{op}.default"] == count, called
    torch._dynamo.reset()


def test_metal_kernels_compute_a_whole_step() -> None:
    tokens = text()[:1, :6]
    model = build(num_hidden_layers=1)
    out, plain = gradients(model, tokens)
    with metalcore.accelerate(model), metalcore.trace() as t, metalcore.simulate():
        found, grads = gradients(model, tokens)
    calls = Counter(r.op for r in t.records)
    assert {r.path.split(":")[0] for r in t.records} == {"sim"}
    assert calls["rms_norm"] == calls["rms_norm_backward"] == 3
    assert calls["rope"] == 2
    assert calls["attention"] == calls["attention_backward"] == 1
    assert calls["swiglu"] == calls["swiglu_backward"] == calls["cross_entropy_"] == 1
    assert error(found.loss, out.loss) <= allowed()
    assert_close(grads, plain, allowed())


def test_import_needs_no_transformers() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None; import metalcore, torch; "
        "print(metalcore.accelerate(torch.nn.Sequential(torch.nn.LayerNorm(8))).count('norm'))"
    )
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert run.stdout.strip() == "1", run.stderr


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
def test_logits_that_are_read_in_each_step_are_computed_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[Tensor] = []
    linear = F.linear

    def counted(*args: Any) -> Tensor:
        y = linear(*args)
        if y.shape[-1] == VOCABULARY:
            products.append(y)
        return y

    monkeypatch.setattr(F, "linear", counted)
    model, tokens = build(next(f for f in FAMILIES if f.name == family)), text()
    out, plain = gradients(model, tokens)
    reads = [True, True, True, False, False, True, True]
    # the first step cannot know; one that was not read goes back to the loss without logits
    times = [2, 1, 1, 1, 1, 2, 1]
    with metalcore.accelerate(model):
        for is_read, expected in zip(reads, times, strict=True):
            products.clear()
            with metalcore.trace() as t:
                found, grads = gradients(model, tokens)
            if is_read:
                assert error(found.logits, out.logits) <= allowed()
                assert torch.equal(found.logits.argmax(-1), out.logits.argmax(-1))
            within_loss = Counter(r.op for r in t.records)["cross_entropy_"]
            assert len(products) + within_loss == expected
            assert error(found.loss, out.loss) <= allowed()
            assert_close(grads, plain, allowed())


def test_more_labels_than_the_loss_wants() -> None:
    model, tokens = build(), text()
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    cases: list[dict[str, Any]] = [
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": torch.tensor(11)},
        {"labels": labels, "num_items_in_batch": 7},
        {"labels": labels, "shift_labels": shifted},
    ]
    plain = [model(tokens, **case).loss for case in cases]
    with metalcore.accelerate(model), metalcore.trace() as t:
        found = [model(tokens, **case).loss for case in cases]
    assert Counter(r.op for r in t.records)["cross_entropy_"] == len(cases)
    for a, b in zip(found, plain, strict=True):
        assert error(a, b) <= allowed()
