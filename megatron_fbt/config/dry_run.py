"""--dry_run: all checks and the plan of a run, without processes."""

import dataclasses
import json
import os
from pathlib import Path

from megatron_fbt.config.checks import resolve_world_size
from megatron_fbt.config.load import CommandOptions
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError
from megatron_fbt.versions import check_megatron_core_version


def run_dry(config: PretrainConfig, options: CommandOptions) -> None:
    """Print the plan of a validated configuration, as a table or, with options.json, as one JSON object.

    A run folder that holds a checkpoint gives the plan of its resume.

    Raises:
        CheckpointError: if the run folder's checkpoints cannot be read.
        ConfigError: if Megatron-Core's version is not supported, the vocabulary is not known, nothing fits
            memory.budget_gib, or prefixes cannot be reused as asked for on this machine.
        DataError: if the tokenizer cannot be read, or training finds too little in its data.
    """
    check_megatron_core_version()
    world_size = resolve_world_size(config, os.environ, dry_run=True)
    from megatron_fbt.core.backends import as_here, check_reuse
    from megatron_fbt.core.precision_report import precision_report
    from megatron_fbt.training.fingerprint import stage_samples
    from megatron_fbt.training.resume import find_resume_point
    from megatron_fbt.training.run_folder import steps_and_samples, stored_phase_starts

    check_reuse(config)
    checkpoint = find_resume_point(config).checkpoint
    phase_starts = None if checkpoint is None else stored_phase_starts(config, checkpoint)
    vocab_size, done = planned_vocab_size(config), steps_and_samples(checkpoint)
    plan = make_plan(as_here(config), world_size, vocab_size, phase_starts, done)
    if checkpoint is not None:
        plan = dataclasses.replace(plan, notes=(_resumed(config, checkpoint, done[0], plan.train_steps), *plan.notes))
    config.memory.chosen = plan.recompute
    from megatron_fbt.data.forecast import forecast

    data, notes = forecast(config, plan.train_samples, stage_samples(config, checkpoint))
    precision = precision_report(config)
    if options.json:
        print(
            json.dumps(
                {
                    **plan.as_dict(),
                    "precision": precision.as_dict(),
                    "data": data and data.as_dict(),
                    "data_notes": notes,
                },
                indent=2,
            )
        )
        return
    print(plan.describe())
    print(precision.describe())
    print("\n".join([*(["", data.describe()] if data else []), *(f"note: {note}" for note in notes)]), end="")
    print("\n" if data or notes else "", end="")


def _resumed(config: PretrainConfig, checkpoint: Path, done: int, steps: int) -> str:
    """Whose plan it is."""
    rest = "the run is finished" if done >= steps else f"{steps - done:,} to go"
    return (
        f"{config.run.dir} has {checkpoint.name} with {done:,} steps done, {rest}: this is the plan of its resume; "
        "another run.dir gives that of a new run"
    )


def planned_vocab_size(config: PretrainConfig) -> int:
    """Vocabulary of a run: model.vocab_size, or the tokenizer's.

    A plan can be made where the tokenizer's files are not, if model.vocab_size is given.

    Raises:
        ConfigError: if neither is given, or model.vocab_size is too small for the tokenizer.
        DataError: if the tokenizer cannot be read.
    """
    path = config.data.tokenizer.path
    if config.model.vocab_size is not None and (path is None or not os.path.exists(path)):
        return config.model.vocab_size
    if path is None:
        raise ConfigError("model.vocab_size = null: no tokenizer to take it from; set it, or set data.tokenizer.path")
    from megatron_fbt.data.tokenizer import build_tokenizer

    return check_vocab_size(config, build_tokenizer(config.data.tokenizer).vocab_size)


def check_vocab_size(config: PretrainConfig, tokenizer_vocab_size: int) -> int:
    """Vocabulary of the model for a tokenizer that is already built.

    Raises:
        ConfigError: if model.vocab_size is smaller than the tokenizer's vocabulary.
    """
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer_vocab_size:
        raise ConfigError(
            f"model.vocab_size = {wanted}: smaller than the tokenizer's {tokenizer_vocab_size}; "
            f"give at least {tokenizer_vocab_size}, or null"
        )
    return wanted or tokenizer_vocab_size
