"""Hashes while writing, and what is found out about files afterwards."""

import concurrent.futures
import os
import threading
import time

import pytest
import xxhash

from megatron_fbt.core import manifest
from megatron_fbt.core.manifest import (
    FileEntry,
    HashingFile,
    HashingReader,
    check_content,
    check_sizes,
    hash_file,
    write_manifest,
)
from megatron_fbt.errors import DamagedCheckpointError


def test_a_file_is_hashed_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK", 1000)
    blocks = [b"short", os.urandom(999), os.urandom(1000), b"", os.urandom(5000)]
    with open(tmp_path / "file", "wb", buffering=0) as raw:
        file = HashingFile(raw)
        for block in blocks:
            file.write(memoryview(block))
        assert file.tell() == 7004
        file.close()
    whole = b"".join(blocks)
    assert (tmp_path / "file").read_bytes() == whole
    assert file.entry == FileEntry(7004, xxhash.xxh3_128(whole).hexdigest()) == hash_file(tmp_path / "file")


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 4500])
def test_a_file_is_hashed_block_by_block(tmp_path, monkeypatch, size):
    monkeypatch.setattr(manifest, "BLOCK", 1000)
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == FileEntry(size, xxhash.xxh3_128(content).hexdigest())


def test_what_is_read_in_any_order_is_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK", 1000)
    content = os.urandom(9000)
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        reader = HashingReader(file)
        for begin, end in ((10, 2500), (2500, 2501), (100, 4000), (5000, 5000), (6000, 8123), (0, 9000)):
            memory = bytearray(end - begin)
            file.seek(77)  # others read from the file, too
            reader.read_into(begin, memoryview(memory))
            assert memory == content[begin:end]
        with pytest.raises(EOFError):
            reader.read_into(8990, memoryview(bytearray(11)))
        assert reader.finish() == FileEntry(9000, xxhash.xxh3_128(content).hexdigest())


@pytest.mark.parametrize("noticed_by", ["write", "close"])
def test_what_the_disk_refuses_later_is_not_lost(tmp_path, monkeypatch, noticed_by):
    monkeypatch.setattr(manifest, "SYNCED_AT_ONCE", 100)
    monkeypatch.setattr(manifest, "HASHED_AT_ONCE", 100)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with open(tmp_path / "file", "wb", buffering=0) as raw:
        file = HashingFile(raw)
        file.write(bytes(99))
        file.flush()
        file.write(bytes(99))
        concurrent.futures.wait([file._syncing])
        with pytest.raises(OSError, match="No space left"):
            file.write(bytes(200)) if noticed_by == "write" else file.close()
        assert file.failure.errno == 28
        file.close()


def test_a_flush_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "SYNCED_AT_ONCE", 100)
    disk = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: disk.wait(60))
    with open(tmp_path / "file", "wb", buffering=0) as raw:
        file = HashingFile(raw)
        file.write(bytes(150))
        began = time.monotonic()
        file.flush()
        assert time.monotonic() - began < 30 and not disk.is_set()
        closing = threading.Thread(target=file.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive(), "close has to wait"
        disk.set()
        closing.join()


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "tensors").write_bytes(b"0123456789")
    (tmp_path / "other").write_bytes(b"abc")
    write_manifest(tmp_path, {name: hash_file(tmp_path / name) for name in ("tensors", "other")}, {"step": 3})
    return tmp_path


def test_an_intact_checkpoint_passes(checkpoint):
    found = check_sizes(checkpoint)
    check_content(checkpoint, "tensors", found)
    assert found.size == 13 and found.facts["step"] == 3


@pytest.mark.parametrize(
    "damage, text", [("gone", "is missing"), ("half", "has 5 bytes instead of 10"), ("longer", "11")]
)
def test_a_file_of_another_size_is_named(checkpoint, damage, text):
    path = checkpoint / "tensors"
    path.unlink() if damage == "gone" else os.truncate(path, {"half": 5, "longer": 11}[damage])
    with pytest.raises(DamagedCheckpointError, match=f"{path} .*{text}"):
        check_sizes(checkpoint)


def test_a_changed_byte_is_found(checkpoint):
    (checkpoint / "tensors").write_bytes(b"0123456780")
    found = check_sizes(checkpoint)
    with pytest.raises(DamagedCheckpointError, match="tensors is not what was written"):
        check_content(checkpoint, "tensors", found)
    check_content(checkpoint, "other", found)


def test_a_file_that_the_manifest_does_not_know_is_refused(checkpoint):
    with pytest.raises(DamagedCheckpointError, match="stranger is not in manifest.json"):
        check_content(checkpoint, "stranger", check_sizes(checkpoint))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"format": 1, "files": {"x": {"bytes": 1e999, "xxh3_128": ""}}}',
        '{"format": 9, "files": {}}',
        '{"format": 1, "files": {"../x": {"bytes": 1, "xxh3_128": ""}}}',
    ],
)
def test_a_damaged_manifest_is_named(checkpoint, content):
    (checkpoint / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpointError, match="manifest.json cannot be read"):
        check_sizes(checkpoint)
