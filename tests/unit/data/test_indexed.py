"""Pairs of .bin and .idx: exact ids and offsets, whole or not there, and every damage noticed at opening."""

import resource
import shutil
import tracemalloc
import warnings

import numpy
import pytest
import xxhash
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, _IndexReader

from megatron_fbt.data.encode import token_dtype
from megatron_fbt.data.indexed import IndexedWriter, byte_offsets, check_indexed, open_indexed
from megatron_fbt.errors import DataError
from tests.unit.data.corpus import numbered_documents, write_documents

VOCABULARIES = [256, 65_499, 65_500, 65_535, 65_536, 65_537, 151_936]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("mmap", [True, False])
def test_ids_are_the_same_after_writing_and_reading(tmp_path, vocab_size, mmap):
    edges = {0, 1, 65_533, 65_534, 65_535, 65_536, 65_537, vocab_size - 2, vocab_size - 1}
    ids = sorted(i for i in edges if i < vocab_size)
    prefix = write_documents(tmp_path / "v", [ids, ids[::-1]], vocab_size)
    data = open_indexed(prefix, mmap, vocab_size)
    assert [data[i].tolist() for i in range(2)] == [ids, ids[::-1]]
    assert (tmp_path / "v.bin").stat().st_size == 2 * len(ids) * (2 if vocab_size < 65_500 else 4)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("bad", ["at the end", "beyond 2^16", "negative"])
def test_ids_outside_the_vocabulary_are_errors_not_wraps(tmp_path, vocab_size, bad):
    token = {"at the end": vocab_size, "beyond 2^16": vocab_size + 65_536, "negative": -1}[bad]
    writer = IndexedWriter(str(tmp_path / "v"), vocab_size)
    with pytest.raises(DataError, match=f"token id {token} is outside the vocabulary of {vocab_size}"):
        writer.add(numpy.array([1, token]), numpy.array([2]))
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_smaller_vocabulary_than_the_datas_is_noticed_at_opening(tmp_path):
    prefix = write_documents(tmp_path / "v", [[1, 2, 500]], 1000)
    check_indexed(prefix, 501)
    with pytest.raises(DataError, match=r"v\.bin: token id 500 is outside the vocabulary of 500"):
        check_indexed(prefix, 500)


def test_byte_offsets_beyond_two_gib_are_exact(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "big.bin"), dtype=numpy.int32)
    for _ in range(5):
        builder.sequence_lengths.append(2**30)
        builder.end_document()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Could not determine rank")  # Megatron-Core's, outside of a process group
        builder.finalize(str(tmp_path / "big.idx"))
        index = _IndexReader(str(tmp_path / "big.idx"), multimodal=False)
    assert index.sequence_pointers.tolist() == [i * 2**32 for i in range(5)]
    with open(tmp_path / "big.bin", "wb") as stream:
        stream.truncate(5 * 2**32)  # sparse
    check_indexed(str(tmp_path / "big"), 10)
    with open(tmp_path / "big.bin", "wb") as stream:
        stream.truncate(2**32)
    with pytest.raises(DataError, match=f"{2**32} bytes found, {5 * 2**32} expected"):
        check_indexed(str(tmp_path / "big"))


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "good", numbered_documents(10, 7))


def cut(path, size):
    with open(path, "rb+") as stream:
        stream.truncate(size)


def of_another_corpus(prefix):
    other = write_documents(f"{prefix}_other", numbered_documents(10, 8))
    shutil.copy(f"{other}.idx", f"{prefix}.idx")


def with_equal_sizes(prefix):
    """Another index with the same number of documents and tokens, whose offsets are not its own."""
    content = bytearray(open(f"{prefix}.idx", "rb").read())
    content[34 + 40 + 8] ^= 4
    open(f"{prefix}.idx", "wb").write(content)


