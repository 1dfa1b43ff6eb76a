"""Which checkpoints of a run are kept."""

from typing import Dict, List, Optional, Sequence

from megatron_fbt.config.checkpoint import CheckpointConfig


def expendable(
    steps: Sequence[int], newest: int, losses: Dict[int, Optional[float]], config: CheckpointConfig
) -> List[int]:
    """Steps whose checkpoints may go.

    Args:
        steps: of all checkpoints.
        newest: the one that `latest` names; it stays, and so do later ones, which a run that went back left behind.
        losses: validation losses of those that were measured.
        config: keep_last (null = all stay), keep_every, keep_best.
    """
    if config.keep_last is None:
        return []
    before = sorted(step for step in steps if step <= newest)
    kept = {newest, *before[-config.keep_last :]}
    if config.keep_every is not None:
        kept.update(step for step in before if step % config.keep_every == 0)
    measured = {step: loss for step, loss in losses.items() if loss is not None and step <= newest}
    if config.keep_best and measured:
        kept.add(min(measured, key=lambda step: (measured[step], step)))
    return [step for step in before if step not in kept]
