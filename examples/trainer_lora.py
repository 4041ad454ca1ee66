# SPDX-License-Identifier: MIT
"""Adapters fine-tuned by transformers' Trainer: python examples/trainer_lora.py"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import metalcore


def main(steps: int = 30, hidden: int = 128) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    metalcore.accelerate(model)
    rows = torch.randint(256, (16, 32))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.backends.mps.is_available(),
        )
        optimizer = metalcore.MetalAdamW(model.parameters(), lr=1e-2)
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        loss = trainer.train().training_loss
    print(f"mean loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    main()
