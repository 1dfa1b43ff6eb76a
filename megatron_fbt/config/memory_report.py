"""What each process of a run holds: bytes of weights, gradients, optimizer and activations under every sharding."""

import dataclasses
from dataclasses import dataclass
from typing import Dict, List

from megatron_fbt.config.activation_memory import peak_activations
from megatron_fbt.config.deepspeed import ZERO_STAGES, shards_over_stages
from megatron_fbt.config.parameter_count import StageCount, stage_parameters
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.text_table import table_lines

SHARDINGS = ("none", "megatron", "zero1", "zero2", "zero3")


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
    chunks_shards = config.memory.chunked_loss and sharding == "zero3"
    return not (muon_shards or chunks_shards) and (stages == 1 or shards_over_stages(sharding))


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
    asked = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, sharding=sharding))
    activations, logits = peak_activations(asked, stage, vocab_size)
    return RankMemory(
        weights=(2 if low else 4) * (shared if zero == 3 else held.total),
        gradients=4 * (shared if zero >= 2 else held.total),
        master_weights=4 * stepped if low or zero else 0,
        moments=moments,
        activations=activations,
        logits=logits,
    )


def memory_table(report: Dict[str, RankMemory], chosen: str) -> List[str]:
    """Lines of a table in GiB on the fullest process, the chosen sharding marked."""
    names = [field.name for field in dataclasses.fields(RankMemory)] + ["total"]
    rows = [["GiB by optimizer.sharding", *(name.replace("_", " ") for name in names)]]
    for sharding, memory in report.items():
        mark = " (this run)" if sharding == chosen else ""
        rows.append([f"  {sharding}{mark}", *(f"{getattr(memory, name) / 2**30:.2f}" for name in names)])
    return table_lines(rows)
