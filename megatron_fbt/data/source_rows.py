"""Rows of data.sources: each sample from the source and the row that the mixture says."""

import logging
import math
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import torch

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.sources import SourceConfig, parse_split
from megatron_fbt.data.data_plan import DataPlan, StagePlan, source_plan, unknown_source
from megatron_fbt.data.epochs import EpochRows
from megatron_fbt.data.first_rank import is_first_rank
from megatron_fbt.data.index_cache import IndexConfig, IndexLog
from megatron_fbt.data.indexed import quiet_megatron
from megatron_fbt.data.interleave import Interleaving, apportion
from megatron_fbt.data.mixture import Mixture, Stage, make_mixture, trains
from megatron_fbt.data.prefixes import find_prefixes
from megatron_fbt.data.streams import TRAIN, VALID, Stream, open_stream
from megatron_fbt.errors import ConfigError, DataError

with quiet_megatron():
    from megatron.core.datasets.utils import Split

logger = logging.getLogger(__name__)


class MixedRows(torch.utils.data.Dataset):
    """Rows of several sources in the order of a mixture.

    Args:
        mixture: Says which.
        rows: [sources] rows of each; None for those that the mixture does not use.
    """

    def __init__(self, mixture: Mixture, rows: Sequence[Optional[EpochRows]]):
        self.mixture, self._rows = mixture, list(rows)

    def __len__(self) -> int:
        return self.mixture.samples

    def __getitem__(self, index: int) -> Dict[str, Any]:
        source, row = self.mixture.place(index)
        return self._rows[source][row]

    def where(self, index: int) -> str:
        """Source and row of a sample, for messages."""
        source, row = self.mixture.place(index)
        return f"row {row} of source {self.mixture.names[source]}"


@dataclass
class SourceRows:
    """Rows of both splits, and what training reads."""

    train: MixedRows
    valid: Optional[MixedRows]
    plan: DataPlan


def source_rows(
    config: PretrainConfig,
    tokenizer,
    train_samples: int,
    valid_samples: int,
    stage_samples: Sequence[int],
    builds: bool,
    log: Optional[IndexLog],
) -> SourceRows:
    """Open the sources of a configuration and build their rows.

    Args:
        config: With data.sources.
        tokenizer: That made the data.
        train_samples: Rows of the whole run.
        valid_samples: Rows of one evaluation; 0 = none.
        stage_samples: See mixture.make_mixture.
        builds: Whether this process fills the index cache.
        log: See IndexConfig.

    Raises:
        ConfigError: Budgets, or more epochs than a source may have.
        DataError: See streams.open_stream; or a source has nothing to train on.
    """
    streams = open_sources(config, tokenizer, check=is_first_rank())
    mixture = make_mixture(config, train_samples, stage_samples)
    plan = plan_of_mixture(config, streams, mixture)
    check_epochs(plan)

    def rows(stream: Stream, count: int, split: Split) -> Optional[EpochRows]:
        if not count:
            return None
        settings = index_config(config, tokenizer, stream, stream.cache, builds, log)
        return EpochRows(stream.dataset, stream.range(split.value), count, split, settings, stream.tokens(split.value))

    train = [rows(stream, count, Split.train) for stream, count in zip(streams, mixture.rows, strict=True)]
    valid_mixture = _valid_mixture(config, streams, mixture, valid_samples)
    valid = None
    if valid_mixture is not None:
        counts = zip(streams, valid_mixture.rows, strict=True)
        valid = MixedRows(valid_mixture, [rows(stream, count, Split.valid) for stream, count in counts])
    return SourceRows(MixedRows(mixture, train), valid, plan)


def open_sources(config: PretrainConfig, tokenizer, check: bool) -> List[Stream]:
    """A stream for each source.

    Raises:
        DataError: See streams.open_stream and check_pairs.
    """
    streams = [open_source(config, source, tokenizer, check) for source in config.data.sources]
    check_pairs(streams)
    return streams


def check_pairs(streams: Sequence[Optional[Stream]]) -> None:
    """Refuse a pair in two sources, by whatever path: each would count its epochs, and split it, by itself.

    Raises:
        DataError: Naming the pair and both sources.
    """
    owners: Dict[str, str] = {}
    for stream in streams:
        for prefix in stream.prefixes if stream is not None else ():
            other = owners.setdefault(os.path.realpath(prefix), stream.name)
            if other != stream.name:
                raise DataError(
                    f"data.sources: the pair {prefix} belongs to {other} and to {stream.name}; name it in one of them "
                    "(its split gives both training and validation their parts)"
                )


def open_source(config: PretrainConfig, source: SourceConfig, tokenizer=None, check: bool = True) -> Stream:
    """The stream of one source.

    Raises:
        DataError: See streams.open_stream.
    """
    return open_stream(
        source.name,
        find_prefixes(source.name, source.paths, tokenizer),
        parse_split(source.split or config.data.split),
        cache_folder(config),
        config.data.mmap,
        None if tokenizer is None else tokenizer.vocab_size,
        check=check,
    )


