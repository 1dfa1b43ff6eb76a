"""Data sets and micro-batches in real processes: one rank of each stage reads, all of them hold the same."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.errors import DataError
from tests.distributed.launch import run_distributed
from tests.unit.data.chats import chat, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import EOD, PlainTokenizer, data_config, numbered_documents, write_documents

WEIGHTS = [None, [1, 4]]
IDS = [[0, 1], [6, 7], [2**32 + 1, 3 * 10**12]]


class ReadOnce:
    """Rows that may be read on tensor-parallel rank 0 only."""

    def __init__(self, rows, allowed):
        self._rows, self._allowed, self.reads = rows, allowed, 0
        self.sequence_length = rows.sequence_length

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        assert self._allowed, "only tensor-parallel rank 0 reads"
        self.reads += 1
        if index == 4:
            raise DataError("row 4 cannot be read")
        return self._rows[index]


def stage_of(rank, tensor_size):
    """This rank's tensor-parallel group and rank, and its stage."""
    groups = [dist.new_group([tensor_size * s + t for t in range(tensor_size)]) for s in range(3)]
    return groups[rank // tensor_size], rank % tensor_size, rank // tensor_size


def load_in_three_stages(rank, world_size, folder, prefix):
    config = data_config(folder, [prefix])
    rows = build_datasets(config, PlainTokenizer(), 40, 0).train
    whole = load_micro_batches(rows, IDS, EOD, BatchReader(None, 0, True, True, torch.device("cpu")))
    group, tensor_rank, stage = stage_of(rank, world_size // 3)
    reader = BatchReader(group, tensor_rank, stage == 0, stage == 2, torch.device("cpu"))
    watched = ReadOnce(rows, tensor_rank == 0)
    sent = []
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, **keywords: (sent.append(tensor.numel()), broadcast(tensor, **keywords))
    batches = load_micro_batches(watched, IDS, EOD, reader)
    dist.broadcast = broadcast
    for batch, expected in zip(batches, whole, strict=True):
        for name, wanted in (("tokens", stage == 0), ("labels", stage == 2), ("loss_mask", stage == 2)):
            value = getattr(batch, name)
            assert torch.equal(value, getattr(expected, name)) if wanted else value is None
        assert torch.equal(batch.document_starts, expected.document_starts)
        assert torch.equal(batch.sample_ids, expected.sample_ids)
    fields = 3 if stage == 2 else 1
    assert sent == [1 + 3 * fields * 2 * 8]
    reads = watched.reads
    with pytest.raises(DataError) as caught:
        load_micro_batches(watched, [[0, 1], [3, 4]], EOD, reader)
    # The group is still usable and in step.
    (batch,) = load_micro_batches(watched, IDS[:1], EOD, reader)
    assert torch.equal(batch.document_starts, whole[0].document_starts)
    return reads, str(caught.value)


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "corpus", numbered_documents(30, 13))


def test_stages_hold_what_they_need_and_only_their_first_rank_reads(tmp_path, prefix):
    results = run_distributed(load_in_three_stages, 6, str(tmp_path), prefix, timeout=300)
    assert [reads for reads, _ in results] == [6, 0, 6, 0, 6, 0]
    for rank, (_, message) in enumerate(results):
        on_others = "samples 0 to 4 cannot be read; tensor-parallel rank 0 of this stage says why"
        assert message == ("row 4 cannot be read" if rank % 2 == 0 else on_others)


def read_share(rank, world_size, folder, prefixes, weights):
    """The rows of two steps that this data-parallel rank reads, of a blend built by all ranks together."""
    config = data_config(folder, prefixes, weights=weights)
    data = build_datasets(config, PlainTokenizer(), 24, 6)
    reader = BatchReader(None, 0, True, True, torch.device("cpu"))
    found = {}
    for consumed in (0, 12):
        ids = micro_batch_sample_ids(consumed, 12, 2, rank, world_size)
        for batch in load_micro_batches(data.train, ids, EOD, reader):
            found.update(zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True))
    return found, [data.valid[i]["tokens"].tolist() for i in range(len(data.valid))]


