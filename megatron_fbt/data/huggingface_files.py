"""Folders of tokenizer files: what may be used of them, and writing them so that transformers 4.x and 5.x load them."""

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from megatron_fbt.data.unencodable import unencodable
from megatron_fbt.errors import DataError

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
    """Rewrite tokenizer_config.json of save_pretrained so that 4.x and 5.x read, and have written, the same.

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
    elif not content.get("extra_special_tokens"):  # 4.x writes an empty one
        content.pop("extra_special_tokens", None)
    for name in OF_THIS_MACHINE:
        content.pop(name, None)
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def load_fast_tokenizer(folder: Path):
    """The tokenizer of a folder as transformers has it; no code that lies there is run.

    Raises:
        DataError: The folder holds no fast tokenizer, or one that does not always give the same tokens, or whose
            eos_token is none of them.
    """
    if not folder.is_dir():  # said before the slow import
        raise DataError(f"tokenizer {folder}: no such folder; data.tokenizer.path must name one with tokenizer files")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options = {"local_files_only": True, "use_fast": True, "trust_remote_code": False}
    try:
        if (folder / "tokenizer_config.json").is_file() or not (folder / "tokenizer.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    except Exception as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = f"it needs code of its own, which is not run; save it as a {GENERIC_CLASS}, with a tokenizer.json"
        raise DataError(f"tokenizer {folder}: transformers cannot load it: {reason}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"tokenizer {folder}: not a fast tokenizer; save it with a tokenizer.json")
    _refuse_sampling(tokenizer.backend_tokenizer.model, folder)
    _check_end_token(tokenizer.eos_token, folder)
    return tokenizer


def _refuse_sampling(model, folder: Path) -> None:
    for name in ("dropout", "alpha"):
        value = getattr(model, name, None)
        if value:
            raise DataError(
                f"tokenizer {folder}: {name} of its model is {value:.4g}, which gives other tokens each time; set it "
                "to null in tokenizer.json"
            )


def _check_end_token(name: Any, folder: Path) -> None:
    """Refuse an eos_token that is no token, of which transformers would make a new one."""
    path = folder / "tokenizer.json"
    if name is None or not path.is_file():
        return
    from tokenizers import Tokenizer

    decoder = _json_of(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    added = {token.get("content") if isinstance(token, dict) else token for token in decoder.values()}
    added.update(_json_of(folder / "added_tokens.json"))
    if name not in added and Tokenizer.from_file(str(path)).token_to_id(name) is None:
        raise DataError(
            f"tokenizer {folder}: its eos_token {name!r} is none of its tokens, and would become a new one that no "
            "model knows; correct eos_token in tokenizer_config.json, or add the token to tokenizer.json"
        )


def _json_of(path: Path) -> Dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def encode_batch(backend, texts: Sequence[str], path: Path) -> List[Any]:
    """The encodings of texts, without special tokens.

    Args:
        backend: A Tokenizer of the package tokenizers.
        texts: [n].
        path: Of the tokenizer, for messages.

    Raises:
        UnencodableText: It gives up on a text, as without an unknown token.
    """
    try:
        return backend.encode_batch_fast(list(texts), add_special_tokens=False)
    except Exception:
        for position, text in enumerate(texts):
            try:
                backend.encode(text, add_special_tokens=False)
            except Exception as error:
                raise unencodable(path, text, error, position) from error
        raise
