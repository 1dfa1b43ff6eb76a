"""Learning rate as a pure function of the samples consumed so far."""

from types import SimpleNamespace

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.errors import ConfigError


class LearningRate:
    """Megatron-Core's schedule, asked for one point at a time.

    With c the samples consumed before a step, w the warm-up, n the length of the schedule and d the decay:

        c <= w              lr * c / w                                    (only if w > 0)
        WSD, c <= n - d     lr
        WSD, c <= n         min_lr + (lr - min_lr) * (n - c) / d          d = round(lr_decay_fraction * n)
        cosine, c <= n      min_lr + (lr - min_lr) * (1 + cos(pi (c - w) / (n - w))) / 2
        c > n               min_lr

    Groups that Muon steps have a peak and an end of their own, in the same proportion to each other.

    There is no state: a resumed run, or one in another layout, gets the same value from the same count.
    """

    def __init__(self, config: OptimizerConfig, warmup_samples: int, decay_samples: int) -> None:
        """Set up the schedule.

        Args:
            config: lr, min_lr, lr_decay_style, lr_decay_fraction and weight_decay are read.
            warmup_samples: length of the linear warm-up from 0, in samples.
            decay_samples: where the schedule ends, in samples: the run's train_samples.

        Raises:
            ConfigError: the warm-up does not end before the decay begins (or the run ends), or min_lr > lr.
        """
        decay_length = round(config.lr_decay_fraction * decay_samples)
        last_warmup = decay_samples - (decay_length if config.lr_decay_style == "WSD" else 1)
        if warmup_samples > last_warmup or warmup_samples >= decay_samples:
            raise ConfigError(
                f"optimizer.lr_warmup_steps={config.lr_warmup_steps} is {warmup_samples} samples, but the run of "
                f"{decay_samples} samples has at most {max(0, last_warmup)} before the decay: use a shorter warm-up, a "
                f"smaller optimizer.lr_decay_fraction (now {config.lr_decay_fraction}) or a longer run"
            )
        if not 0 <= config.min_lr <= config.lr:
            raise ConfigError(
                f"optimizer.min_lr={config.min_lr} must lie between 0 and optimizer.lr={config.lr}: lower it"
            )
        self._scheduler = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[]),
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=warmup_samples,
            lr_decay_steps=decay_samples,
            lr_decay_style=config.lr_decay_style,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=decay_samples,
            wd_incr_style="constant",
            wsd_decay_steps=decay_length,
            lr_wsd_decay_style="linear",
        )

    def at(self, consumed_samples: int) -> float:
        """Learning rate of a step.

        Args:
            consumed_samples: samples consumed before the step.
        """
        self._scheduler.num_steps = consumed_samples
        return self._scheduler.get_lr({})

    def apply(self, optimizer: object, consumed_samples: int) -> float:
        """Set learning rate and weight decay of every parameter group.

        Args:
            optimizer: anything with `param_groups`; a group may carry its own max_lr, min_lr and wd_mult.
            consumed_samples: samples consumed before the step.

        Returns:
            The learning rate of a group without values of its own.
        """
        scheduler = self._scheduler
        scheduler.num_steps, scheduler.optimizer = consumed_samples, optimizer
        scheduler.step(0)
        return scheduler.get_lr({})
