"""What a run would read of its data, where nothing is built: for a dry run."""

from typing import List, Optional, Sequence, Tuple

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.data_plan import DataPlan, plan_of_blend
from megatron_fbt.data.dataset import open_paths
from megatron_fbt.data.mixture import make_mixture
from megatron_fbt.data.source_rows import check_epochs, check_pairs, open_source, plan_of_mixture
from megatron_fbt.data.streams import TRAIN, Stream
from megatron_fbt.errors import DataError, MissingDataError


def forecast(
    config: PretrainConfig, train_samples: int, stage_samples: Sequence[int]
) -> Tuple[Optional[DataPlan], List[str]]:
    """What training reads of each source, as far as the data are here.

    Args:
        config: Validated.
        train_samples: Rows of the run.
        stage_samples: See mixture.make_mixture.

    Returns:
        The plan (None if there is nothing to say), and notes on data that are not here or that training refuses.

    Raises:
        ConfigError: A source would be read more often than it may.
        DataError: See source_rows.check_pairs.
    """
    data = config.data
    if data.format != "indexed" or not (data.paths or data.sources):
        return None, []
    if not data.sources:
        try:
            streams = open_paths(config)
        except DataError as error:
            return None, [_note("the data", error)]
        weights = [float(stream.weight or stream.tokens(TRAIN)) for stream in streams]
        return plan_of_blend(streams, weights, train_samples, data.sequence_length), []
    found: List[Optional[Stream]] = []
    notes = []
    for source in data.sources:
        try:
            found.append(open_source(config, source))
        except DataError as error:
            found.append(None)
            notes.append(_note(f"source {source.name}", error))
    check_pairs(found)
    plan = plan_of_mixture(config, found, make_mixture(config, train_samples, stage_samples))
    check_epochs(plan)
    return plan, notes


def _note(what: str, error: DataError) -> str:
    if isinstance(error, MissingDataError):
        return f"{what} cannot be read here: {error}"
    return f"training will refuse {what}: {error}"
