"""One training process from joining the process group to leaving it."""

from megatron_fbt.config.plan import RunPlan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.parallel import initialize_parallel, shut_down_parallel
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import StoppedBySignal
from megatron_fbt.training.reporter import Reporter
from megatron_fbt.training.signals import SignalWatcher
from megatron_fbt.training.trainer import Trainer


def run_session(config: PretrainConfig, plan: RunPlan, tokenizer: Tokenizer, is_main: bool) -> None:
    """Join the run, resume it if its folder holds a checkpoint, train, leave.

    Raises:
        FBTError: see Trainer.train; on all ranks.
    """
    with SignalWatcher() as signals:
        layout = initialize_parallel(config.parallel, config.run.seed)
        validation_rows = config.training.eval_iters * config.training.global_batch_size
        datasets = build_datasets(config, tokenizer, plan.train_samples, validation_rows)
        trainer = Trainer(config, plan, layout, datasets, tokenizer.eod)
        resumed = trainer.resume()
        reporter = Reporter(config, plan, trainer.state.step, active=is_main)
        if resumed:
            reporter.resumed(trainer.state, trainer.last_saved)
        final_state = "failed"
        try:
            trainer.train(reporter, signals)
            final_state = "finished"
        except StoppedBySignal:
            final_state = "stopped"
            raise
        finally:
            reporter.status(final_state)
            reporter.close()
        shut_down_parallel(layout)
