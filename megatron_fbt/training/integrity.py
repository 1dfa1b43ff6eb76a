"""What a checkpoint is and whether it is what was written, for people and scripts."""

import math
from pathlib import Path
from typing import Any, Dict, List

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fbt.core.manifest import MANIFEST, check_content, read_manifest
from megatron_fbt.core.safe_index import read_index
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.resume import check_complete
from megatron_fbt.training.run_folder import read_trainer_state, written_config


def find_damage(checkpoint: Path) -> List[str]:
    """Read every file of a checkpoint and say what is not as it was written; nothing is executed.

    Returns:
        One line for each damaged or unknown file; empty for an intact checkpoint.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    checks = [lambda file=name: check_content(checkpoint, file, manifest) for name in manifest.files]
    checks += [lambda: read_index(checkpoint), lambda: check_complete(checkpoint)]
    problems: List[str] = []
    for check in checks:
        try:
            check()
        except CheckpointError as error:
            if not any(str(error).split(" ")[0] == known.split(" ")[0] for known in problems):
                problems.append(str(error))
    unknown = sorted(path.name for path in checkpoint.iterdir() if path.name not in {*manifest.files, MANIFEST})
    return problems + [f"{checkpoint / name} is not in {MANIFEST}" for name in unknown]


def describe_checkpoint(checkpoint: Path) -> Dict[str, Any]:
    """What a checkpoint holds, ready for JSON; files are looked at, tensors are not read.

    Raises:
        CheckpointError: it is damaged.
    """
    check_complete(checkpoint)
    manifest, index = read_manifest(checkpoint), read_index(checkpoint)
    state, config = read_trainer_state(checkpoint), written_config(checkpoint)
    tensors = {
        name: entry for name, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    weights = {name: entry for name, entry in tensors.items() if not name.startswith("optimizer.")}
    return {
        "checkpoint": str(checkpoint),
        "step": state.step,
        "written": manifest.facts.get("written"),
        "samples": state.consumed_samples,
        "tokens": state.consumed_samples * config.data.sequence_length,
        "token_equivalents": state.token_equivalents,
        "pass_counts": state.pass_counts,
        "parameters": sum(math.prod(entry.size) for entry in weights.values()),
        "number_formats": sorted({str(entry.properties.dtype).removeprefix("torch.") for entry in weights.values()}),
        "tensors": len(tensors),
        "model": {
            "num_layers": config.model.num_layers,
            "hidden_size": config.model.hidden_size,
            "num_attention_heads": config.model.num_attention_heads,
            "vocab_size": config.model.vocab_size,
            "fusion": config.feedback.fusion,
        },
        "optimizer": config.optimizer.type,
        "layout": manifest.facts.get("layout"),
        "versions": manifest.facts.get("versions"),
        "data": manifest.facts.get("data"),
        "validation_loss": manifest.facts.get("validation_loss"),
        "files": len(manifest.files) + 1,
        "bytes": manifest.size,
    }
