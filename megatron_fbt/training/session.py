"""One training process from joining the process group to leaving it."""

import contextlib
from pathlib import Path
from typing import Optional

from megatron_fbt.config.plan import RunPlan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.core.parallel import initialize_parallel, shut_down_parallel
from megatron_fbt.core.phases import phase
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.stored_tokenizer import FOLDER, store_tokenizer
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import StoppedBySignal
from megatron_fbt.training.claim import claim_run_folder, resume
from megatron_fbt.training.failure import on_first_rank, speaks_first
from megatron_fbt.training.fingerprint import STAGES, data_fingerprint, stage_facts, stage_samples
from megatron_fbt.training.lease import Lease
from megatron_fbt.training.messages import hide_gpu_hints
from megatron_fbt.training.reporter import Reporter
from megatron_fbt.training.run_folder import changed_fields, initial_checkpoint
from megatron_fbt.training.signals import SignalWatcher
from megatron_fbt.training.stop import StopRequests
from megatron_fbt.training.trainer import Trainer

NETWORK_FIELDS = ("model.", "feedback.fusion", "feedback.input_scale", "data.reset_")
"""What the network computes from given weights."""


def run_session(
    config: PretrainConfig,
    plan: RunPlan,
    tokenizer: Tokenizer,
    planned: Optional[Path],
    is_main: bool,
    signals: SignalWatcher,
) -> None:
    """Join the run, resume it if its folder holds a checkpoint, train, leave.

    An exception says in its attribute `speaks` whether this rank is to print it.

    Args:
        config: validated, with model.vocab_size resolved.
        plan: derived quantities.
        tokenizer: the one that made the data.
        planned: the checkpoint that the plan was made for; None = a new run.
        is_main: whether this is rank 0, which reports.
        signals: already watching.

    Raises:
        FBTError: see Trainer.train.
    """
    reporter = Reporter(config, plan, active=is_main)
    requests = StopRequests(signals, Path(config.run.dir), config.training.wall_clock_limit_s, is_main)
    lease = Lease(Path(config.run.dir), config.checkpoint.lease_seconds)
    try:
        if not on_gpu():
            hide_gpu_hints()
        layout = initialize_parallel(config.parallel, config.run.seed)
        _train(config, plan, tokenizer, layout, planned, lease, reporter, requests)
    except StoppedBySignal as stop:
        stop.speaks = is_main
        requests.obeyed()
        reporter.end("stopped")
        shut_down_parallel(layout)
        raise
    except BaseException as error:
        error.speaks = speaks_first()
        with contextlib.suppress(OSError):  # on a full disk the error itself must still reach the user
            if lease.held:  # what is in the folder of another run is that run's
                reporter.end("failed")
        raise
    finally:
        lease.release()
    reporter.end("finished")
    shut_down_parallel(layout)


def _train(config, plan, tokenizer, layout, planned, lease: Lease, reporter: Reporter, requests: StopRequests) -> None:
    point = claim_run_folder(config, lease, reporter.say, layout.cpu_group)
    source = initial_checkpoint(config) if point.checkpoint is None else None
    reporter.starting("opening the data; row indices that are not cached yet are built")
    validation_rows = config.training.eval_iters * config.training.global_batch_size
    limits = config.parallel
    with phase(limits, layout, limits.data_timeout_s):
        stages = on_first_rank(lambda: stage_samples(config, point.checkpoint), layout.cpu_group)
        datasets = build_datasets(config, tokenizer, plan.train_samples, validation_rows, stages)
    reporter.data(datasets.plan)
    reporter.say(f"building the model: {plan.parameters:,} parameters, {plan.largest_rank_parameters:,} on one process")
    trainer = Trainer(config, plan, layout, datasets, tokenizer.eod)
    trainer.guard, trainer.checkpointer.guard = lease.check_noticed, lease.check
    trainer.checkpointer.before_publishing = reporter.flush
    fingerprint = data_fingerprint(config, tokenizer)
    trainer.checkpointer.facts.update({"data": fingerprint, STAGES: stage_facts(config, stages)})
    if point.checkpoint is not None:
        resume(config, trainer, point, planned, fingerprint, reporter)
        if config.checkpoint.init_from is not None:
            reporter.say("checkpoint.init_from is not read: the run resumes from its own checkpoint")
    elif source is not None:
        with phase(limits, layout, limits.load_timeout_s):
            trainer.checkpointer.load_weights(source, trainer.stage, trainer.optimizer)
        reporter.say(f"a new run with the weights of {source}")
        differing = [change for change in changed_fields(config, source) if change.startswith(NETWORK_FIELDS)]
        if differing:
            reporter.say(f"the network differs from the one that made them: {'; '.join(differing)}")
    copied = Path(config.run.dir) / FOLDER
    on_first_rank(lambda: store_tokenizer(tokenizer, config.data, copied), layout.cpu_group)
    trainer.checkpointer.folder.attached = copied
    reporter.begin(trainer.state)
    trainer.train(reporter, requests)
