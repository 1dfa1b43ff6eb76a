"""Tokenizer files for two generations of transformers."""

import json
import re

import pytest
from transformers import AutoTokenizer

from megatron_fbt.data.huggingface_files import load_fast_tokenizer, make_portable
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import DataError
from tests.unit.hf.exports import LetterTokenizer


def test_what_4_cannot_read_is_written_otherwise(tmp_path):
    newer = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<|im_end|>"],
        "is_local": True,
        "local_files_only": True,
        "eos_token": "<eod>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(newer))
    make_portable(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_end|>"],
        "eos_token": "<eod>",
        "model_input_names": ["input_ids", "attention_mask"],
    }


def test_a_class_that_both_know_stays(tmp_path):
    content = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image": "<image>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    make_portable(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == content


def test_saved_files_load_with_equal_ids_and_special_tokens(tmp_path):
    LetterTokenizer().save_for_huggingface(tmp_path / "source")
    richer = AutoTokenizer.from_pretrained(tmp_path / "source")
    richer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<|im_end|>"]})
    richer.save_pretrained(tmp_path / "richer")
    HuggingFaceTokenizer(tmp_path / "richer").save_for_huggingface(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in written
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.all_special_tokens == richer.all_special_tokens and len(saved) == len(richer)
    assert saved.added_tokens_encoder == richer.added_tokens_encoder
    assert saved("0123", add_special_tokens=False).data == {"input_ids": [0, 1, 2, 3], "attention_mask": [1, 1, 1, 1]}


def write_folder(folder, model=None, **config):
    """A tokenizer of a few words."""
    model = model or {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<eod>": 2}, "unk_token": "<unk>"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eod>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def test_a_text_that_it_gives_up_on_is_named_and_its_place_known(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_folder(tmp_path))
    assert tokenizer.tokenize_batch(["a b", "b"]) == [[0, 1], [1]]
    for encode in (tokenizer.tokenize_batch, tokenizer.text_encoder().tokenize_flat):
        with pytest.raises(DataError, match=rf"tokenizer {tmp_path}: it cannot encode the text 'a c': .*UNK") as caught:
            encode(["a b", "b", "a c", "c"])
        assert caught.value.position == 2
    with pytest.raises(DataError, match="cannot encode the text 'c'"):
        tokenizer.encode_rendered("c")


def test_dropout_is_refused(tmp_path):
    model = {"type": "BPE", "dropout": 0.1, "vocab": {"a": 0, "b": 1, "ab": 2, "<eod>": 3}, "merges": [["a", "b"]]}
    with pytest.raises(DataError, match=rf"{tmp_path}: dropout of its model is 0.1, .*null in tokenizer.json"):
        load_fast_tokenizer(write_folder(tmp_path, model=model))
    load_fast_tokenizer(write_folder(tmp_path, model={**model, "dropout": None}))


def test_an_end_token_that_is_no_token_is_refused(tmp_path):
    with pytest.raises(DataError, match=rf"{tmp_path}: its eos_token '<oed>' is none of its tokens"):
        load_fast_tokenizer(write_folder(tmp_path, eos_token="<oed>"))
    decoder = {"3": {"content": "<oed>", "special": True}}
    added = load_fast_tokenizer(write_folder(tmp_path, eos_token="<oed>", added_tokens_decoder=decoder))
    assert added.eos_token_id == 3


def test_code_that_lies_beside_a_tokenizer_is_never_run_nor_asked_about(tmp_path, monkeypatch):
    def asked(*_):
        raise AssertionError("a question to the user")

    monkeypatch.setattr("builtins.input", asked)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Own: pass\n")
    write_folder(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(DataError, match=re.escape(f"tokenizer {tmp_path}: ") + ".*code of its own, which is not run"):
        load_fast_tokenizer(tmp_path)
    assert not (tmp_path / "run").exists()
