"""Filling the cache of a run ahead of it, in one process: the run's own way of building its rows, without the run."""

import glob
import os
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from megatron_fbt.config.checks import validate_for_training
from megatron_fbt.config.dry_run import check_vocab_size
from megatron_fbt.config.load import parse_command_line
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.data_plan import DataPlan
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.index_cache import IndexLog
from megatron_fbt.data.source_rows import cache_folder
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.training.batch_size import run_length
from megatron_fbt.training.fingerprint import data_fingerprint, refuse_other_data, stage_samples
from megatron_fbt.training.messages import set_up_messages
from megatron_fbt.training.resume import find_resume_point
from megatron_fbt.training.run_folder import steps_and_samples
from megatron_fbt.versions import check_megatron_core_version


def prepare_from_command_line(config_file: str, overrides: Sequence[str]) -> Dict[str, Any]:
    """Read a run's configuration as the run does, and fill its cache.

    Args:
        config_file: YAML file.
        overrides: fields as the run's command line has them.

    Returns:
        See prepare_cache.

    Raises:
        ConfigError, DataError, CheckpointError: as the run would raise them.
    """
    config, _ = parse_command_line(["--config", config_file, *overrides, "--dry_run"])
    validate_for_training(config)
    set_up_messages(True)
    check_megatron_core_version()
    return prepare_cache(config, run_tokenizer(config))


def prepare_cache(config: PretrainConfig, tokenizer) -> Dict[str, Any]:
    """Build what a run, or its resume, needs of its data and does not find in the cache.

    Args:
        config: of the run, validated; model.vocab_size is set.
        tokenizer: of the run.

    Returns:
        cache_dir; built and found, the entries by their paths below it; bytes of the entries; seconds; training_rows
        and validation_rows; data, the plan of the sources for JSON (or None), and table, the same for a person.
    """
    began = time.monotonic()
    checkpoint = find_resume_point(config).checkpoint
    config.model.vocab_size = check_vocab_size(config, tokenizer.vocab_size)
    _, samples = run_length(config.training, config.data.sequence_length, steps_and_samples(checkpoint))
    validation = config.training.eval_iters * config.training.global_batch_size
    cache, log = cache_folder(config), IndexLog()
    if checkpoint is not None:
        refuse_other_data(config, checkpoint, data_fingerprint(config, tokenizer))
    stages = stage_samples(config, checkpoint)
    datasets = build_datasets(config, tokenizer, samples, validation, stages, log)
    plan: Optional[DataPlan] = datasets.plan
    return {
        "cache_dir": os.path.abspath(cache),
        "built": _relative(log.built, cache),
        "found": _relative(log.found, cache),
        "bytes": sum(os.path.getsize(path) for base in {*log.built, *log.found} for path in _files(base)),
        "seconds": round(time.monotonic() - began, 3),
        "training_rows": len(datasets.train),
        "validation_rows": 0 if datasets.valid is None else len(datasets.valid),
        "data": None if plan is None else plan.as_dict(),
        "table": "" if plan is None else plan.describe(),
    }


def describe(report: Dict[str, Any]) -> str:
    """The report of prepare_cache for a person."""
    built, found = len(report["built"]), len(report["found"])
    lines = [report["table"], ""] if report["table"] else []
    return "\n".join(
        [
            *lines,
            f"{built} entries built, {found} found: {report['bytes']:,} bytes in {report['cache_dir']}",
            f"{report['training_rows']:,} rows for training, {report['validation_rows']:,} for validation; "
            f"{report['seconds']:.1f} s",
        ]
    )


def _relative(bases: List[str], cache: str) -> List[str]:
    return sorted({os.path.relpath(base, cache) for base in bases})


def _files(base: str) -> Tuple[str, ...]:
    return (*glob.glob(f"{glob.escape(base)}-*"), *glob.glob(f"{glob.escape(base)}/*"))
