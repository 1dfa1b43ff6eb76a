"""Rows of tokens for training and validation: Megatron-Core's data sets, split by documents and blended by weight."""

import hashlib
import logging
import math
import os
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple, Union

import numpy
import torch

from megatron_fbt.config.data import parse_split
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.conversations import open_conversations, prepare_conversations
from megatron_fbt.data.first_rank import first_rank_first, from_first_rank, is_first_rank
from megatron_fbt.data.indexed import check_ids, check_indexed, quiet_megatron
from megatron_fbt.data.labelled import LabelledRows, labelled_rows, open_labelled, prepare_labelled
from megatron_fbt.data.packing import PackedRows, conversation_rows
from megatron_fbt.data.splits import document_ranges
from megatron_fbt.errors import ConfigError, DataError

with quiet_megatron():
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megatron_fbt.data.index_cache import CachedBlendedDataset, CachedGPTDataset

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
            raise DataError(f"{self._name} row {index}: cannot be read: {error}") from error
        check_ids(row["tokens"], self._vocab_size, f"of the {self._name} row {index}")
        check_ids(row["labels"][-1:], self._vocab_size, f"of the {self._name} row {index}")
        return {name: row[name] for name in ("tokens", "labels", "loss_mask")}


@dataclass
class Datasets:
    """Rows of each split; ``valid`` is None when there is nothing to validate on."""

    train: Union[Rows, PackedRows, LabelledRows]
    valid: Union[Rows, PackedRows, LabelledRows, None]


@dataclass(frozen=True, eq=False)
class _Source:
    """One data set of the blend.

    Attributes:
        prefix: Path without .bin and .idx.
        indexed: The opened files.
        cache: Folder for its indices, named by its content.
        weight: As configured; None = in proportion to the tokens.
    """

    prefix: str
    indexed: IndexedDataset
    cache: str
    weight: Optional[float]


def build_datasets(config: PretrainConfig, tokenizer, train_samples: int, valid_samples: int) -> Datasets:
    """Build the rows for training and validation; to be called by all ranks if there is a process group.

    The order of the rows depends on run.seed, the data section and the number of samples. Training repeats the
    documents as often as ``train_samples`` asks for, in a new order each time; validation holds at most one row for
    each stretch of ``sequence_length`` tokens, and sample numbers beyond its end start again.

    Args:
        config: Sections data and run are used, and the resolved model.vocab_size.
        tokenizer: The tokenizer that made the data.
        train_samples: Rows of the whole run.
        valid_samples: Rows of one evaluation; 0 = no validation.

    Raises:
        ConfigError: Paths, weights or split cannot work.
        DataError: A file is missing, damaged or made with another tokenizer, or there is nothing to train on. On all
            ranks, if there is a process group.
    """
    paths, weights = config.data.paths, blend_weights(config.data.paths, config.data.weights)
    parts = parse_split(config.data.split)
    if train_samples < 1:
        raise ConfigError(f"the run has {train_samples} training samples; training needs at least one step")
    if config.data.format == "labelled":
        return _build_labelled(config, train_samples, valid_samples)
    tokenizer.eod  # noqa: B018  refused before any data are read
    if config.data.format == "conversations":
        return _build_conversations(config, tokenizer, train_samples, valid_samples)

    def build() -> Datasets:
        sources = [_open(config, tokenizer, prefix, weight) for prefix, weight in zip(paths, weights, strict=True)]
        builder = _SplitBuilder(config, tokenizer, sources, parts)
        return Datasets(builder.train(train_samples), builder.valid(valid_samples))

    return first_rank_first(build)


def _build_conversations(config: PretrainConfig, tokenizer, train_samples: int, valid_samples: int) -> Datasets:
    folder = from_first_rank(lambda: prepare_conversations(config.data, _cache_folder(config), tokenizer))

    def build() -> Datasets:
        conversations = open_conversations(folder, config.data.mmap)
        seed, pad = config.run.seed, tokenizer.eod
        return Datasets(*conversation_rows(config.data, conversations, train_samples, valid_samples, pad, seed))

    return first_rank_first(build)


