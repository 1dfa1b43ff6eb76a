"""Prompts from options, files and standard input; conversations."""

import gzip
import io
import json

import pytest

from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.inference.prompts import PromptSource, encode_prompts
from megatron_fbt.inference.text import load_tokenizer
from tests.unit.hf.exports import LetterTokenizer


def read(stdin="", **fields):
    return PromptSource(**fields).read(io.StringIO(stdin))


def test_every_source(tmp_path):
    assert read(texts=["a", "b\n"]) == ["a", "b\n"]
    (tmp_path / "one.txt").write_text("a\nb\n", encoding="utf-8")
    assert read(file=str(tmp_path / "one.txt")) == ["a\nb\n"] and read("x\n") == ["x\n"]
    (tmp_path / "lines.txt").write_bytes("a b\r\né\nlast".encode())
    assert read(list_file=str(tmp_path / "lines.txt")) == ["a b", "é", "last"]
    rows = '{"prompt": "a\\nb", "id": 1}\n{"prompt": "c"}'
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        assert read(list_file=str(tmp_path / name)) == ["a\nb", "c"]
    (tmp_path / "rows.jsonl").write_text('{"question": "q"}\n')
    assert read(list_file=str(tmp_path / "rows.jsonl"), key="question") == ["q"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "", "the file is empty"),
        ("p.txt", "a\n\nb\n", "line 2: the prompt is empty"),
        ("p.txt", b"a\n\xff\n", "p.txt, line 2: not UTF-8: invalid start byte at byte 1; save it"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "line 2: the object has no key 'prompt'; its keys are 'text'"),
        ("p.jsonl", "a\n", "line 1: not one JSON object"),
        ("p.jsonl", '{"prompt": 3}\n', "line 1: the prompt is a int"),
        ("p.jsonl", '{"prompt": ""}\n', "line 1: the prompt is empty"),
        ("absent.txt", None, "cannot be read.*absent.txt"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words):
        read(list_file=str(path))


USER = {"role": "user", "content": "1<eod>2"}


def test_conversations(tmp_path):
    tokenizer = LetterTokenizer(50)
    tokenizer.save_for_huggingface(tmp_path / "model")
    path = tmp_path / "c.jsonl"
    rows = [[USER], [USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "4"}]]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    source = PromptSource(list_file=str(path), chat=True)
    contents = source.read(io.StringIO())
    assert contents == rows and PromptSource(texts=["5"], chat=True).read(io.StringIO()) == [
        [{"role": "user", "content": "5"}]
    ]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "fbt"}')
    own = load_tokenizer(tmp_path / "model")
    with pytest.raises(CheckpointError, match="no chat template"):
        encode_prompts(contents, own, str(tmp_path / "model"), source)
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    prompts = encode_prompts(contents, own, str(tmp_path / "model"), source)
    letters = "".join(chr(ord("0") + index) for index in range(49))
    shown = ["".join("|" if token == 49 else letters[token] for token in prompt.ids) for prompt in prompts]
    assert shown[0].count("|") == 1, "what a message says cannot become a control token"
    assert shown[1].count("|") == 3 and prompts[1].content == rows[1]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "list of objects"),
        ([{"content": "x"}], "list of objects"),
        (["x"], "list of objects"),
        ([USER, {"role": "assistant", "content": "3"}], "line 1: the conversation ends with the assistant's message"),
        (7, "the prompt is a int"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, messages, words):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(ConfigError, match=words):
        PromptSource(list_file=str(path), chat=True).read(io.StringIO())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "message 2: the user's content is missing or no text"),
        ({"role": "user", "content": 3}, "message 2: the user's content is missing or no text"),
        ({"role": "user", "content": "\ud800"}, "lone surrogate"),
        ({"role": "user", "content": [{"type": "text", "text": "a\ud800"}]}, "lone surrogate"),
    ],
)
def test_messages_without_a_text_are_named(tmp_path, message, words):
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [USER, message]}))
    with pytest.raises(ConfigError, match=f"line 1: .*{words}"):
        read(list_file=str(tmp_path / "c.jsonl"), chat=True)
