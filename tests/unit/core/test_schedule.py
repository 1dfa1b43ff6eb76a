"""What a step's recipe is: weights of the passes, and which positions the passes fuse."""

import dataclasses

import pytest
import torch

from megatron_fbt.config.feedback import FeedbackConfig, LossWeightsConfig, PrefixConfig
from megatron_fbt.core.schedule import Recipe
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.feedback.prefix import fused_positions

STARTS = torch.zeros(3, 12, dtype=torch.bool)
STARTS[:, 0] = STARTS[1, 5] = True
REGION = torch.zeros(3, 12, dtype=torch.bool)
REGION[0, 4:] = REGION[1, 3:7] = True
IDS = torch.arange(3)


def fused(prefix: PrefixConfig, training: bool, region=None, pass_number: int = 2) -> torch.Tensor:
    """Positions that a pass over a micro-batch fuses, [b, s] bool."""
    batch = MicroBatch(None, None, None, STARTS, IDS, region)
    return Recipe(FeedbackConfig(prefix=prefix), 1234, training).fused(batch, pass_number)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pass_number", [2, 3])
def test_with_prompts_the_region_is_fused_in_training_and_in_validation(training, pass_number):
    found = fused(PrefixConfig(granularity="prompt"), training, REGION, pass_number)
    assert torch.equal(found, REGION & ~STARTS) and not found[1, 5] and not found[2].any()


@pytest.mark.parametrize("granularity", ["row", "document"])
@pytest.mark.parametrize("region", [None, REGION], ids=["without", "with"])
def test_validation_has_no_mix_in_and_training_has(granularity, region):
    prefix = PrefixConfig(granularity=granularity)
    assert torch.equal(fused(prefix, False, region), ~STARTS)
    expected = fused_positions(prefix, STARTS, IDS, 2, 1234)
    assert torch.equal(fused(prefix, True, region), expected) and not torch.equal(expected, ~STARTS)


def test_the_warm_up_scales_the_extra_passes_alone():
    recipe = Recipe(FeedbackConfig(loss_weights=LossWeightsConfig(2.0, 3.0, [1.0, 2.0])), 1, True)
    assert recipe.weights(3) == [2.0, 1.0, 2.0]
    quarter = dataclasses.replace(recipe, extra_factor=0.25)
    assert quarter.weights(3) == [2.0, 0.25, 0.5] and quarter.weights(1) == [2.0]
