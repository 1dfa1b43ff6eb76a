"""Number formats."""

import dataclasses
from dataclasses import dataclass
from typing import List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section

LOSS_SCALES = (2.0**-14, 2.0**64)
"""Smallest and largest loss scale: below, fp16 gradients vanish; above, fp32 sums of them could overflow."""


@dataclass
class PrecisionConfig(Section):
    """Formats of weights, activations and gradients."""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """bf16 and fp16 keep fp32 master weights and optimizer states, and reduce gradients in fp32; fp16 scales the loss.
    Not fp16 with DeepSpeed's shardings."""
    loss_scale: Optional[float] = None
    """Constant factor of the loss, which is a sum over tokens, with fp16; null = one that follows the gradients."""
    initial_loss_scale: float = 2.0**15
    """Factor of the first step; a step whose gradients overflow is skipped."""
    min_loss_scale: float = 1.0
    """Smallest factor; an overflow there counts as a bad step (training.max_bad_steps)."""
    loss_scale_window: int = 1000
    """Steps without an overflow after which the factor doubles."""
    hysteresis: int = 2
    """Overflows from which on each one halves the factor, counted anew whenever it has doubled."""
    fp8: Optional[Literal["e4m3", "hybrid"]] = None
    """Format of the layers' products: e4m3, or with output gradients in e5m2 (hybrid); null = no FP8."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """How operands are scaled: from the tensor itself (tensorwise), from earlier steps (delayed), in blocks of 128
    (blockwise) or 32 values (mxfp8)."""
    fp8_emulated: bool = False
    """FP8's rounding by the torch backend, on any machine: for studies, slower than bf16."""
    num_layers_at_start_in_bf16: int = 0
    """First layers of the model without FP8."""
    num_layers_at_end_in_bf16: int = 0
    """Last layers of the model without FP8."""
    fp8_fusion: bool = False
    """The fusion layer's products in FP8, too."""
    fp8_head: bool = False
    """The output head in FP8, too (fp8_emulated alone)."""
    fp8_param_gather: bool = False
    """Weights of FP8 products are kept and gathered in FP8, beside fp32 masters. Needs Transformer Engine and
    optimizer.sharding megatron."""
    fp8_amax_history_len: int = 1024
    """Updates of the scales whose largest values the delayed recipe keeps."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Which of them makes the delayed recipe's scale."""
    gradient_accumulation_fusion: bool = False
    """Layers add weight gradients to the fp32 buffers themselves, by a kernel of NVIDIA's Apex, which must be
    installed. Not with DeepSpeed's shardings."""

    def in_fp8(self, layer: int, num_layers: int) -> bool:
        """Whether a layer's products are in FP8.

        Args:
            layer: counted from 0 in the whole model.
            num_layers: in the whole model.
        """
        first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return self.fp8 is not None and first <= layer < num_layers - last

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("precision", self)
        rules.integers("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", low=0)
        rules.integers("fp8_amax_history_len", "loss_scale_window", "hysteresis")
        low, high = LOSS_SCALES
        rules.numbers("loss_scale", "initial_loss_scale", "min_loss_scale", low=low, high=high)
        self._loss_scale_rules(rules)
        switches = (
            "fp8_emulated",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
            "fp8_fusion",
            "fp8_head",
            "fp8_param_gather",
        )
        self._unused(rules, self.fp8 is None, "precision.fp8 is null", "fp8_recipe", *switches)
        delayed = self.fp8 is not None and self.fp8_recipe == "delayed"
        why = "precision.fp8_recipe is not delayed"
        self._unused(rules, not delayed, why, "fp8_amax_history_len", "fp8_amax_compute_algo")
        if rules.usable("dtype", "fp8") and self.fp8 is not None:
            self._fp8_rules(rules, delayed)
        return rules.problems

    def _loss_scale_rules(self, rules: Rules) -> None:
        moving = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        full = rules.usable("dtype") and self.dtype != "fp16"
        self._unused(rules, full, f"precision.dtype = {self.dtype!r} needs no loss scale", "loss_scale", *moving)
        constant = self.dtype == "fp16" and self.loss_scale is not None
        self._unused(rules, constant, f"precision.loss_scale = {self.loss_scale} is constant", *moving)
        if rules.usable("initial_loss_scale", "min_loss_scale") and self.min_loss_scale > self.initial_loss_scale:
            why = f"above precision.initial_loss_scale = {self.initial_loss_scale:g}"
            rules.add("min_loss_scale", why, "give at most that")

    def _fp8_rules(self, rules: Rules, delayed: bool) -> None:
        allowed = ("bf16", "fp32") if self.fp8_emulated else ("bf16",)
        why = f"not what layers have beside FP8 (precision.fp8 = {self.fp8!r})"
        rules.require(self.dtype in allowed, "dtype", why, f"set it to {allowed[0]}, or precision.fp8 to null")
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if delayed and rules.usable(field):
                why = "the delayed recipe updates all scales together, and so covers every layer"
                remedy = "set it to 0, or precision.fp8_recipe to tensorwise"
                rules.require(getattr(self, field) == 0, field, why, remedy)

    def _unused(self, rules: Rules, unused: bool, why: str, *fields: str) -> None:
        """Refuse values that would change nothing."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for field in fields:
            if unused and rules.usable(field) and getattr(self, field) != defaults[field]:
                rules.add(field, f"changes nothing: {why}", f"leave it out ({defaults[field]})")
