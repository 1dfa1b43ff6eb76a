"""Identity of a run."""

from dataclasses import dataclass
from typing import List

from megatron_fbt.config.rules import Rules, Section


@dataclass
class RunConfig(Section):
    """Folder and seed."""

    dir: str = "runs/default"
    """Run folder: config.yaml, metrics.jsonl, status.json, tensorboard/, checkpoints/."""
    seed: int = 1234
    """Seed of initial weights, pass counts, prefix cuts, jitter and data order."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("run", self)
        if rules.usable("dir"):
            rules.require(bool(self.dir.strip()), "dir", "empty", "name the folder of the run")
        rules.integers("seed", low=0, high=2**32 - 1)
        return rules.problems
