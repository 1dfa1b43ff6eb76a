"""Rules across sections: does the model fit the layout, and the batch the pipeline?"""

import itertools
from typing import List, Mapping, Optional, Sequence

from megatron_fbt.config.deepspeed import ZERO_STAGES, deepspeed_settings, sharding_problems
from megatron_fbt.config.fp8 import precision_problems
from megatron_fbt.config.pipeline_split import split_problems
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuse_problems
from megatron_fbt.config.rules import raise_problems
from megatron_fbt.data.mixture import mixture_problems
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.batch_size import BatchSizeSchedule, run_length


def validate_config(
    config: PretrainConfig, world_size: Optional[int] = None, phase_start_steps: Optional[Sequence[int]] = None
) -> None:
    """Run the rules of every section, then those across sections.

    Args:
        config: the whole configuration.
        world_size: processes of the run; None = parallel.world_size. With neither, what depends on the
            data-parallel size is not checked.
        phase_start_steps: of the pass schedule in a resumed run; None = those of a new run of this length.

    Raises:
        ConfigError: listing every problem found with field, value and remedy.
    """
    raise_problems([problem for section in vars(config).values() for problem in section.problems()])
    problems = layout_problems(config) + _length_problems(config) + _region_problems(config) + _muon_problems(config)
    problems += sharding_problems(config) + _loss_problems(config) + reuse_problems(config)
    problems += [] if problems else precision_problems(config)
    problems += mixture_problems(config, run_length(config.training, config.data.sequence_length)[1])
    world_size = world_size or config.parallel.world_size
    if world_size is not None:
        problems += _world_problems(config, world_size, phase_start_steps)
    raise_problems(problems)
    if world_size is not None and config.optimizer.sharding in ZERO_STAGES:
        deepspeed_settings(config, world_size // config.parallel.model_parallel_size)


def validate_for_training(config: PretrainConfig) -> None:
    """Refuse what a dry run can do without but training cannot.

    Raises:
        ConfigError: if data or tokenizer are not named.
    """
    problems = []
    if not config.data.paths and not config.data.sources:
        problems.append("data.paths = []: no data set; give the prefix of a .bin/.idx pair, e.g. --data.paths=[corpus]")
    if config.data.format == "labelled" and config.data.tokenizer.path is None:
        if config.model.vocab_size is None:
            problems.append("model.vocab_size = null: rows of token ids do not tell it; give the number of ids")
    elif config.data.tokenizer.path is None:
        remedy = "give a SentencePiece .model file or a folder with Hugging Face tokenizer files"
        problems.append(f"data.tokenizer.path = null: no tokenizer; {remedy}")
    raise_problems(problems)


def resolve_world_size(config: PretrainConfig, environment: Mapping[str, str], dry_run: bool) -> int:
    """Number of processes of the run.

    Args:
        config: the whole configuration.
        environment: os.environ, of which the launcher's WORLD_SIZE is read.
        dry_run: a dry run believes parallel.world_size, then the launcher, and otherwise takes the smallest layout,
            with one data-parallel rank.

    Raises:
        ConfigError: if a real run has another number of processes than parallel.world_size.
    """
    wanted = config.parallel.world_size
    launched = launcher_number(environment, "WORLD_SIZE")
    if dry_run:
        return wanted or launched or config.parallel.model_parallel_size
    launched = launched or 1
    if wanted is not None and wanted != launched:
        raise ConfigError(
            f"parallel.world_size = {wanted}: the launcher started {launched} processes; start {wanted} "
            "(torchrun --nnodes, --nproc_per_node), or set it to null"
        )
    return launched


def launcher_number(environment: Mapping[str, str], name: str) -> Optional[int]:
    """A number that the launcher hands over in its environment; None if it is not there.

    Raises:
        ConfigError: it is not a whole number of at least 0.
    """
    text = environment.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise ConfigError(f"environment variable {name} = {text!r}: not a whole number; unset it, or use a launcher")
    return int(text)


def layout_problems(config: PretrainConfig) -> List[str]:
    """Tensor and pipeline parallelism cut the model into equal parts."""
    tensor = config.parallel.tensor_model_parallel_size
    model, tensor_field = config.model, "tensor_model_parallel_size"
    divisions = [
        ("model.num_attention_heads", model.num_attention_heads, tensor, tensor_field),
        ("model.num_query_groups", model.query_groups, tensor, tensor_field),
        ("model.ffn_hidden_size", model.ffn_size, tensor, tensor_field),
        ("model.hidden_size", model.hidden_size, tensor, tensor_field),
    ]
    if config.parallel.sequence_parallel:
        divisions.append(("data.sequence_length", config.data.sequence_length, tensor, tensor_field))
    return split_problems(config.parallel, model.num_layers) + [
        f"{field} = {value}: not a multiple of parallel.{size_field} = {size}; change one of them"
        + (" or switch parallel.sequence_parallel off" if field == "data.sequence_length" else "")
        for field, value, size, size_field in divisions
        if value % size
    ]


def _muon_problems(config: PretrainConfig) -> List[str]:
    """Muon needs whole matrices."""
    tensor = config.parallel.tensor_model_parallel_size
    if config.optimizer.type != "muon" or tensor == 1:
        return []
    return [
        f"parallel.tensor_model_parallel_size = {tensor}: optimizer.type = 'muon' would orthogonalise each process's "
        "shard of a matrix instead of the matrix; set it to 1, or optimizer.type to adamw"
    ]


def _loss_problems(config: PretrainConfig) -> List[str]:
    """The loss over chunks reads the head's weight itself, which zero3 gathers for the head's own call alone."""
    if not config.memory.chunked_loss or config.optimizer.sharding != "zero3":
        return []
    return [
        "memory.chunked_loss = true: not available with optimizer.sharding = 'zero3'; set it to null or false, or "
        "optimizer.sharding to another value"
    ]


def _region_problems(config: PretrainConfig) -> List[str]:
    """The boundary at the prompt's end needs data that know where the prompt ends."""
    if config.feedback.prefix.granularity != "prompt" or config.data.format != "indexed":
        return []
    return [
        f"feedback.prefix.granularity = 'prompt': data.format = {config.data.format!r} marks no prompts; set it to "
        "conversations or labelled, or feedback.prefix.granularity to row or document"
    ]


def _length_problems(config: PretrainConfig) -> List[str]:
    """The phases of the learning rate fit into the run."""
    optimizer, batch = config.optimizer, config.training.global_batch_size
    _, samples = run_length(config.training, config.data.sequence_length)
    warmup = optimizer.lr_warmup_steps * batch
    decay = optimizer.lr_decay_fraction * samples if optimizer.lr_decay_style == "WSD" else 0
    if not warmup or (warmup < samples and warmup + decay <= samples):
        return []
    return [
        f"optimizer.lr_warmup_steps = {optimizer.lr_warmup_steps}: {warmup:,} rows of warm-up and {decay:,.0f} rows "
        f"of decay do not fit into a run of {samples:,} rows; shorten the warm-up or optimizer.lr_decay_fraction, "
        "or train longer"
    ]


def _world_problems(config: PretrainConfig, world_size: int, starts: Optional[Sequence[int]]) -> List[str]:
    """Processes and batches divide over the layout."""
    parallel, training = config.parallel, config.training
    copies, rest = divmod(world_size, parallel.model_parallel_size)
    if rest:
        product = (
            f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size} "
            f"x context {parallel.context_parallel_size} = {parallel.model_parallel_size}"
        )
        return [f"parallel.world_size = {world_size}: not a multiple of {product}; start a multiple of it"]
    rows = training.micro_batch_size * copies
    start, increment, _ = training.rampup_batch_size or (training.global_batch_size, 1, 0)
    sizes = range(start, training.global_batch_size + 1, increment)
    bad = [size for size in sizes if size % rows]
    if bad:
        field = "global_batch_size" if training.rampup_batch_size is None else "rampup_batch_size"
        value = getattr(training, field)
        return [
            f"training.{field} = {value}: a global batch of {bad[0]} rows is not a multiple of micro_batch_size "
            f"{training.micro_batch_size} x data-parallel size {copies} = {rows}; give multiples of {rows}"
        ]
    return _pipeline_problems(config, copies, starts)


