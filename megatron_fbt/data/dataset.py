"""Rows of tokens for training and validation: Megatron-Core's data sets, split by documents and blended by weight."""

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Sequence, Union

import numpy
import torch

from megatron_fbt.config.data import parse_split
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.cache_folder import folders_made, is_whole
from megatron_fbt.data.conversations import open_conversations, prepare_conversations
from megatron_fbt.data.data_plan import DataPlan, plan_of_blend
from megatron_fbt.data.first_rank import first_rank_first, from_first_rank, is_first_rank, on_other_nodes
from megatron_fbt.data.indexed import check_ids, quiet_megatron
from megatron_fbt.data.labelled import LabelledRows, labelled_rows, open_labelled, prepare_labelled
from megatron_fbt.data.packing import PackedRows, conversation_rows
from megatron_fbt.data.prefixes import find_prefixes
from megatron_fbt.data.streams import TRAIN, VALID, Stream, open_stream
from megatron_fbt.errors import ConfigError, DataError

with quiet_megatron():
    from megatron.core.datasets.utils import Split

    from megatron_fbt.data.index_cache import CachedBlendedDataset, CachedGPTDataset, IndexConfig, IndexLog
    from megatron_fbt.data.source_rows import cache_folder, index_config, source_rows

logger = logging.getLogger(__name__)


class Rows(torch.utils.data.Dataset):
    """Rows of one split, equal on all ranks.

    Attributes:
        sequence_length: Tokens in a row (s).
    """

    def __init__(self, dataset, sequence_length: int, vocab_size: int, name: str):
        self._dataset = dataset
        self.sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict:
        """Row ``index``: tokens [s] int64, labels [s] int64 (the true next tokens), loss_mask [s] float32.

        Raises:
            DataError: A token id is outside the vocabulary, or the data cannot be read.
        """
        try:
            row = self._dataset[index]
        except OSError as error:
            raise DataError(f"{self._name} row {index}{self._of(index)}: cannot be read: {error}") from error
        for ids in (row["tokens"], row["labels"][-1:]):
            if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
                check_ids(ids, self._vocab_size, f"of the {self._name} row {index}{self._of(index)}")
        return {name: row[name] for name in ("tokens", "labels", "loss_mask")}

    def _of(self, index: int) -> str:
        """Where a row is from, if the data set can tell."""
        return f", {self._dataset.where(index)}" if hasattr(self._dataset, "where") else ""


@dataclass
class Datasets:
    """Rows of each split; ``valid`` is None when there is nothing to validate on."""

    train: Union[Rows, PackedRows, LabelledRows]
    valid: Union[Rows, PackedRows, LabelledRows, None]
    plan: Optional[DataPlan] = None
    """What training reads of each source; None where the data come from JSON Lines."""


