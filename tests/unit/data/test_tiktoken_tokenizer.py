"""tiktoken tokenizers: what their two files must hold, and where they have no Hugging Face form."""

import json
import shutil
import sys

import pytest

from megatron_fbt.config.data import DataConfig, TokenizerConfig
from megatron_fbt.data.stored_tokenizer import store_tokenizer, stored_path
from megatron_fbt.data.tokenizer import build_tokenizer
from megatron_fbt.errors import ConfigError, DataError


@pytest.fixture
def copy(tiktoken_file, tmp_path):
    """A copy that a test may spoil."""
    for path in tiktoken_file.parent.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path / "small.tiktoken"


def build(path):
    return build_tokenizer(TokenizerConfig(type="tiktoken", path=str(path)))


def change(copy, **facts):
    path = copy.with_name("small.tiktoken.json")
    content = {**json.loads(path.read_text()), **facts}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_the_type_is_one_of_the_configuration(tiktoken_file):
    assert TokenizerConfig(type="tiktoken", path=str(tiktoken_file)).problems() == []


def test_control_tokens_come_by_name_in_chats_only(tiktoken_file):
    tokenizer = build(tiktoken_file)
    turn = tokenizer.control_tokens["<|turn|>"]
    assert turn not in tokenizer.tokenize("a<|turn|>b") and turn in tokenizer.encode_rendered("a<|turn|>b")
    assert tokenizer.template_variables == {"eos_token": "<|end|>"}
    assert tokenizer.detokenize([turn, tokenizer.vocab_size - 3]) == ""  # the gap in the ids


def test_a_run_stores_both_files_and_finds_them_again(tiktoken_file, tmp_path):
    config = DataConfig(tokenizer=TokenizerConfig(type="tiktoken", path=str(tiktoken_file)))
    tokenizer = build(tiktoken_file)
    assert stored_path(tmp_path / "stored", config) is None
    store_tokenizer(tokenizer, config, tmp_path / "stored")
    again = build(stored_path(tmp_path / "stored", config))
    assert again.unique_identifiers == tokenizer.unique_identifiers


def test_without_the_package_the_error_says_what_to_install(tiktoken_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match="pip install tiktoken"):
        build(tiktoken_file)


def test_no_end_token_is_refused_on_use(copy):
    change(copy, eod=None)
    tokenizer = build(copy)
    for use in (lambda: tokenizer.eod, tokenizer.text_encoder):
        with pytest.raises(DataError, match="names no end-of-document token"):
            use()


SPOILT = {
    "no pattern": ({"pat_str": None}, "KeyError: 'pat_str'"),
    "a pattern that is none": ({"pat_str": "("}, "tiktoken refuses it"),
    "a pattern that loses text": ({"pat_str": r"\w+"}, "the rest is lost"),
    "an end token that is none": ({"eod": "<|stop|>"}, "eod one of special_tokens"),
    "an id that is a token's": ({"special_tokens": {"<|end|>": 5}}, r"not theirs alone: \[5\]"),
    "an id that is none": ({"special_tokens": {"<|end|>": "x"}}, "special_tokens texts with ids"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_facts_that_cannot_be_are_named(copy, spoilt):
    facts, message = SPOILT[spoilt]
    change(copy, **facts)
    with pytest.raises(DataError, match=message):
        build(copy)


def test_a_special_token_that_is_named_twice_is_refused(copy):
    facts = copy.with_name("small.tiktoken.json")
    facts.write_text(
        facts.read_text().replace('"special_tokens": {', '"special_tokens": {"<|end|>": 9, "<|end|>": 8, ')
    )
    with pytest.raises(DataError, match=r"it names '<\|end\|>' more than once"):
        build(copy)


def test_ranks_that_cannot_be_are_named(copy):
    lines = copy.read_bytes().splitlines()
    for content, message in (
        (lines[1:], "no token for 1 of the 256 bytes"),
        ([*lines, b"!!! 7"], f"line {len(lines) + 1}: not a token in base64"),
        ([*lines, lines[0] + b"9999 9"], f"line {len(lines) + 1}"),
        ([*lines, b"YWJjZGVmZ2hpams= 3"], "come twice"),
        ([*lines, lines[-1].split()[0] + b" 9999"], f"line {len(lines) + 1}: .*has come before with rank"),
        ([], "is empty"),
    ):
        copy.write_bytes(b"\n".join(content))
        with pytest.raises(DataError, match=message):
            build(copy)
    copy.with_name("small.tiktoken.json").unlink()
    copy.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match="small.tiktoken.json: no such file"):
        build(copy)


def test_ranks_with_gaps_are_not_exported_wrongly(copy, tmp_path):
    lines = copy.read_bytes().splitlines()
    copy.write_bytes(b"\n".join(lines[:-2] + lines[-1:]))
    tokenizer = build(copy)
    with pytest.raises(DataError, match="its ranks have gaps"):
        tokenizer.save_for_huggingface(tmp_path / "export")
    assert not (tmp_path / "export").exists()
