"""What a run folder says about its run, readable in an instant: no torch, no processes.

<run.dir>/checkpoints/step_00000100/    a checkpoint
<run.dir>/checkpoints/latest            name of the newest complete checkpoint
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import yaml

from megatron_fbt.config.feedback import resolved_input_scale
from megatron_fbt.config.load import dump_yaml, load_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError, ConfigError

TRACKER = "latest"
STATE_FILE = "trainer_state.json"
CONFIG_FILE = "config.yaml"
FREE_TO_CHANGE = ("run.dir", "logging.", "checkpoint.")
"""Configuration that has no influence on the numbers of a run."""


@dataclass
class TrainerState:
    """What a run must remember beside weights and optimizer state."""

    step: int = 0
    """Steps executed."""
    consumed_samples: int = 0
    """Rows read; the next row's sample number."""
    token_equivalents: int = 0
    """Tokens times passes so far."""
    switch_on_step: Optional[int] = None
    """The run's first step with several passes, counted from 0; null = it has not come."""
    phase_start_steps: List[int] = dataclasses.field(default_factory=list)
    """First step of each phase of feedback.schedule."""
    pass_counts: List[int] = dataclasses.field(default_factory=list)
    """Steps executed with 1, 2, ... passes."""
    updates: int = 0
    """Optimizer updates made."""
    fusion_updates: int = 0
    """Updates of the fusion layer."""
    skipped: int = 0
    """Steps skipped because of bad numbers."""
    bad_in_a_row: int = 0
    """Of these, the last ones without a good step between."""
    left_out: List[List[int]] = dataclasses.field(default_factory=list)
    """[first, one after the last] of the samples that are not used, numbered as in a run that uses all."""
    rewinds: int = 0
    """How often the run has gone back to a checkpoint because of bad numbers."""
    recent_losses: List[float] = dataclasses.field(default_factory=list)
    """Losses of pass 1 that training.spikes compares the next step with."""
    recent_grad_norms: List[float] = dataclasses.field(default_factory=list)
    """Gradient norms of these steps."""
    loss_scaler: List[float] = dataclasses.field(default_factory=list)
    """With precision.dtype fp16: loss scale, steps since an overflow, overflows until it falls."""

    @property
    def fusion_active(self) -> bool:
        """Whether a multi-pass batch has come."""
        return self.switch_on_step is not None

    @property
    def pass_shares(self) -> Dict[int, float]:
        """{K: share of the steps so far with K passes}, for every K up to the largest so far."""
        return {passes: count / sum(self.pass_counts) for passes, count in enumerate(self.pass_counts, start=1)}

    def count_passes(self, passes: int) -> None:
        """Count one executed step."""
        self.pass_counts += [0] * (passes - len(self.pass_counts))
        self.pass_counts[passes - 1] += 1

    def describe_passes(self) -> str:
        """The pass counts so far, for a person."""
        counts = {passes: count for passes, count in enumerate(self.pass_counts, start=1) if count}
        shares = ", ".join(f"{passes}: {count:,} ({self.pass_shares[passes]:.2%})" for passes, count in counts.items())
        mean = sum(passes * share for passes, share in self.pass_shares.items())
        return f"steps by passes so far: {shares}; mean passes {mean:.4f}, token-equivalents {self.token_equivalents:,}"


def step_folder(step: int) -> str:
    """Name of the checkpoint after so many steps."""
    return f"step_{step:08d}"


def checkpoints_folder(config: PretrainConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.run.dir) / "checkpoints"


def find_step_folder(checkpoint: Union[str, Path]) -> Path:
    """Folder of one checkpoint.

    Args:
        checkpoint: The step's folder itself, a `checkpoints` folder or a run folder; of the last two, the checkpoint
            that the tracker file `latest` names.

    Raises:
        CheckpointError: No checkpoint there; the message has the path.
    """
    folder = Path(checkpoint)
    if not os.path.isdir(folder):  # False for a name that is too long, too
        raise CheckpointError(f"checkpoint {folder}: no such folder. Name a step_... folder, or the run's folder.")
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    tracker = folder / TRACKER
    if tracker.is_file():
        name = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if name not in {path.name for path in folder.iterdir() if path.is_dir()}:
            raise CheckpointError(
                f"{tracker}: names {name[:80]!r}, which is not a folder beside it. Name a step_... folder."
            )
        folder = folder / name
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"checkpoint {folder}: neither config.yaml nor a tracker file '{TRACKER}' in it. "
            "Name a step_... folder, or the run's folder."
        )
    if (folder / "status.json").is_file() and not (folder / "manifest.json").exists():
        raise CheckpointError(f"checkpoint {folder}: the run there has no checkpoint yet. Name another folder.")
    return folder


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Counters of a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = checkpoint / STATE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        state = TrainerState(**content)
        for name, default in vars(TrainerState()).items():
            kinds = {int: (int,), list: (list,)}.get(type(default), (int, type(None)))
            value = getattr(state, name)
            if not isinstance(value, kinds) or (isinstance(value, int) and value < 0):
                raise ValueError(f"{name} = {str(value)[:80]!r}")
        if not all(isinstance(pair, list) and [type(end) for end in pair] == [int, int] for pair in state.left_out):
            raise ValueError(f"left_out = {str(state.left_out)[:80]!r}")
        return state
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; resume from an older checkpoint") from error


