"""What a run's order of samples follows from; a resumed run must have the same."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.manifest import read_manifest
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import CheckpointError


def data_fingerprint(config: PretrainConfig, tokenizer: Tokenizer) -> Dict[str, Any]:
    """Blend, seed, row length and tokenizer by the names of their fields, ready for JSON."""
    data = config.data
    identity = json.dumps(list(tokenizer.unique_identifiers.items()))
    return {
        "data.format": data.format,
        "data.paths": [os.path.normpath(path) for path in data.paths],
        "data.weights": data.weights,
        "data.split": data.split,
        "data.sequence_length": data.sequence_length,
        "data.tokenizer": hashlib.sha256(identity.encode()).hexdigest(),
        "run.seed": config.run.seed,
    }


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
