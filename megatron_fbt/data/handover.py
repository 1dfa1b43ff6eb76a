"""Data sets handed to other processes: what lies in files is opened there again instead of being copied."""

import io
import mmap
import pickle
from types import SimpleNamespace
from typing import Any, Optional, Tuple

import numpy

from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import DataError


def pack(dataset: Any) -> bytes:
    """A data set as bytes for `unpack` in a process of the same machine.

    Arrays that are mapped read-only from files travel as names of these files: an index of a run over 10^12 tokens has
    gigabytes, which all processes so share through the page cache. Of a tokenizer the facts travel that rows need.
    """
    stream = io.BytesIO()
    _Packer(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(dataset)
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """The data set in this process.

    Raises:
        DataError: a file of it cannot be opened any more.
    """
    try:
        return pickle.loads(packed)
    except OSError as error:
        raise DataError(f"the data set cannot be opened in a process that reads ahead: {error}") from error


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, numpy.ndarray):
            place = _place_in_file(value)
            return NotImplemented if place is None else (_open_again, place)
        if isinstance(value, Tokenizer):
            return _facts, (value.eod, value.pad, value.vocab_size, value.unique_identifiers)
        return NotImplemented


def _place_in_file(array: numpy.ndarray) -> Optional[Tuple]:
    """(path, type, offset in bytes, shape) of an array whose memory is a file mapped read-only; None for others."""
    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    mapped = isinstance(root, numpy.memmap) and isinstance(root.base, mmap.mmap) and root.mode == "r"
    if not mapped or array.size == 0 or not array.flags.c_contiguous:
        return None
    offset = root.offset + array.ctypes.data - root.ctypes.data
    return str(root.filename), array.dtype, offset, array.shape


def _open_again(path: str, dtype: numpy.dtype, offset: int, shape: Tuple[int, ...]) -> numpy.memmap:
    return numpy.memmap(path, mode="r", dtype=dtype, offset=offset, shape=shape)


def _facts(eod: int, pad: int, vocab_size: int, unique_identifiers: Any) -> SimpleNamespace:
    return SimpleNamespace(eod=eod, pad=pad, vocab_size=vocab_size, unique_identifiers=unique_identifiers)
