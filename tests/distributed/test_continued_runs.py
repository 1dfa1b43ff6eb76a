"""New runs from the weights of a checkpoint: long context in another layout, instruction tuning decoded in SOFT."""

import dataclasses
import json
import string
from pathlib import Path

import pytest
import torch

from megatron_fbt.config.feedback import JitterConfig, PrefixConfig
from megatron_fbt.config.load import load_yaml
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.hf.convert import convert_checkpoint
from megatron_fbt.inference.batches import continue_text
from megatron_fbt.inference.text import GenerationOptions, load_model
from megatron_fbt.training.checkpoint import Checkpointer, read_weights
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import VOCAB, branch, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus
from tests.unit.data.chats import chat, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import PlainTokenizer
from tests.unit.hf.reference import Reference

PLAIN_RECIPE = {"feedback__prefix": PrefixConfig(probability=0.0), "feedback__jitter": JitterConfig(0.0)}
SHAPE = {"model__hidden_size": 32, "model__ffn_hidden_size": 48, "model__vocab_size": VOCAB}
COMMON = {**SHAPE, "model__init_method_std": 0.2, "feedback__schedule": "full", "training__rampup_batch_size": None}
SOURCE_STEPS, TUNING_STEPS, HALF = 4, 60, 40
SPLIT = {"tensor": (2, 1), "pipeline": (1, 2)}
LONG = {"data__sequence_length": 64, "model__rotary_base": 500_000.0}
"""Four times the source's rows, and another base than its 10,000."""


def source_config(folder, corpus):
    """Four steps in two tensor-parallel processes."""
    return run_config(Path(folder) / "source", corpus, (2, 1), training__train_steps=SOURCE_STEPS, **COMMON)


def long_config(folder, corpus, layout=(1, 1), **overrides):
    """Longer rows and another RoPE base, from the newest checkpoint of the source."""
    fields = {
        **COMMON,
        **PLAIN_RECIPE,
        **LONG,
        "training__train_steps": 2,
        "optimizer__lr_warmup_steps": 0,
        "checkpoint__init_from": str(Path(folder) / "source"),
    }
    return run_config(Path(folder) / f"long{layout[1]}", corpus, layout, **{**fields, **overrides})


def tuning_config(folder, chats, name, layout=(1, 1)):
    """Instruction tuning from the source's step folder."""
    config = run_config(
        Path(folder) / name,
        chats,
        layout,
        **COMMON,
        feedback__prefix=PrefixConfig(granularity="prompt"),
        data__format="conversations",
        data__sequence_length=24,
        data__reset_attention_mask=True,
        data__reset_position_ids=True,
        training__train_steps=TUNING_STEPS,
        training__global_batch_size=4,
        training__eval_iters=1,
        checkpoint__save_interval=HALF,
        checkpoint__init_from=str(Path(folder) / "source" / "checkpoints" / "step_00000004"),
    )
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(Path(folder) / "letters")
    return config


def keep_loaded(folder, name):
    """Save what a run holds before its first step."""

    def hook(trainer):
        if trainer.state.step == 0:
            copy = Checkpointer(Path(folder) / name / "checkpoints", None, trainer.layout)
            copy.save(trainer.stage, trainer.optimizer, trainer.state, "")

    return hook


def source_and_long_context(rank, world_size, folder, corpus, chats):
    """Tensor parallel 2, then pipeline parallel 2; and once more, which resumes. Tuning is begun in both."""
    assert run(source_config(folder, corpus)) == "finished"
    config = long_config(folder, corpus, (1, 2))
    assert run(config, keep_loaded(folder, "loaded")) == "finished"
    sharded = {"optimizer__sharding": "megatron", "precision__dtype": "bf16", "training__train_steps": 1}
    assert run(long_config(folder, corpus, **sharded), keep_loaded(folder, "half")) == "finished"
    config.training.train_steps = 3
    assert run(config) == "finished"
    assert run(long_config(folder, corpus, (2, 1), model__num_layers=4, run__dir=f"{folder}/no")) == "CheckpointError"
    tokenizer = HuggingFaceTokenizer(Path(folder) / "letters")
    for name, layout in SPLIT.items():
        assert run(tuning_config(folder, chats, name, layout), stop_before(3), tokenizer) == "StoppedBySignal"


def tune(rank, world_size, folder, chats):
    """One process: tuned at a stretch, and once more from the checkpoint in the middle."""
    tokenizer = HuggingFaceTokenizer(Path(folder) / "letters")
    whole, resumed = (tuning_config(folder, chats, name) for name in ("tuned", "resumed"))
    assert run(whole, tokenizer=tokenizer) == "finished"
    branch(Path(whole.run.dir), Path(resumed.run.dir), HALF)
    assert run(resumed, tokenizer=tokenizer) == "finished"


CHATS = [(c + c, c.upper().lower() + string.ascii_lowercase[(n * 7 + 3) % 26]) for n, c in enumerate("abcdefghijklmno")]
"""Question and answer; the last three of the fifteen are for validation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the three runs have been."""
    folder = tmp_path_factory.mktemp("continued")
    write_letter_tokenizer(folder / "letters")
    chats = write_chats(folder / "chats.jsonl", [chat(f"user: {q}", f"assistant: {a}") for q, a in CHATS])
    corpus = write_corpus(folder)
    run_distributed(source_and_long_context, 2, str(folder), corpus, chats, timeout=200, init_group=False)
    run_distributed(tune, 1, str(folder), chats, timeout=200, init_group=False)
    return folder


