"""The README.md of an exported model."""

from pathlib import Path
from string import Template
from typing import Any, Dict, Iterator, Optional

import yaml
from transformers import PretrainedConfig

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.hf.configuration_fbt import FBTConfig
from megatron_fbt.training.run_folder import TrainerState

TEMPLATE = Template(
    """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- full-bandwidth-transformer
$tags---

# Full-Bandwidth Transformer

$introduction $parameters parameters ($dtype), $layers layers, hidden size $hidden, vocabulary $vocabulary,
trained on rows of $length tokens with up to $passes parallel passes. $options

```python
$usage
```
$body
$verification
## Training configuration

$training
```yaml
$configuration```
"""
)
REGIMES = """
| regime | prompt | new tokens |
|---|---|---|
| `standard` | one plain pass | plain: an ordinary transformer |
| `soft` | one plain pass | carry the top state |
| `fused` | one plain pass, then `fused_passes` more that carry it | carry the top state |
| `recurrent` | token by token (slow; for evaluation) | carry the top state |

`model(input_ids, passes=K)` runs K parallel passes; with `labels` the loss is NLL(pass 1) + mean NLL(passes 2..K).
Left-padded batches, beam search and several return sequences work; static caches and assisted decoding are refused.
"""


FULL = """\
A decoder-only transformer that feeds its top state back into the next position's input (arXiv:2608.08888), trained
with megatron_fbt."""
PLAIN = """\
The plain mode of a model that was trained with megatron_fbt (arXiv:2608.08888), as transformers' own {architecture}."""
WITH_TOKENIZER = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{trust})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{trust})
prompt = tokenizer("A prompt", return_tensors="pt", add_special_tokens=False)
output = model.generate(prompt.input_ids, {regime}max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
WITH_IDS = """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{trust})
prompt = torch.tensor([[1, 2, 3]])  # token ids: the model was trained on rows of them, without a tokenizer
output = model.generate(prompt, {regime}max_new_tokens=64)
print(output[0].tolist())"""


LEFT_OUT = ("logging", "checkpoint", "parallel", "memory")
"""Sections of the configuration that say nothing about the numbers of the model."""


def model_card(
    exported: PretrainedConfig, config: PretrainConfig, state: Optional[TrainerState], report: Dict[str, Any]
) -> str:
    """Fill in the card.

    Args:
        exported: The exported model's configuration.
        config: The run's.
        state: The run's counters; None = not known.
        report: Of the export: format, architecture, dtype, parameters, notes, verification.
    """
    full = report["format"] == "fbt"
    usage = WITH_IDS if exported.eos_token_id is None else WITH_TOKENIZER
    regime = f'regime="{exported.regime}", ' if full else ""
    options = _options(exported) if full else (f"{note[0].upper()}{note[1:]}." for note in report["notes"])
    return TEMPLATE.substitute(
        tags="- custom_code\n" if full else "",
        introduction=FULL if full else PLAIN.format(architecture=report["architecture"]),
        parameters=f"{report['parameters']:,}",
        dtype=report["dtype"],
        layers=exported.num_hidden_layers,
        hidden=exported.hidden_size,
        vocabulary=f"{exported.vocab_size:,}",
        length=f"{exported.max_position_embeddings:,}",
        passes=config.feedback.max_passes,
        usage=usage.format(regime=regime, trust=", trust_remote_code=True" if full else ""),
        options=" ".join(options),
        body=REGIMES if full else "",
        verification=describe_verification(report["verification"]),
        training="" if state is None else _progress(state),
        configuration=training_yaml(config),
    )


def describe_verification(verification: Optional[Dict[str, Any]]) -> str:
    """The section on the parity of logits; empty where it was not measured."""
    if verification is None:
        return ""
    rows = [
        f"| {line['passes']} | {line['max_abs_difference']:.2e} | {line['kl']:.2e} | {line['top1_agreement']:.2%} |"
        for line in verification["passes"]
    ]
    verdict = "PASSED" if verification["passed"] else "NOT PASSED"
    return "\n".join(
        [
            "## Logits against the training model\n",
            f"{verdict}: {verification['tokens']:,} tokens ({verification['source']}), both models in float32.",
            f"{verification['limits']}.\n",
            "| passes | largest difference of logits | KL divergence, mean, nats | same top-1 token |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def training_yaml(config: PretrainConfig) -> str:
    """The configuration of the run, without what is particular to machines: folders and layout."""
    sections = {name: values for name, values in yaml.safe_load(dump_yaml(config)).items() if name not in LEFT_OUT}
    sections["run"] = {"seed": sections["run"]["seed"]}
    data = sections["data"]
    data.pop("cache_dir", None)
    data["paths"] = [Path(path).name for path in data["paths"]]
    for section, name in ((data, "chat_template"), (data["tokenizer"], "path")):
        section[name] = None if section.get(name) is None else Path(section[name]).name
    return yaml.safe_dump(sections, sort_keys=False)


def _progress(state: TrainerState) -> str:
    text = f"{state.step:,} steps, {state.consumed_samples:,} rows, {state.token_equivalents:,} token-equivalents"
    shares = ", ".join(f"K = {passes}: {share:.1%}" for passes, share in state.pass_shares.items() if share)
    return f"{text}{f' ({shares})' if shares else ''}.\n"


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
