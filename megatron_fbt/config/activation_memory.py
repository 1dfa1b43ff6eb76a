"""What a step holds at its fullest above weights, gradients and optimizer: an estimate, for the torch backend.

Numbers are counted for each token and layer as autograd saves them in fp32 or bf16 on a CPU; extra passes count as
whole rows, the most that they can compute.
"""

from dataclasses import dataclass
from typing import List, Tuple

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.parameter_count import padded_vocab_size, stage_parameters
from megatron_fbt.config.pipeline_split import stage_layers
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuses_prefix

FUSION_VECTORS = 7
"""Vectors of the hidden size that fusing one token keeps for the backward."""
EXCHANGED = 4
"""Vectors of the hidden size, for each token, that are on their way between stages."""
FINAL_NORM_VECTORS = 2
"""Vectors that the final norm keeps beside those of a layer."""


@dataclass(frozen=True)
class InFlight:
    """Passes of micro-batches whose backward a stage still waits for, at most."""

    first: int
    """First passes that are not their batch's last."""
    middle: int
    last: int

    @property
    def total(self) -> int:
        """All passes."""
        return self.first + self.middle + self.last


def passes_in_flight(config: PretrainConfig, stage: int) -> InFlight:
    """Of the deepest batch in Megatron-Core's schedules: passes in turn, each of one micro-batch for each stage."""
    passes, stages = config.feedback.max_passes, config.parallel.pipeline_model_parallel_size
    if passes == 1:
        return InFlight(0, 0, stages - stage)
    after = 2 * (stages - 1 - stage) + 1
    return InFlight(stages + max(0, after - stages), (passes - 2) * stages, min(stages, after))


def peak_activations(config: PretrainConfig, stage: int, vocab_size: int) -> Tuple[int, int]:
    """Bytes on each process of a stage at the fullest point of a step: activations, and what the soft-max needs.

    Args:
        config: validated, with a policy of recompute.
        stage: its number.
        vocab_size: entries of the vocabulary, without padding.
    """
    estimate = _Estimate(config, stage, vocab_size)
    return max(estimate.moments(), key=sum)


