"""The manifest of a corpus: what is written comes back, and damage is named."""

import json
import os

import pytest

from megatron_fbt.core.manifest import FileEntry
from megatron_fbt.data.corpus_manifest import CorpusManifest, Shard, is_manifest, read_manifest, write_manifest
from megatron_fbt.errors import DataError


def two_shards(folder):
    shards = tuple(
        Shard(
            f"{folder}/c-0000{i}-of-00002",
            10 + i,
            2**31 + i,
            999,
            {"empty_text": 2, **({"crlf": 1} if i else {})},
            {".bin": FileEntry(2 * (2**31 + i), "ab"), ".idx": FileEntry(400, "cd")},
        )
        for i in range(2)
    )
    identity = {"class": "SentencePieceTokenizer", "sha256": "12"}
    return CorpusManifest(f"{folder}/c.manifest.json", "text", identity, 32000, 2, "uint16", shards)


def test_what_is_written_comes_back_with_its_totals(tmp_path, monkeypatch):
    manifest = two_shards(tmp_path)
    write_manifest(manifest)
    monkeypatch.chdir(tmp_path)
    assert read_manifest("c.manifest.json") == manifest == read_manifest(tmp_path / "c.manifest.json")
    assert manifest.tokens == 2**32 + 1 and manifest.documents == 21 and manifest.bytes == 2**33 + 2
    assert manifest.text_bytes == 1998 and manifest.skipped == {"crlf": 1, "empty_text": 4}
    assert manifest.prefixes == [f"{tmp_path}/c-0000{i}-of-00002" for i in range(2)]
    assert os.listdir(tmp_path) == ["c.manifest.json"]


def test_a_corpus_can_be_moved_as_a_whole(tmp_path):
    (tmp_path / "old").mkdir()
    write_manifest(two_shards(tmp_path / "old"))
    os.rename(tmp_path / "old", tmp_path / "new")
    assert read_manifest(tmp_path / "new" / "c.manifest.json").prefixes[0] == f"{tmp_path}/new/c-00000-of-00002"


def test_manifests_are_told_by_their_names():
    assert is_manifest("a/b.manifest.json") and not is_manifest("a/b.json") and not is_manifest("a/b")


def without_shards(content):
    content["shards"] = []


def shard_twice(content):
    first = content["shards"][0]
    content["shards"][1] = first
    for name in ("tokens", "documents", "text_bytes"):
        content[name] = 2 * first[name]
    content["bytes"] = 2 * first["files"][".bin"]["bytes"]


DAMAGES = {
    "another format": (lambda c: c.update(format=7), "format 7, not 1"),
    "a missing entry": (lambda c: c.pop("vocab_size"), "vocab_size"),
    "wrong totals": (lambda c: c.update(tokens=1), "totals"),
    "negative bytes": (lambda c: c.update(bytes=-1), "totals"),
    "other bytes of text": (lambda c: c.update(text_bytes=1), "totals"),
    "a negative count": (lambda c: c["shards"][0].update(documents=-10), "c-00000-of-00002 has negative counts"),
    "a shard listed twice": (shard_twice, "lists .*c-00000-of-00002 twice"),
    "no shards": (without_shards, "totals"),
    "a file missing": (lambda c: c["shards"][1]["files"].pop(".idx"), "c-00001-of-00002"),
    "a list for an object": (lambda c: c["shards"].append([]), "TypeError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path, damage):
    write_manifest(two_shards(tmp_path))
    path = tmp_path / "c.manifest.json"
    content = json.loads(path.read_text())
    spoil, message = DAMAGES[damage]
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"c\.manifest\.json: cannot be read .*{message}"):
        read_manifest(path)


def test_missing_and_cut_manifests_are_named(tmp_path):
    with pytest.raises(DataError, match=r"c\.manifest\.json: no such file"):
        read_manifest(tmp_path / "c.manifest.json")
    write_manifest(two_shards(tmp_path))
    content = (tmp_path / "c.manifest.json").read_bytes()
    (tmp_path / "c.manifest.json").write_bytes(content[:-40])
    with pytest.raises(DataError, match=r"c\.manifest\.json: cannot be read"):
        read_manifest(tmp_path / "c.manifest.json")
