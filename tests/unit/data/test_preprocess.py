"""Preprocessing in shards: continued by shard, shared by nodes, the same output for any number of workers."""

import gzip
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_fbt.data.corpus_manifest import read_manifest
from megatron_fbt.data.encode import EncodeSettings
from megatron_fbt.data.indexed import open_indexed
from megatron_fbt.data.inputs import InputFile
from megatron_fbt.data.output_lock import locked
from megatron_fbt.data.prefixes import find_prefixes
from megatron_fbt.data.preprocess import PreprocessOptions, preprocess
from megatron_fbt.data.shard_record import group_inputs
from megatron_fbt.data.unencodable import UnencodableText
from megatron_fbt.errors import ConfigError, DataError

TEXTS = ["Hello,  world\n", " \tx = 1\n\n", "\u4e2d\u6587 </s> <unk> \u2581\u2581 <|end|>", "a" * 500, "end"]


@pytest.fixture(scope="session")
def tokenizers(sentencepiece_model, huggingface_folder, tiktoken_file):
    """A path of each type."""
    return {"sentencepiece": sentencepiece_model, "huggingface": huggingface_folder, "tiktoken": tiktoken_file}


def jsonl(path, texts):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in texts))


def options(tokenizers, folder, output, kind="tiktoken", skip=False, keys=("text",), form="jsonl", **more):
    settings = EncodeSettings(kind, str(tokenizers[kind]), keys, form, skip)
    return PreprocessOptions([str(folder)], str(output), settings, **more)


def texts_of(settings, prefix):
    tokenizer = settings.build_tokenizer()
    data = open_indexed(str(prefix), vocab_size=tokenizer.vocab_size)
    documents = [data[i].tolist() for i in range(len(data))]
    assert all(ids[-1] == tokenizer.eod and ids.count(tokenizer.eod) == 1 for ids in documents)
    assert sum(map(len, documents)) * data.index.dtype_size == os.path.getsize(f"{prefix}.bin")
    return [tokenizer.detokenize(ids[:-1]) for ids in documents]


def contents(folder):
    if not folder.exists():
        return {}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def five_files(folder):
    """Files of different sizes; all texts in order."""
    texts = []
    for i in range(5):
        part = [f"{i} {j} {TEXTS[(i + j) % len(TEXTS)]}" for j in range(3 + 4 * i)]
        jsonl(folder / f"part-{i}.jsonl", part)
        texts += part
    return texts


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken"])
def test_the_documents_of_all_shards_are_the_texts_in_order(tokenizers, tmp_path, kind):
    texts = five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", kind, shards=3)
    report = preprocess(given)
    manifest = read_manifest(tmp_path / "out" / "x.manifest.json")
    assert manifest.prefixes == [f"{tmp_path}/out/x-0000{i}-of-00003" for i in range(3)]
    assert [text for prefix in manifest.prefixes for text in texts_of(given.encode, prefix)] == texts
    tokenizer = given.encode.build_tokenizer()
    assert (manifest.documents, manifest.vocab_size, manifest.eod) == (len(texts), tokenizer.vocab_size, tokenizer.eod)
    assert manifest.tokenizer == tokenizer.unique_identifiers and manifest.token_type == "uint16"
    assert manifest.text_bytes == sum(len(text.encode()) for text in texts) == report["text_bytes"]
    assert manifest.tokens == report["tokens"] and report["shards"] == {"made": 3, "kept": 0, "of": 3}
    assert report["outputs"][0]["manifest"] == manifest.path
    endings = (".bin", ".idx", ".shard.json")
    assert sorted(contents(tmp_path / "out")) == sorted(
        ["x.manifest.json", *(f"x-0000{i}-of-00003{ending}" for i in range(3) for ending in endings)]
    )