class _Estimate:
    """Bytes of the parts of a step on one process of a stage; see peak_activations."""

    def __init__(self, config: PretrainConfig, stage: int, vocab_size: int):
        model, parallel = config.model, config.parallel
        self.config = config
        self.first, self.last = stage == 0, stage == parallel.pipeline_model_parallel_size - 1
        self.number = 4 if config.precision.dtype == "fp32" else 2
        self.tokens = config.training.micro_batch_size * config.data.sequence_length
        self.layers = stage_layers(parallel, model.num_layers)[stage]
        self.hidden = model.hidden_size // sequence_shards(config)
        self.flight, self.policy = passes_in_flight(config, stage), config.memory.policy
        self.several = config.feedback.max_passes > 1
        self.reuses = self.several and reuses_prefix(config)
        self.chunked = config.memory.chunks_loss(config.optimizer.sharding, config.precision.fp8_head)
        rows = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size)
        self.rows = rows // parallel.tensor_model_parallel_size
        self.one_graph = config.optimizer.sharding in ZERO_STAGES
        weights = stage_parameters(model, parallel, vocab_size)[stage].total
        self.waiting_gradients = self.number * weights if self.one_graph and self.several else 0
        """Bytes of weight gradients of later passes, where one backward goes through all passes."""

    def moments(self) -> List[Tuple[int, int]]:
        """(activations, soft-max) at the points of a step that may be its fullest."""
        flight, logits = self.flight, self.logits()
        first, middle, last = self.kept("first"), self.kept("middle"), self.kept("last")
        whole = flight.first * first + flight.middle * middle + flight.last * last
        if self.config.parallel.pipeline_model_parallel_size > 1:
            modes = {self.policy.of_pass(last=True), self.policy.of_pass(last=not self.several)}
            backward = max(self.backward(mode) for mode in modes)
            whole += EXCHANGED * self.number * self.tokens * self.hidden
            return [(whole, logits), (whole + max(backward, self.table()), self.kept_logits())]
        found = [(whole, logits), (whole + self.backward(self.policy.of_pass(last=True)), self.kept_logits())]
        mode, waiting = self.policy.of_pass(last=False), self.shared_keys() + self.waiting_gradients
        for left in range(flight.total - 1, -1, -1):  # passes whose backward is still to come
            held = left and first + (left - 1) * middle + waiting
            softmax = self.kept_logits() * left // flight.total
            found += [(held + self.table(), softmax), (held + (left and self.backward(mode)), softmax)]
        return found

    def kept(self, which: str) -> int:
        """Bytes that a pass keeps for its backward."""
        last = which == "last"
        mode = self.policy.of_pass(last=last)
        layers = self.layers * layer_elements(self.config, mode)
        vectors = (1 if which == "first" or not self.several else FUSION_VECTORS) if self.first else 0
        vectors += FINAL_NORM_VECTORS if self.last else 0
        kept = self.number * (self.tokens * (layers + vectors * self.hidden) + self.angles(mode))
        if self.last and self.chunked:
            kept += self.number * self.tokens * self.hidden  # the loss keeps the states' gradient
        if which == "first" and self.last and self.reuses:
            kept += self.number * self.tokens * self.hidden  # later passes read the states of the prefix
        if which == "first" and self.reuses and mode != "selective":
            kept += self.shared_keys() if mode == "full" or self.repeats_keys else 0
        return kept + self.masks(which)

    @property
    def repeats_keys(self) -> bool:
        """Whether attention keeps copies of keys and values, one for each query head."""
        return self.config.model.query_groups != self.config.model.num_attention_heads

    def shared_keys(self) -> int:
        """Bytes of pass 1's keys and values, or of their gradients, that wait while later passes run."""
        model, tensor = self.config.model, self.config.parallel.tensor_model_parallel_size
        keys = 2 * model.query_groups * model.head_size // tensor
        return self.number * self.tokens * self.layers * keys if self.reuses else 0

    def masks(self, which: str) -> int:
        """Bytes of a pass's additive masks: of packed documents, of windows, of suffixes."""
        data, rows = self.config.data, self.config.training.micro_batch_size
        if data.reset_attention_mask:
            masks = rows * (1 if self.config.model.sliding_window is None else 2)
        else:
            suffix = self.reuses and which != "first"
            masks = int(suffix) + int(self.config.model.sliding_window is not None)
        return self.number * masks * data.sequence_length**2

    def angles(self, mode: str) -> int:
        """Cosines and sines of the rotations of queries and keys that all layers keep."""
        each = 4 * self.config.model.head_size * self.config.data.sequence_length
        return 0 if mode == "full" else self.layers * each

    def backward(self, mode: str) -> int:
        """Bytes of one layer's backward, and of what it computes again first."""
        again = 0 if mode == "none" else layer_elements(self.config, "none") - layer_elements(self.config, mode)
        model, tensor = self.config.model, self.config.parallel.tensor_model_parallel_size
        gradients = model.ffn_size // tensor  # and those of hidden states, which take the place of what is done with
        weight = model.ffn_size * model.hidden_size // tensor
        return self.number * (self.tokens * (max(again, 0) + gradients) + weight)

    def table(self) -> int:
        """Bytes of the embedding's gradient, where its rows are not added to the buffer one by one."""
        whole = self.first and (self.one_graph or self.config.parallel.overlap_grad_reduce)
        return self.number * self.rows * self.config.model.hidden_size if whole else 0

    def logits(self) -> int:
        """Bytes that the soft-max needs while the last loss is computed."""
        if not self.last:
            return 0
        if not self.chunked:
            return self.kept_logits() + 4 * self.tokens * self.rows
        chunk = min(int(self.config.memory.loss_chunk_mib * 2**20), 4 * self.tokens * self.rows)
        return chunk if self.number == 4 else chunk + chunk // 2

    def kept_logits(self) -> int:
        """Bytes of the soft-max that all passes in flight keep: none with chunks."""
        if not self.last or self.chunked:
            return 0
        return 4 * self.tokens * self.rows * self.flight.total


def layer_elements(config: PretrainConfig, recompute: str) -> int:
    """Numbers that a layer keeps for each token, on one process; measured by the tensors that autograd saves.

    Norms keep input, normalised input and output, the MLP its two halves, SiLU, the second half again and their
    product; attention queries, keys, values and the context. With fewer key/value heads than query heads the former
    are repeated, but not where attention is computed again.
    """
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    hidden = model.hidden_size // sequence_shards(config)
    queries = model.num_attention_heads * model.head_size // tensor
    keys = model.query_groups * model.head_size // tensor
    if recompute == "full":
        return hidden
    attention = 2 * (queries + keys) if recompute == "selective" else 4 * queries
    if model.qk_layernorm:
        attention += 3 * (queries + keys)
    if model.attention_output_gate:
        attention += 2 * queries
    return 6 * hidden + 5 * model.ffn_size // tensor + attention


def sequence_shards(config: PretrainConfig) -> int:
    """Ranks that hold parts of a row between layers."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
