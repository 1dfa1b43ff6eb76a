"""What a configuration comes to: every derived quantity of a run, before anything is started."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from megatron_fbt.config.feedback import FeedbackConfig, resolved_input_scale
from megatron_fbt.config.memory import MemoryConfig, RecomputePolicy
from megatron_fbt.config.memory_report import RankMemory, memory_report, memory_table
from megatron_fbt.config.parameter_count import count_parameters, padded_vocab_size, stage_parameters
from megatron_fbt.config.pipeline_split import stage_layers
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.recompute_choice import RecomputeOption, choose, option_table, recompute_options, with_policy
from megatron_fbt.config.reuse import reuse_obstacle, saved_share
from megatron_fbt.config.rules import step_at_fraction
from megatron_fbt.training.batch_size import NOTHING_DONE, BatchSizeSchedule, run_length

__all__ = ["RunPlan", "make_plan", "padded_vocab_size"]


@dataclass(frozen=True)
class RunPlan:
    """Derived quantities of a run. Samples are rows of sequence_length tokens; steps count from 0."""

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    layers_per_stage: Tuple[int, ...]
    vocab_size: int
    padded_vocab_size: int
    parameters: int
    """All parameters, the fusion layer's included, padded vocabulary rows not."""
    fusion_parameters: int
    largest_rank_parameters: int
    """On the fullest process, padding and the last stage's copy of a tied embedding included."""
    sharding: str
    memory: Dict[str, RankMemory]
    """Bytes on the fullest process, under every sharding that the layout allows."""
    recompute: RecomputePolicy
    """What is computed again in the backward, as given or as memory.budget_gib has it."""
    budget_gib: Optional[float]
    recompute_options: Tuple[RecomputeOption, ...]
    """What the budget chooses among, the least computation first."""
    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    """At full size, after any ramp-up."""
    num_microbatches: int
    """Micro-batches of each data-parallel rank in a step of full size."""
    tokens_per_step: int
    """In a step of full size, each token counted once."""
    train_steps: int
    train_samples: int
    train_tokens: int
    """Each token counted once whatever the number of passes."""
    phase_start_steps: Tuple[int, ...]
    pass_shares: Dict[int, float]
    """{K: expected share of the run's steps with K passes}."""
    expected_passes: float
    """Mean pass count over the run's steps."""
    token_equivalents: float
    """Expected sum of tokens x passes."""
    reused_share: Optional[float]
    """Expected share of an extra pass's positions that prefix reuse spares (torch backend); None = the data tell."""
    max_passes: int
    validation_passes: int
    notes: Tuple[str, ...]
    """What is allowed but perhaps not meant."""

    def as_dict(self) -> Dict[str, Any]:
        """All fields, for JSON."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """An aligned table for a person."""
        rows = self._layout_rows() + self._run_rows()
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}".rstrip() for label, value in rows]
        lines += ["", "memory of the fullest process", *memory_table(self.memory, self.sharding), ""]
        if self.budget_gib is not None:
            lines += [*option_table(self.recompute_options, self.recompute, self.budget_gib), ""]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def _layout_rows(self) -> List[Tuple[str, str]]:
        state = f"{self.memory[self.sharding].states / 2**30:.2f} GiB on the fullest process"
        layout = (
            f"{self.world_size:,} = tensor {self.tensor_model_parallel_size} x pipeline "
            f"{self.pipeline_model_parallel_size} x data {self.data_parallel_size}"
        )
        return [
            ("processes", layout),
            ("layers per stage", _layers(self.layers_per_stage)),
            ("vocabulary", f"{self.vocab_size:,} (padded to {self.padded_vocab_size:,})"),
            ("parameters", f"{self.parameters:,} (fusion {self.fusion_parameters:,})"),
            ("parameters, fullest process", f"{self.largest_rank_parameters:,}"),
            ("weights, gradients, optimizer", state),
        ]

    def _run_rows(self) -> List[Tuple[str, str]]:
        batch = f"{self.global_batch_size:,} rows = {self.tokens_per_step:,} tokens"
        micro = f"{self.num_microbatches:,} of {self.micro_batch_size:,} x {self.sequence_length:,} tokens on each rank"
        shares = ", ".join(f"{count}: {share:.2%}" for count, share in self.pass_shares.items())
        return [
            ("global batch", batch),
            ("micro-batches", micro),
            ("steps", f"{self.train_steps:,}"),
            ("samples", f"{self.train_samples:,}"),
            ("tokens", f"{self.train_tokens:,}"),
            ("phases start at steps", ", ".join(f"{step:,}" for step in self.phase_start_steps)),
            ("steps by passes", shares),
            ("mean passes", f"{self.expected_passes:.4f}"),
            ("token-equivalents", f"{self.token_equivalents:,.0f}"),
            ("spared in extra passes", _spared(self.reused_share)),
            ("passes in validation", f"{self.validation_passes}"),
        ]


def _spared(share: Optional[float]) -> str:
    """The expected saving of prefix reuse."""
    return "as the data have it" if share is None else f"{share:.1%} of the positions"


def _layers(stages: Tuple[int, ...]) -> str:
    """One number for equal stages, else that of each stage."""
    return f"{stages[0]:,}" if len(set(stages)) == 1 else ", ".join(map(str, stages))


def make_plan(
    config: PretrainConfig,
    world_size: int,
    vocab_size: int,
    phase_start_steps: Optional[Sequence[int]] = None,
    done: Tuple[int, int] = NOTHING_DONE,
) -> RunPlan:
    """Derive a run's quantities.

    Args:
        config: a configuration that validate_config accepts for `world_size`.
        world_size: processes of the run.
        vocab_size: entries of the vocabulary, without padding.
        phase_start_steps: as a resumed run has them; None = those of a new run of this length.
        done: steps and rows of a resumed run.

    Raises:
        ConfigError: nothing fits memory.budget_gib.
    """
    parallel, model, training = config.parallel, config.model, config.training
    tensor, sequence_length = parallel.tensor_model_parallel_size, config.data.sequence_length
    data_parallel_size = world_size // parallel.model_parallel_size
    steps, samples = run_length(training, sequence_length, done)
    batches = BatchSizeSchedule(training, data_parallel_size)
    starts = tuple(phase_start_steps or config.feedback.phase_start_steps(steps))
    shares, token_equivalents = _expected_passes(config.feedback, starts, steps, batches, sequence_length)
    count = count_parameters(model, vocab_size)
    stages = stage_parameters(model, parallel, vocab_size)
    micro_batches = training.num_microbatches(data_parallel_size)
    options = recompute_options(config, shares, data_parallel_size, vocab_size)
    policy = choose(config.memory, options)
    return RunPlan(
        world_size=world_size,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        data_parallel_size=data_parallel_size,
        layers_per_stage=tuple(stage_layers(parallel, model.num_layers)),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tensor),
        parameters=count.total,
        fusion_parameters=count.fusion,
        largest_rank_parameters=max(stage.total for stage in stages),
        sharding=config.optimizer.sharding,
        memory=memory_report(with_policy(config, policy), data_parallel_size, vocab_size),
        recompute=policy,
        budget_gib=config.memory.budget_gib,
        recompute_options=tuple(options),
        sequence_length=sequence_length,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        num_microbatches=micro_batches,
        tokens_per_step=training.global_batch_size * sequence_length,
        train_steps=steps,
        train_samples=samples,
        train_tokens=samples * sequence_length,
        phase_start_steps=starts,
        pass_shares=shares,
        expected_passes=sum(passes * share for passes, share in shares.items()),
        token_equivalents=token_equivalents,
        reused_share=_reused_share(config, shares, micro_batches),
        max_passes=config.feedback.max_passes,
        validation_passes=config.feedback.validation_passes,
        notes=tuple(_notes(config) + _unreached(config, starts, steps)),
    )


def _reused_share(config: PretrainConfig, shares: Dict[int, float], micro_batches: int) -> Optional[float]:
    """See RunPlan: the mean over all extra passes of the run; of batches of two where the run has no extra pass."""
    extra = {passes: share * (passes - 1) for passes, share in shares.items() if passes > 1}
    if not extra:
        return saved_share(config, min(2, config.feedback.max_passes), micro_batches)
    saved = {passes: saved_share(config, passes, micro_batches) for passes in extra}
    if None in saved.values():
        return None
    return sum(extra[passes] * saved[passes] for passes in extra) / sum(extra.values())


def _expected_passes(
    feedback: FeedbackConfig, starts: Tuple[int, ...], steps: int, batches: BatchSizeSchedule, sequence_length: int
) -> Tuple[Dict[int, float], float]:
    """Share of each pass count over the steps, and tokens x passes, both in expectation."""
    shares: Dict[int, float] = {}
    token_equivalents = 0.0
    edges = [min(start, steps) for start in (*starts, steps)]
    for phase, (begin, end) in zip(feedback.phases, itertools.pairwise(edges), strict=True):
        if end == begin:
            continue
        rows = batches.samples_after(end) - batches.samples_after(begin)
        for passes, probability in phase.passes.items():
            shares[passes] = shares.get(passes, 0.0) + probability * (end - begin) / steps
            token_equivalents += probability * passes * rows * sequence_length
    return dict(sorted(shares.items())), token_equivalents


def _unreached(config: PretrainConfig, starts: Sequence[int], steps: int) -> List[str]:
    """Parts of the configuration that the run is too short for, or that change nothing in it."""
    notes = []
    for index, (first, end) in enumerate(itertools.pairwise([*starts, steps])):
        if first >= min(end, steps):
            counts = ", ".join(map(str, sorted(config.feedback.phases[index].passes)))
            reason = f"the run ends after step {steps:,}" if first >= steps else "the next one starts there too"
            notes.append(
                f"phase {index + 1} of feedback.schedule (passes {counts}) is never reached: it starts after step "
                f"{first:,}, and {reason}"
            )
    z_loss = config.training.z_loss
    first = step_at_fraction(z_loss.from_fraction, steps)
    if z_loss.coefficient > 0 and not (first < steps and z_loss.coefficient_at(first, steps)):
        notes.append(f"training.z_loss is never active: its window holds none of the {steps:,} steps")
    for index, stage in enumerate(config.data.stages):
        if stage.first_step >= steps:
            notes.append(
                f"data.stages[{index}] is never reached: it begins after step {stage.first_step:,}, and the run ends "
                f"after step {steps:,}"
            )
    window, length = config.model.sliding_window, config.data.sequence_length
    if window is not None and window >= length:
        notes.append(f"model.sliding_window = {window:,} changes nothing in rows of {length:,} tokens")
    if config.feedback.max_passes == 1:
        notes.append("no batch has more than one pass: the fusion layer is never trained")
    return notes


def _notes(config: PretrainConfig) -> List[str]:
    """Settings that contradict no rule, but are seldom meant."""
    notes = []
    scale, norm = resolved_input_scale(config), config.model.input_norm
    if norm == "none" and scale == 1.0:
        notes.append(
            "model.input_norm is none, so plain inputs have the RMS of the embedding table, but feedback.input_scale "
            f"is 1; give it that RMS (about model.init_method_std = {config.model.init_method_std:g} from scratch)"
        )
    if norm == "rms" and scale != 1.0:
        notes.append(f"plain inputs have RMS 1 (model.input_norm rms), fused ones feedback.input_scale = {scale:g}")
    memory = config.memory
    if memory.chunked_loss is False and memory.loss_chunk_mib != MemoryConfig.loss_chunk_mib:
        notes.append(f"memory.loss_chunk_mib = {memory.loss_chunk_mib:g} is unused: memory.chunked_loss is false")
    if memory.budget_gib is None and memory.policy == RecomputePolicy("none", "early"):
        notes.append("memory.recompute_passes = early changes nothing: memory.recompute is none")
    obstacle = reuse_obstacle(config)
    if config.feedback.max_passes > 1 and config.feedback.prefix_reuse is None and obstacle is not None:
        notes.append(f"feedback.prefix_reuse is off, extra passes are computed in full: {obstacle}")
    awake = itertools.dropwhile(lambda phase: max(phase.passes) == 1, config.feedback.phases)
    if config.optimizer.type == "muon" and any(1 in phase.passes for phase in awake):
        notes.append(
            "optimizer.type is muon, which makes a step of full length of any momentum: one-pass batches after "
            "the first multi-pass one move the fusion layer on along its last gradients; take them out of the schedule"
        )
    if not config.data.paths and not config.data.sources:
        notes.append("data.paths is empty: training needs it")
    if config.data.tokenizer.path is None and config.data.format != "labelled":
        notes.append("data.tokenizer.path is null: training needs it")
    return notes