def build_datasets(
    config: PretrainConfig,
    tokenizer,
    train_samples: int,
    valid_samples: int,
    stage_samples: Sequence[int] = (),
    log: Optional[IndexLog] = None,
) -> Datasets:
    """Build the rows for training and validation; to be called by all ranks if there is a process group.

    The order of the rows depends on run.seed, the data section and the number of samples. Training repeats the
    documents as often as ``train_samples`` asks for, in a new order each time; validation holds at most one row for
    each stretch of ``sequence_length`` tokens, and sample numbers beyond its end start again.

    Args:
        config: Sections data and run are used, training for stages, and the resolved model.vocab_size.
        tokenizer: The tokenizer that made the data.
        train_samples: Rows of the whole run.
        valid_samples: Rows of one evaluation; 0 = no validation.
        stage_samples: See mixture.make_mixture.
        log: Takes down which entries of the index cache were built and which found.

    Raises:
        ConfigError: Paths, weights, split, budgets or epochs cannot work.
        DataError: A file is missing, damaged or made with another tokenizer, or there is nothing to train on. On all
            ranks, if there is a process group.
    """
    if not config.data.sources:
        blend_weights(config.data.paths, config.data.weights)
    parse_split(config.data.split)
    if train_samples < 1:
        raise ConfigError(f"the run has {train_samples} training samples; training needs at least one step")
    if config.data.format == "labelled":
        return _build_labelled(config, train_samples, valid_samples, log)
    tokenizer.eod  # noqa: B018  refused before any data are read
    if config.data.format == "conversations":
        return _build_conversations(config, tokenizer, train_samples, valid_samples, log)

    def build(builds: bool) -> Datasets:
        if config.data.sources:
            found = source_rows(config, tokenizer, train_samples, valid_samples, stage_samples, builds, log)
            vocab_size, length = tokenizer.vocab_size, config.data.sequence_length
            train = Rows(found.train, length, vocab_size, Split.train.name)
            valid = None if found.valid is None else Rows(found.valid, length, vocab_size, Split.valid.name)
            return Datasets(train, valid, found.plan)
        builder = _SplitBuilder(config, tokenizer, open_paths(config, tokenizer, is_first_rank()), builds, log)
        train = builder.train(train_samples)
        return Datasets(train, builder.valid(valid_samples), builder.plan(train_samples))

    return first_rank_first(build)


def open_paths(config: PretrainConfig, tokenizer=None, check: bool = True) -> List[Stream]:
    """A stream for each entry of data.paths.

    Args:
        config: Without data.sources.
        tokenizer: That made the data, if it is known.
        check: See streams.open_stream.

    Raises:
        DataError: See streams.open_stream.
    """
    data, split = config.data, parse_split(config.data.split)
    weights = blend_weights(data.paths, data.weights)
    return [
        open_stream(
            path,
            find_prefixes(path, [path], tokenizer),
            split,
            cache_folder(config),
            data.mmap,
            None if tokenizer is None else tokenizer.vocab_size,
            weight,
            check,
        )
        for path, weight in zip(data.paths, weights, strict=True)
    ]


def _build_conversations(
    config: PretrainConfig, tokenizer, train_samples: int, valid_samples: int, log: Optional[IndexLog]
) -> Datasets:
    cache = cache_folder(config)
    folder = _prepare(lambda: prepare_conversations(config.data, cache, tokenizer), cache, log)

    def build(_: bool) -> Datasets:
        conversations = open_conversations(folder, config.data.mmap)
        seed, pad = config.run.seed, tokenizer.eod
        return Datasets(*conversation_rows(config.data, conversations, train_samples, valid_samples, pad, seed))

    return first_rank_first(build)


def _build_labelled(
    config: PretrainConfig, train_samples: int, valid_samples: int, log: Optional[IndexLog]
) -> Datasets:
    cache = cache_folder(config)
    folder = _prepare(lambda: prepare_labelled(config.data, cache, config.model.vocab_size), cache, log)

    def build(_: bool) -> Datasets:
        source = open_labelled(folder, config.data.mmap)
        return Datasets(*labelled_rows(config.data, source, train_samples, valid_samples, config.run.seed))

    return first_rank_first(build)


def _prepare(work: Callable[[], Iterator[str]], cache: str, log: Optional[IndexLog]) -> str:
    """The folder that `work` makes or finds in the cache, on each node."""
    before = folders_made(cache) if log is not None else {}
    folder = os.path.join(cache, os.path.basename(from_first_rank(work)))
    on_other_nodes(lambda: not is_whole(Path(folder)), work)
    if log is not None:
        was_there = folders_made(cache).get(folder) == before.get(folder)
        (log.found if was_there else log.built).append(folder)
    return folder


