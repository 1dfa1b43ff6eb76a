"""Identity of a run."""

from dataclasses import dataclass


@dataclass
class RunConfig:
    """Folder and seed."""

    dir: str = "runs/default"
    """Run folder: config.yaml, metrics.jsonl, status.json, tensorboard/, checkpoints/."""
    seed: int = 1234
    """Seed of initial weights, pass counts, prefix cuts, jitter and data order."""
