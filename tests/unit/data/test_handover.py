"""Data sets of every format in another process: the same rows with their documents, and nothing large on the way."""

import json
import multiprocessing
import pickle
from multiprocessing import forkserver

import numpy
import pytest
import torch

from megatron_fbt.config.sources import SourceConfig
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.handover import pack, unpack
from megatron_fbt.data.loader import rows_ahead
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import DataError
from tests.unit.data.chats import chat, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import data_config, numbered_documents, write_documents

READER = BatchReader(None, 0, True, True, torch.device("cpu"))
IDS = [[0, 1, 2], [7, 8, 9]]


@pytest.fixture(scope="module", autouse=True)
def server():
    """The fork server of the distributed tests."""
    multiprocessing.set_forkserver_preload(["tests.distributed.preload"])
    forkserver.ensure_running()


def config_of(folder, name):
    letters = range(9 if name == "chats" else 3000)
    if name == "chats":
        write_chats(folder / "chats.jsonl", [chat(f"user: {n}", "assistant: ok") for n in letters])
        return data_config(folder, [folder / "chats.jsonl"], 24, format="conversations")
    if name == "labelled":
        rows = [
            {"input_ids": [n % 40, 1, 2, 3], "labels": [-100, 7, 8, -100], "feedback": [0, 0, 1, 1]} for n in letters
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return data_config(folder, [folder / "rows.jsonl"], 4, format="labelled")
    paths = [write_documents(folder / f"c{n}", numbered_documents(2000, 11, vocab_size=40), 40) for n in range(3)]
    if name == "blend":
        return data_config(folder, paths, weights=[1, 2, 4])
    sources = [SourceConfig("joined", paths[:2], 0.4), SourceConfig("other", paths[2:], 0.6)]
    return data_config(folder, [], sources=sources)


@pytest.mark.parametrize("name", ["blend", "mixture", "chats", "labelled"])
def test_rows_of_another_process_are_the_same_and_files_are_opened_there(tmp_path, name):
    write_letter_tokenizer(tmp_path / "letters")
    tokenizer = HuggingFaceTokenizer(tmp_path / "letters")
    config = config_of(tmp_path, name)
    config.model.vocab_size = tokenizer.vocab_size
    rows = build_datasets(config, tokenizer, 6000, 0).train
    packed = pack(rows)
    most = {"labelled": 36_000, "blend": 36_000}  # numbers of 3,000 rows; those of 1,600 documents of each data set
    assert len(packed) < most.get(name, 12_000) and b"<|assistant|>" not in packed
    ahead = rows_ahead(1, rows, tokenizer.eod, READER, lambda: iter([IDS]))
    found = load_micro_batches(rows, IDS, tokenizer.eod, READER, ahead)
    ahead.close()
    for batch, expected in zip(found, load_micro_batches(rows, IDS, tokenizer.eod, READER), strict=True):
        for field, value in vars(expected).items():
            same = getattr(batch, field) is None if value is None else torch.equal(getattr(batch, field), value)
            assert same and (value is not None or field in ("feedback_region", "on_host")), field
    starts = torch.cat([batch.document_starts for batch in found])
    assert starts[:, 0].all() and bool(starts[:, 1:].any()) == (name != "labelled")


def test_views_of_a_mapped_file_are_opened_where_they_lie(tmp_path):
    numbers = numpy.arange(24, dtype=numpy.int32)
    numbers.tofile(tmp_path / "numbers")
    whole = numpy.memmap(tmp_path / "numbers", mode="r", dtype=numpy.int32, offset=8)
    views = [
        whole,
        whole.reshape(2, 11),
        whole[5:],
        whole[3:][2:4],
        whole.reshape(11, 2)[1:],
        whole.view(numpy.ndarray),
    ]
    copies = [whole[::2], whole[:0], whole.reshape(2, 11).T, numbers]
    for view in (*views, *copies):
        found = unpack(pack(view))
        assert found.dtype == view.dtype and found.shape == view.shape and numpy.array_equal(found, view)
    (numpy.arange(24, dtype=numpy.int32) + 100).tofile(tmp_path / "numbers")
    assert [int(unpack(pack(view)).flat[0]) for view in views] == [102, 102, 107, 107, 104, 102]
    (tmp_path / "numbers").unlink()
    with pytest.raises(DataError, match="cannot be opened in a process that reads ahead: .*numbers"):
        unpack(pack(whole))
    assert pickle.loads(pack({"a": [1]})) == {"a": [1]}