def test_nodes_share_the_shards_and_the_last_one_writes_the_manifest(tokenizers, tmp_path):
    five_files(tmp_path / "in")
    preprocess(options(tokenizers, tmp_path / "in", tmp_path / "one" / "x", shards=4))
    for rank in (1, 0, 2):
        assert not (tmp_path / "many" / "x.manifest.json").exists()
        more = {"shards": 4, "num_nodes": 3, "node_rank": rank}
        report = preprocess(options(tokenizers, tmp_path / "in", tmp_path / "many" / "x", **more))
        assert report["shards"] == {"made": 2 if rank == 0 else 1, "kept": 0, "of": 4}
        assert (report["outputs"][0]["manifest"] is None) == (rank != 2)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_a_second_call_keeps_what_is_complete_and_makes_the_rest(tokenizers, tmp_path, capsys):
    five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=5)
    first = preprocess(given)
    whole = contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    second = preprocess(given)
    assert "already complete" in capsys.readouterr().err
    assert second["shards"] == {"made": 0, "kept": 5, "of": 5}
    assert {path: path.stat().st_mtime_ns for path in times} == times
    same = ("documents", "tokens", "text_bytes", "skipped", "outputs", "files")
    assert [second[name] for name in same] == [first[name] for name in same]
    (tmp_path / "out" / "x-00002-of-00005.shard.json").unlink()
    with open(tmp_path / "out" / "x-00004-of-00005.bin", "ab") as stream:
        stream.write(b"x")
    assert preprocess(given)["shards"] == {"made": 2, "kept": 3, "of": 5}
    notes = capsys.readouterr().err
    assert "x-00002-of-00005: made anew, because it has no record" in notes
    assert "bytes instead of" in notes and contents(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "change, made, why",
    [
        ("input", 1, "part-1.jsonl has changed"),
        ("new input", 2, "part-[0-9].jsonl is new in it"),
        ("overwrite", 2, "--overwrite is given"),
        ("record", 1, "record .*x-00001-of-00002.shard.json: cannot be read"),
    ],
)
def test_what_has_changed_is_made_anew_and_the_reason_told(tokenizers, tmp_path, capsys, change, made, why):
    five_files(tmp_path / "in")
    more = {"shards": 2}
    preprocess(options(tokenizers, tmp_path / "in", tmp_path / "x", **more))
    capsys.readouterr()
    if change == "input":
        os.utime(tmp_path / "in" / "part-1.jsonl", ns=(1, 1))
    elif change == "new input":
        jsonl(tmp_path / "in" / "part-9.jsonl", ["other texts " * 300])
    elif change == "record":
        (tmp_path / "x-00001-of-00002.shard.json").write_text("{")
    else:
        more |= {"overwrite": True}
    given = options(tokenizers, tmp_path / "in", tmp_path / "x", **more)
    report = preprocess(given)
    error = capsys.readouterr().err
    assert report["shards"]["made"] == made and re.search(f"made anew, because .*{why}", error)
    fresh = options(tokenizers, tmp_path / "in", tmp_path / "fresh" / "x", **more)
    preprocess(fresh)
    expected = contents(tmp_path / "fresh")
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected


SETTINGS = {
    "policy": ({"skip": True}, "skip_bad_lines was false and is true"),
    "tokenizer": ({"kind": "sentencepiece"}, "tokenizer was .*; vocab_size was 602 and is 1000"),
    "key": ({"keys": ("txet",)}, r'json_keys was \["text"\] and is \["txet"\]'),
    "format": ({"form": "files"}, 'input_format was "jsonl" and is "files"'),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_other_settings_do_not_replace_what_is_there_unless_told_to(tokenizers, tmp_path, change):
    five_files(tmp_path / "in")
    preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=3))
    before = contents(tmp_path / "out")
    more, why = SETTINGS[change]
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=3, **more)
    with pytest.raises(ConfigError, match=f"x-00000-of-00003 is there .*{why}.*--overwrite"):
        preprocess(given)
    assert contents(tmp_path / "out") == before
    anew = replace(given, overwrite=True)
    if change == "key":  # which the input does not have: nothing is lost to a bad line either
        with pytest.raises(DataError, match="line 1: .*key_missing"):
            preprocess(anew)
        assert contents(tmp_path / "out") == before
        return
    assert preprocess(anew)["shards"]["made"] == 3
    preprocess(options(tokenizers, tmp_path / "in", tmp_path / "fresh" / "x", shards=3, **more))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_shard_lives_until_the_one_of_changed_input_is_ready(tokenizers, tmp_path):
    five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=2)
    preprocess(given)
    before = contents(tmp_path / "out")
    good = (tmp_path / "in" / "part-4.jsonl").read_bytes()
    (tmp_path / "in" / "part-4.jsonl").write_bytes(good + b"42\n")
    with pytest.raises(DataError, match="part-4.jsonl, line 20"):
        preprocess(given)
    assert contents(tmp_path / "out") == before
    (tmp_path / "in" / "part-4.jsonl").write_bytes(good + b'{"text": "more"}\n')
    assert preprocess(given)["shards"] == {"made": 1, "kept": 1, "of": 2}
    assert read_manifest(tmp_path / "out" / "x.manifest.json").documents == 55 + 1


