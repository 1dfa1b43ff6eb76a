"""Reading raw text: which files, which lines, and what is wrong with a record."""

import gzip
import json
import os

import pytest
import zstandard

from megatron_fbt.data.input_files import find_inputs, run_inputs, sort_inputs
from megatron_fbt.data.inputs import BadRecord, parse_line, parse_lines, read_lines, read_text_file
from megatron_fbt.errors import DataError

BAD_LINES = {
    "blank_line": [b"\n", b" \t \n", b"\r\n"],
    "crlf": [b'{"text": "a"}\r\n'],
    "byte_order_mark": [b'\xef\xbb\xbf{"text": "a"}\n'],
    "invalid_json": [b'{"text": "a', b'{"text": "a"}{"text": "b"}\n', b"text\n", b'{"text": "a\x00b"}\n', b"[" * 9999],
    "no_final_newline": [b'{"text": "a"}'],
    "not_an_object": [b"42\n", b'["text"]\n', b"null\n", b'"text"\n'],
    "key_missing": [b'{"txt": "a"}\n', b"{}\n"],
    "text_null": [b'{"text": null}\n'],
    "text_not_a_string": [b'{"text": 3}\n', b'{"text": ["a"]}\n', b'{"text": {"a": 1}}\n'],
    "nul_character": [b'{"text": "a\\u0000b"}\n'],
    "lone_surrogate": [b'{"text": "a\\ud800"}\n', b'{"text": "\\udc00\\ud800"}\n'],
    "invalid_utf8": [b'{"text": "\xff"}\n', b'{"text": "\xc3"}\n', '{"text": "\u00e9"}\n'.encode("latin-1")],
}


@pytest.mark.parametrize("kind, line", [(kind, line) for kind, lines in BAD_LINES.items() for line in lines])
def test_bad_lines_are_told_apart(kind, line):
    with pytest.raises(BadRecord) as caught:
        parse_line(line, ["text"])
    assert caught.value.kind == kind


