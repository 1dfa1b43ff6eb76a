"""The configuration that DeepSpeed gets, and what a user may add to it."""

import json
from pathlib import Path

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.deepspeed import HANDED_ON, deepspeed_settings
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError


def zero(sharding="zero1", dtype="fp32", added=None, folder=None, **optimizer) -> PretrainConfig:
    config = PretrainConfig()
    config.optimizer.sharding, config.precision.dtype = sharding, dtype
    config.model.vocab_size = 1000
    config.training.train_steps, config.training.train_tokens = 10, None
    config.training.micro_batch_size, config.training.global_batch_size = 2, 16
    for name, value in optimizer.items():
        setattr(config.optimizer, name, value)
    if added is not None:
        path = folder / "ds.json"
        path.write_text(added if isinstance(added, str) else json.dumps(added))
        config.optimizer.deepspeed_config = str(path)
    return config


@pytest.mark.parametrize("sharding, stage", [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_what_is_generated(sharding, stage):
    settings = deepspeed_settings(zero(sharding, dtype="bf16", offload=True), data_parallel_size=4)
    assert settings["zero_optimization"] == {
        "stage": stage,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu"},
    }
    assert settings["train_micro_batch_size_per_gpu"] == 2 and settings["gradient_accumulation_steps"] == 1
    assert settings["gradient_clipping"] == 0.0  # one factor clips and divides by the loss tokens
    assert settings["bf16"]["enabled"] and settings["data_types"] == {"grad_accum_dtype": "fp32"}


def test_what_a_user_adds_is_merged(tmp_path):
    added = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    settings = deepspeed_settings(zero("zero2", added=added, folder=tmp_path), 2)
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1000 and settings["wall_clock_breakdown"] is True
    assert settings["zero_optimization"]["overlap_comm"] is False


def test_what_is_switched_off_or_left_to_us_is_accepted(tmp_path):
    added = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "amp": False,
        "zero_optimization": {"stage": "auto", "sub_group_size": 5e8, "reduce_bucket_size": "auto"},
    }
    settings = deepspeed_settings(zero("zero3", added="\ufeff" + json.dumps(added), folder=tmp_path), 2)
    assert settings["zero_optimization"] == {"stage": 3, "overlap_comm": False, "sub_group_size": 500_000_000}
    assert settings.keys() == deepspeed_settings(zero("zero3"), 2).keys()


def test_memory_of_an_offloaded_optimizer_can_be_pinned(tmp_path):
    added = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    settings = deepspeed_settings(zero("zero2", added=added, folder=tmp_path, offload=True), 2)
    assert settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_the_page_has_what_is_handed_on():
    page = (Path(__file__).parents[3] / "docs" / "sharding.md").read_text()
    assert [path for path in HANDED_ON if f"`{path.removeprefix('zero_optimization.')}`" not in page] == []


def test_batch_arithmetic_that_agrees_is_accepted(tmp_path):
    added = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
    }
    settings = deepspeed_settings(zero(added=added, folder=tmp_path), data_parallel_size=2)
    assert "train_batch_size" not in settings and settings["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    "added, words",
    [
        ({"train_batch_size": 32}, ["train_batch_size = 32", "training.global_batch_size = 16"]),
        ({"gradient_accumulation_steps": 8}, ["gradient_accumulation_steps = 8", "= 4"]),
        ({"gradient_clipping": 0.5}, ["gradient_clipping = 0.5", "optimizer.clip_grad = 1.0"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage = 3", "needs 1"]),
        ({"optimizer": {"type": "Adam"}}, ["optimizer is decided by optimizer.type"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler is decided by optimizer.lr_decay_style"]),
        ({"fp16": {"enabled": True}}, ["fp16 is decided by precision.dtype"]),
        ({"managed_gradient_accumulation": True}, ["managed_gradient_accumulation = True", "needs False"]),
        ({"train_batch_size": 8, "fp16": {"enabled": True}}, ["train_batch_size = 8", "fp16"]),
        ({"bf16": {"enabled": True}}, ["bf16 is decided by precision.dtype"]),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ["data_types is decided by precision.dtype"]),
        ({"torch_autocast": {"enabled": True}}, ["torch_autocast is decided by precision.dtype"]),
        ({"no_such_key": 5}, ["no_such_key is nothing that is handed on", "docs/sharding.md"]),
        ({"prescale_gradients": True}, ["prescale_gradients is nothing that is handed on"]),
        ({"zero_optimization": {"reduce_bucket_sizes": 5}}, ["zero_optimization.reduce_bucket_sizes is nothing"]),
        ({"zero_optimization": {"mics_shard_size": 1}}, ["zero_optimization.mics_shard_size is nothing"]),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, ["reduce_bucket_size = 'big'", "whole number"]),
        ({"zero_optimization": {"reduce_bucket_size": -5}}, ["reduce_bucket_size = -5", "whole number"]),
        ({"zero_optimization": {"reduce_bucket_size": True}}, ["reduce_bucket_size = True", "whole number"]),
        ({"zero_optimization": {"reduce_bucket_size": 1e999}}, ["reduce_bucket_size = inf", "whole number"]),
        ({"zero_optimization": {"reduce_scatter": 1}}, ["reduce_scatter = 1", "true or false"]),
        ({"zero_optimization": 3}, ["zero_optimization = 3: no JSON object"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ["decided by optimizer.offload"]),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ["offload_param is nothing"]),
    ],
)
def test_contradictions_are_named(tmp_path, added, words):
    with pytest.raises(ConfigError) as error:
        deepspeed_settings(zero(added=added, folder=tmp_path), data_parallel_size=2)
    assert all(word in str(error.value) for word in ["optimizer.deepspeed_config", *words])


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_file_that_is_no_json_object(tmp_path, content):
    with pytest.raises(ConfigError, match=r"optimizer.deepspeed_config = .*JSON"):
        deepspeed_settings(zero(added=content, folder=tmp_path), 2)


def test_a_missing_file_is_named_by_the_checks(tmp_path):
    config = zero(deepspeed_config=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="none.json"):
        validate_config(config, world_size=2)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"optimizer.sharding": "zero2", "parallel.pipeline_model_parallel_size": 2},
            "pipeline_model_parallel_size = 2",
        ),
        ({"optimizer.sharding": "zero3", "parallel.pipeline_model_parallel_size": 2}, "zero1 or megatron"),
        ({"optimizer.sharding": "zero1", "parallel.overlap_grad_reduce": True}, "overlap_grad_reduce = true"),
        ({"optimizer.sharding": "zero1", "optimizer.type": "muon"}, "optimizer.sharding = 'zero1'"),
        ({"optimizer.sharding": "none", "optimizer.offload": True}, "optimizer.offload = "),
        ({"optimizer.sharding": "megatron", "optimizer.deepspeed_config": "x.json"}, "optimizer.deepspeed_config"),
    ],
)
def test_what_cannot_be_combined_is_refused(change, words):
    config = zero()
    for name, value in change.items():
        section, attribute = name.split(".")
        setattr(getattr(config, section), attribute, value)
    with pytest.raises(ConfigError) as error:
        validate_config(config, world_size=4)
    assert words in str(error.value)
