"""The index cache: built once, by anybody, whole or not at all; prepared ahead by the code that the run uses."""

import json
import multiprocessing
import os
import pickle
import shutil
import time
from pathlib import Path

import numpy
import pytest

from megatron_fbt.config.sources import SourceConfig, StageConfig
from megatron_fbt.data import index_cache
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.epochs import EpochRows
from megatron_fbt.data.index_cache import IndexLog
from megatron_fbt.data.prepare import prepare_cache
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import DataError
from tests.unit.data.chats import chat, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import PlainTokenizer, data_config, numbered_documents, write_documents

TOKENIZER = PlainTokenizer()


def config_of(folder, kind="sources"):
    """A run over three pairs, of which `mixed` has one entry of two."""
    prefixes = [str(folder / name) for name in ("a", "b", "c")]
    for number, prefix in enumerate(prefixes):
        if not os.path.exists(f"{prefix}.idx"):
            write_documents(prefix, numbered_documents(20 + number, 13))
    config = data_config(folder / "run", prefixes if kind == "paths" else [], 8, "8,2,0")
    if kind == "sources":
        config.data.sources = [SourceConfig("ab", prefixes[:2], weight=2), SourceConfig("c", prefixes[2:], tokens=400)]
        config.data.stages = [StageConfig(0), StageConfig(12, {"ab": 1})]
    config.training.train_steps, config.training.global_batch_size, config.training.eval_iters = 25, 4, 1
    return config


def rows_of(config, log=None):
    data = build_datasets(config, TOKENIZER, 100, 4, log=log)
    return [data.train[n]["tokens"].tolist() for n in range(100)] + [data.valid[n]["tokens"].tolist() for n in range(4)]


