"""Mixtures over real files: every token of an epoch once, true labels, exact stops and resumes, shares and limits."""

import logging
import os
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fbt.config.sources import SourceConfig, StageConfig
from megatron_fbt.core.manifest import FileEntry
from megatron_fbt.data.corpus_manifest import CorpusManifest, Shard, write_manifest
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.epochs import rows_inside, rows_of_epochs
from megatron_fbt.data.forecast import forecast
from megatron_fbt.data.prefixes import find_prefixes, indexed_pairs
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.data.streams import JoinedDataset, check_document_count, open_stream
from megatron_fbt.errors import ConfigError, DataError
from megatron_fbt.training.batch_size import BatchSizeSchedule, run_length
from tests.unit.data.corpus import PlainTokenizer, data_config, numbered_documents, write_documents

TOKENIZER = PlainTokenizer(60_000)


def write_different(prefix, first, lengths):
    """Documents in which no token comes twice; how many there are."""
    ids = iter(range(first, 60_000))
    write_documents(prefix, [[next(ids) for _ in range(length)] for length in lengths], 60_000)
    return sum(lengths)


def mixed(folder, sources, length=8, split="1,0,0", stages=(), **training):
    config = data_config(folder, [], length, split)
    config.data.sources = list(sources)
    config.data.stages = [StageConfig(first_step, weights) for first_step, weights in stages]
    for name, value in {"train_steps": 100, "global_batch_size": 4, **training}.items():
        setattr(config.training, name, value)
    return config


def build(config, valid=0, tokenizer=TOKENIZER):
    return build_datasets(config, tokenizer, run_length(config.training, config.data.sequence_length)[1], valid)