def test_shards_of_another_number_are_told_and_not_read_together(tokenizers, tmp_path, capsys):
    five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "x")
    for shards in (1, 3, 2):
        preprocess(replace(given, shards=shards))
    error = capsys.readouterr().err
    assert error.count(f"{tmp_path}/x: a shard of another --shards") == 2
    assert error.count("x-00000-of-00003: a shard of another --shards") == 1
    for pattern in ("x-*.bin", "x", "x-*-of-00003.bin"):
        paths = [f"{tmp_path}/{pattern}", f"{tmp_path}/x-00001-of-00002"]
        with pytest.raises(DataError, match="one corpus that was cut twice"):
            find_prefixes("data", paths[: 1 if pattern == "x-*.bin" else 2])
    assert len(find_prefixes("data", [f"{tmp_path}/x-*-of-00003.bin"])) == 3


def test_what_keeps_the_manifest_from_being_written_is_told(tokenizers, tmp_path, capsys):
    five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "x", shards=2, num_nodes=2)
    preprocess(given)
    assert "no manifest yet" in capsys.readouterr().err
    os.utime(tmp_path / "in" / "part-0.jsonl", ns=(1, 1))
    assert preprocess(replace(given, node_rank=1))["outputs"][0]["manifest"] is None
    assert "x-00000-of-00002: input" in (error := capsys.readouterr().err) and "part-0.jsonl has changed" in error


def test_an_output_that_another_process_writes_is_left_alone(tokenizers, tmp_path):
    five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=5)
    with locked(str(tmp_path / "out" / "x-00000-of-00005")):
        (tmp_path / "out" / "x-00000-of-00005.bin.partial").write_bytes(b"its work")
        before = contents(tmp_path / "out")
        with pytest.raises(DataError, match=rf"x-00000-of-00005: another process \({os.getpid()} on .*is writing it"):
            preprocess(replace(given, overwrite=True))
        assert contents(tmp_path / "out") == before
    with locked(str(tmp_path / "out" / "x-00002-of-00005")), pytest.raises(DataError, match="00002-of-00005: another"):
        preprocess(given)
    complete = sorted(path.name for path in (tmp_path / "out").glob("*.shard.json"))
    assert complete == ["x-00000-of-00005.shard.json", "x-00001-of-00005.shard.json"]
    (tmp_path / "out" / "x-00001-of-00005.lock").write_bytes(b"of a killed process")
    assert preprocess(given)["shards"] == {"made": 3, "kept": 2, "of": 5}
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.suffix in (".lock", ".partial")]


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(tokenizers, tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    five_files(tmp_path / "in")
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(DataError, match="output .*/out/x: cannot be written: Read-only file system"):
        preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x"))


def test_a_bad_line_ends_its_shard_and_leaves_the_complete_ones(tokenizers, tmp_path):
    five_files(tmp_path / "in")
    (tmp_path / "in" / "part-3.jsonl").write_bytes(b'{"text": "a"}\n42\n')
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=5)
    with pytest.raises(DataError, match=r"part-3\.jsonl, line 2: .*not_an_object.*--skip_bad_lines"):
        preprocess(given)
    made = [f"x-0000{i}-of-00005{ending}" for i in range(3) for ending in (".bin", ".idx", ".shard.json")]
    assert sorted(contents(tmp_path / "out")) == sorted(made)
    jsonl(tmp_path / "in" / "part-3.jsonl", ["mended"])
    assert preprocess(given)["shards"] == {"made": 2, "kept": 3, "of": 5}


