"""Steps whose loss or gradient norm stands out from the steps before."""

import math
import statistics
from typing import List, Optional

from megatron_fbt.config.training import SpikeConfig


class SpikeWatch:
    """Compares each step with the medians of a running window of good steps; the same on all ranks.

    Args:
        config: what counts as a spike.
        losses: of pass 1 in the last good steps, in nats; changed in place, so that a checkpoint has them.
        norms: gradient norms of these steps.
    """

    def __init__(self, config: SpikeConfig, losses: List[float], norms: List[float]):
        self.config, self.losses, self.norms = config, losses, norms

    def judge(self, loss: float, norm: float) -> Optional[str]:
        """Why a step should be skipped; None for a good one, which joins the window.

        Args:
            loss: of pass 1, which every number of passes has.
            norm: of the gradient, before clipping.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        reasons = [
            f"{name} {value:.4g} is more than {factor:g} times {statistics.median(window):.4g}, its median over "
            f"{len(window)} steps"
            for name, value, factor, window in (
                ("loss of pass 1", loss, self.config.loss_factor, self.losses),
                ("gradient norm", norm, self.config.grad_norm_factor, self.norms),
            )
            if factor is not None and len(window) == self.config.window and value > factor * statistics.median(window)
        ]
        if reasons:
            return "; ".join(reasons)
        for window, value in ((self.losses, loss), (self.norms, norm)):
            window.append(value)
            del window[: -self.config.window]
        return None
