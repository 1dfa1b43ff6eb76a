"""The tokenizer of a run, or what stands in for it where the data are token ids already."""

from collections import OrderedDict
from typing import Dict, List, Sequence

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_fbt.errors import ConfigError, DataError

NO_TOKEN = -1
"""An id that no row holds."""


class TokenIds(Tokenizer):
    """No tokenizer: the data are ids below vocab_size, and no token ends a document."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.unique_identifiers = OrderedDict([("class", type(self).__name__), ("vocab_size", str(vocab_size))])

    @property
    def eod(self) -> int:
        return NO_TOKEN

    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        raise DataError("the data are token ids (data.tokenizer.path is null): there is no tokenizer for text")

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    @property
    def control_tokens(self) -> Dict[str, int]:
        return {}

    @property
    def template_variables(self) -> Dict[str, str]:
        return {}

    def save_for_huggingface(self, folder) -> None:
        """There is nothing to save."""


def run_tokenizer(config: PretrainConfig) -> Tokenizer:
    """The tokenizer that a run's configuration names; with data.format labelled it may name none.

    Raises:
        ConfigError: There is neither a tokenizer nor the size of a vocabulary.
        DataError: The tokenizer's files are missing or are no tokenizer of this type.
    """
    if config.data.format != "labelled" or config.data.tokenizer.path is not None:
        return build_tokenizer(config.data.tokenizer)
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size = null: rows of token ids do not tell it; give the number of ids")
    return TokenIds(config.model.vocab_size)
