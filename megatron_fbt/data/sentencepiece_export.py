"""A SentencePiece BPE model as a Hugging Face fast tokenizer with equal encoding and decoding.

The vocabulary is written with real spaces instead of SentencePiece's space symbol, so no normalizer is needed and a
literal U+2581 in a text falls back to bytes like any other character outside the vocabulary.
"""

import json
from pathlib import Path
from typing import Dict, List, Tuple

from megatron_fbt.errors import DataError

_PROBES = (
    "",
    " ",
    "text",
    "  two leading spaces",
    "trailing  \n\n\n",
    "\n",
    "\t\ttabs\tand \r\n line ends\r",
    "def f(x):\n        return x  # eight spaces\n\n\n    pass\n",
    "</s> <s> <unk> <pad> <0x0A> <0xE2><0x96><0x81> <|endoftext|>",
    "\u2581 \u2581\u2581a\u2581 a",
    "na\u00efve \u4e2d\u6587 \U0001f600\U0001f468\u200d\U0001f469 \u0301\ufb01 \u00a0\u3000\ufeff\ufffd\u2028\x7f\x01",
    " " * 77 + "=" * 77 + "-=" * 33 + "\n" * 33,
)


def save_sentencepiece_for_huggingface(tokenizer, model, folder) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and, if there is one, chat_template.jinja.

    Args:
        tokenizer: The project's SentencePiece tokenizer.
        model: Its sentencepiece.SentencePieceProcessor.
        folder: Where the files go; made if missing.

    Raises:
        DataError: The model is not byte-fallback BPE without normalization, or the result would encode differently.
    """
    if not tokenizer.is_lossless:
        raise DataError(
            f"tokenizer {tokenizer.path}: only SentencePiece BPE models with byte fallback and without normalization "
            "can be written for Hugging Face (tools/train_tokenizer.py makes such models); for another model use its "
            "Hugging Face files and data.tokenizer.type huggingface from the start"
        )
    fast = _fast_tokenizer(tokenizer, model)
    for probe in _PROBES:
        expected = tokenizer.tokenize(probe)
        found = fast.encode(probe, add_special_tokens=False).ids
        if found != expected or fast.decode(found) != tokenizer.detokenize(expected):
            raise DataError(
                f"tokenizer {tokenizer.path}: its Hugging Face form would encode {probe!r} as {found}, not {expected}; "
                "it seems not to be a BPE model"
            )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    special = {"eos_token": model.id_to_piece(tokenizer.eod), "unk_token": model.id_to_piece(model.unk_id())}
    for name, token in (("bos_token", model.bos_id()), ("pad_token", model.pad_id())):
        if token >= 0:
            special[name] = model.id_to_piece(token)
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": tokenizer.saved_chat_template is None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    _write_json(folder / "tokenizer_config.json", {**special, **options})
    _write_json(folder / "special_tokens_map.json", special)
    if tokenizer.saved_chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.saved_chat_template, encoding="utf-8")


def _fast_tokenizer(tokenizer, model):
    from tokenizers import AddedToken, Tokenizer, decoders, models

    surface = tokenizer.surface_pieces()
    names = [surface[i] or model.id_to_piece(i) for i in range(tokenizer.vocab_size)]
    vocabulary = {name: i for i, name in enumerate(names)}
    scores = {name: model.get_score(i) for i, name in enumerate(names) if surface[i]}
    fast = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(scores),
            byte_fallback=True,
            unk_token=model.id_to_piece(model.unk_id()),
            fuse_unk=False,
        )
    )
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    control = [i for i in range(tokenizer.vocab_size) if model.is_control(i) or model.is_unknown(i)]
    fast.add_special_tokens([AddedToken(names[i], special=True, normalized=False) for i in control])
    fast.encode_special_tokens = True
    return fast


def _merges(scores: Dict[str, float]) -> List[Tuple[str, str]]:
    """All pairs of pieces that join to a piece, best piece first.

    SentencePiece joins, again and again, the leftmost of the neighbours whose joint piece has the best score.
    """
    merges = []
    for piece in sorted(scores, key=lambda name: -scores[name]):
        cuts = range(len(piece) - 1, 0, -1)
        merges += [(piece[:cut], piece[cut:]) for cut in cuts if piece[:cut] in scores and piece[cut:] in scores]
    return merges


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
