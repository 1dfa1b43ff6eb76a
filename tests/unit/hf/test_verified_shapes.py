"""Native and exported logits, position by position, for the head counts that converters get wrong."""

import pytest

from megatron_fbt.hf.convert import Conversion, convert_checkpoint
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.exports import LetterTokenizer
from tests.unit.hf.reference import random_weights, tiny_config


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (6, 2)])
def test_native_and_exported_logits_agree_beyond_position_100(tmp_path, heads, groups):
    config = tiny_config(num_attention_heads=heads, num_query_groups=groups, ffn_hidden_size=88)
    config.data.sequence_length = 160
    LetterTokenizer(50).save_for_huggingface(tmp_path / "tokenizer")
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(tmp_path / "tokenizer")
    write_checkpoint(tmp_path / "step", random_weights(config, seed=heads * 10 + groups), config)
    report = convert_checkpoint(tmp_path / "step", tmp_path / "out", Conversion(verify=True, format="fbt"))
    verification = report["verification"]
    assert verification["tokens"] >= 8 * 160 and verification["passed"]
    assert [line["passes"] for line in verification["passes"]] == [1, 2, 3]
    for line in verification["passes"]:
        assert line["max_abs_difference"] < 1e-5 and line["top1_agreement"] == 1
