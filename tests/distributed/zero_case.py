"""What test_zero.py asserts on: the same steps under every sharding, and checkpoints that pass between them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.memory_report import RankMemory, rank_memory
from megatron_fbt.config.parameter_count import stage_parameters
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import run_passes
from megatron_fbt.training.checkpoint import Checkpointer
from megatron_fbt.training.lr_schedule import LearningRate
from megatron_fbt.training.optimizer import HeldBytes, StepReport
from megatron_fbt.training.run_folder import TrainerState
from tests.distributed.model_case import Built, Case, Grid, build, global_batch, own_part, start

STEPS = (1, 2, 1, 3, 2)
"""Passes of the steps; more steps go on from the beginning."""
MODELS: Dict[str, Dict[str, Any]] = {
    "tied": {},
    "untied": {
        "model.share_embeddings_and_output_weights": False,
        "model.qk_layernorm": True,
        "model.add_qkv_bias": True,
        "feedback.fusion": "concat",
        "memory.recompute": "full",
    },
}


@dataclass(frozen=True)
class Job:
    """A model that takes some steps under one sharding and leaves a checkpoint.

    Attributes:
        model: Of MODELS.
        sharding: optimizer.sharding.
        save: Where its checkpoint goes.
        load: Checkpoint that it goes on from; None = a new run.
        steps: Number of steps.
        more: Further fields.
        fault: "nan" or "spike": what happens to the third step.
    """

    model: str
    sharding: str
    save: Path
    load: Optional[Path] = None
    steps: int = len(STEPS)
    more: Dict[str, Any] = field(default_factory=dict)
    fault: Optional[str] = None

    @property
    def case(self) -> Case:
        """Its model and recipe."""
        batch = {"training.micro_batch_size": 2, "training.global_batch_size": 16}
        tokenizer = {"data.tokenizer.type": "huggingface", "data.tokenizer.path": str(self.save.parent / "tokenizer")}
        more = {**tokenizer, **self.more}
        if self.sharding == "zero3" and self.model == "untied":  # by default it shards no small weights
            added = self.save.with_suffix(".json")
            draft = self.save.with_suffix(f".{os.getpid()}")  # all ranks write it, and one may be reading it
            draft.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
            draft.replace(added)
            more["optimizer.deepspeed_config"] = str(added)
        return Case("", {**MODELS[self.model], **batch, "optimizer.sharding": self.sharding, **more})


@dataclass
class Outcome:
    """What one rank saw of a job."""

    reports: List[StepReport]
    held: HeldBytes
    expected: RankMemory


def run_jobs(rank: int, world_size: int, grid: Grid, jobs: Sequence[Job]) -> List[Outcome]:
    """The function that test processes start with: jobs of one layout, one after the other."""
    layout = start(grid)
    return [run_job(job, grid, layout) for job in jobs]


def run_job(job: Job, grid: Grid, layout: Layout) -> Outcome:
    """Load, take the steps, save."""
    built, state = build(job.case, grid, layout), TrainerState()
    if job.load is not None:
        state = Checkpointer(job.load.parent, None, layout).load(job.load, built.stage, built.optimizer)
    reports = [take_step(built, state, job.fault if step == 2 else None) for step in range(job.steps)]
    folder = Checkpointer(job.save, None, layout)
    folder.save(built.stage, built.optimizer, state, dump_yaml(built.config))
    config, vocab = built.config, built.stage.vocab_size
    stage = stage_parameters(config.model, config.parallel, vocab)[layout.pipeline_rank]
    expected = rank_memory(config, layout.pipeline_rank, stage, job.sharding, layout.data_size, vocab)
    return Outcome(reports, built.optimizer.held_bytes(), expected)


def take_step(built: Built, state: TrainerState, fault: Optional[str] = None) -> StepReport:
    """One step as the trainer takes it, learning rate and dormant fusion layer included."""
    optimizer, passes = built.optimizer, STEPS[state.step % len(STEPS)]
    if passes > 1 and state.switch_on_step is None:
        state.switch_on_step = state.step
    LearningRate(built.config.optimizer, 0, 1000).apply(optimizer, 0)
    built.stage.train()
    optimizer.zero_grad()
    everything = global_batch(state.step)
    batches = own_part(everything[: len(everything) // built.layout.data_size * built.layout.data_size], built.layout)
    if fault == "nan" and built.layout.data_rank == built.layout.data_size - 1:
        batches[0].loss_mask = batches[0].loss_mask * float("nan")
    optimizer.judge = lambda loss, norm: "a spike" if fault == "spike" else None
    totals = run_passes(
        built.stage,
        batches,
        passes,
        built.recipe,
        on_last_backward=optimizer.on_last_backward,
        through=optimizer.through,
    )
    report = optimizer.step(totals, state.switch_on_step is not None, False)
    state.step, state.updates, state.fusion_updates = state.step + 1, optimizer.updates, optimizer.fusion_updates
    return report


def tensors(folder: Path) -> Dict[str, torch.Tensor]:
    """Everything in the only checkpoint of a folder, whole, by name."""
    from megatron_fbt.core.checkpoint_io import read_tensors

    (checkpoint,) = folder.glob("step_*")
    return read_tensors(checkpoint)
