"""Rules of fp16 and its loss scale."""

import pytest

from megatron_fbt.config.fp8 import precision_problems
from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.config.pretrain import PretrainConfig


@pytest.mark.parametrize(
    "values, parts",
    [
        ({"dtype": "bf16", "loss_scale": 8.0}, ["precision.loss_scale = 8", "dtype = 'bf16' needs no loss scale"]),
        ({"dtype": "fp32", "hysteresis": 3}, ["precision.hysteresis = 3", "dtype = 'fp32' needs no loss scale"]),
        ({"loss_scale": 8.0, "loss_scale_window": 9}, ["precision.loss_scale_window = 9", "loss_scale = 8.0 is con"]),
        ({"loss_scale": 0.0}, ["precision.loss_scale = 0.0"]),
        ({"loss_scale": 1e-8}, ["precision.loss_scale = 1e-08", "of at least 6.10352e-05"]),
        ({"loss_scale": 1e39}, ["precision.loss_scale = 1e+39", "at most 1.84467e+19"]),
        ({"initial_loss_scale": 1e39}, ["precision.initial_loss_scale = 1e+39"]),
        ({"initial_loss_scale": -1.0}, ["precision.initial_loss_scale = -1.0"]),
        ({"initial_loss_scale": float("inf")}, ["precision.initial_loss_scale = inf"]),
        ({"min_loss_scale": float("nan")}, ["precision.min_loss_scale = nan"]),
        ({"min_loss_scale": 2.0**16}, ["precision.min_loss_scale = 65536.0", "initial_loss_scale = 32768"]),
        ({"loss_scale_window": 0}, ["precision.loss_scale_window = 0"]),
        ({"hysteresis": 1.5}, ["precision.hysteresis = 1.5"]),
        ({"dtype": "fp8"}, ["precision.dtype = 'fp8'"]),
        ({"fp8": "hybrid"}, ["precision.dtype = 'fp16'", "set it to bf16"]),
    ],
)
def test_each_problem_names_field_value_and_remedy(values, parts):
    problems = PrecisionConfig(**{"dtype": "fp16", **values}).problems()
    assert len(problems) == 1 and all(part in problems[0] for part in parts), problems


@pytest.mark.parametrize(
    "values", [{}, {"loss_scale": 3.0}, {"initial_loss_scale": 1}, {"min_loss_scale": 1e-4}, {"hysteresis": 1}]
)
def test_what_is_allowed(values):
    assert PrecisionConfig(dtype="fp16", **values).problems() == []


@pytest.mark.parametrize("sharding, refused", [("zero1", 1), ("zero2", 1), ("zero3", 1), ("none", 0), ("megatron", 0)])
def test_only_optimizers_with_a_loss_scale_step_in_fp16(sharding, refused):
    config = PretrainConfig()
    config.precision.dtype, config.optimizer.sharding = "fp16", sharding
    problems = precision_problems(config)
    assert len(problems) == refused
    assert all("precision.dtype = 'fp16'" in problem and sharding in problem for problem in problems)
