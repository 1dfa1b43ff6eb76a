"""The error for texts that a tokenizer cannot encode."""

from pathlib import Path
from typing import Union

from megatron_fbt.errors import DataError


class UnencodableText(DataError):
    """A tokenizer gives up on a text.

    Attributes:
        position: Of the text among those that were given together.
    """

    def __init__(self, message: str, position: int = 0):
        super().__init__(message)
        self.position = position


def unencodable(path: Union[str, Path], text: str, error: Exception, position: int) -> UnencodableText:
    """What to raise where the tokenizer of a path gives up on a text."""
    reason = " ".join(str(error).split())
    return UnencodableText(f"tokenizer {path}: it cannot encode the text {text[:60]!r}: {reason}", position)