def test_weights_move_to_another_layout_bit_for_bit_and_nothing_else_does(folder):
    source, loaded = checkpoint_of(folder / "source", SOURCE_STEPS), checkpoint_of(folder / "loaded", 0)
    assert source.keys() == loaded.keys()
    for name, value in loaded.items():
        if "exp_avg" in name:
            assert not value.any() and source[name].any(), name
        else:
            assert torch.equal(value, source[name]), name
    state = json.loads((folder / "loaded" / "checkpoints" / "step_00000000" / "trainer_state.json").read_text())
    assert not any(state[name] for name in ("step", "consumed_samples", "updates", "fusion_updates"))


def test_weights_move_to_another_number_format_and_sharded_states(folder):
    source, loaded = checkpoint_of(folder / "source", SOURCE_STEPS), checkpoint_of(folder / "half", 0)
    weights = [name for name in source if not name.startswith("optimizer.")]
    assert not any(name.startswith("optimizer.master.") for name in source), "float32 weights are stored once"
    assert weights and all(torch.equal(loaded[f"optimizer.master.{name}"], source[name]) for name in weights)
    assert all(torch.equal(loaded[name], source[name].bfloat16()) for name in weights)


def test_a_longer_context_starts_where_the_source_is_under_the_new_base(folder):
    config = long_config(folder, str(folder / "corpus"))
    rows = build_datasets(config, PlainTokenizer(VOCAB), 16, 0).train
    weights = read_weights(folder / "source" / "checkpoints" / "step_00000004")
    sums = old_base = 0
    for row in (rows[i] for i in range(8)):
        starts = torch.cat([torch.tensor([True]), row["tokens"][:-1] == 0])
        sums += losses(Reference(weights, config), row, lambda t, s=starts: bool(s[t]))
        before = dataclasses.replace(config, model=dataclasses.replace(config.model, rotary_base=10_000.0))
        old_base += losses(Reference(weights, before), row, lambda t, s=starts: bool(s[t]))
    found = rows_of(folder / "long2")
    assert [found[0][f"loss_pass_{k}"] for k in (1, 2, 3)] == pytest.approx((sums / 8 / 64).tolist(), rel=1e-5)
    assert abs(old_base - sums).max() / 8 / 64 > 1e-3, "the base makes no difference"
    assert [row["step"] for row in found] == [1, 2, 3] and found[0]["tokens"] == 8 * 64


def losses(reference, row, plain):
    """Summed negative log-likelihood of a row's labels in three passes."""
    states = reference.passes(row["tokens"], 3, plain)
    logits = torch.stack([reference.logits(state) for state in states])
    return -logits.log_softmax(-1)[:, torch.arange(len(row["labels"])), row["labels"]].sum(-1)


def test_tuning_resumes_bit_for_bit(folder):
    assert rows_of(folder / "tuned") == rows_of(folder / "resumed")
    tensors = [checkpoint_of(folder / name, TUNING_STEPS) for name in ("tuned", "resumed")]
    assert [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])] == []


@pytest.mark.parametrize("name", SPLIT)
def test_tuning_is_the_same_where_the_model_is_split(folder, name):
    whole, split = rows_of(folder / "tuned")[:3], rows_of(folder / name)
    for expected, found in zip(whole, split, strict=True):
        losses_of = [[row[f"loss_pass_{k}"] for k in (1, 2, 3)] for row in (found, expected)]
        assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-4) and found["loss_tokens"] == expected["loss_tokens"]


def test_the_last_pass_of_tuning_is_what_soft_decoding_computes(folder):
    """Pass 3 has the true states of the three positions that predict an answer and its end."""
    step = folder / "tuned" / "checkpoints" / f"step_{TUNING_STEPS:08d}"
    config = load_yaml(str(step / "config.yaml"))
    reference, tokenizer = Reference(read_weights(step), config), HuggingFaceTokenizer(folder / "letters")
    total = plain = 0.0
    for question, answer in CHATS[12:]:
        prompt = tokenizer.encode_rendered(f"<|user|>{question}<|end|>\n<|assistant|>")
        reply = tokenizer.encode_rendered(f"{answer}<|end|>")
        ids = torch.tensor(prompt + reply)
        for regime in ("soft", "standard"):
            logits = reference.logits(reference.regime(ids, regime, len(prompt)))[len(prompt) - 1 : -1]
            nll = -logits.log_softmax(-1)[range(3), ids[len(prompt) :]].sum().item()
            total, plain = (total + nll, plain) if regime == "soft" else (total, plain + nll)
    found = rows_of(folder / "tuned")[-1]
    assert found["validation_loss_pass_3"] == pytest.approx(total / 9, rel=1e-5)
    assert found["validation_loss_pass_1"] == pytest.approx(plain / 9, rel=1e-5) != pytest.approx(total / 9, rel=1e-3)


def test_the_tuned_model_answers_in_soft(folder):
    convert_checkpoint(folder / "tuned", folder / "export")
    model, tokenizer = load_model(folder / "export", "cpu")
    for question, answer in CHATS[:12]:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        result = continue_text(model, tokenizer, prompt, GenerationOptions("soft", max_new_tokens=6))
        assert (result["continuation"], result["finish"], result["prompt_tokens"]) == (answer, "eos", 6), question