def read_shares_and_fail(rank, world_size, folder, prefixes, broken):
    shares = [read_share(rank, world_size, f"{folder}/{weights}", prefixes, weights) for weights in WEIGHTS]
    with pytest.raises(DataError) as caught:
        build_datasets(data_config(folder, [broken]), PlainTokenizer(), 40, 0)
    return shares, str(caught.value), read_conversations_and_fail(folder)


def read_conversations_and_fail(folder):
    """Rows of conversations, and what is said of a file with a bad line, while the first rank often gives signs."""
    from megatron_fbt.data import first_rank
    from megatron_fbt.data.tokenizer import HuggingFaceTokenizer

    first_rank.SIGN_OF_LIFE_S = 0.0
    tokenizer = HuggingFaceTokenizer(f"{folder}/letters")
    config = data_config(folder, [f"{folder}/chats.jsonl"], 24, format="conversations")
    rows = build_datasets(config, tokenizer, 9, 0).train
    config.data.paths = [f"{folder}/bad.jsonl"]
    with pytest.raises(DataError) as caught:
        build_datasets(config, tokenizer, 9, 0)
    return [rows[i]["tokens"].tolist() for i in range(9)], str(caught.value)


def test_samples_are_the_same_for_any_number_of_ranks_and_damage_ends_them_all(tmp_path, prefix):
    prefixes = [write_documents(tmp_path / f"c{i}", numbered_documents(30, 11 + i, start=100 * i)) for i in range(2)]
    os.truncate(f"{prefix}.bin", 100)
    write_letter_tokenizer(tmp_path / "letters")
    write_chats(tmp_path / "chats.jsonl", [chat(f"user: {n}", "assistant: ok") for n in range(9)])
    (tmp_path / "bad.jsonl").write_text((tmp_path / "chats.jsonl").read_text() + "{}\n")
    results = run_distributed(read_shares_and_fail, 3, str(tmp_path), prefixes, prefix, timeout=300)
    assert all("corpus.bin: 100 bytes found, 780 expected" in message for _, message, _ in results)
    assert all("bad.jsonl, line 10: no key 'messages'" in message for *_, (_, message) in results)
    assert len({str(rows) for *_, (rows, _) in results}) == 1 and len(list(tmp_path.glob("data_cache/conv*"))) == 1
    for number, weights in enumerate(WEIGHTS):
        alone, valid = read_share(0, 1, str(tmp_path / f"alone{number}"), prefixes, weights)
        together = {}
        for shares, _, _ in results:
            found, its_valid = shares[number]
            assert not together.keys() & found.keys() and its_valid == valid
            together.update(found)
        assert sorted(alone) == list(range(24)) and together == alone


def build_at_once(rank, world_size, folder, prefix, rounds):
    """Each process is a run of its own that shares nothing but the cache; barriers make them start together."""
    config_of = {round_: data_config(folder, [prefix], cache_dir=f"{folder}/cache{round_}") for round_ in range(rounds)}
    store = dist.FileStore(f"{folder}/store", world_size)
    results = []
    for round_, config in config_of.items():
        store.add(f"round{round_}", 1)
        while store.add(f"round{round_}", 0) < world_size:
            time.sleep(0.001)
        rows = build_datasets(config, PlainTokenizer(), 60, 0).train
        results.append([rows[i]["tokens"].tolist() for i in range(len(rows))])
    return results


def test_separate_runs_may_build_the_same_cache_at_once(tmp_path, prefix):
    results = run_distributed(build_at_once, 4, str(tmp_path), prefix, 20, timeout=300, init_group=False)
    assert all(rows == results[0][0] for process in results for rows in process)
    assert not list(Path(tmp_path).rglob(".building-*"))
