"""The README.md of an exported model."""

from string import Template
from typing import Iterator

from megatron_fbt.hf.configuration_fbt import FBTConfig

TEMPLATE = Template(
    """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- full-bandwidth-transformer
- custom_code
---

# Full-Bandwidth Transformer

A decoder-only transformer that feeds its top state back into the next position's input (arXiv:2608.08888), trained
with megatron_fbt. $parameters parameters ($dtype), $layers layers, hidden size $hidden, vocabulary $vocabulary,
trained on rows of $length tokens with up to $passes parallel passes. $options

```python
$usage
```

| regime | prompt | new tokens |
|---|---|---|
| `standard` | one plain pass | plain: an ordinary transformer |
| `soft` | one plain pass | carry the top state |
| `fused` | one plain pass, then `fused_passes` more that carry it | carry the top state |
| `recurrent` | token by token (slow; for evaluation) | carry the top state |

`model(input_ids, passes=K)` runs K parallel passes; with `labels` the loss is NLL(pass 1) + mean NLL(passes 2..K).
Left-padded batches, beam search and several return sequences work; static caches and assisted decoding are refused.
"""
)


WITH_TOKENIZER = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder", trust_remote_code=True)
prompt = tokenizer("A prompt", return_tensors="pt", add_special_tokens=False)
output = model.generate(prompt.input_ids, regime="{regime}", max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
WITH_IDS = """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
prompt = torch.tensor([[1, 2, 3]])  # token ids: the model was trained on rows of them, without a tokenizer
output = model.generate(prompt, regime="{regime}", max_new_tokens=64)
print(output[0].tolist())"""


def model_card(exported: FBTConfig, parameters: int, dtype: str) -> str:
    """Fill in the card.

    Args:
        exported: The exported model's configuration.
        parameters: Number of parameters, a tied matrix counted once.
        dtype: Number format of the weights.
    """
    usage = WITH_IDS if exported.eos_token_id is None else WITH_TOKENIZER
    return TEMPLATE.substitute(
        parameters=f"{parameters:,}",
        dtype=dtype,
        layers=exported.num_hidden_layers,
        hidden=exported.hidden_size,
        vocabulary=f"{exported.vocab_size:,}",
        length=f"{exported.max_position_embeddings:,}",
        passes=exported.passes,
        usage=usage.format(regime=exported.regime),
        options=" ".join(_options(exported)),
    )


def _options(exported: FBTConfig) -> Iterator[str]:
    """Sentences on what a user of the model may need to know of its layers."""
    yield f"Fusion: `{exported.fusion}`."
    if exported.sliding_window is not None:
        skip = exported.window_attn_skip_freq
        full = "" if skip is None else f" (every layer in {skip} sees all)"
        yield f"A position sees {exported.sliding_window:,} positions{full}; the cache keeps all."
    if exported.attention_output_gate:
        yield "Attention outputs are gated."
    if exported.reset_attention_mask:
        yield "Attention stayed within documents: rows of several need `document_starts`."
