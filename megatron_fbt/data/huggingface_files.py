"""Tokenizer files that transformers 4.x and 5.x both load."""

import json
from pathlib import Path

GENERIC_CLASS = "PreTrainedTokenizerFast"
"""Loads tokenizer.json as it is; 5.x writes another name for it, which 4.x does not know."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What a tokenizer's folder may consist of."""
OF_THIS_MACHINE = ("is_local", "local_files_only")


def make_portable(folder: Path) -> None:
    """Rewrite what save_pretrained of 5.x puts into tokenizer_config.json and 4.x cannot read.

    Args:
        folder: Holds tokenizer_config.json and tokenizer.json.
    """
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") in (None, "TokenizersBackend", GENERIC_CLASS):
        content["tokenizer_class"] = GENERIC_CLASS
        content.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(content.get("extra_special_tokens"), list):  # a mapping in 4.x
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    for name in OF_THIS_MACHINE:
        content.pop(name, None)
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