def steps_and_samples(checkpoint: Optional[Path]) -> Tuple[int, int]:
    """How far a checkpoint is; of none, (0, 0).

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    state = TrainerState() if checkpoint is None else read_trainer_state(checkpoint)
    return state.step, state.consumed_samples


def stored_phase_starts(config: PretrainConfig, checkpoint: Path) -> Optional[List[int]]:
    """First steps of the phases of feedback.schedule as a checkpoint has them, whatever the run's length is now.

    Returns:
        None if the list of phases has changed since, or none is stored: then they start as in a new run.

    Raises:
        CheckpointError: counters or configuration of the checkpoint are missing or damaged.
    """
    if written_config(checkpoint).feedback.phases != config.feedback.phases:
        return None
    return read_trainer_state(checkpoint).phase_start_steps or None


def prepare_run_folder(run_dir: str) -> None:
    """Make the run folder, and see that it can be written.

    Raises:
        ConfigError: it is a file, or cannot be made or written.
    """
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "is not a folder" if Path(run_dir).exists() else f"cannot be made ({error.strerror})"
        raise ConfigError(f"run.dir = {run_dir!r}: {reason}; name another folder") from None
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir = {run_dir!r}: may not be written; change its permissions or name another folder")


def changed_fields(config: PretrainConfig, checkpoint: Path) -> List[str]:
    """Fields that differ from those a checkpoint was written with, as `field: old -> new`.

    Raises:
        CheckpointError: the checkpoint's configuration is missing or damaged.
    """
    old, new = _flat(_written_sections(checkpoint)), _flat(yaml.safe_load(dump_yaml(config)))
    names = [name for name in new if name in old and old[name] != new[name] and not name.startswith(FREE_TO_CHANGE)]
    if config.model.vocab_size is None:  # not known yet: the tokenizer's
        names = [name for name in names if name != "model.vocab_size"]
    return [f"{name}: {json.dumps(old[name])} -> {json.dumps(new[name])}" for name in names]


def written_config(checkpoint: Path) -> PretrainConfig:
    """The configuration that a checkpoint was written with.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    _written_sections(checkpoint)
    try:
        return load_yaml(str(checkpoint / CONFIG_FILE))
    except ConfigError as error:
        raise CheckpointError(f"the configuration of the checkpoint cannot be read: {error}") from error


def _written_sections(checkpoint: Path) -> Dict[str, Any]:
    path = checkpoint / CONFIG_FILE
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read: {reason}; resume from an older checkpoint") from error
    names = [section.name for section in dataclasses.fields(PretrainConfig)]
    whole = isinstance(sections, dict) and all(isinstance(sections.get(name), dict) for name in names)
    if not whole or "seed" not in sections["run"]:
        raise CheckpointError(f"{path} holds no whole configuration; resume from an older checkpoint")
    return sections


def initial_checkpoint(config: PretrainConfig) -> Optional[Path]:
    """The checkpoint whose weights a new run starts from; None if checkpoint.init_from is not set.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    if config.checkpoint.init_from is None:
        return None
    checkpoint = find_step_folder(config.checkpoint.init_from)
    old, new = _meaning(written_config(checkpoint)), _meaning(config)
    _refuse_differences(f"{checkpoint} is of another model", old, new, "name another checkpoint.init_from")
    return checkpoint


def refuse_another_model(config: PretrainConfig, checkpoint: Path) -> None:
    """Refuse to go on from a checkpoint whose weights mean something else, or whose optimizer keeps other states.

    Raises:
        CheckpointError: naming the fields; or the checkpoint's configuration is missing or damaged.
    """
    old, new = ({**_meaning(c), "optimizer.type": c.optimizer.type} for c in (written_config(checkpoint), config))
    _refuse_differences(f"{checkpoint} is of another model or optimizer", old, new, "choose another run.dir")


def _refuse_differences(what: str, old: Dict[str, Any], new: Dict[str, Any], remedy: str) -> None:
    differing = [
        f"{name} = {value}: the checkpoint has {old[name]}"
        for name, value in new.items()
        if value != old[name] and None not in (value, old[name])
    ]
    if differing:
        raise CheckpointError(
            f"{what}: {'; '.join(differing)}. Set these fields to the checkpoint's values, or {remedy}"
        )


def _meaning(config: PretrainConfig) -> Dict[str, Any]:
    """What gives a model's weights their meaning, by field; None where it is not known yet."""
    model = config.model
    return {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.kv_channels": model.head_size,
        "model.qk_layernorm": model.qk_layernorm,
        "model.add_qkv_bias": model.add_qkv_bias,
        "model.attention_output_gate": model.attention_output_gate,
        "model.residual_multiplier": model.residual_multiplier,
        "model.layernorm_epsilon": model.layernorm_epsilon,
        "model.share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
        "model.input_norm": model.input_norm,
        "model.vocab_size": model.vocab_size,
        "feedback.fusion": config.feedback.fusion,
        "feedback.input_scale": resolved_input_scale(config),
    }


def _flat(tree: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Dotted names of the leaves; pass counts as keys of a schedule stay where they are, inside a list."""
    leaves: Dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update(_flat(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
