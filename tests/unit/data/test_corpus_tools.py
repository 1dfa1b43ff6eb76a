"""Checking and merging tokenized corpora: every fault by name, the same documents after a merge."""

import json
import os
import shutil
from dataclasses import replace

import numpy
import pytest

from megatron_fbt.core.manifest import hash_file
from megatron_fbt.data import corpus_check, corpus_merge
from megatron_fbt.data.corpus_check import validate
from megatron_fbt.data.corpus_manifest import read_manifest, write_manifest
from megatron_fbt.data.corpus_merge import merge
from megatron_fbt.data.encode import EncodeSettings
from megatron_fbt.data.indexed import open_indexed
from megatron_fbt.data.output_lock import locked
from megatron_fbt.data.preprocess import PreprocessOptions, preprocess
from megatron_fbt.errors import ConfigError, DataError


def corpus(folder, name, tokenizer, shards=2, files=3, kind="tiktoken"):
    """A corpus of some files of some lines; its manifest."""
    source = folder / f"in-{name}"
    source.mkdir()
    for i in range(files):
        lines = [json.dumps({"text": f"{name} {i} {j} " + "words " * (j % 9)}) for j in range(5 + 7 * i)]
        (source / f"{i}.jsonl").write_text("\n".join(lines) + '\n{"text": ""}\n')
    settings = EncodeSettings(kind, str(tokenizer))
    preprocess(PreprocessOptions([str(source)], str(folder / name), settings, shards=shards))
    return folder / f"{name}.manifest.json"


def documents(*manifests):
    found = []
    for manifest in manifests:
        for prefix in read_manifest(manifest).prefixes:
            data = open_indexed(prefix)
            found += [data[i].tolist() for i in range(len(data))]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiktoken_file):
    folder = tmp_path_factory.mktemp("made")
    corpus(folder, "web", tiktoken_file)
    return folder


@pytest.fixture
def web(made, tmp_path):
    """The manifest of a copy that a test may spoil."""
    shutil.copytree(made, tmp_path / "web")
    return tmp_path / "web" / "web.manifest.json"


@pytest.fixture(params=[1 << 21, 7], ids=["whole", "in pieces"])
def pieces(request, monkeypatch):
    monkeypatch.setattr("megatron_fbt.data.document_reader.TOKENS", request.param)
    monkeypatch.setattr("megatron_fbt.data.document_reader._DOCUMENTS", 4 if request.param == 7 else 1 << 20)