def test_a_shard_without_documents_is_no_data_set_but_part_of_the_corpus(tokenizers, tmp_path):
    jsonl(tmp_path / "in" / "a.jsonl", ["one"])
    jsonl(tmp_path / "in" / "b.jsonl", [" ", ""])
    report = preprocess(options(tokenizers, tmp_path / "in", tmp_path / "x", shards=2))
    manifest = read_manifest(tmp_path / "x.manifest.json")
    assert manifest.prefixes == [f"{tmp_path}/x-00000-of-00002"] and len(manifest.shards) == 2
    assert manifest.skipped == report["skipped"] == {"empty_text": 2}


@pytest.mark.parametrize("shards", [1, 2])
def test_no_document_at_all_is_an_error_and_leaves_nothing(tokenizers, tmp_path, shards):
    jsonl(tmp_path / "in" / "a.jsonl", ["", " "])
    jsonl(tmp_path / "in" / "b.jsonl", ["\n"])
    with pytest.raises(DataError, match="a.jsonl, .*b.jsonl: no record has 'text', so there is no document .*: 3}"):
        preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", shards=shards))
    assert not contents(tmp_path / "out")


def test_every_key_has_a_corpus_of_its_own(tokenizers, tmp_path):
    (tmp_path / "in").mkdir()
    rows = [{"title": "T", "text": "one"}, {"title": "", "text": "two"}, {"text": "none"}]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "in" / name).write_bytes(content)
    given = options(tokenizers, tmp_path / "in", tmp_path / "x", keys=("text", "title"), skip=True, shards=2)
    report = preprocess(given)
    assert report["skipped"] == {"empty_text": 2, "key_missing": 2}
    assert report["documents"] == 6 and [output["documents"] for output in report["outputs"]] == [4, 2]
    manifests = [read_manifest(tmp_path / f"x_{key}.manifest.json") for key in ("text", "title")]
    assert [m.skipped for m in manifests] == [{"key_missing": 2}, {"empty_text": 2, "key_missing": 2}]
    assert [m.key for m in manifests] == ["text", "title"]
    assert texts_of(given.encode, manifests[1].prefixes[0]) == ["T"]


