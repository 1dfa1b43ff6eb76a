"""Tokenizer files for two generations of transformers."""

import json

from transformers import AutoTokenizer

from megatron_fbt.data.huggingface_files import make_portable
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
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