def blend_weights(paths: Sequence[str], weights: Optional[Sequence[float]]) -> List[Optional[float]]:
    """A weight for each path, or None for all of them.

    Raises:
        ConfigError: There is no path, or the weights are not one finite positive number for each path.
    """
    if not paths:
        raise ConfigError("data.paths is empty: name at least one data set (prefix of .bin and .idx)")
    if weights is None:
        return [None] * len(paths)
    if len(weights) != len(paths):
        raise ConfigError(f"data.weights has {len(weights)} numbers for {len(paths)} data.paths; give one for each")
    for path, weight in zip(paths, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"data.weights: {weight} for {path}; they must be positive; leave unused data sets out")
    return [float(weight) for weight in weights]


class _SplitBuilder:
    """Builds the rows of each split from the streams of data.paths."""

    def __init__(
        self, config: PretrainConfig, tokenizer, streams: List[Stream], builds: bool, log: Optional[IndexLog] = None
    ):
        self._config, self._tokenizer, self._streams = config, tokenizer, streams
        self._builds, self._log = builds, log
        self._length = config.data.sequence_length

    def train(self, samples: int) -> Rows:
        for stream in self._streams:
            if stream.tokens(TRAIN) < 2:
                raise DataError(
                    f"data set {stream.name}: data.split {self._config.data.split} gives training "
                    f"{stream.documents(TRAIN)} of its {len(stream)} documents and fewer than two "
                    "tokens; give training a larger part or leave the data set out"
                )
        total = sum(stream.tokens(TRAIN) for stream in self._streams)
        if total <= self._length and is_first_rank():
            logger.warning("%d tokens of training data do not fill a row of %d: rows repeat them", total, self._length)
        return self._rows(self._streams, Split.train, samples)

    def valid(self, samples: int) -> Optional[Rows]:
        if samples < 1:
            return None
        streams = [stream for stream in self._streams if stream.tokens(VALID) > self._length]
        for stream in self._streams:
            if stream not in streams and is_first_rank():
                logger.info(
                    "data set %s has no part in validation: data.split %s gives it %d documents with %d tokens, and a "
                    "row needs %d",
                    stream.name,
                    self._config.data.split,
                    stream.documents(VALID),
                    stream.tokens(VALID),
                    self._length + 1,
                )
        if not streams and is_first_rank():
            logger.warning("validation is off: data.split %s leaves no row for it", self._config.data.split)
        if not streams:
            return None
        available = sum((stream.tokens(VALID) - 1) // self._length for stream in streams)
        return self._rows(streams, Split.valid, min(samples, available))

    def plan(self, samples: int) -> DataPlan:
        """What training reads of each stream."""
        return plan_of_blend(self._streams, self._weights(self._streams, TRAIN), samples, self._length)

    def _rows(self, streams: List[Stream], split: Split, samples: int) -> Rows:
        dataset = self._blend(streams, split, samples) if len(streams) > 1 else self._one(streams[0], split, samples)
        return Rows(dataset, self._length, self._tokenizer.vocab_size, split.name)

    def _weights(self, streams: List[Stream], place: int) -> List[float]:
        return [float(stream.weight or stream.tokens(place)) for stream in streams]

    def _blend(self, streams: List[Stream], split: Split, samples: int) -> CachedBlendedDataset:
        weights = self._weights(streams, split.value)
        total = sum(weights)
        # The blend always draws from the source that lags most, so none gets more than its share rounded up.
        rows = [
            self._one(stream, split, int(samples * w / total) + 2) for stream, w in zip(streams, weights, strict=True)
        ]
        config = self._index_config(streams[0], os.path.dirname(streams[0].cache))
        return CachedBlendedDataset(rows, [weight / total for weight in weights], samples, config)

    def _one(self, stream: Stream, split: Split, samples: int) -> CachedGPTDataset:
        documents = numpy.arange(*stream.range(split.value), dtype=numpy.int32)
        config = self._index_config(stream, stream.cache)
        return CachedGPTDataset(stream.dataset, stream.name, documents, samples, split, config)

    def _index_config(self, stream: Stream, cache: str) -> IndexConfig:
        return index_config(self._config, self._tokenizer, stream, cache, self._builds, self._log)
