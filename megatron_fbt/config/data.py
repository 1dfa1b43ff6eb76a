"""Data sets and tokenizer."""

from dataclasses import dataclass, field
from typing import List, Literal, Optional


@dataclass
class TokenizerConfig:
    """Where token ids come from."""

    type: Literal["sentencepiece", "huggingface"] = "sentencepiece"
    path: Optional[str] = None
    """SentencePiece .model file, or a folder with Hugging Face tokenizer files."""


@dataclass
class DataConfig:
    """Indexed data sets (.bin/.idx), named by their common prefix."""

    paths: List[str] = field(default_factory=list)
    """Prefixes of the data sets, without .bin/.idx."""
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
