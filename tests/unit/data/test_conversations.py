"""The cache of conversations: what goes in, what is refused by file and line, damage and interruption."""

import gzip
import json
import logging

import numpy
import pytest
import zstandard

from megatron_fbt.data.conversations import open_conversations, prepare_conversations
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import DataError
from tests.unit.data.chats import TAGGED, chat, spell, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import data_config

CHATS = [
    chat("user: ab", "assistant: cd"),
    chat("user: only a question"),
    chat("system: be", "user: x", "assistant: y", "user: z", "assistant: w"),
]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return HuggingFaceTokenizer(write_letter_tokenizer(tmp_path_factory.mktemp("letters")))


def prepare(folder, paths, letters, **data):
    config = data_config(folder, paths, format="conversations", **data).data
    return list(prepare_conversations(config, str(folder / "cache"), letters))[-1]


@pytest.mark.parametrize("mmap", [True, False])
def test_tokens_marks_and_counts_of_every_conversation(tmp_path, letters, mmap):
    found = open_conversations(prepare(tmp_path, [write_chats(tmp_path / "a.jsonl", CHATS)], letters), mmap)
    shown = [(spell(ids), "".join(map(str, mask))) for ids, mask in map(found.conversation, range(len(found)))]
    assert shown == [
        ("UabE/AcdE/", "0000001110"),
        ("SbeE/UxE/AyE/UzE/AwE/", "000000000011000000110"),
    ]
    assert found.lengths.tolist() == [10, 21] and found.first_labels.tolist() == [6, 10]
    assert found.tokens.dtype == numpy.uint16 and found.assistant.dtype == numpy.uint8
    report = {"conversations": 2, "tokens": 31, "assistant_tokens": 7, "skipped": {"no_assistant_turn": 1}}
    assert report.items() <= found.report.items() and found.report["ended_by_eod"] == 2


def test_compressed_files_and_folders_are_read_in_sorted_order(tmp_path, letters):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"messages": messages}).encode() + b"\n" for messages in (CHATS[0], CHATS[2], CHATS[0])]
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines[0]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1]))
    (folder / "c.jsonl").write_bytes(lines[2])
    (folder / "._d.jsonl").write_bytes(b"hidden")
    found = open_conversations(prepare(tmp_path, [str(folder)], letters), True)
    assert found.lengths.tolist() == [10, 21, 10]


GOOD = json.dumps({"messages": CHATS[0]}).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\n", "the line is blank"),
        (b'{"messages": [', "not one JSON object"),
        (b'{"messages": []}\n', "'messages' is \\[\\]"),
        (b'{"text": "a"}\n', "no key 'messages'"),
        (b'{"messages": ["a"]}\n', "message 1 is no object whose 'role' is a text"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}\n', "message 2 .* 'content'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', "message 1 .* 'content' is a text"),
        (b'{"messages": [{"role": " ", "content": "a"}]}\n', "the role of message 1 is blank"),
        (b'{"messages": [{"role": "user", "content": "a\\u0000"}]}\n', "NUL"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "lone surrogate"),
        (b'\xff{"messages": []}\n', "not UTF-8"),
        (GOOD[:-1], "no line end"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, letters, line, reason):
    (tmp_path / "bad.jsonl").write_bytes(GOOD + GOOD + line)
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 3: .*{reason}"):
        prepare(tmp_path, [tmp_path / "bad.jsonl"], letters)
    assert not list((tmp_path / "cache").iterdir())


def test_files_without_any_answer_are_refused(tmp_path, letters):
    with pytest.raises(DataError, match="no conversation has a turn of role 'assistant' .2 lines read"):
        prepare(tmp_path, [write_chats(tmp_path / "a.jsonl", [CHATS[1], chat("human: a", "gpt: b")])], letters)


def test_the_cache_is_used_again_and_follows_content_template_and_tokenizer(tmp_path, letters):
    path = write_chats(tmp_path / "a.jsonl", CHATS)
    first = prepare(tmp_path, [path], letters)
    written = (tmp_path / "cache").stat().st_mtime_ns
    assert prepare(tmp_path, [path], letters) == first and (tmp_path / "cache").stat().st_mtime_ns == written
    (tmp_path / "chat.jinja").write_text(TAGGED)
    other_template = prepare(tmp_path, [path], letters, chat_template=str(tmp_path / "chat.jinja"))
    other_tokenizer = HuggingFaceTokenizer(write_letter_tokenizer(tmp_path / "letters"))
    assert prepare(tmp_path, [path], other_tokenizer) == first
    other_tokenizer.unique_identifiers["sha256"] = "another"
    write_chats(tmp_path / "b.jsonl", CHATS[::-1])
    found = {first, other_template, prepare(tmp_path, [path], other_tokenizer)}
    assert len(found | {prepare(tmp_path, [tmp_path / "b.jsonl"], letters)}) == 4


@pytest.mark.parametrize("name", ["tokens.bin", "assistant.bin", "ends.npy", "first_labels.npy", "report.json"])
@pytest.mark.parametrize("size", [0, -2, None])
def test_a_damaged_cache_is_noticed_and_built_again(tmp_path, letters, name, size, caplog):
    path = write_chats(tmp_path / "a.jsonl", CHATS)
    folder = prepare(tmp_path, [path], letters)
    damaged = tmp_path / "cache" / folder / name
    content = damaged.read_bytes()
    if size is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content[:size])
    with caplog.at_level(logging.WARNING, logger="megatron_fbt"):
        assert prepare(tmp_path, [path], letters) == folder
    assert damaged.read_bytes() == content and "damaged" in caplog.text
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.rsplit("/", 1)[1]]


def test_a_process_that_does_not_see_the_cache_says_so(tmp_path):
    with pytest.raises(DataError, match=r"data\.cache_dir must be a folder that all processes share"):
        open_conversations(str(tmp_path / "conversations-0"), True)