def test_good_lines_give_their_texts_and_blank_texts_give_none():
    assert parse_line('{"text": "\u4e2d \\ud83d\\ude00", "b": ""}\n'.encode(), ["text", "b"]) == [
        "\u4e2d \U0001f600",
        None,
    ]
    assert parse_line(b'  {"text": " \\n\\t "}  \n', ["text"]) == [None]


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def write_corpus(folder):
    """Plain, gzip and zstandard files (the last in two frames), an empty one and hidden ones."""
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_bytes(line("a1") + line("a2"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(line("b1")) + gzip.compress(line("b2")))
    compress = zstandard.ZstdCompressor().compress
    (folder / "c.jsonl.zst").write_bytes(compress(line("c1")) + compress(line("c2")))
    (folder / "d.jsonl").write_bytes(b"")
    (folder / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    (folder / ".hidden").mkdir(exist_ok=True)
    (folder / ".hidden" / "x.jsonl").write_bytes(b"no")
    (folder / "notes.txt").write_bytes(b"no")


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path):
    write_corpus(tmp_path / "corpus")
    files = find_inputs([str(tmp_path)], "jsonl")
    assert [file.path.rsplit("/", 1)[1] for file in files] == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.jsonl"]
    texts = [parse_line(raw, ["text"])[0] for file in files for raw, _ in read_lines(file)]
    assert texts == ["a1", "a2", "b1", "b2", "c1", "c2"]


@pytest.mark.parametrize("name", ["big.jsonl", "big.jsonl.gz", "big.jsonl.zst"])
def test_lines_longer_and_shorter_than_a_block_come_whole(tmp_path, name):
    lines = [line("x" * length) for length in (3, 5 << 20, 0, 1 << 20, 7)] + [line(str(i)) for i in range(3000)]
    content = b"".join(lines)[:-1]
    pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(name.rsplit(".", 1)[1], bytes)
    (tmp_path / name).write_bytes(pack(content))
    file = find_inputs([str(tmp_path / name)], "jsonl")[0]
    found = list(read_lines(file))
    assert [raw for raw, _ in found] == lines[:-1] + [lines[-1][:-1]]
    assert found[-1][1] == file.size


@pytest.mark.parametrize(
    "name, pack", [("t.jsonl.gz", gzip.compress), ("t.jsonl.zst", zstandard.ZstdCompressor().compress)]
)
@pytest.mark.parametrize("kept", [0.5, -1, -9, -10_000])
def test_truncated_compressed_files_are_errors_that_name_them(tmp_path, name, pack, kept):
    packed = pack(b"".join(line(f"{i * 7919}") for i in range(500)))
    (tmp_path / name).write_bytes(packed[: int(len(packed) * kept) if kept > 0 else kept])
    with pytest.raises(DataError, match=name + ".*cut off"):
        list(read_lines(find_inputs([str(tmp_path)], "jsonl")[0]))


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.zst"])
def test_damaged_compressed_files_are_errors_that_name_them(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is not compressed")
    with pytest.raises(DataError, match=name + ".*damaged"):
        list(read_lines(find_inputs([str(tmp_path)], "jsonl")[0]))


def test_whole_files_can_be_chosen_by_suffix_and_left_out_by_name(tmp_path):
    for name in ("b/x.py", "a/y.rst", "a/z.bin", "site-packages/n.py", "c/test/m.py", "top.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = find_inputs([str(tmp_path)], "files", [".py", ".rst", ".txt"], ["site-packages", "test"])
    assert [file.path[len(str(tmp_path)) + 1 :] for file in files] == ["a/y.rst", "b/x.py", "top.txt"]
    assert read_text_file(files[0].path) == "a/y.rst"


@pytest.mark.parametrize("content, kind", [(b"\xff\xfea", "invalid_utf8"), (b"a\0b", "nul_character")])
def test_files_that_are_no_text_are_told_apart(tmp_path, content, kind):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadRecord) as caught:
        read_text_file(str(tmp_path / "x"))
    assert caught.value.kind == kind


@pytest.mark.parametrize("pattern", ["", "/*/*.jsonl", "/**/*.jsonl", "/s*"])
def test_a_folder_that_cannot_be_read_is_an_error_and_not_left_out(tmp_path, monkeypatch, pattern):
    write_corpus(tmp_path / "good")
    (tmp_path / "secret").mkdir()
    real = os.scandir

    def scandir(path="."):
        if str(path).rstrip("/").endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    if pattern:
        (tmp_path / "secret" / "x.jsonl").write_bytes(line("a"))
        assert find_inputs([f"{tmp_path}{pattern}"], "jsonl")
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="input .*/secret/?: cannot be read: Permission denied"):
        find_inputs([f"{tmp_path}{pattern}"], "jsonl")


def test_links_that_are_not_followed_are_told(tmp_path):
    write_corpus(tmp_path / "corpus")
    write_corpus(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "corpus" / "folder")
    os.symlink(tmp_path / "nowhere", tmp_path / "corpus" / "broken.jsonl")
    os.symlink(tmp_path / "nowhere", tmp_path / "corpus" / "broken.txt")
    left_out = []
    assert len(find_inputs([str(tmp_path / "corpus")], "jsonl", left_out=left_out)) == 4
    assert sorted(line.split(": left out")[0] for line in left_out) == [
        f"{tmp_path}/corpus/broken.jsonl",
        f"{tmp_path}/corpus/folder",
    ]


def test_a_link_to_a_file_that_is_given_is_no_second_file(tmp_path):
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(line(name))
    os.symlink(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    files, repeated = sort_inputs(find_inputs([str(tmp_path)], "jsonl"))
    assert [os.path.basename(file.path) for file in files] == ["a.jsonl", "c.jsonl"]
    assert repeated == [str(tmp_path / "a.jsonl")]


def test_a_number_of_many_digits_beside_the_text_is_json():
    assert parse_line(b'{"text": "a", "n": ' + b"7" * 5000 + b"}\n", ["text"]) == ["a"]
    with pytest.raises(BadRecord, match="not a string"):
        parse_line(b'{"text": ' + b"7" * 5000 + b"}\n", ["text"])


def test_a_file_that_has_gone_is_named(tmp_path):
    with pytest.raises(DataError, match="gone.txt: cannot be read: No such file"):
        read_text_file(str(tmp_path / "gone.txt"))


def test_missing_and_empty_inputs_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        find_inputs([str(tmp_path / "nowhere")], "jsonl")
    with pytest.raises(DataError, match="no file to read.*jsonl"):
        find_inputs([str(tmp_path)], "jsonl")


def test_hard_links_are_one_file_whatever_leads_to_them(tmp_path):
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(line(name))
    os.link(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    os.symlink(tmp_path / "a.jsonl", tmp_path / "d.jsonl")
    files, repeated = sort_inputs(find_inputs([str(tmp_path)], "jsonl"))
    assert [os.path.basename(file.path) for file in files] == ["a.jsonl", "c.jsonl"]
    assert repeated == [str(tmp_path / "a.jsonl")]


def test_files_without_hard_links_are_told_apart_where_the_disk_gives_them_one_number(tmp_path, monkeypatch):
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(line(name))
    files = find_inputs([str(tmp_path)], "jsonl")
    facts = os.stat(tmp_path / "b.jsonl")
    monkeypatch.setattr(os, "stat", lambda *_, **__: facts)
    assert sort_inputs(files) == (files, [])


def test_the_files_of_a_run_keep_their_order_and_repeats_are_told(tmp_path, caplog):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(line(name))
    files = run_inputs([str(tmp_path / "b.jsonl"), str(tmp_path), str(tmp_path / "b.jsonl")])
    assert [os.path.basename(file.path) for file in files] == ["b.jsonl", "a.jsonl"]
    assert caplog.messages == [f"data.paths {tmp_path}/b.jsonl: named more than once, read once"]


@pytest.mark.parametrize("log", [28, 31])
def test_frames_of_the_longest_windows_are_read(tmp_path, log):
    window = (log - 10) << 3
    header = b"\x28\xb5\x2f\xfd\x00" + bytes([window])  # no content size, window of 1 << log
    content = line("a" * 50)
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content  # the last one, stored as it is
    (tmp_path / "a.jsonl.zst").write_bytes(header + block)
    assert [raw for raw, _ in read_lines(find_inputs([str(tmp_path)], "jsonl")[0])] == [content]


def test_a_line_that_cannot_be_encoded_is_named(tmp_path):
    def parse(line):
        if b"2" in line:
            raise DataError("no token for it")

    (tmp_path / "a.jsonl").write_bytes(line("1") + line("2"))
    with pytest.raises(DataError, match=rf"data.paths {tmp_path}/a.jsonl, line 2: no token for it$"):
        list(parse_lines(find_inputs([str(tmp_path)], "jsonl"), parse))
