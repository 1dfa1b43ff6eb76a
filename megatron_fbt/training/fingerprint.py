"""What a run's order of samples follows from; a resumed run must have the same."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.sources import SourceConfig
from megatron_fbt.core.manifest import read_manifest
from megatron_fbt.data.mixture import first_samples
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.run_folder import steps_and_samples

STAGES = "data_stages"
"""Entry of a checkpoint's manifest."""


def data_fingerprint(config: PretrainConfig, tokenizer: Tokenizer) -> Dict[str, Any]:
    """Blend, seed, row length and tokenizer by the names of their fields, ready for JSON."""
    data = config.data
    identity = json.dumps(list(tokenizer.unique_identifiers.items()))
    return {
        "data.format": data.format,
        "data.paths": [os.path.normpath(path) for path in data.paths],
        "data.weights": data.weights,
        "data.sources": [_source(source) for source in data.sources],
        "data.stages": [dataclasses.asdict(stage) for stage in data.stages],
        "data.split": data.split,
        "data.sequence_length": data.sequence_length,
        "data.tokenizer": hashlib.sha256(identity.encode()).hexdigest(),
        "run.seed": config.run.seed,
    }


def _source(source: SourceConfig) -> Dict[str, Any]:
    """What of a source the order of samples follows from."""
    fields = {name: value for name, value in dataclasses.asdict(source).items() if name != "max_epochs"}
    return {**fields, "paths": [os.path.normpath(path) for path in source.paths]}


def stage_samples(config: PretrainConfig, checkpoint: Optional[Path]) -> List[int]:
    """First sample of each stage of data.stages: of those that a resumed run has met, the one at which it did.

    Batches may have another size since then; a new run, and the stages to come, follow the configuration.

    Raises:
        CheckpointError: the checkpoint's counters or manifest cannot be read.
    """
    done = steps_and_samples(checkpoint)
    known = [] if checkpoint is None else read_manifest(checkpoint).facts.get(STAGES, [])
    met = []
    for stage, (first_step, first_sample) in zip(config.data.stages, known):
        if stage.first_step != first_step or first_step > done[0]:
            break
        met.append(int(first_sample))
    return first_samples(config, met, done)


def stage_facts(config: PretrainConfig, samples: Sequence[int]) -> List[List[int]]:
    """What stage_samples reads from a manifest: [first step, first sample] of each stage."""
    return [[stage.first_step, sample] for stage, sample in zip(config.data.stages, samples)]


def refuse_other_data(config: PretrainConfig, checkpoint: Path, fingerprint: Dict[str, Any]) -> None:
    """Refuse to go on with other data than before, but for the fields in checkpoint.allow_changes.

    Raises:
        CheckpointError: naming each field with its old and new value.
    """
    before = read_manifest(checkpoint).facts.get("data") or {}
    changed = [
        f"{name} = {_show(value)}: the run has {_show(before[name])}"
        for name, value in fingerprint.items()
        if name in before and before[name] != value and name not in config.checkpoint.allow_changes
    ]
    if changed:
        names = ", ".join(change.partition(" ")[0] for change in changed)
        raise CheckpointError(
            f"the data of {checkpoint} were others: {'; '.join(changed)}. Set these fields back, choose another "
            f"run.dir, or allow the change: checkpoint.allow_changes = [{names}]"
        )


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
