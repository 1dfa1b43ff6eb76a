"""Rows of the vocabulary that only tensor parallelism needs never leave a checkpoint, and no text can hold them."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_fbt.hf.convert import Conversion, convert_checkpoint
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from megatron_fbt.inference.batches import continue_prompts
from megatron_fbt.inference.prompts import Prompt
from megatron_fbt.inference.text import GenerationOptions, load_model
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.exports import LetterTokenizer
from tests.unit.hf.reference import random_weights, tiny_config

ENTRIES, PADDED = 100, 128
REGIMES = ("standard", "soft", "fused", "recurrent")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def exported(request, tmp_path_factory):
    """Export of a checkpoint whose padded rows would win every arg-max."""
    folder = tmp_path_factory.mktemp("padded")
    config = tiny_config(vocab_size=ENTRIES, share_embeddings_and_output_weights=request.param)
    LetterTokenizer(ENTRIES).save_for_huggingface(folder / "tokenizer")
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(folder / "tokenizer")
    weights = random_weights(config, vocab_size=PADDED)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in weights:
            weights[name][ENTRIES:] = 1e4
    write_checkpoint(folder / "step", weights, config)
    convert_checkpoint(folder / "step", folder / "out", Conversion(format="fbt"))
    return folder / "out"


def test_vocabulary_embedding_and_head_agree(exported):
    model, tokenizer = load_model(exported, "cpu")
    tensors = load_file(exported / "model.safetensors")
    tables = [tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors]
    assert len(tables) == (1 if model.config.tie_word_embeddings else 2)
    assert all(table.shape[0] == ENTRIES and table.abs().max() < 1e4 for table in tables)
    assert model.config.vocab_size == len(tokenizer) == ENTRIES
    assert model.get_input_embeddings().num_embeddings == model.get_output_embeddings().out_features == ENTRIES


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("flat", [True, False])
def test_no_text_holds_a_padded_row(exported, regime, flat):
    model = FBTForCausalLM.from_pretrained(exported).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    if flat:  # every true logit is -100, as padded ones often are
        model.lm_head.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, -100.0))
    ids = torch.arange(9)[None].expand(8, -1)
    torch.manual_seed(0)
    options = {"regime": regime, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
    greedy = model.generate(ids, do_sample=False, **options)
    sampled = model.generate(ids, do_sample=True, temperature=5.0, top_k=0, **options)
    assert max(greedy.max(), sampled.max()) < ENTRIES
    assert not flat or len(set(sampled[:, 9:].flatten().tolist())) > 50, "every token may come"
    own = GenerationOptions(regime, max_new_tokens=12, temperature=5.0)
    found = [result for batch in continue_prompts(model, LOOSE, [Prompt("", list(range(9)))], own) for result in batch]
    assert max(found[0]["token_ids"]) < ENTRIES


class Loose:
    """Decodes ids to nothing: texts do not matter here."""

    def decode(self, ids, skip_special_tokens):
        return ""


LOOSE = Loose()