def plan_of_mixture(config: PretrainConfig, streams: Sequence[Optional[Stream]], mixture: Mixture) -> DataPlan:
    """What training reads of each source.

    Args:
        config: With data.sources.
        streams: Of the sources; None where the data are not here.
        mixture: Over the run.

    Raises:
        DataError: A source that training reads has fewer than two tokens for it.
    """
    length, sources = config.data.sequence_length, []
    for stream, source, rows in zip(streams, config.data.sources, mixture.rows, strict=True):
        if stream is None:
            sources.append(unknown_source(source.name, rows, mixture.samples, length, source.max_epochs))
            continue
        if rows and stream.tokens(TRAIN) < 2:
            raise DataError(
                f"data set {stream.name}: its split {source.split or config.data.split} gives training "
                f"{stream.documents(TRAIN)} of its {len(stream)} documents and fewer than two tokens; give training a "
                "larger part, or leave the source out"
            )
        sources.append(source_plan(stream, rows, mixture.samples, length, source.max_epochs))
        if not rows and trains(source, config.data.split) and is_first_rank():
            logger.warning("source %s has no row in this run: its share is too small, or no stage uses it", source.name)
    stages = [
        StagePlan(
            stage.first_step,
            stage.first_sample,
            stage.end_sample - stage.first_sample,
            dict(zip(mixture.names, stage.order.quotas, strict=True)),
        )
        for stage in mixture.stages
    ]
    return DataPlan(length, mixture.samples, tuple(sources), tuple(stages))


def check_epochs(plan: DataPlan) -> None:
    """Refuse a run that reads a source more often than it may.

    Raises:
        ConfigError: Naming each such source, its epochs, the limit and what fits.
    """
    problems = []
    for source in plan.sources:
        if None in (source.max_epochs, source.epoch_tokens) or source.tokens <= source.max_epochs * source.epoch_tokens:
            continue
        fits = math.floor(source.max_epochs * source.epoch_tokens / plan.sequence_length)
        problems.append(
            f"data.sources: the run reads {source.epochs:.4f} epochs of {source.name} ({source.tokens:,} tokens, an "
            f"epoch has {source.epoch_tokens:,}), above its max_epochs {source.max_epochs:g}; {fits:,} rows fit, "
            f"{fits * plan.sequence_length:,} tokens, {fits / plan.samples:.4%} of the run: lower its weight or its "
            "tokens, shorten the run, or raise max_epochs"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _valid_mixture(
    config: PretrainConfig, streams: Sequence[Stream], mixture: Mixture, samples: int
) -> Optional[Mixture]:
    """The mixture of validation: shares by weight, or by what training reads of a source with a budget.

    It is the same in all stages of training, so that losses can be compared.
    """
    if samples < 1:
        return None
    length, split = config.data.sequence_length, config.data.split
    usable = [stream.tokens(VALID) > length for stream in streams]
    for stream, source, has_row in zip(streams, config.data.sources, usable, strict=True):
        if not has_row and is_first_rank():
            logger.info(
                "data set %s has no part in validation: its split %s gives it %d documents with %d tokens, and a row "
                "needs %d",
                stream.name,
                source.split or split,
                stream.documents(VALID),
                stream.tokens(VALID),
                length + 1,
            )
    if not any(usable):
        if is_first_rank():
            logger.warning("validation is off: the splits of the sources leave no row for it")
        return None
    available = sum((stream.tokens(VALID) - 1) // length for stream, has_row in zip(streams, usable) if has_row)
    whole = sum(source.weight for source in config.data.sources if source.weight is not None)
    weights = [
        0.0 if not has_row else source.weight / whole if source.weight is not None else rows / mixture.samples
        for source, rows, has_row in zip(config.data.sources, mixture.rows, usable, strict=True)
    ]
    if not any(weights):
        weights = [float(has_row) for has_row in usable]
    order = Interleaving(apportion(min(samples, available), weights))
    return Mixture(mixture.names, [Stage(0, 0, order.length, order, (0,) * len(streams))])


def index_config(
    config: PretrainConfig, tokenizer, stream: Stream, cache: str, builds: bool, log: Optional[IndexLog]
) -> IndexConfig:
    """Megatron-Core's settings of a data set.

    Args:
        config: Of the run.
        tokenizer: That made the data.
        stream: The documents.
        cache: Folder for the indices.
        builds: See IndexConfig.
        log: See IndexConfig.
    """
    total = sum(stream.split)
    return IndexConfig(
        random_seed=config.run.seed % 2**32,
        sequence_length=config.data.sequence_length,
        blend=([stream.prefixes[0]], None),
        split=",".join(f"{part / total:.12f}" for part in stream.split),
        path_to_cache=cache,
        mmap_bin_files=config.data.mmap,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
        create_attention_mask=False,
        builds=builds,
        log=log,
    )


def cache_folder(config: PretrainConfig) -> str:
    """Folder of everything that is made from the data."""
    return config.data.cache_dir or os.path.join(config.run.dir, "data_cache")
