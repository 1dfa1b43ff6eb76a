"""What FP8 asks of a model, a batch and a layout."""

from typing import List, Tuple

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.parameter_count import padded_vocab_size
from megatron_fbt.config.pretrain import PretrainConfig

MULTIPLE = {"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}
"""What both dimensions of every operand must be a multiple of, by precision.fp8_recipe."""
CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Oldest compute capability of a GPU that has the products of a recipe."""


def precision_problems(config: PretrainConfig) -> List[str]:
    """What cannot be combined with the number formats; whatever libraries and devices there are."""
    sharding = config.optimizer.sharding
    if config.precision.gradient_accumulation_fusion and sharding in ZERO_STAGES:
        return [
            f"precision.gradient_accumulation_fusion = true: optimizer.sharding = {sharding!r} has no buffers that "
            "layers could add gradients to; set it to false, or optimizer.sharding to megatron"
        ]
    if config.precision.dtype == "fp16" and sharding in ZERO_STAGES:
        return [
            f"precision.dtype = 'fp16': optimizer.sharding = {sharding!r} steps without the loss scale that it needs; "
            "set it to bf16, or optimizer.sharding to megatron"
        ]
    if config.precision.fp8 is None:
        return []
    problems = _backend_problems(config) + _weight_problems(config) + _head_problems(config)
    return problems + _layer_problems(config) + _delayed_problems(config) + _dimension_problems(config)


def _backend_problems(config: PretrainConfig) -> List[str]:
    precision, chosen = config.precision, config.model.transformer_impl
    if precision.fp8_emulated:
        if chosen != "transformer_engine":
            return []
        return [
            "precision.fp8_emulated = true: the torch backend emulates FP8, but model.transformer_impl = "
            "'transformer_engine'; set that to torch or auto, or precision.fp8_emulated to false"
        ]
    problems = []
    if chosen == "torch":
        problems.append(
            f"precision.fp8 = {precision.fp8!r}: model.transformer_impl = 'torch' has no FP8 products; set that to "
            "auto or transformer_engine, or precision.fp8_emulated to true"
        )
    if precision.fp8_head:
        problems.append(
            "precision.fp8_head = true: Megatron-Core's output head has no FP8 products; set it to false, or "
            "precision.fp8_emulated to true"
        )
    if config.optimizer.sharding == "zero3":
        problems.append(
            f"precision.fp8 = {precision.fp8!r}: optimizer.sharding = 'zero3' gathers weights anew for each pass, "
            "while Transformer Engine keeps their 8-bit copies through a step; set optimizer.sharding to megatron"
        )
    return problems


def _weight_problems(config: PretrainConfig) -> List[str]:
    """Megatron-Core's sharded optimizer alone rounds its fp32 masters to 8 bits again after a step."""
    precision, sharding = config.precision, config.optimizer.sharding
    if not precision.fp8_param_gather:
        return []
    field = "precision.fp8_param_gather = true"
    if precision.fp8_emulated:
        return [
            f"{field}: precision.fp8_emulated = true rounds copies of weights, which stay in precision.dtype; set it "
            "to false, or precision.fp8_emulated to false"
        ]
    if sharding == "megatron":
        return []
    return [
        f"{field}: optimizer.sharding = {sharding!r} gathers no weights that a step has rounded to 8 bits; set it to "
        "false, or optimizer.sharding to megatron"
    ]


def _head_problems(config: PretrainConfig) -> List[str]:
    """The loss over chunks computes logits from the head's weight, without the head's FP8 product."""
    if not (config.precision.fp8_head and config.memory.chunked_loss):
        return []
    return [
        "memory.chunked_loss = true: precision.fp8_head = true computes all logits in one FP8 product; set it to null "
        "or false, or precision.fp8_head to false"
    ]


def _layer_problems(config: PretrainConfig) -> List[str]:
    """Some layer is in FP8; Megatron-Core wants the others in the first and the last pipeline stage."""
    precision, layers = config.precision, config.model.num_layers
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if first + last >= layers:
        return [
            f"precision.num_layers_at_start_in_bf16 = {first}: with num_layers_at_end_in_bf16 = {last} none of the "
            f"{layers} layers is in FP8; make them smaller, or set precision.fp8 to null"
        ]
    stages = config.parallel.pipeline_model_parallel_size
    return [
        f"precision.{name} = {value}: more than model.num_layers {layers} / parallel.pipeline_model_parallel_size "
        f"{stages} = {layers // stages}; give at most that"
        for name, value in (("num_layers_at_start_in_bf16", first), ("num_layers_at_end_in_bf16", last))
        if value > layers // stages and not precision.fp8_emulated
    ]


def _delayed_problems(config: PretrainConfig) -> List[str]:
    """Transformer Engine updates delayed scales at the end of each pass of each micro-batch."""
    precision, passes = config.precision, config.feedback.max_passes
    if precision.fp8_recipe != "delayed" or precision.fp8_emulated or passes == 1:
        return []
    problems = []
    if precision.fp8_amax_compute_algo == "most_recent":
        problems.append(
            f"precision.fp8_amax_compute_algo = 'most_recent': with up to {passes} passes the scales of one pass would "
            "be those of another one; set it to max, or precision.fp8_recipe to tensorwise"
        )
    per_step = passes * config.training.global_batch_size // config.training.micro_batch_size
    if precision.fp8_amax_history_len < per_step:
        problems.append(
            f"precision.fp8_amax_history_len = {precision.fp8_amax_history_len}: a step may make {per_step} updates "
            f"({passes} passes of {per_step // passes} micro-batches), and scales would depend on their order; give at "
            f"least {per_step}, or set precision.fp8_recipe to tensorwise"
        )
    if config.memory.recompute == "full":
        problems.append(
            "memory.recompute = 'full': Transformer Engine hands the delayed recipe's scales to recomputed passes "
            f"first in first out, but {passes} passes are recomputed last first; set it to selective, or "
            "precision.fp8_recipe to tensorwise"
        )
    return problems


def fp8_dimensions(config: PretrainConfig) -> List[Tuple[str, int, str]]:
    """Dimensions of the operands: what each is, its size on one process, and the fields that make it."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    rows, length = config.training.micro_batch_size, config.data.sequence_length
    shards = tensor if config.parallel.sequence_parallel else 1
    over, size = f" / tensor_model_parallel_size {tensor}", "model.hidden_size"
    heads = model.num_attention_heads * model.head_size
    projected = heads * (2 if model.attention_output_gate else 1) + 2 * model.query_groups * model.head_size
    tokens = f"data.sequence_length {length} x training.micro_batch_size {rows}" + (over if shards > 1 else "")
    found = [
        ("tokens", length * rows // shards, tokens),
        ("the hidden size", model.hidden_size, f"{size} {model.hidden_size}"),
        ("attention's width", heads // tensor, f"heads {model.num_attention_heads} x {model.head_size}{over}"),
        ("queries, keys and values", projected // tensor, f"{projected}{over}"),
        ("the MLP's width", model.ffn_size // tensor, f"model.ffn_hidden_size {model.ffn_size}{over}"),
    ]
    if config.precision.fp8_fusion:
        found.append(("the fusion layer's width", model.hidden_size // tensor, f"{size} {model.hidden_size}{over}"))
    if config.precision.fp8_head:
        divisor = model.make_vocab_size_divisible_by
        padded = padded_vocab_size(model.vocab_size or divisor * tensor, divisor, tensor)
        name = f"padded vocabulary {padded:,}" if model.vocab_size else f"model.make_vocab_size_divisible_by {divisor}"
        found.append(("the head's width", padded // tensor, name + (over if model.vocab_size else "")))
    return found


def _dimension_problems(config: PretrainConfig) -> List[str]:
    recipe = config.precision.fp8_recipe
    multiple = MULTIPLE[recipe]
    return [
        f"precision.fp8_recipe = {recipe!r}: needs multiples of {multiple}, but {what} is {value:,} ({made_of}), "
        f"{value % multiple} too many; change that" + (", or take the tensorwise recipe (16)" if multiple > 16 else "")
        for what, value, made_of in fp8_dimensions(config)
        if value % multiple
    ]
