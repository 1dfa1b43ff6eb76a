"""Which checkpoints go."""

import pytest

from megatron_fbt.config.checkpoint import CheckpointConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.health import last_pass_validation
from megatron_fbt.training.retention import expendable
from tests.unit.training.checkpoints import publish

STEPS = [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "options, newest, losses, gone",
    [
        ({}, 10, {}, []),
        ({"keep_last": 2}, 10, {}, [2, 4, 6]),
        ({"keep_last": 1}, 10, {}, [2, 4, 6, 8]),
        ({"keep_last": 9}, 10, {}, []),
        ({"keep_last": 1, "keep_every": 4}, 10, {}, [2, 6]),
        ({"keep_last": 1, "keep_best": True}, 10, {2: 3.0, 4: 2.0, 6: 2.0, 8: None}, [2, 6, 8]),
        ({"keep_last": 1, "keep_best": True}, 10, {}, [2, 4, 6, 8]),
        ({"keep_last": 2, "keep_every": 6, "keep_best": True}, 10, {2: 1.0, 10: 2.0}, [4]),
        ({"keep_last": 1}, 6, {}, [2, 4]),
        ({"keep_last": 1, "keep_best": True}, 6, {8: 0.1, 4: 2.0}, [2]),
    ],
)
def test_what_goes(options, newest, losses, gone):
    assert expendable(STEPS, newest, losses, CheckpointConfig(**options)) == gone


def test_validation_losses_are_those_of_the_manifests(tmp_path):
    config = PretrainConfig()
    config.checkpoint.keep_last, config.checkpoint.keep_best, config.checkpoint.keep_every = 1, True, 5
    for step, loss in ((2, 2.5), (4, 1.5), (5, None), (6, 3.5), (8, 2.5)):
        publish(tmp_path, step, config, facts={"validation_loss": loss})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000004", "step_00000005", "step_00000008"]
    (tmp_path / "checkpoints" / "step_00000004" / "manifest.json").unlink()
    publish(tmp_path, 10, config, facts={"validation_loss": 4.5})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000005", "step_00000008", "step_00000010"]


def test_the_loss_of_a_checkpoint_is_that_of_the_last_pass():
    row = {f"validation_loss_pass_{k}": 4.0 - k for k in (1, 2, 3)}
    assert last_pass_validation(row) == 1.0 and last_pass_validation({"loss": 1.0}) is None
    assert last_pass_validation({**row, "validation_loss_pass_3": float("nan")}) is None


@pytest.mark.parametrize("options", [{"keep_every": 5}, {"keep_best": True}])
def test_exceptions_from_keep_last_need_it(options):
    with pytest.raises(ConfigError, match="checkpoint.keep_.*: checkpoint.keep_last is null, so all are kept; set"):
        CheckpointConfig(**options).validate()
