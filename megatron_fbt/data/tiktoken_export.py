"""A tiktoken tokenizer as a Hugging Face fast tokenizer with equal encoding and decoding."""

import re
from pathlib import Path
from typing import Dict, List, Tuple

from megatron_fbt.data.huggingface_files import make_portable
from megatron_fbt.errors import DataError

_PROBES = (
    "",
    " ",
    "text",
    "  two leading spaces",
    "trailing  \n\n\n",
    "blanks at the end   ",
    "line\n$ 5 \n\n  x$",
    "\t\ttabs\tand \r\n line ends\r",
    "def f(x):\n        return x  # eight spaces\n\n\n    pass\n",
    "1 12 123 1234 12345 123456 1234567890123 3.14159 \u0663\u0664\u0665\u0666\u0667",
    "it's I'LL we'Ve don't o'clock 'Tis DON'T",
    "</s> <s> <unk> <pad> <|endoftext|> <|im_start|>",
    "na\u00efve \u4e2d\u6587\u4e2d\u6587 \U0001f600\U0001f468\u200d\U0001f469 \u0301\ufb01",
    "\u00a0 \u3000\ufeff\ufffd\u2028\x7f\x01",
    "\u01c5 \u01c5aB CamelCaseWord \u02b0\u0939\u093f\u0928\u094d\u0926\u0940 \u0645\u0631\u062d\u0628\u0627",
    " " * 77 + "=" * 77 + "-=" * 33 + "\n" * 33 + "a" * 99,
)
_POSSESSIVE_COUNT = re.compile(r"(\\[pP]\{\^?\w+\}|\\\w|\[(?:\\.|[^\]\\])*\]|[^\\()\[\]{}|*+?])(\{\d*,?\d*\})\+")
_UNUSED = "<|unused_{}|>"


def save_tiktoken_for_huggingface(tokenizer, ranks: Dict[bytes, int], pattern: str, folder) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja.

    Args:
        tokenizer: The project's tiktoken tokenizer.
        ranks: {token: id} without special tokens.
        pattern: Splits texts before pairs are merged.
        folder: Where the files go; made if missing.

    Raises:
        DataError: There is no equal fast tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    fast = _fast_tokenizer(tokenizer, ranks, pattern)
    for probe in _PROBES:
        expected, found = tokenizer.tokenize(probe), fast.encode(probe, add_special_tokens=False).ids
        if found != expected or fast.decode(found) != probe:
            raise _no_equal(tokenizer, f"it would encode {probe!r} as {found}, not {expected}")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        split_special_tokens=tokenizer.saved_chat_template is None,
        clean_up_tokenization_spaces=False,
        **tokenizer.template_variables,
    )
    if tokenizer.saved_chat_template is not None:
        wrapped.chat_template = tokenizer.saved_chat_template
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wrapped.save_pretrained(str(folder))
    make_portable(folder)


def _no_equal(tokenizer, why: str) -> DataError:
    return DataError(
        f"tokenizer {tokenizer.path}: it has no equal among Hugging Face's fast tokenizers: {why}; for another model "
        "use its Hugging Face files and data.tokenizer.type huggingface from the start"
    )


def _fast_tokenizer(tokenizer, ranks: Dict[bytes, int], pattern: str):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _no_equal(tokenizer, "its ranks have gaps")
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(_translated(pattern)), behavior="isolated")
    except Exception as error:
        raise _no_equal(tokenizer, f"its pattern is not understood there ({error})") from error
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    names = {token: name for name, token in tokenizer.control_tokens.items()}
    added = [names.get(i, _UNUSED.format(i)) for i in range(len(ranks), tokenizer.vocab_size)]
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added])
    if any(fast.token_to_id(name) != token for token, name in names.items()):
        raise _no_equal(tokenizer, "its special tokens would have other ids")
    fast.encode_special_tokens = True
    return fast


def _translated(pattern: str) -> str:
    """The pattern for the other expression engine: there ``{1,3}+`` repeats, and ``$`` is the end of a line."""
    pattern = _POSSESSIVE_COUNT.sub(r"(?>\1\2)", pattern)
    return re.sub(r"(\\.)|\$", lambda found: found[1] or r"\z", pattern)


def _merges(ranks: Dict[bytes, int]) -> List[Tuple[bytes, bytes]]:
    """All pairs of tokens that join to a token, lowest joint rank first."""
    merges = []
    for token in sorted(ranks, key=ranks.get):
        cuts = range(1, len(token))
        pairs = [(token[:cut], token[cut:]) for cut in cuts if token[:cut] in ranks and token[cut:] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _byte_letters() -> List[str]:
    """[256] the letters that byte-level tokenizers write for bytes: printable ones for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