def _build_labelled(config: PretrainConfig, train_samples: int, valid_samples: int) -> Datasets:
    folder = from_first_rank(lambda: prepare_labelled(config.data, _cache_folder(config), config.model.vocab_size))

    def build() -> Datasets:
        source = open_labelled(folder, config.data.mmap)
        return Datasets(*labelled_rows(config.data, source, train_samples, valid_samples, config.run.seed))

    return first_rank_first(build)


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
    """Builds the rows of each split from the opened sources."""

    def __init__(self, config: PretrainConfig, tokenizer, sources: List[_Source], parts: Sequence[float]):
        self._config = config
        self._tokenizer = tokenizer
        self._sources = sources
        self._parts = parts
        self._length = config.data.sequence_length

    def train(self, samples: int) -> Rows:
        for source in self._sources:
            if self._tokens(source, Split.train) < 2:
                raise DataError(
                    f"data set {source.prefix}: data.split {self._config.data.split} gives training "
                    f"{self._documents(source, Split.train)} of its {len(source.indexed)} documents and fewer than two "
                    "tokens; give training a larger part or leave the data set out"
                )
        total = sum(self._tokens(source, Split.train) for source in self._sources)
        if total <= self._length and is_first_rank():
            logger.warning("%d tokens of training data do not fill a row of %d: rows repeat them", total, self._length)
        return self._rows(self._sources, Split.train, samples)

    def valid(self, samples: int) -> Optional[Rows]:
        if samples < 1:
            return None
        sources = [source for source in self._sources if self._tokens(source, Split.valid) > self._length]
        for source in self._sources:
            if source not in sources and is_first_rank():
                logger.info(
                    "data set %s has no part in validation: data.split %s gives it %d documents with %d tokens, and a "
                    "row needs %d",
                    source.prefix,
                    self._config.data.split,
                    self._documents(source, Split.valid),
                    self._tokens(source, Split.valid),
                    self._length + 1,
                )
        if not sources and is_first_rank():
            logger.warning("validation is off: data.split %s leaves no row for it", self._config.data.split)
        if not sources:
            return None
        available = sum((self._tokens(source, Split.valid) - 1) // self._length for source in sources)
        return self._rows(sources, Split.valid, min(samples, available))

    def _rows(self, sources: List[_Source], split: Split, samples: int) -> Rows:
        dataset = self._blend(sources, split, samples) if len(sources) > 1 else self._one(sources[0], split, samples)
        return Rows(dataset, self._length, self._tokenizer.vocab_size, split.name)

    def _blend(self, sources: List[_Source], split: Split, samples: int) -> CachedBlendedDataset:
        weights = [float(source.weight or self._tokens(source, split)) for source in sources]
        total = sum(weights)
        # The blend always draws from the source that lags most, so none gets more than its share rounded up.
        rows = [
            self._one(source, split, int(samples * w / total) + 2) for source, w in zip(sources, weights, strict=True)
        ]
        config = self._megatron_config(sources[0], os.path.dirname(sources[0].cache))
        return CachedBlendedDataset(rows, [weight / total for weight in weights], samples, config)

    def _one(self, source: _Source, split: Split, samples: int) -> CachedGPTDataset:
        first, end = self._range(source, split)
        documents = numpy.arange(first, end, dtype=numpy.int32)
        config = self._megatron_config(source, source.cache)
        return CachedGPTDataset(source.indexed, source.prefix, documents, samples, split, config)

    def _megatron_config(self, source: _Source, cache: str) -> GPTDatasetConfig:
        total = sum(self._parts)
        return GPTDatasetConfig(
            random_seed=self._config.run.seed % 2**32,
            sequence_length=self._length,
            blend=([source.prefix], None),
            split=",".join(f"{part / total:.12f}" for part in self._parts),
            path_to_cache=cache,
            mmap_bin_files=self._config.data.mmap,
            tokenizer=self._tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=self._config.data.eod_mask_loss,
            create_attention_mask=False,
        )

    def _range(self, source: _Source, split: Split) -> Tuple[int, int]:
        return document_ranges(self._parts, len(source.indexed))[split.value]

    def _documents(self, source: _Source, split: Split) -> int:
        first, end = self._range(source, split)
        return end - first

    def _tokens(self, source: _Source, split: Split) -> int:
        first, end = self._range(source, split)
        return int(source.indexed.sequence_lengths[first:end].sum(dtype=numpy.int64))


def _cache_folder(config: PretrainConfig) -> str:
    return config.data.cache_dir or os.path.join(config.run.dir, "data_cache")


def _open(config: PretrainConfig, tokenizer, prefix: str, weight: Optional[float]) -> _Source:
    if is_first_rank():
        check_indexed(prefix, tokenizer.vocab_size)
    cache = _cache_folder(config)
    try:
        indexed = IndexedDataset(prefix, multimodal=False, mmap=config.data.mmap)
        return _Source(prefix, indexed, os.path.join(cache, _fingerprint(prefix)), weight)
    except (OSError, AssertionError) as error:
        raise DataError(f"data set {prefix}: cannot be opened: {error}") from error


def _fingerprint(prefix: str) -> str:
    """A name for the content of a data set: sizes of both files and up to 64 MiB of the index, spread over it.

    Indices cached for older data of the same path are so never used.
    """
    step = 1 << 20
    sizes = [os.path.getsize(f"{prefix}{ending}") for ending in (".bin", ".idx")]
    digest = hashlib.sha256(repr(sizes).encode())
    blocks = -(-sizes[1] // step)
    with open(f"{prefix}.idx", "rb") as stream:
        for block in sorted({i * (blocks - 1) // 63 for i in range(64)}):
            stream.seek(block * step)
            digest.update(stream.read(step))
    return digest.hexdigest()[:16]
