"""The factor that keeps fp16 gradients from vanishing or overflowing (precision.loss_scale)."""

from typing import List

from megatron_fbt.config.precision import PrecisionConfig


class LossScaler:
    """Doubles the scale after a window of steps without an overflow; after some overflows each further one halves it.

    With a power of two as the first scale, scaling changes no digit of a gradient.

    Args:
        config: precision section, dtype fp16.
    """

    def __init__(self, config: PrecisionConfig):
        self.config = config
        self.constant = config.loss_scale is not None
        self.scale = config.loss_scale if self.constant else config.initial_loss_scale
        self._good_steps, self._overflows_left = 0, config.hysteresis

    @property
    def may_fall(self) -> bool:
        """Whether the scale is above its minimum, so that an overflow says nothing about the run."""
        return not self.constant and self.scale > self.config.min_loss_scale

    def update(self, overflow: bool) -> None:
        """Take a step into account whose loss was finite.

        Args:
            overflow: its gradient was not.
        """
        if self.constant:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self.config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps >= self.config.loss_scale_window:  # a resumed run may have a smaller window
            self._good_steps, self._overflows_left = 0, self.config.hysteresis
            self.scale *= 2

    @property
    def state(self) -> List[float]:
        """What a resumed run goes on with: scale, steps since an overflow, overflows until it falls."""
        return [self.scale, self._good_steps, self._overflows_left]

    def restore(self, state: List[float]) -> None:
        """Go on from a state; a constant scale stays as configured, and so does the minimum."""
        if not self.constant:
            self.scale = max(float(state[0]), self.config.min_loss_scale)
            self._good_steps, self._overflows_left = int(state[1]), int(state[2])
