"""What each process of a run holds: bytes of weights, gradients, optimizer and activations under every sharding."""

import dataclasses
from dataclasses import dataclass
from typing import Dict, List

from megatron_fbt.config.deepspeed import ZERO_STAGES, shards_over_stages
from megatron_fbt.config.parameter_count import StageCount, padded_vocab_size, stage_parameters
from megatron_fbt.config.pipeline_split import stage_layers
from megatron_fbt.config.pretrain import PretrainConfig

SHARDINGS = ("none", "megatron", "zero1", "zero2", "zero3")
FUSION_VECTORS = 7
"""Vectors of the hidden size that fusing one token keeps for the backward, beside those of a plain input."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one process. Activations and logits are those of the deepest batch, estimated for the torch backend."""

    weights: int
    gradients: int
    master_weights: int
    moments: int
    activations: int
    logits: int

    @property
    def states(self) -> int:
        """All that lasts from step to step."""
        return self.weights + self.gradients + self.master_weights + self.moments

    @property
    def total(self) -> int:
        """All parts."""
        return sum(dataclasses.astuple(self))


def memory_report(config: PretrainConfig, data_parallel_size: int, vocab_size: int) -> Dict[str, RankMemory]:
    """The fullest process's memory under each sharding that the layout allows.

    Args:
        config: validated.
        data_parallel_size: ranks over which states are sharded.
        vocab_size: entries of the vocabulary, without padding.
    """
    allowed = [sharding for sharding in SHARDINGS if _allowed(config, sharding)]
    return {sharding: largest_rank(config, sharding, data_parallel_size, vocab_size) for sharding in allowed}


def largest_rank(config: PretrainConfig, sharding: str, data_parallel_size: int, vocab_size: int) -> RankMemory:
    """The fullest process's memory; arguments as in rank_memory."""
    stages = stage_parameters(config.model, config.parallel, vocab_size)
    ranks = [
        rank_memory(config, index, held, sharding, data_parallel_size, vocab_size) for index, held in enumerate(stages)
    ]
    return max(ranks, key=lambda memory: memory.total)


def _allowed(config: PretrainConfig, sharding: str) -> bool:
    stages = config.parallel.pipeline_model_parallel_size
    muon_shards = config.optimizer.type == "muon" and sharding != "none"
    return not muon_shards and (stages == 1 or shards_over_stages(sharding))


def rank_memory(
    config: PretrainConfig, stage: int, held: StageCount, sharding: str, data_parallel_size: int, vocab_size: int
) -> RankMemory:
    """Memory of each process of a pipeline stage.

    Args:
        config: validated.
        stage: its number.
        held: parameters on each of its processes.
        sharding: value of optimizer.sharding that is asked about.
        data_parallel_size: ranks over which states are sharded.
        vocab_size: entries of the vocabulary, without padding.
    """
    zero, low = ZERO_STAGES.get(sharding, 0), config.precision.dtype != "fp32"
    shared = -(-held.total // data_parallel_size)
    stepped = held.total if sharding == "none" else shared
    moments = 8 * stepped - (4 * held.hidden_matrices if config.optimizer.type == "muon" else 0)
    return RankMemory(
        weights=(2 if low else 4) * (shared if zero == 3 else held.total),
        gradients=4 * (shared if zero >= 2 else held.total),
        master_weights=4 * stepped if low or zero else 0,
        moments=moments,
        activations=_activations(config, stage),
        logits=_logits(config, stage, vocab_size),
    )


def passes_in_flight(config: PretrainConfig, stage: int) -> int:
    """Most passes of micro-batches whose backward a stage still waits for, in the deepest batch."""
    passes, stages = config.feedback.max_passes, config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return passes
    if passes == 1:
        return stages - stage
    return 2 * (stages - 1 - stage) + (passes - 1) * stages + 1


def _tokens(config: PretrainConfig) -> int:
    return config.training.micro_batch_size * config.data.sequence_length


def _activations(config: PretrainConfig, stage: int) -> int:
    """Bytes that layers, fusion and final norm keep for the backward."""
    layers = stage_layers(config.parallel, config.model.num_layers)[stage]
    hidden = config.model.hidden_size // _sequence_shards(config)
    number = 4 if config.precision.dtype == "fp32" else 2
    alive, mode = passes_in_flight(config, stage), config.memory.policy.recompute
    early = config.memory.policy.recompute_passes == "early"
    plain = min(alive, 1) if early and mode != "none" else (alive if mode == "none" else 0)
    kept = plain * layer_elements(config, "none") + (alive - plain) * layer_elements(config, mode)
    working = layer_elements(config, "none") if mode == "full" else 0
    first = FUSION_VECTORS * hidden * alive if stage == 0 and config.feedback.max_passes > 1 else 0
    return number * _tokens(config) * (layers * kept + working + first)


def layer_elements(config: PretrainConfig, recompute: str) -> int:
    """Numbers that a layer keeps for each token, on one process; measured by the tensors that autograd saves.

    Norms keep input and output, the MLP its two halves, SiLU and their product; attention queries, keys, values and
    the context. With fewer key/value heads than query heads these are repeated, else a view of the projection is kept.
    """
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    hidden = model.hidden_size // _sequence_shards(config)
    queries = model.num_attention_heads * model.head_size // tensor
    keys = model.query_groups * model.head_size // tensor
    if recompute == "full":
        return hidden
    attention = 3 * (queries + keys) if recompute == "selective" else (6 if keys == queries else 4) * queries
    if model.qk_layernorm:
        attention += 3 * (queries + keys)
    if model.attention_output_gate:
        attention += 2 * queries
    return 6 * hidden + 5 * model.ffn_size // tensor + attention


def _sequence_shards(config: PretrainConfig) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1


def _logits(config: PretrainConfig, stage: int, vocab_size: int) -> int:
    """Bytes of the soft-max over the vocabulary, float32: that of every pass in flight, or one chunk of tokens.

    With chunks each pass in flight keeps its states' gradients or the states, of which the former count here.
    """
    parallel = config.parallel
    if stage != parallel.pipeline_model_parallel_size - 1:
        return 0
    tensor = parallel.tensor_model_parallel_size
    rows = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, tensor) // tensor
    if config.memory.chunks_loss(config.optimizer.sharding):
        kept = (4 if config.precision.dtype == "fp32" else 2) * config.model.hidden_size // _sequence_shards(config)
        chunk = min(int(config.memory.loss_chunk_mib * 2**20), 4 * _tokens(config) * rows)
        return chunk + _tokens(config) * kept * passes_in_flight(config, stage)
    copies = 2 if config.training.z_loss.coefficient > 0 else 1
    return 4 * _tokens(config) * rows * passes_in_flight(config, stage) * copies


def memory_table(report: Dict[str, RankMemory], chosen: str) -> List[str]:
    """Lines of a table in GiB, the chosen sharding marked."""
    names = [field.name for field in dataclasses.fields(RankMemory)] + ["total"]
    rows = [["GiB on the fullest process", *(name.replace("_", " ") for name in names)]]
    for sharding, memory in report.items():
        mark = " (this run)" if sharding == chosen else ""
        rows.append([f"  {sharding}{mark}", *(f"{getattr(memory, name) / 2**30:.2f}" for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
