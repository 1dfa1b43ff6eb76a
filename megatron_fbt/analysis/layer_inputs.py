"""What a layer of an exported model reads, in the plain pass, after fused passes and under the recurrence."""

import re
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from megatron_fbt.analysis.fixed_point import pass_states
from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.generation_fbt import FBTCache

RECURRENT = 0
"""Pass count that stands for token-by-token processing."""


def passes_of(regime: str) -> int:
    """Parallel passes of "plain" (1) and "fusedN" (N + 1); RECURRENT for "recurrent".

    Raises:
        ConfigError: Another name.
    """
    if regime == "recurrent":
        return RECURRENT
    found = re.fullmatch(r"fused([1-9]\d*)", regime)
    if regime != "plain" and not found:
        raise ConfigError(f"regime {regime!r}: must be plain, fused1, fused2, ... or recurrent")
    return int(found[1]) + 1 if found else 1


@torch.no_grad()
def layer_inputs(
    model: Any, input_ids: Tensor, layers: Sequence[int], regimes: Sequence[str]
) -> Dict[Tuple[int, str], Tensor]:
    """Inputs of layers over whole rows.

    Args:
        model: An exported model, in evaluation mode.
        input_ids: [B, T], without padding.
        layers: 0 = the stack's input u_t; the number of layers = what the final norm reads.
        regimes: See passes_of.

    Returns:
        {(layer, regime): [B, T, D]}.
    """
    network = model.model
    modules = [*network.layers, network.norm]
    wanted = {regime: passes_of(regime) for regime in regimes}
    seen: Dict[int, List[Tensor]] = {layer: [] for layer in layers}
    handles = [
        modules[layer].register_forward_pre_hook(lambda module, args, layer=layer: seen[layer].append(args[0]))
        for layer in seen
    ]
    found = {}
    try:
        for k, _ in enumerate(pass_states(model, input_ids, max(wanted.values())), start=1):
            for regime in (regime for regime, passes in wanted.items() if passes == k):
                found.update({(layer, regime): seen[layer][-1] for layer in layers})
            for kept in seen.values():
                kept.clear()
        if RECURRENT in wanted.values():
            network.token_by_token(input_ids, None, FBTCache())
            found.update({(layer, "recurrent"): torch.cat(seen[layer], dim=1) for layer in layers})
    finally:
        for handle in handles:
            handle.remove()
    return found
