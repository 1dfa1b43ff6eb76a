"""Data sets and tokenizer."""

import math
import os
from dataclasses import dataclass, field
from typing import List, Literal, Optional, Tuple

from megatron_fbt.config.rules import Rules, Section
from megatron_fbt.errors import ConfigError


def parse_split(text: str) -> Tuple[float, float, float]:
    """Read a split such as `969,30,1`: the relative parts of training, validation and test.

    Args:
        text: three numbers, not negative, separated by commas; blanks around them do not matter.

    Returns:
        The three numbers as written (not normalised).

    Raises:
        ConfigError: naming the text, if it is anything else or all parts are zero.
    """
    remedy = "give three numbers for training, validation and test, not negative and not all zero, such as 969,30,1"
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or not all(math.isfinite(part) and part >= 0 for part in parts) or sum(parts) == 0:
        raise ConfigError(f"data.split = {text!r}: not a split; {remedy}")
    return parts[0], parts[1], parts[2]


@dataclass
class TokenizerConfig(Section):
    """Where token ids come from."""

    type: Literal["sentencepiece", "huggingface"] = "sentencepiece"
    path: Optional[str] = None
    """SentencePiece .model file, or a folder with Hugging Face tokenizer files."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("data.tokenizer", self)
        if rules.usable("path") and self.path is not None:
            rules.require(bool(self.path.strip()), "path", "empty", "name a file or a folder, or set it to null")
        return rules.problems


@dataclass
class DataConfig(Section):
    """Indexed data sets (.bin/.idx), named by their common prefix."""

    paths: List[str] = field(default_factory=list)
    """Prefixes of the data sets, without .bin/.idx; each at most once."""
    weights: Optional[List[float]] = None
    """Blend weights, one for each path, positive; null = in proportion to the number of samples."""
    split: str = "969,30,1"
    """Parts of the documents for training, validation and test."""
    sequence_length: int = 1024
    """Tokens in a row."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    cache_dir: Optional[str] = None
    """Folder for data set indices; null = <run.dir>/data_cache."""
    mmap: bool = True
    """Memory-map the .bin files."""
    eod_mask_loss: bool = False
    """Leave the prediction that follows an end-of-document token out of the loss."""
    reset_attention_mask: bool = False
    """Mask attention across packed documents. Not available yet: refused."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("data", self)
        rules.integers("sequence_length")
        if rules.usable("paths"):
            self._path_rules(rules)
        if self.weights is not None and rules.usable("weights", "paths"):
            self._weight_rules(rules)
        if rules.usable("split"):
            self._split_rules(rules)
        if rules.usable("reset_attention_mask") and self.reset_attention_mask:
            why = "attention cannot be masked across packed documents in this version"
            rules.add("reset_attention_mask", why, "set it to false")
        return rules.problems + self.tokenizer.problems()

    def _path_rules(self, rules: Rules) -> None:
        """Every data set is named, and named once: the same one twice would be two sources with equal samples."""
        if not all(path.strip() for path in self.paths):
            rules.add("paths", "one entry is empty", "remove it")
        normal = [os.path.normpath(path) for path in self.paths]
        repeated = sorted({path for path in normal if normal.count(path) > 1})
        if repeated:
            remedy = "name it once, with the sum of its weights in data.weights"
            rules.add("paths", f"{', '.join(repeated)} is named more than once", remedy)

    def _weight_rules(self, rules: Rules) -> None:
        """One finite positive weight for each path."""
        if len(self.weights) != len(self.paths):
            why = f"{len(self.weights)} weights for {len(self.paths)} data.paths"
            rules.add("weights", why, "give one weight for each path, or null")
        elif not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            remedy = "give finite weights above 0, and leave out the path of a source that is not wanted"
            rules.add("weights", "a weight is zero, negative or not a finite number", remedy)

    def _split_rules(self, rules: Rules) -> None:
        """The split can be read and leaves something to train on."""
        try:
            train, _, _ = parse_split(self.split)
        except ConfigError as error:
            rules.problems.append(str(error))
            return
        rules.require(train > 0, "split", "leaves nothing for training", "give a first number above 0")