def test_a_good_corpus_has_no_fault(web, pieces, capsys):
    manifest = read_manifest(web)
    report = validate([str(web), *manifest.prefixes])
    assert report["faults"] == [] and report["shards"] == 4
    assert report["documents"] == 2 * manifest.documents and report["tokens"] == 2 * manifest.tokens
    assert corpus_check.main([str(web), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


def cut(prefix):
    with open(f"{prefix}.bin", "rb+") as stream:
        stream.truncate(20)


def flip(prefix, ending, place):
    content = bytearray(open(f"{prefix}{ending}", "rb").read())
    content[place] ^= 1
    open(f"{prefix}{ending}", "wb").write(content)


def change_record(prefix, ending=".shard.json", **entries):
    path = f"{prefix}{ending}"
    content = json.loads(open(path).read())
    content.update(entries)
    open(path, "w").write(json.dumps(content))


def rewrite(prefix, change):
    """Other ids, with the hash that belongs to them, as a broken writer would leave them."""
    ids = numpy.fromfile(f"{prefix}.bin", dtype=numpy.uint16)
    change(ids)
    before = open(f"{prefix}.shard.json").read()
    old = hash_file(f"{prefix}.bin").digest
    ids.tofile(f"{prefix}.bin")
    new = hash_file(f"{prefix}.bin").digest
    open(f"{prefix}.shard.json", "w").write(before.replace(old, new))
    manifest = f"{prefix[: prefix.rindex('/')]}/web.manifest.json"
    content = open(manifest).read()
    open(manifest, "w").write(content.replace(old, new))


def set_at(place, value):
    def change(ids):
        ids[place] = value

    return change


def too_few_documents(prefix):
    shard = json.loads(open(f"{prefix}.shard.json").read())["shards"][0]
    shard["documents"] -= 1
    change_record(prefix, shards=[shard], documents=shard["documents"])


FAULTS = {
    "a missing file": (lambda p: os.unlink(f"{p}.idx"), "missing"),
    "a cut .bin": (cut, "size"),
    "a flipped bit of .bin": (lambda p: flip(p, ".bin", 9), "checksum"),
    "a flipped bit of .idx": (lambda p: flip(p, ".idx", 60), "checksum"),
    "an id beyond the vocabulary": (lambda p: rewrite(p, set_at(3, 60_000)), "token_ids"),
    "no end token": (lambda p: rewrite(p, set_at(-1, 5)), "end_tokens"),
    "an end token inside": (lambda p: rewrite(p, set_at(0, 599 + 1)), "end_tokens"),
    "no record": (lambda p: os.unlink(f"{p}.shard.json"), "record"),
    "a record of another tokenizer": (lambda p: change_record(p, tokenizer={"class": "x"}), "record"),
    "a record with other counts": (too_few_documents, "record"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_fault_has_its_name_and_exit_code_3(web, pieces, case, capsys):
    spoil, kind = FAULTS[case]
    prefix = read_manifest(web).prefixes[1]
    spoil(prefix)
    assert corpus_check.main([str(web), "--json"]) == 3
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert {fault["kind"] for fault in faults} == {kind}
    assert all(fault["file"].startswith(prefix) for fault in faults)
    assert corpus_check.main([str(web)]) == 3 and f": {kind}: " in capsys.readouterr().out


def test_several_faults_are_all_found(web):
    first, second = read_manifest(web).prefixes
    cut(first)
    flip(second, ".bin", 0)
    flip(second, ".idx", 40)
    faults = [(fault["file"], fault["kind"]) for fault in validate([str(web)])["faults"]]
    assert faults == [(f"{first}.bin", "size"), (f"{second}.bin", "checksum"), (f"{second}.idx", "checksum")]


def test_a_manifest_without_one_of_its_shards_is_a_fault(web, capsys):
    manifest = read_manifest(web)
    write_manifest(replace(manifest, shards=manifest.shards[:1]))
    assert corpus_check.main([str(web)]) == 3
    out = capsys.readouterr().out
    assert "manifest: 1 of 2 shards are not in it" in out and "web-00001-of-00002" in out
    assert out.endswith(": 1 fault\n")


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_file_stands_for_its_pair(web, ending):
    prefix = read_manifest(web).prefixes[1]
    assert validate([prefix + ending]) == {**validate([prefix]), "faults": []}


def test_what_nothing_is_known_of_cannot_be_checked(web, capsys):
    prefix = read_manifest(web).prefixes[0]
    shutil.copy(f"{prefix}.bin", web.parent / "bare.bin")
    assert corpus_check.main([str(web.parent / "bare")]) == 3
    assert "bare: it has neither" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_a_merge_has_all_documents_in_order(web, pieces, tmp_path, tiktoken_file, shards):
    other = corpus(tmp_path, "other", tiktoken_file, shards=1, files=2)
    report = merge([str(web), str(tmp_path / "other")], str(tmp_path / "all"), shards)
    merged = read_manifest(tmp_path / "all.manifest.json")
    assert documents(tmp_path / "all.manifest.json") == documents(web, other)
    assert len(merged.shards) == shards == report["shards"] and merged.key == "text"
    both = [read_manifest(web), read_manifest(other)]
    for name in ("documents", "tokens", "bytes", "text_bytes"):
        assert getattr(merged, name) == sum(getattr(part, name) for part in both)
    assert merged.skipped == {"empty_text": 5}
    longest = max(map(len, documents(web, other)))
    assert all(abs(shard.tokens - merged.tokens / shards) <= longest for shard in merged.shards)
    assert validate([str(tmp_path / "all.manifest.json")])["faults"] == []


def test_a_shard_for_each_document_and_not_one_more(made, tmp_path):
    web = made / "web.manifest.json"
    count = read_manifest(web).documents
    merge([str(web)], str(tmp_path / "x"), count)
    assert [shard.documents for shard in read_manifest(tmp_path / "x.manifest.json").shards] == [1] * count
    with pytest.raises(ConfigError, match=f"--shards is {count + 1}"):
        merge([str(web)], str(tmp_path / "y"), count + 1)


def test_corpora_of_different_tokenizers_are_not_merged(made, tmp_path, sentencepiece_model, capsys):
    other = corpus(tmp_path, "other", sentencepiece_model, 1, 1, "sentencepiece")
    args = [str(made / "web.manifest.json"), str(other), "--output", str(tmp_path / "all")]
    assert corpus_merge.main(args) == 3
    assert "cannot be merged: tokenizer is" in capsys.readouterr().err


def test_a_merge_neither_replaces_nor_reads_its_own_output(web, tmp_path):
    prefix = str(web).removesuffix(".manifest.json")
    with pytest.raises(ConfigError, match="is there already"):
        merge([str(web)], prefix)
    one = read_manifest(web).prefixes[0]
    with pytest.raises(ConfigError, match="is one of the corpora"):
        merge([one], one, overwrite=True)
    with pytest.raises(DataError, match="named more than once"):
        merge([str(web), one], str(tmp_path / "all"))
    merge([str(web)], str(tmp_path / "all"))
    merge([one], str(tmp_path / "all"), overwrite=True)
    assert read_manifest(tmp_path / "all.manifest.json").documents == read_manifest(web).shards[0].documents


def test_links_and_a_manifest_of_the_same_name_do_not_destroy_the_input(web, tmp_path):
    os.symlink(web.parent, tmp_path / "link")
    before = {path.name: path.read_bytes() for path in web.parent.glob("web*")}
    prefix, linked = str(web.parent / "web"), str(tmp_path / "link" / "web")
    with pytest.raises(ConfigError, match="is one of the corpora"):  # its shards have other names than the output
        merge([str(web)], linked, overwrite=True)
    for source, output in ((prefix, linked), (linked, prefix)):
        with pytest.raises(ConfigError, match="is one of the corpora"):
            merge([f"{source}-00000-of-00002"], f"{output}-00000-of-00002", overwrite=True)
        with pytest.raises(DataError, match="named more than once"):
            merge([f"{prefix}-00000-of-00002", f"{linked}-00000-of-00002"], str(tmp_path / "all"))
    assert {path.name: path.read_bytes() for path in web.parent.glob("web*")} == before


@pytest.mark.parametrize("output", [".", "folder/", "folder/.."])
def test_a_folder_is_no_prefix_of_a_merge(web, tmp_path, output, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must be the prefix of file names"):
        merge([str(web)], output)


def test_a_merge_leaves_an_output_alone_that_another_process_writes(web, tmp_path):
    merge([str(web)], str(tmp_path / "all"), 2)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("all*")}
    with locked(str(tmp_path / "all-00001-of-00002")), pytest.raises(DataError, match="another process .* writing it"):
        merge([str(web)], str(tmp_path / "all"), 2, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("all*")} == before


def test_a_disk_that_refuses_everything_is_exit_code_3(web, tmp_path, monkeypatch, capsys):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("megatron_fbt.data.corpus_merge.remove_pair", read_only)
    assert corpus_merge.main([str(web), "--output", str(tmp_path / "all")]) == 3
    assert "all: cannot be written: Read-only file system" in capsys.readouterr().err


def test_an_id_beyond_the_vocabulary_is_told_with_its_file(web, tmp_path):
    prefix = read_manifest(web).prefixes[1]
    rewrite(prefix, set_at(3, 60_000))
    with pytest.raises(DataError, match=rf"{prefix}\.bin: token id 60000"):
        merge([str(web)], str(tmp_path / "all"))


@pytest.mark.parametrize("ending, place", [(".bin", 0), (".idx", -1)])
def test_a_damaged_source_leaves_no_output(web, tmp_path, ending, place):
    flip(read_manifest(web).prefixes[1], ending, place)
    with pytest.raises(DataError, match=rf"-00001-of-00002\{ending}: it is not what was written"):
        merge([str(web)], str(tmp_path / "out" / "all"), 2)
    assert not list((tmp_path / "out").iterdir())