DAMAGES = {
    "last byte of .bin": (lambda p: cut(f"{p}.bin", 139), r"good\.bin: 139 bytes found, 140 expected"),
    "last document of .bin": (lambda p: cut(f"{p}.bin", 126), r"good\.bin: 126 bytes found, 140 expected"),
    "half of .bin": (lambda p: cut(f"{p}.bin", 70), r"good\.bin: 70 bytes found, 140 expected"),
    "empty .bin": (lambda p: cut(f"{p}.bin", 0), r"good\.bin: 0 bytes found, 140 expected"),
    "last byte of .idx": (lambda p: cut(f"{p}.idx", 241), r"good\.idx: 241 bytes found, 242 expected"),
    "half of .idx": (lambda p: cut(f"{p}.idx", 121), r"good\.idx: 121 bytes found, 242 expected"),
    "empty .idx": (lambda p: cut(f"{p}.idx", 0), r"good\.idx: 0 bytes found, at least 34 expected"),
    "no index": (lambda p: open(f"{p}.idx", "wb").write(b"x" * 242), r"good\.idx: it does not begin like"),
    ".idx of another corpus": (of_another_corpus, r"good\.bin: 140 bytes found, 160 expected by .*good\.idx"),
    "damaged offsets": (with_equal_sizes, r"good\.idx: its byte offsets do not follow"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_an_error_with_file_and_sizes(prefix, damage, mmap):
    spoil, message = DAMAGES[damage]
    spoil(prefix)
    with pytest.raises(DataError, match=message):
        open_indexed(prefix, mmap)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, tmp_path, ending):
    (tmp_path / f"good{ending}").unlink()
    with pytest.raises(DataError, match=rf"good\{ending}: no such file"):
        check_indexed(prefix)


def test_a_pair_without_tokens_is_refused(tmp_path):
    write_documents(tmp_path / "none", [])
    with pytest.raises(DataError, match=r"none\.bin: 0 bytes found, at least one token expected"):
        check_indexed(str(tmp_path / "none"))


def test_nothing_has_its_name_before_the_end_and_an_old_pair_lives_until_then(prefix, tmp_path):
    old = [(tmp_path / f"good{ending}").read_bytes() for ending in (".bin", ".idx")]
    writer = IndexedWriter(prefix, 1000)
    writer.add(numpy.array([1, 2]), numpy.array([2]))
    writer.finish()
    assert [(tmp_path / f"good{ending}").read_bytes() for ending in (".bin", ".idx")] == old
    writer.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.bin", "good.idx"]
    data = IndexedDataset(prefix)  # its rows are views that die with it
    assert data[0].tolist() == [1, 2]


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path):
    writer = IndexedWriter(str(tmp_path / "full"), 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(DataError, match=r"full\.bin: cannot be written: .* bytes free"):
            for _ in range(100):
                writer.add(numpy.ones(10_000, dtype=numpy.int64), numpy.array([10_000]))
            writer.finish()
        writer.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.parametrize("count", [0, 1, 7, 12])
def test_the_files_are_those_of_megatrons_builder_byte_for_byte(tmp_path, monkeypatch, vocab_size, count):
    monkeypatch.setattr("megatron_fbt.data.indexed._PART", 4)
    generator = numpy.random.default_rng(count)
    documents = [generator.integers(0, vocab_size, 1 + i * i).tolist() for i in range(count)]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=token_dtype(vocab_size))
    for document in documents:
        builder.add_document(numpy.array(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    writer = IndexedWriter(str(tmp_path / "ours"), vocab_size)
    for first in range(0, count, 5):
        part = documents[first : first + 5]
        writer.add(numpy.concatenate(part), numpy.array([len(document) for document in part]))
    writer.finish()
    writer.publish()
    for ending in (".bin", ".idx"):
        content = (tmp_path / f"ours{ending}").read_bytes()
        assert content == (tmp_path / f"theirs{ending}").read_bytes()
        entry = writer.files[ending]
        assert (entry.size, entry.digest) == (len(content), xxhash.xxh3_128_hexdigest(content))


def test_a_document_costs_a_few_bytes_of_memory(tmp_path):
    writer = IndexedWriter(str(tmp_path / "many"), 1000)
    ids, lengths = numpy.ones(10_000, dtype=numpy.uint16), numpy.ones(10_000, dtype=numpy.int64)
    writer.add(ids, lengths)
    tracemalloc.start()
    for _ in range(99):
        writer.add(ids, lengths)
    writer.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 990_000
    writer.publish()
    check_indexed(str(tmp_path / "many"), 2)


def test_byte_offsets_are_exact_beyond_32_bits():
    lengths = numpy.full(5, 2**30, dtype=numpy.int32)
    assert numpy.concatenate(list(byte_offsets(lengths, 4))).tolist() == [i * 2**32 for i in range(5)]
    many = numpy.full((3 * 10**12) // (2**31 - 1) + 1, 2**31 - 1, dtype=numpy.int32)
    last = numpy.concatenate(list(byte_offsets(many, 4)))[-1]
    assert int(last) == (len(many) - 1) * (2**31 - 1) * 4 > 10**13


def test_two_writers_of_one_pair_do_not_mix(tmp_path):
    first = IndexedWriter(str(tmp_path / "x"), 1000)
    with pytest.raises(DataError, match=r"x\.bin\.partial: another process is writing it"):
        IndexedWriter(str(tmp_path / "x"), 1000)
    first.add(numpy.array([5, 6]), numpy.array([2]))
    first.finish()
    first.publish()
    second = IndexedWriter(str(tmp_path / "x"), 1000)
    second.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert numpy.fromfile(tmp_path / "x.bin", dtype=numpy.uint16).tolist() == [5, 6]


def test_lengths_that_are_not_those_of_the_ids_are_refused(tmp_path):
    writer = IndexedWriter(str(tmp_path / "v"), 1000)
    with pytest.raises(DataError, match="3 ids for documents of 4 tokens"):
        writer.add(numpy.array([1, 2, 3]), numpy.array([2, 2]))


def test_documents_of_impossible_length_are_refused(tmp_path):
    writer = IndexedWriter(str(tmp_path / "v"), 1000)
    with pytest.raises(DataError, match="a document of 0 tokens"):
        writer.add(numpy.array([], dtype=numpy.int64), numpy.array([0]))