def delivered(config, data, layout, stops):
    """Rows of a run in the order in which it reads them: data-parallel ranks, and a new start at each stop."""
    ranks, micro = layout
    schedule = BatchSizeSchedule(config.training, ranks)
    consumed, rows = 0, []
    for step in range(config.training.train_steps):
        if step in stops:  # what a resumed run knows is the number of samples consumed
            data = build(config)
        size = schedule.global_batch_size(consumed)
        per_rank = [micro_batch_sample_ids(consumed, size, micro, rank, ranks) for rank in range(ranks)]
        rows += [data.train[n] for m in range(size // (micro * ranks)) for rank in per_rank for n in rank[m]]
        consumed += size
    return rows


def check_stream(rows, tokens, first, length):
    """All rows of one source in their order: epochs whole, labels true.

    Args:
        rows: EpochRows of the source.
        tokens: of an epoch; they are numbered from `first` on.
        first: see tokens.
        length: tokens in a row.
    """
    place = numpy.argsort(numpy.asarray(rows.shuffle_index), kind="stable")
    assert len(rows) == rows_of_epochs(rows.epochs, tokens, length)
    in_order = [rows[int(number)] for number in place]
    stream = torch.cat([row["tokens"] for row in in_order] + [in_order[-1]["labels"][-1:]])
    assert torch.equal(torch.cat([row["labels"] for row in in_order]), stream[1:])
    for begin in range(0, len(stream) - tokens, tokens):
        assert sorted(stream[begin : begin + tokens].tolist()) == list(range(first, first + tokens))
    unused = rows.epochs * tokens - length * len(rows)
    assert 1 <= unused <= length
    return unused


SIZES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pairs_of_sources=st.lists(SIZES, min_size=1, max_size=3),
    length=st.integers(2, 20),
    layout=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]),
    steps=st.integers(2, 12),
    ramp=st.booleans(),
    staged=st.booleans(),
    stops=st.sets(st.integers(1, 11), max_size=2),
    seed=st.integers(0, 2**40),
)
def test_every_token_of_an_epoch_comes_once_in_any_layout_and_after_any_stop(
    tmp_path_factory, pairs_of_sources, length, layout, steps, ramp, staged, stops, seed
):
    folder, sources, sizes = tmp_path_factory.mktemp("any"), [], []
    for number, pairs in enumerate(pairs_of_sources):
        pairs[0][0] += 2  # training needs two tokens
        paths = [str(folder / f"{number}-{pair}") for pair in range(len(pairs))]
        first = 1 + 10_000 * number
        sizes.append(0)
        for path, lengths in zip(paths, pairs, strict=True):
            sizes[-1] += write_different(path, first + sizes[-1], lengths)
        sources.append(SourceConfig(f"s{number}", paths, weight=1.0 + number))
    stages = [(0, None), (1, {"s0": 1}), (steps - 1, {s.name: 2.0 for s in sources})] if staged and steps > 2 else []
    unit = layout[0] * layout[1]
    training = {"rampup_batch_size": [unit, unit, 3 * unit]} if ramp else {}
    config = mixed(folder, sources, length, stages=stages, train_steps=steps, global_batch_size=2 * unit, **training)
    config.run.seed = seed
    data = build(config)
    mixture, all_rows = data.train._dataset.mixture, data.train._dataset._rows
    found = delivered(config, data, layout, stops)
    assert len(found) == mixture.samples == len(data.train)
    by_source = [[] for _ in sources]
    for row in found:
        by_source[(int(row["tokens"][0]) - 1) // 10_000].append(row["tokens"])
    for number, (rows, tokens, plan) in enumerate(zip(by_source, sizes, data.plan.sources, strict=True)):
        assert len(rows) == mixture.rows[number] == plan.rows
        if not rows:
            continue
        # The run's rows are the source's first ones in their order, each once: no layout and no stop changes them.
        expected = [all_rows[number][n]["tokens"] for n in range(len(rows))]
        assert torch.equal(torch.stack(rows), torch.stack(expected))
        assert plan.tail_tokens == check_stream(all_rows[number], tokens, 1 + 10_000 * number, length)
        assert plan.tokens == length * len(rows) and plan.epoch_tokens == tokens
        check_epochs_follow(rows, tokens, 1 + 10_000 * number)


def check_epochs_follow(rows, tokens, first):
    """No token comes for the third time before all have come once, and so on: an epoch ends before the next but one."""
    seen, least = numpy.zeros(tokens, dtype=int), 0
    for row in rows:
        least = seen.min()
        numpy.add.at(seen, row.numpy() - first, 1)
        spread = -(-len(row) // tokens) + 1  # a row longer than an epoch holds several
        assert seen.max() <= least + spread


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
@pytest.mark.parametrize("asked", ["one", "epoch", "epoch and one", "ten epochs"])
def test_one_document_of_about_a_row(tmp_path, extra, asked):
    length, tokens = 8, 8 + extra
    epoch = max(1, (tokens - 1) // length)
    samples = {"one": 1, "epoch": epoch, "epoch and one": epoch + 1, "ten epochs": 10 * tokens // length}[asked]
    write_different(tmp_path / "one", 1, [tokens])
    source = SourceConfig("one", [str(tmp_path / "one")], weight=1)
    data = build(mixed(tmp_path, [source], train_steps=samples, global_batch_size=1), valid=3)
    assert data.valid is None and len(data.train) == samples
    unused = check_stream(data.train._dataset._rows[0], tokens, 1, length)
    assert data.plan.sources[0].tail_tokens == unused
    following = {n: n % tokens + 1 for n in range(1, tokens + 1)}
    for n in range(samples):
        row = data.train[n]
        assert row["labels"].tolist() == [following[t] for t in row["tokens"].tolist()]


def test_an_epoch_is_over_before_the_next_begins_and_a_longer_run_has_the_same_rows_first(tmp_path):
    tokens = write_different(
        tmp_path / "c", 1, [5] * 16
    )  # 80 tokens: 10 rows of 8, the last label is of the next epoch
    source = SourceConfig("c", [str(tmp_path / "c")], weight=1)

    def rows(steps, seed=1):
        config = mixed(tmp_path, [source], train_steps=steps, global_batch_size=1)
        config.run.seed = seed
        data = build(config)
        return [data.train[n]["tokens"].tolist() for n in range(steps)]

    long = rows(40)
    for epoch in range(4):
        assert sorted(sum(long[10 * epoch : 10 * epoch + 10], [])) == list(range(1, tokens + 1))
    assert len({str(long[10 * epoch : 10 * epoch + 10]) for epoch in range(4)}) == 4
    for steps in (1, 9, 10, 11, 20, 25):
        assert rows(steps) == long[:steps]
    assert rows(40, seed=2) != long


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12])
@pytest.mark.parametrize("length", [2048, 8191])
def test_rows_of_epochs_beyond_32_bits(tokens, length):
    edges = [rows_inside(epoch, tokens, length) for epoch in range(4)]
    for epoch, (first, end) in enumerate(edges):
        assert first * length >= epoch * tokens > (first - 1) * length
        assert end * length + 1 <= (epoch + 1) * tokens < (end + 1) * length + 1
    between = [following[0] - before[1] for before, following in zip(edges, edges[1:], strict=False)]
    assert set(between) <= {0, 1}


def test_several_pairs_are_one_stream_of_documents(tmp_path):
    parts = [
        numbered_documents(7, 5, start=1),
        numbered_documents(1, 9, start=200),
        numbered_documents(4, 9, start=400),
    ]
    prefixes = [write_documents(tmp_path / f"part-{n}", part) for n, part in enumerate(parts)]
    whole = write_documents(tmp_path / "whole", sum(parts, []))
    joined = open_stream("s", prefixes, (8, 2, 0), str(tmp_path), True, 1000)
    single = open_stream("s", [whole], (8, 2, 0), str(tmp_path), True, 1000)
    assert isinstance(joined.dataset, JoinedDataset) and len(joined) == len(single) == 12
    assert numpy.array_equal(joined.dataset.sequence_lengths, single.dataset.sequence_lengths)
    assert [joined.tokens(n) for n in range(3)] == [single.tokens(n) for n in range(3)]
    for number in range(12):
        assert numpy.array_equal(joined.dataset.get(number), single.dataset.get(number))
        assert numpy.array_equal(joined.dataset.get(number, 1, 2), single.dataset.get(number, 1, 2))
    rows = []
    for paths in (prefixes, [whole], [str(tmp_path / "part-*")]):
        data = build(mixed(tmp_path, [SourceConfig("s", paths, weight=1)], split="8,2,0"), 2, PlainTokenizer())
        rows.append([data.train[n]["tokens"].tolist() for n in range(400)] + [data.valid[0]["tokens"].tolist()])
    assert rows[0] == rows[1] == rows[2]
    # data.paths with a pattern: one entry, one stream.
    plain = data_config(tmp_path, [tmp_path / "part-?.bin"])
    joined_rows = build_datasets(plain, PlainTokenizer(), 60, 0).train
    plain.data.paths = [whole]
    whole_rows = build_datasets(plain, PlainTokenizer(), 60, 0).train
    assert all(torch.equal(joined_rows[n]["tokens"], whole_rows[n]["tokens"]) for n in range(60))


def test_what_paths_stand_for(tmp_path):
    for name in ("b", "a", "c.d"):
        write_documents(tmp_path / name, [[1, 2]])
    assert find_prefixes("s", [f"{tmp_path}/*.bin"]) == [f"{tmp_path}/{name}" for name in ("a", "b", "c.d")]
    assert find_prefixes("s", [f"{tmp_path}/[ab]", f"{tmp_path}/c.d"]) == [f"{tmp_path}/{n}" for n in ("a", "b", "c.d")]
    with pytest.raises(DataError, match=r"data set s: .*/x\* matches no \.bin file and no manifest"):
        find_prefixes("s", [f"{tmp_path}/x*"])
    with pytest.raises(DataError, match=r"the pair .*/b is named twice"):
        find_prefixes("s", [f"{tmp_path}/*.bin", f"{tmp_path}/b"])
    config = mixed(
        tmp_path, [SourceConfig("s", [f"{tmp_path}/x*"], 1), SourceConfig("t", [f"{tmp_path}/a"], 1, split="0,1,0")]
    )
    assert list(indexed_pairs(config.data)) == [(f"{tmp_path}/a", "0,1,0")]


def test_the_prefix_of_a_sharded_corpus_stands_for_its_manifest(tmp_path):
    shard = tmp_path / "corpus-00000-of-00001"
    write_documents(shard, [[1, 2]])
    shards = (Shard(str(shard), 1, 2, 0, {}, {ending: FileEntry(0, "0" * 16) for ending in (".bin", ".idx")}),)
    write_manifest(CorpusManifest(f"{tmp_path}/corpus.manifest.json", "text", {}, 10, 0, "uint16", shards))
    assert find_prefixes("s", [f"{tmp_path}/corpus"]) == [str(shard)]
    write_documents(tmp_path / "corpus", [[1, 2]])
    assert find_prefixes("s", [f"{tmp_path}/corpus"]) == [f"{tmp_path}/corpus"]


def test_files_that_a_manifest_does_not_mean_are_refused(tmp_path):
    write_documents(tmp_path / "corpus", [[1, 2]])
    sizes = {ending: os.path.getsize(f"{tmp_path}/corpus{ending}") for ending in (".bin", ".idx")}
    shard = Shard(f"{tmp_path}/corpus", 1, 2, 0, {}, {end: FileEntry(size, "0" * 16) for end, size in sizes.items()})
    manifest = f"{tmp_path}/corpus.manifest.json"
    identity = dict(TOKENIZER.unique_identifiers)
    write_manifest(CorpusManifest(manifest, "text", identity, TOKENIZER.vocab_size, TOKENIZER.eod, "uint16", (shard,)))
    assert find_prefixes("s", [manifest], TOKENIZER) == [shard.prefix]
    write_documents(tmp_path / "corpus", [[1, 2, 3]])
    with pytest.raises(DataError, match=rf"corpus\.bin has 6 bytes, {sizes['.bin']} were written; it was cut or repl"):
        find_prefixes("s", [manifest], TOKENIZER)


def test_each_source_has_its_split_and_one_may_be_for_validation_only(tmp_path, caplog):
    for number, name in enumerate(("a", "b", "c")):
        write_different(tmp_path / name, 1 + 1000 * number, [20] * 10)
    paths = {name: [str(tmp_path / name)] for name in ("a", "b", "c")}
    sources = [
        SourceConfig("a", paths["a"], weight=1),
        SourceConfig("b", paths["b"], weight=3, split="5,5,0"),
        SourceConfig("c", paths["c"], weight=4, split="0,1,0"),
    ]
    with caplog.at_level(logging.INFO, logger="megatron_fbt"):
        data = build(mixed(tmp_path, sources, split="1,0,0"), valid=14)
    train = Counter(int(data.train[n]["tokens"][0]) // 1000 for n in range(400))
    assert train == {0: 100, 1: 300}
    valid = Counter(int(data.valid[n]["tokens"][0]) // 1000 for n in range(len(data.valid)))
    assert len(data.valid) == 14 and valid == {1: 6, 2: 8}
    assert {int(t) for n in range(400) for t in data.train[n]["tokens"] if t > 1000} == set(range(1001, 1101))
    assert "data set a has no part in validation: its split 1,0,0 gives it 0 documents" in caplog.text
    assert [source.valid_documents for source in data.plan.sources] == [0, 5, 10]


@pytest.mark.parametrize("split, documents, length", [("99,1,0", 10, 13), ("100,0,0", 10, 13), ("5,5,0", 10, 3)])
def test_validation_without_a_row_is_switched_off(tmp_path, caplog, split, documents, length):
    write_different(tmp_path / "c", 1, [length] * documents)
    data = build(mixed(tmp_path, [SourceConfig("c", [str(tmp_path / "c")], 1)], 16, split), valid=5)
    assert data.valid is None and "validation is off" in caplog.text


def test_a_pair_in_two_sources_is_refused_by_whatever_path(tmp_path):
    write_documents(tmp_path / "a", [[1, 2, 3]] * 9)
    (tmp_path / "link").symlink_to(tmp_path)
    paths = {"one": f"{tmp_path}/a", "two": f"{tmp_path}/link/a*"}
    config = mixed(tmp_path, [SourceConfig(name, [path], 1) for name, path in paths.items()])
    for refused in (lambda: build(config), lambda: forecast(config, 8, [])):
        with pytest.raises(DataError, match=r"pair .*/link/a belongs to one and to two; name it in one of them"):
            refused()


def test_a_source_without_training_documents_is_named(tmp_path):
    write_different(tmp_path / "c", 1, [20])
    with pytest.raises(DataError, match="data set tiny: its split 1,999,0 gives training 0 of its 1 documents"):
        build(mixed(tmp_path, [SourceConfig("tiny", [str(tmp_path / "c")], 1, split="1,999,0")]))


def test_more_epochs_than_allowed_are_refused_with_what_would_fit(tmp_path):
    write_different(tmp_path / "a", 1, [20] * 10)
    write_different(tmp_path / "b", 1000, [20] * 100)
    paths = [[str(tmp_path / "a")], [str(tmp_path / "b")]]

    def plan(weight, limit):
        sources = [SourceConfig("a", paths[0], weight, max_epochs=limit), SourceConfig("b", paths[1], 3)]
        return build(mixed(tmp_path, sources)).plan

    # 100 of 400 rows are 800 tokens, 4 epochs of 200.
    assert plan(1, 4).sources[0].epochs == 4 and plan(1, None).sources[0].epochs == 4
    with pytest.raises(ConfigError) as caught:
        plan(1, 3.5)
    text = str(caught.value)
    assert "4.0000 epochs of a (800 tokens, an epoch has 200), above its max_epochs 3.5" in text
    assert "87 rows fit, 696 tokens, 21.7500% of the run" in text


def test_documents_beyond_32_bits_are_refused_by_name():
    check_document_count("web", 2**31 - 1)
    with pytest.raises(
        DataError, match=r"data set web: 2,147,483,648 documents, and one source can have 2,147,483,647"
    ):
        check_document_count("web", 2**31)


def test_a_damaged_pair_of_a_source_is_named(tmp_path):
    write_different(tmp_path / "a", 1, [20] * 10)
    with open(tmp_path / "a.bin", "ab") as file:
        file.truncate(399)
    with pytest.raises(DataError, match=r"a\.bin: 399 bytes found, 400 expected"):
        build(mixed(tmp_path, [SourceConfig("s", [str(tmp_path / "a")], 1)]))


def test_a_bad_id_is_named_with_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fbt.data.indexed._PART", 4)
    write_different(tmp_path / "a", 1, [50] * 10)
    data = build(mixed(tmp_path, [SourceConfig("web", [str(tmp_path / "a")], 1)]), tokenizer=PlainTokenizer(200))
    with pytest.raises(DataError, match="train row [0-9]+, row [0-9]+ of source web: token id .* vocabulary of 200"):
        for n in range(60):
            data.train[n]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_as_few_rows_as_a_batch(tmp_path, ranks, more):
    batch = 2 * ranks
    write_different(tmp_path / "a", 1, [9] * 4)
    source = SourceConfig("a", [str(tmp_path / "a")], 1, split="2,2,0")
    config = mixed(tmp_path, [source], train_steps=None, train_samples=batch + more, global_batch_size=batch)
    steps, samples = run_length(config.training, 8)
    assert samples == steps * batch == (batch if more < 1 else 2 * batch)
    data = build(config, valid=batch)
    assert len(data.train) == samples and 1 <= len(data.valid) <= 2  # a batch of validation wraps around
    ids = [n for rank in range(ranks) for m in micro_batch_sample_ids(0, batch, 2, rank, ranks) for n in m]
    assert sorted(ids) == list(range(batch))


def test_300_sources_can_all_be_read(tmp_path):
    for number in range(300):
        write_different(tmp_path / f"s{number}", 1 + 100 * number, [6, 7])
    weights = [10.0 ** -(number % 9) for number in range(300)]
    sources = [SourceConfig(f"s{n}", [str(tmp_path / f"s{n}")], w) for n, w in enumerate(weights)]
    data = build(mixed(tmp_path, sources, length=4, train_steps=250))
    found = Counter((int(data.train[n]["tokens"][0]) - 1) // 100 for n in range(1000))
    assert max(abs(found[n] - 1000 * w / sum(weights)) for n, w in enumerate(weights)) < 1
    assert os.path.isdir(tmp_path / "data_cache")
