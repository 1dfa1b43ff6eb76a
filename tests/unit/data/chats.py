"""A tokenizer of single letters that can chat, and files of conversations."""

import json
from pathlib import Path
from typing import Dict, List, Optional, Sequence

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTROL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
SHORT = {"<|end|>": "E", "<|system|>": "S", "<|user|>": "U", "<|assistant|>": "A", "\n": "/"}
"""How tests show tokens that are not one printable character."""
LETTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789<|>"


def write_letter_tokenizer(folder: Path, template: Optional[str] = TEMPLATE) -> Path:
    """A Hugging Face folder: control tokens 0 to 3 (0 ends a turn and a document), then one token a letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*CONTROL, *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(CONTROL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder


def spell(ids: Sequence[int]) -> str:
    """Tokens of the letter tokenizer, a character each."""
    names = [*CONTROL, *LETTERS]
    return "".join(SHORT.get(names[int(i)], names[int(i)]) for i in ids)


def chat(*turns: str) -> List[Dict[str, str]]:
    """Messages from texts such as ``user: hello``."""
    pairs = (turn.split(": ", 1) for turn in turns)
    return [{"role": role, "content": content} for role, content in pairs]


def write_chats(path: Path, conversations: Sequence[List[Dict[str, str]]]) -> str:
    """A JSON Lines file; its path as text."""
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    path.write_text(text, encoding="utf-8")
    return str(path)