def snapshot(folder):
    """Every file with its content's identity."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["paths", "sources"])
def test_after_preparing_the_run_builds_nothing(tmp_path, kind, monkeypatch):
    config = config_of(tmp_path, kind)
    expected = rows_of(config)
    shutil.rmtree(tmp_path / "run")
    report = prepare_cache(config, TOKENIZER)
    # paths: three data sets and their blend, each for training and validation; sources: two, each for both.
    assert len(report["built"]) == {"paths": 8, "sources": 4}[kind] and report["found"] == []
    assert report["cache_dir"] == str(tmp_path / "run" / "data_cache")
    before = snapshot(tmp_path / "run")
    assert report["bytes"] == sum(len(content) for _, _, content in before.values())

    def refuse(*_):
        raise AssertionError("something was built")

    monkeypatch.setattr(EpochRows, "_build", refuse)
    monkeypatch.setattr(index_cache, "_in_memory", refuse)
    monkeypatch.setattr(index_cache._Entry, "write", refuse)
    log = IndexLog()
    assert rows_of(config, log) == expected and snapshot(tmp_path / "run") == before
    assert log.built == [] and len(log.found) == len(report["built"])
    again = prepare_cache(config, TOKENIZER)
    assert again["built"] == [] and again["found"] == report["built"] and again["data"] == report["data"]


def test_preparing_reads_json_lines(tmp_path):
    letters = HuggingFaceTokenizer(write_letter_tokenizer(tmp_path / "letters"))
    path = write_chats(tmp_path / "chats.jsonl", [chat("user: a", "assistant: b")] * 9)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": list(range(1, 9)), "labels": [-100] * 7 + [5]}) + "\n")
    for name, file, tokenizer in (("conversations", path, letters), ("labelled", rows, TOKENIZER)):
        config = data_config(tmp_path / name, [file], 8, "1,0,0", format=name, reset_attention_mask=True)
        config.training.train_steps, config.training.global_batch_size = 5, 2
        first = prepare_cache(config, tokenizer)
        before = snapshot(tmp_path / name)
        again = prepare_cache(config, tokenizer)
        assert len(first["built"]) == 1 and first["built"] == again["found"] and again["built"] == first["found"] == []
        assert snapshot(tmp_path / name) == before and first["training_rows"] == 10


@pytest.mark.parametrize("kind", ["paths", "sources"])
def test_a_cache_that_is_complete_may_be_read_only(tmp_path, kind, monkeypatch):
    config = config_of(tmp_path, kind)
    expected = rows_of(config)
    before = snapshot(tmp_path / "run")

    def read_only(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_cache.tempfile, "mkdtemp", read_only)
    monkeypatch.setattr(index_cache.os, "replace", read_only)
    assert rows_of(config) == expected and snapshot(tmp_path / "run") == before
    next((tmp_path / "run").rglob("*train-shuffle_index.npy")).unlink()
    with pytest.raises(DataError, match=r"is missing or damaged and cannot be written: .*tools/prepare_cache\.py"):
        rows_of(config)


DAMAGES = {
    "cut": lambda content: content[:-1],
    "empty": lambda content: b"",
    "zeros": lambda content: content[:128] + bytes(len(content) - 128),
    "one bit": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "another's": lambda content: content + b"1",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["paths", "sources"])
def test_damaged_files_are_noticed_and_built_again(tmp_path, kind, damage, caplog):
    config = config_of(tmp_path, kind)
    expected = rows_of(config)
    good = {name: content for name, (_, _, content) in snapshot(tmp_path / "run").items()}
    for name in good:
        if damage == "zeros" and len(good[name]) <= 128:
            continue
        path = tmp_path / "run" / name
        path.write_bytes(DAMAGES[damage](good[name]))
    assert rows_of(config) == expected
    assert {name: content for name, (_, _, content) in snapshot(tmp_path / "run").items()} == good
    assert caplog.text.count("building it again") == {"paths": 8, "sources": 4}[kind]
    assert not list((tmp_path / "run").rglob(".building-*"))


def test_rows_can_be_handed_to_other_processes(tmp_path):
    config = config_of(tmp_path)
    expected = rows_of(config)
    data = build_datasets(config, TOKENIZER, 100, 4)
    train = pickle.loads(pickle.dumps(data.train))
    assert [train[n]["tokens"].tolist() for n in range(100)] == expected[:100]


def test_indices_of_older_data_are_not_used(tmp_path):
    config = config_of(tmp_path)
    rows_of(config)
    write_documents(tmp_path / "b", [[7] * 12 + [0] for _ in range(21)])  # as many documents of the same length
    found = rows_of(config)
    assert 7 in {token for row in found for token in row}
    log = IndexLog()
    rows_of(config, log)
    assert log.built == []


def test_what_a_killed_builder_left_is_not_taken_for_an_entry(tmp_path):
    config = config_of(tmp_path)
    expected = rows_of(config)
    for sums in (tmp_path / "run").rglob("*-sums.json"):
        sums.unlink()  # the file that is put into its place last
    folders = sorted(path for path in (tmp_path / "run" / "data_cache").iterdir())
    for folder, age in zip(folders, (2 * index_cache.LEFTOVER_S, 60), strict=True):
        (folder / ".building-x").mkdir()
        os.utime(folder / ".building-x", (time.time() - age,) * 2)
    log = IndexLog()
    assert rows_of(config, log) == expected and len(log.built) == 4
    assert [(folder / ".building-x").exists() for folder in folders] == [False, True]


def _build_rounds(folder, kind, rounds, barrier, results):
    try:
        for number in range(rounds):
            config = config_of(Path(folder), kind)
            config.data.cache_dir = f"{folder}/cache{number}"
            barrier.wait(60)
            results.put(rows_of(config))
    except BaseException as error:
        results.put(repr(error))
        barrier.abort()


def build_at_once(folder, kind, rounds):
    """Four processes build the same caches at the same time."""
    config = config_of(folder, kind)
    expected = rows_of(config)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_build_rounds, args=(str(folder), kind, rounds, barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in range(4 * rounds)]
    for process in processes:
        process.join(30)
    assert all(rows == expected for rows in found), [rows for rows in found if isinstance(rows, str)]
    contents = [
        {name: content for name, (_, _, content) in snapshot(folder / f"cache{number}").items()}
        for number in range(rounds)
    ]
    assert all(content == contents[0] for content in contents) and len(contents[0]) >= 16
    assert not any(".building" in name for name in contents[0])


def test_four_processes_build_the_same_cache_at_once(tmp_path):
    build_at_once(tmp_path, "sources", rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paths", "sources"])
def test_four_processes_build_the_same_cache_at_once_twenty_times(tmp_path, kind):
    build_at_once(tmp_path, kind, rounds=20)


def test_epochs_of_megatron_are_counted_at_once(tmp_path):
    write_documents(tmp_path / "one", [[1, 2]])
    data = build_datasets(data_config(tmp_path, [tmp_path / "one"], 8, "1,0,0"), TOKENIZER, 5, 0)
    dataset = data.train._dataset
    dataset.num_samples = 3 * 10**12
    assert dataset._get_num_epochs(7) == (3 * 10**12 * 8 + 1 + 6) // 7
    dataset.num_samples = 1
    assert [dataset._get_num_epochs(tokens) for tokens in (8, 9, 10)] == [2, 1, 1]
    assert numpy.asarray(dataset.shuffle_index).dtype == numpy.uint32
