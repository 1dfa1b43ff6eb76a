"""Mixtures of sources: shares, budgets, epochs, stages, and rows that follow from the sample's number alone."""

import pytest

from megatron_fbt.config.sources import SourceConfig, StageConfig
from megatron_fbt.data.dataset import build_datasets
from tests.unit.data.corpus import EOD, PlainTokenizer, data_config, write_documents

TOKENIZER = PlainTokenizer(60_000)


def numbered(prefix, first, lengths):
    """Documents whose tokens are all different, but for their ends; the prefix and the tokens in order."""
    ids = iter(range(first, 60_000))
    documents = [[next(ids) for _ in range(length - 1)] + [EOD] for length in lengths]
    return write_documents(prefix, documents, TOKENIZER.vocab_size), documents


def mixed(folder, sources, length=8, split="1,0,0", stages=(), steps=100, batch=4, **training):
    config = data_config(folder, [], length, split)
    config.data.sources, config.data.stages = list(sources), list(stages)
    config.training.train_steps, config.training.global_batch_size = steps, batch
    for name, value in training.items():
        setattr(config.training, name, value)
    return config


def test_two_sources_share_the_rows(tmp_path):
    a, _ = numbered(tmp_path / "a", 1, [12] * 30)
    b, _ = numbered(tmp_path / "b", 1000, [20] * 30)
    config = mixed(tmp_path, [SourceConfig("a", [a], weight=3), SourceConfig("b", [b], weight=1)], split="8,2,0")
    data = build_datasets(config, TOKENIZER, 400, 12)
    firsts = [int(data.train[i]["tokens"].max()) >= 1000 for i in range(400)]
    assert sum(firsts) == 100 and all(abs(sum(firsts[:n]) - n / 4) < 1 for n in range(400))
    assert [source.rows for source in data.plan.sources] == [300, 100]
    assert len(data.valid) == 12
    print(data.plan.describe())