def _pipeline_problems(config: PretrainConfig, data_parallel_size: int, starts: Optional[Sequence[int]]) -> List[str]:
    """K > 1 runs Megatron-Core's interleaved schedule, which takes micro-batches in groups of one for each stage."""
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return []
    schedule = BatchSizeSchedule(config.training, data_parallel_size)
    sizes = _multi_pass_batch_sizes(config, schedule, starts)
    rows = config.training.micro_batch_size * data_parallel_size
    return [
        f"training.global_batch_size = {size}: gives {size // rows} micro-batches (micro_batch_size "
        f"{config.training.micro_batch_size}, data-parallel size {data_parallel_size}), but multi-pass batches over "
        f"{stages} pipeline stages need a multiple of {stages}, at least {stages}; give a multiple of {rows * stages} "
        "rows, a smaller micro_batch_size, or fewer stages"
        for size in sizes
        if size // rows % stages
    ]


def _multi_pass_batch_sizes(
    config: PretrainConfig, schedule: BatchSizeSchedule, starts: Optional[Sequence[int]]
) -> List[int]:
    """Global batch sizes at which a step or a validation may run more than one pass, in ascending order."""
    steps, _ = run_length(config.training, config.data.sequence_length)
    starts = [*(starts or config.feedback.phase_start_steps(steps)), steps]
    multi = [
        (first, end)
        for phase, (first, end) in zip(config.feedback.phases, itertools.pairwise(starts), strict=True)
        if max(phase.passes) > 1 and first < end
    ]
    sizes = {
        level.global_batch_size
        for level in schedule.levels()
        for first, end in multi
        if first < (steps if level.end_step is None else level.end_step) and level.first_step < end
    }
    if config.feedback.validation_passes > 1 and config.training.eval_iters > 0:
        sizes.add(config.training.global_batch_size)
    return sorted(sizes)
