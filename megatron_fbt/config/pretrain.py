"""The whole configuration of a training run."""

from dataclasses import dataclass, field

from megatron_fbt.config.checkpoint import CheckpointConfig
from megatron_fbt.config.data import DataConfig
from megatron_fbt.config.feedback import FeedbackConfig
from megatron_fbt.config.logging import LoggingConfig
from megatron_fbt.config.memory import MemoryConfig
from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.config.run import RunConfig
from megatron_fbt.config.training import TrainingConfig


@dataclass
class PretrainConfig:
    """One section for each concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
