"""How the layers are dealt out to pipeline stages."""

from typing import List, Tuple

from megatron_fbt.config.parallel import ParallelConfig


def stage_layers(parallel: ParallelConfig, num_layers: int) -> List[int]:
    """Layers of each pipeline stage; the sum is num_layers for a split that split_problems accepts."""
    rest, stages, (first, last) = _equal_part(parallel, num_layers)
    layers = [rest // stages if stages else 0] * parallel.pipeline_model_parallel_size
    if first is not None:
        layers[0] = first
    if last is not None:
        layers[-1] = last
    return layers


def split_problems(parallel: ParallelConfig, num_layers: int) -> List[str]:
    """Why the layers cannot be dealt out; empty if they can: every stage has one, and all of them are used once."""
    size = parallel.pipeline_model_parallel_size
    rest, stages, ends = _equal_part(parallel, num_layers)
    given = [
        f"parallel.num_layers_in_{name}_pipeline_stage = {value}"
        for name, value in zip(("first", "last"), ends)
        if value is not None
    ]
    if given and size == 1:
        return [f"{given[0]}: there is one pipeline stage; set it to null, or raise pipeline_model_parallel_size"]
    if stages and (rest % stages or rest < stages):
        remedy = "change one of them" + (
            ", or give the first or last stage another number of layers" if size > 1 else ""
        )
        if not given:
            return [
                f"model.num_layers = {num_layers}: not a multiple of parallel.pipeline_model_parallel_size = {size}; "
                f"{remedy}"
            ]
        return [
            f"{' and '.join(given)}: leaves {rest} of model.num_layers = {num_layers} for {stages} other pipeline "
            f"stages, not the same number, at least one, for each; {remedy}"
        ]
    if not stages and rest:
        total = f"add up to {num_layers - rest}, not to model.num_layers = {num_layers}"
        return [f"{' and '.join(given)}: {total}; change one of them"]
    return []


def _equal_part(parallel: ParallelConfig, num_layers: int) -> Tuple[int, int, tuple]:
    """Layers and stages that are left for an equal split, and what first and last stage are given."""
    ends = (parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage)
    given = [value for value in ends if value is not None]
    return num_layers - sum(given), parallel.pipeline_model_parallel_size - len(given), ends