@pytest.mark.parametrize(
    "more, message",
    [
        ({"shards": 6}, "--shards is 6, but there are 5 input files"),
        ({"shards": 0}, "--shards is 0"),
        ({"output": "."}, "--output is '.': it must be the prefix"),
        ({"output": "a/.."}, "--output is 'a/..': it must be the prefix"),
        ({"output": "n" * 240}, "--output: the name n* has more than"),
        ({"shards": 2, "num_nodes": 3}, "--num_nodes is 3, but --shards is 2"),
        ({"shards": 2, "num_nodes": 2, "node_rank": 2}, "--node_rank is 2: it must be from 0 to 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tokenizers, tmp_path, more, message):
    five_files(tmp_path / "in")
    with pytest.raises(ConfigError, match=message):
        preprocess(replace(options(tokenizers, tmp_path / "in", tmp_path / "x"), **more))


def test_a_record_that_cannot_be_written_is_an_error_that_leaves_nothing(tokenizers, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    five_files(tmp_path / "in")
    monkeypatch.setattr("megatron_fbt.data.shard_record.write_json", full)
    with pytest.raises(DataError, match=r"x\.shard\.json: cannot be written: No space left"):
        preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x"))
    assert not contents(tmp_path / "out")


def test_the_output_is_no_input_of_the_next_call(tokenizers, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one")
    given = options(tokenizers, tmp_path, tmp_path / "out", form="files")
    for again in (False, True):
        assert preprocess(replace(given, overwrite=again))["documents"] == 1
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match="holds nothing but this command's output"):
        preprocess(given)
    assert read_manifest(tmp_path / "out.manifest.json").documents == 1


def test_files_named_in_several_ways_are_read_once_in_sorted_order(tokenizers, tmp_path, capsys):
    texts = five_files(tmp_path / "in")
    given = options(tokenizers, tmp_path / "in", tmp_path / "x")
    names = [str(tmp_path / "in" / "part-4.jsonl"), f"{tmp_path}/in/../in", str(tmp_path / "in" / "part-[01].jsonl")]
    preprocess(PreprocessOptions(names, given.output, given.encode))
    assert texts_of(given.encode, tmp_path / "x") == texts
    assert capsys.readouterr().err.count("named more than once, read once") == 3


@pytest.mark.parametrize(
    "sizes, count, groups",
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([100, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 1, 1, 100], 3, [1, 2, 1]),
        ([0, 0, 0], 2, [1, 2]),
        ([5], 1, [1]),
        ([3, 3, 3, 3, 3, 3, 3], 3, [2, 3, 2]),
    ],
)
def test_groups_are_whole_files_of_nearly_equal_bytes(sizes, count, groups):
    files = [InputFile(str(i), size) for i, size in enumerate(sizes)]
    found = group_inputs(files, count)
    assert [file for group in found for file in group] == files
    assert sorted(map(len, found)) == sorted(groups) and all(found)
    largest = max(sum(file.size for file in group) for group in found)
    assert largest <= sum(sizes) / count + max(sizes)


def write_parquet(path, texts, **more):
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, **more)


@pytest.mark.parametrize(
    "kind, workers", [("sentencepiece", 1), ("huggingface", 1), ("tiktoken", 1), ("huggingface", 2), ("tiktoken", 2)]
)
def test_files_of_all_kinds_together_give_their_texts_in_sorted_order(tokenizers, tmp_path, kind, workers):
    folder = tmp_path / "in"
    jsonl(folder / "a.jsonl", ["a1", "a2"])
    lines = b"".join(json.dumps({"text": f"{name} {TEXTS[2]}"}).encode() + b"\n" for name in ("b1", "b2"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.replace(b"b", b"c")))
    write_parquet(folder / "d.parquet", pyarrow.array([f"d{i} \u4e2d" for i in range(50)]), row_group_size=7)
    (folder / "e.jsonl").write_bytes(b"")
    (folder / "._a.jsonl").write_bytes(b"\0")
    (folder / "._d.parquet").write_bytes(b"\0")
    given = options(tokenizers, folder, tmp_path / "x", kind, workers=workers)
    preprocess(given)
    expected = [
        "a1",
        "a2",
        *(f"{n} {TEXTS[2]}" for n in ("b1", "b2", "c1", "c2")),
        *(f"d{i} \u4e2d" for i in range(50)),
    ]
    assert texts_of(given.encode, tmp_path / "x") == expected


def test_two_columns_of_one_name_are_an_error(tokenizers, tmp_path):
    (tmp_path / "in").mkdir()
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "in" / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: it has several columns named 'text'"):
        preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", skip=True))


COLUMNS = {
    "key_missing": (None, None),
    "text_null": (["a", None], 2),
    "text_not_a_string": ([1, 2], 1),
    "nul_character": (["a", "b\0"], 2),
    "invalid_utf8": (pyarrow.array([b"a", b"\xff"], pyarrow.binary()), 2),
    "invalid_utf8 in a text": (pyarrow.array([b"a", b"\xc3"], pyarrow.binary()).view(pyarrow.string()), 2),
    "lone surrogate in bytes": (pyarrow.array([b"\xed\xa0\x80"], pyarrow.binary()), 1),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_bad_rows_of_parquet_are_errors_with_file_and_row_or_skipped_and_counted(tokenizers, tmp_path, case):
    kind = {"invalid_utf8 in a text": "invalid_utf8", "lone surrogate in bytes": "invalid_utf8"}.get(case, case)
    column, row = COLUMNS[case]
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / "a.jsonl", ["good"])
    if column is None:
        pyarrow.parquet.write_table(pyarrow.table({"other": ["a", "b"]}), tmp_path / "in" / "b.parquet")
        row, count = 1, 2
    else:
        write_parquet(tmp_path / "in" / "b.parquet", column)
        count = 2 if kind == "text_not_a_string" else 1
    given = options(tokenizers, tmp_path / "in", tmp_path / "out" / "x")
    with pytest.raises(DataError, match=rf"b\.parquet, row {row}: .*\({kind}\); --skip_bad_lines leaves such rows out"):
        preprocess(given)
    assert not contents(tmp_path / "out")
    report = preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", skip=True))
    assert report["skipped"] == {kind: count}


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary", "dictionary"])
def test_all_types_of_text_columns_are_read(tokenizers, tmp_path, kind):
    texts = pyarrow.array(["one", "\u4e2d", " ", "one"])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pyarrow, kind)())
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "b.parquet", column)
    given = options(tokenizers, tmp_path / "in", tmp_path / "x")
    assert preprocess(given)["skipped"] == {"empty_text": 1}
    assert texts_of(given.encode, tmp_path / "x") == ["one", "\u4e2d", "one"]


