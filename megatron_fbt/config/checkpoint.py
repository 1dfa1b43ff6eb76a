"""When the state of a run is written, what is kept, and from where a run goes on."""

from dataclasses import dataclass, field
from typing import List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section

DATA_FIELDS = (
    "data.format",
    "data.paths",
    "data.weights",
    "data.sources",
    "data.stages",
    "data.split",
    "data.sequence_length",
    "data.tokenizer",
    "run.seed",
)
"""Fields that the order of a run's samples follows from."""


@dataclass
class CheckpointConfig(Section):
    """Checkpoints go to <run.dir>/checkpoints; a run whose folder holds one resumes from it."""

    save_interval: Optional[int] = None
    """Steps between checkpoints; null = only at the end and when stopped."""
    keep_last: Optional[int] = None
    """Number of newest checkpoints kept; null = all. What `latest` names is always kept."""
    keep_every: Optional[int] = None
    """With keep_last: checkpoints of steps that are multiples of this are kept for ever."""
    keep_best: bool = False
    """With keep_last: the checkpoint with the lowest validation loss (of the last pass) is kept."""
    async_save: bool = False
    """Train on while the files of a checkpoint are written, from a copy of the states in memory; one at a time."""
    async_failure: Literal["stop", "warn"] = "stop"
    """What a checkpoint that could not be written does to the run; the checkpoint before is untouched."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: go on from the checkpoint that `latest` names, or if that is damaged, from the complete one before; without
    any, start a new run. must: the same, but without any it is an error. never: start a new run in a new folder."""
    allow_changes: List[str] = field(default_factory=list)
    """Data fields that a resumed run may have otherwise than before: data.format, data.paths, data.weights,
    data.sources, data.stages, data.split, data.sequence_length, data.tokenizer, run.seed."""
    lease_seconds: float = 60.0
    """Seconds after which a run folder is free again when the run that holds it stops to renew its lease."""
    verify_on_load: bool = True
    """Compare the hashes of all files that are read, whole files; sizes are compared in any case."""
    init_from: Optional[str] = None
    """Checkpoint whose weights a new run starts from: a step_... folder, or a run folder for its newest one. Steps,
    optimizer and data begin anew. A run that has a checkpoint of its own resumes from that."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("checkpoint", self)
        rules.integers("save_interval", "keep_last", "keep_every")
        rules.numbers("lease_seconds", above=True)
        for name in ("keep_every", "keep_best"):
            if rules.usable(name, "keep_last") and getattr(self, name) and self.keep_last is None:
                rules.add(name, "checkpoint.keep_last is null, so all are kept", "set checkpoint.keep_last")
        if rules.usable("allow_changes"):
            unknown = [name for name in self.allow_changes if name not in DATA_FIELDS]
            rules.require(not unknown, "allow_changes", "holds other names", f"give some of {', '.join(DATA_FIELDS)}")
        if rules.usable("init_from") and self.init_from is not None:
            rules.require(bool(self.init_from.strip()), "init_from", "empty", "name a folder, or set it to null")
        return rules.problems
