"""Fine-tuning an exported model with peft and with transformers' Trainer, in several passes."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

import megatron_fbt.hf  # noqa: F401, registers the model type
from tests.unit.hf.exports import export
from tests.unit.hf.reference import Reference, random_weights, tiny_config

ROWS = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(3))
PASSES = 3


@pytest.fixture
def folder(tmp_path):
    config = tiny_config(num_query_groups=2)
    return str(export(tmp_path / "model", random_weights(config), config))


def expected_loss(passes):
    """Method section 3, of the exported weights."""
    config = tiny_config(num_query_groups=2)
    reference, sums = Reference(random_weights(config), config), torch.zeros(passes)
    for row in ROWS:
        for k, states in enumerate(reference.passes(row, passes)):
            logits = reference.logits(states)[:-1]
            sums[k] -= logits.log_softmax(-1)[range(11), row[1:]].sum()
    means = sums / (4 * 11)
    return (means[0] + means[1:].mean()).item()


def test_three_steps_of_lora(folder, tmp_path):
    set_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    targets = ["q_proj", "v_proj", "down_proj", "state_proj", "token_gate"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=0.02)
    losses = []
    for _ in range(3):
        output = model(input_ids=ROWS, labels=ROWS, passes=PASSES)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[0] == pytest.approx(expected_loss(PASSES), rel=1e-5)
    assert losses[0] > losses[1] > losses[2] and len(output.pass_losses) == PASSES
    moved = {name for name, weight in model.named_parameters() if "lora_B" in name and weight.any()}
    assert len(moved) == 2 * 3 + 2, "adapters of attention, MLP and fusion learn"
    plain = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora" not in name}
    assert plain.keys() == before.keys() and all(torch.equal(value, before[name]) for name, value in plain.items())
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        merged = model.eval().merge_and_unload()
        expected = merged(ROWS, passes=PASSES).logits
        assert torch.allclose(again(input_ids=ROWS, passes=PASSES).logits, expected, atol=1e-5)
        text = again.generate(input_ids=ROWS[:, :5], regime="fused", max_new_tokens=4, do_sample=False)
        assert torch.equal(text, merged.generate(ROWS[:, :5], regime="fused", max_new_tokens=4, do_sample=False))


class Rows(Dataset):
    """The rows, each its own label. Nothing predicts the first token, which transformers 4 would count as predicted."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return {"input_ids": ROWS[index], "labels": torch.cat([torch.tensor([-100]), ROWS[index, 1:]])}


def test_three_steps_of_trainer(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.passes = PASSES
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(expected_loss(PASSES), rel=1e-3), "the log has four decimal places"
    assert losses[0] > losses[1] > losses[2]
    trainer.save_model(str(tmp_path / "tuned"))
    again = AutoModelForCausalLM.from_pretrained(str(tmp_path / "tuned")).eval()
    with torch.no_grad():
        assert torch.equal(again(ROWS).logits, model.eval()(ROWS).logits)
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["passes"] == PASSES
