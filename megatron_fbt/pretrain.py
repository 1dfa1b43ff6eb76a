"""Train a Full-Bandwidth Transformer: torchrun … -m megatron_fbt.pretrain --config FILE [--section.field value …]."""

import os
import sys
from typing import List, Optional

from megatron_fbt.config.checks import launcher_number, resolve_world_size, validate_config
from megatron_fbt.config.dry_run import check_vocab_size, run_dry
from megatron_fbt.config.load import parse_command_line
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.ending import end_rank
from megatron_fbt.errors import StoppedBySignal
from megatron_fbt.training.batch_size import run_length
from megatron_fbt.training.leftovers import tidy_up
from megatron_fbt.training.messages import set_up_messages
from megatron_fbt.training.resume import find_resume_point
from megatron_fbt.training.run_folder import (
    changed_fields,
    prepare_run_folder,
    refuse_another_model,
    steps_and_samples,
    stored_phase_starts,
)
from megatron_fbt.training.signals import SignalWatcher
from megatron_fbt.versions import check_megatron_core_version


def main(argv: Optional[List[str]] = None) -> int:
    """Parse, check, train; returns the exit code (see megatron_fbt.errors)."""
    try:
        config, options = parse_command_line(sys.argv[1:] if argv is None else argv)
        if options.dry_run:
            run_dry(config, options)
        else:
            with SignalWatcher() as signals:
                train(config, not launcher_number(os.environ, "RANK"), signals)
    except StoppedBySignal as stop:
        if stop.speaks:
            print(stop, flush=True)
        return stop.exit_code
    except Exception as error:
        return end_rank(error)
    return 0


def train(config: PretrainConfig, is_main: bool, signals: SignalWatcher) -> None:
    """Run the training that a configuration describes, on this rank.

    Args:
        config: validated.
        is_main: whether this is rank 0.
        signals: already watching, so that a signal during the slow start is not lost.
    """
    set_up_messages(is_main)
    check_megatron_core_version()
    world_size = resolve_world_size(config, os.environ, dry_run=False)
    validate_config(config, world_size)
    prepare_run_folder(config.run.dir)
    checkpoint = find_resume_point(config).checkpoint
    done = steps_and_samples(checkpoint)
    train_steps, _ = run_length(config.training, config.data.sequence_length, done)
    finished = checkpoint if done[0] >= train_steps else None
    if finished is not None:
        refuse_another_model(config, finished)
        if is_main:
            print(f"{config.run.dir} is finished ({finished.name}, the run has {train_steps} steps): nothing to do")
            print("".join(f"changed since then: {change}\n" for change in changed_fields(config, finished)), end="")
            tidy_up(config)
        return
    phase_starts = None if checkpoint is None else stored_phase_starts(config, checkpoint)
    validate_config(config, world_size, phase_starts)
    tokenizer = run_tokenizer(config)
    config.model.vocab_size = check_vocab_size(config, tokenizer.vocab_size)
    from megatron_fbt.core.backends import as_here, check_backend
    from megatron_fbt.core.precision_report import precision_report
    from megatron_fbt.training.session import run_session

    plan = make_plan(as_here(config), world_size, config.model.vocab_size, phase_starts, done)
    config.memory.chosen = plan.recompute
    if is_main:
        print(plan.describe(), precision_report(config).describe(), sep="\n", flush=True)
    check_backend(config)
    run_session(config, plan, tokenizer, checkpoint, is_main, signals)


if __name__ == "__main__":
    sys.exit(main())