@pytest.mark.parametrize("kept", [0, 3, 0.5, -1, -20])
def test_cut_and_damaged_parquet_files_are_named(tokenizers, tmp_path, kept):
    (tmp_path / "in").mkdir()
    generator = numpy.random.default_rng(0)
    path = tmp_path / "in" / "b.parquet"
    write_parquet(path, [str(number) for number in generator.integers(0, 2**60, 2000)])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)] if 0 < kept < 1 else content[:kept])
    for skip in (False, True):
        with pytest.raises(DataError, match=r"b\.parquet: the Parquet file is cut off, damaged or unreadable"):
            preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x", skip=skip))
    damaged = bytearray(content)
    damaged[100:1500] = bytes(1400)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"b\.parquet"):
        preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x"))
    assert not contents(tmp_path / "out")


def test_a_tiktoken_tokenizer_without_end_token_is_refused_before_any_data_are_read(tiktoken_file, tmp_path):
    (tmp_path / "t.tiktoken").write_bytes(tiktoken_file.read_bytes())
    facts = json.loads((tiktoken_file.parent / "small.tiktoken.json").read_text())
    (tmp_path / "t.tiktoken.json").write_text(json.dumps({**facts, "eod": None}))
    settings = EncodeSettings("tiktoken", str(tmp_path / "t.tiktoken"))
    with pytest.raises(DataError, match="names no end-of-document token"):
        preprocess(PreprocessOptions([str(tmp_path / "nowhere.jsonl")], str(tmp_path / "x"), settings))


@pytest.mark.parametrize("form", ["jsonl", "parquet", "files"])
def test_a_text_that_the_tokenizer_gives_up_on_is_named_with_its_place(tokenizers, tmp_path, form, monkeypatch):
    def give_up(tokenizer, texts):
        raise UnencodableText("no", texts.index("c"))

    monkeypatch.setattr("megatron_fbt.data.tiktoken_tokenizer.TiktokenTokenizer.tokenize_flat", give_up)
    place = {"jsonl": "c.jsonl, line 3", "parquet": "c.parquet, row 3", "files": "c.files"}[form]
    path = tmp_path / "in" / f"c.{form}"
    jsonl(path, ["a", " ", "c"])
    if form == "parquet":
        write_parquet(path, ["a", " ", "c"])
    elif form == "files":
        path.write_text("c")
        (tmp_path / "in" / "b.files").write_text("b")
    given = options(tokenizers, tmp_path / "in", tmp_path / "x", form="jsonl" if form != "files" else form, skip=True)
    with pytest.raises(DataError, match=rf"input {tmp_path}/in/{place}: no$"):
        preprocess(given)


def test_without_pyarrow_the_error_says_what_to_install(tokenizers, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "b.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        preprocess(options(tokenizers, tmp_path / "in", tmp_path / "out" / "x"))
