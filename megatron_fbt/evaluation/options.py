"""What an evaluation is asked to do, and the checks that need no model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Optional, Union

from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.generation_fbt import check_regime
from megatron_fbt.inference.text import check_model_folder

DTYPE_NAMES = ("auto", "fp32", "bf16", "fp16")


@dataclass
class EvaluationOptions:
    """The command line; see tools/evaluate.py --help."""

    model: str
    tasks: List[str]
    regime: List[str] = field(default_factory=lambda: ["soft"])
    data_dir: str = "."
    fused_passes: int = 1
    passes: Union[int, str] = 4
    error_sample: int = 16
    batch_size: int = 8
    limit: Optional[int] = None
    num_fewshot: Optional[int] = None
    samples: int = 1
    temperature: Optional[float] = None
    max_gen_toks: Optional[int] = None
    max_length: Optional[int] = None
    apply_chat_template: bool = False
    allow_code_execution: bool = False
    device: Optional[str] = None
    dtype: str = "auto"
    seed: int = 0
    output: Optional[str] = None
    log_samples: bool = False

    def validate(self) -> None:
        """Check every field, without loading a model.

        Raises:
            ConfigError: A value without a meaning.
            CheckpointError: The model folder is not one.
        """
        for regime in self.regime:
            check_model_options(
                self.model,
                regime,
                self.fused_passes,
                self.passes,
                self.error_sample,
                self.batch_size,
                self.dtype,
                self.max_length,
                self.seed,
            )
        if len(set(self.regime)) != len(self.regime):
            raise ConfigError(f"regime={self.regime}: name each regime once")
        for name in ("limit", "samples", "max_gen_toks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"num_fewshot={self.num_fewshot}: must be 0 or larger")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature}: must be a finite number, 0 (greedy) or larger")
        if self.samples > 1 and not self.temperature:
            raise ConfigError(f"samples={self.samples}: greedy samples are all the same; give --temperature, e.g. 0.8")
        if self.log_samples and self.output is None:
            raise ConfigError("log_samples: samples go beside the results; give --output")


def parse_passes(passes: Union[int, str]) -> Optional[int]:
    """Number of parallel passes; None = "exact", the recurrence.

    Raises:
        ConfigError: Neither.
    """
    if passes == "exact":
        return None
    try:
        number = int(passes)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"passes={passes}: must be a whole number, at least 1, or exact (token by token)")
    return number


def check_model_options(
    pretrained: str,
    regime: str,
    fused_passes: int,
    passes: Union[int, str],
    error_sample: int,
    batch_size: int,
    dtype: str,
    max_length: Optional[int],
    seed: int,
) -> None:
    """Check the arguments of the model type, see FBTLM, without loading anything."""
    try:
        check_regime(regime, fused_passes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    parse_passes(passes)
    for name, value, least in (("error_sample", error_sample, 0), ("batch_size", batch_size, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value}: must be a whole number, at least {least}")
    if max_length is not None and max_length < 2:
        raise ConfigError(f"max_length={max_length}: must be at least 2")
    if dtype not in DTYPE_NAMES:
        raise ConfigError(f"dtype={dtype}: must be one of {', '.join(DTYPE_NAMES)}")
    check_model_folder(pretrained)
    if not (Path(pretrained) / "tokenizer_config.json").is_file():
        raise CheckpointError(
            f"model {pretrained}: has no tokenizer, which tasks in text need; export it with --tokenizer"
        )
