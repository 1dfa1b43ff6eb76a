"""Several processes that encode chunks, whose results come in the order of the input."""

import os
import threading
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Iterable, Iterator, Optional, Tuple, TypeVar

from megatron_fbt.data.chunks import Chunk
from megatron_fbt.data.encode import Encoded, Encoder
from megatron_fbt.errors import DataError

Tag = TypeVar("Tag")

_CHUNKS_AHEAD = 4
"""Chunks in work for each worker, which bounds the memory."""
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}
"""Each worker encodes in one thread."""


def encode_all(
    chunks: Iterable[Tuple[Tag, Optional[Chunk]]], encoder: Encoder, workers: int
) -> Iterator[Tuple[Tag, Optional[Chunk], Optional[Encoded]]]:
    """Each chunk with its tag and result, in order.

    Args:
        chunks: With any tags; a chunk that is None is passed on.
        encoder: Sent to every worker once.
        workers: Processes; 1 = no other process.

    Raises:
        DataError: A worker died, or what the encoder raises.
    """
    if workers > 1:
        yield from _encode_in_pool(chunks, encoder, workers)
        return
    for tag, chunk in chunks:
        with _one_thread():
            encoded = None if chunk is None else encoder(chunk)
        yield tag, chunk, encoded


def _encode_in_pool(chunks, encoder: Encoder, workers: int):
    executor = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(encoder,))
    waiting: "deque[Tuple[Tag, Optional[Chunk], Optional[Future]]]" = deque()

    def first():
        tag, chunk, future = waiting.popleft()
        return tag, chunk, None if future is None else future.result()

    try:
        for tag, chunk in chunks:
            future = None if chunk is None else executor.submit(_encode, chunk)
            # What comes back needs the chunk's place, not its content.
            waiting.append((tag, chunk and chunk.without_content(), future))
            if len(waiting) >= _CHUNKS_AHEAD * workers:
                yield first()
        while waiting:
            yield first()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died (killed, perhaps for lack of memory); what it worked on was not written. Run again, "
            f"with fewer --workers than {workers} if memory is short"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Worker:
    """What a worker process holds."""

    encoder: Encoder


def _begin(encoder: Encoder) -> None:
    """Make a worker ready, and make it end when the main process is killed; it would otherwise wait for ever."""
    _Worker.encoder = encoder
    os.environ.update(_ONE_THREAD)
    sentinel = parent_process().sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _encode(chunk: Chunk) -> Encoded:
    return _Worker.encoder(chunk)
