"""Raw text into Megatron's indexed data sets, with several processes and the same output for any number of them."""

import os
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Dict, Iterable, Iterator, List, Sequence, Tuple

from megatron_fbt.data.encode import Chunk, Encoded, Encoder, EncodeSettings, encode_chunk, make_chunks
from megatron_fbt.data.inputs import InputFile, find_inputs
from megatron_fbt.data.progress import Progress
from megatron_fbt.errors import ConfigError, DataError

_CHUNKS_AHEAD = 4
"""Chunks in work for each worker, which bounds the memory."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read and where to write.

    Attributes:
        inputs: Files and folders.
        output: Prefix of the output; with several keys PREFIX_KEY for each.
        encode: Tokenizer, keys and policy.
        suffixes: See megatron_fbt.data.inputs.find_inputs.
        exclude: Likewise.
        workers: Processes that encode; 1 = no other process.
    """

    inputs: Sequence[str]
    output: str
    encode: EncodeSettings
    suffixes: Sequence[str] = ()
    exclude: Sequence[str] = ()
    workers: int = 1

    def prefixes(self) -> Dict[str, str]:
        """Output prefix of each key."""
        keys = self.encode.json_keys
        if self.encode.input_format == "files" or len(keys) == 1:
            return {keys[0]: self.output}
        return {key: f"{self.output}_{key}" for key in keys}

    def validate(self) -> None:
        """Raise ConfigError for values that cannot work."""
        keys = self.encode.json_keys
        if self.workers < 1:
            raise ConfigError(f"--workers is {self.workers}: it must be at least 1")
        if not keys or len(set(keys)) != len(keys) or any(not key or "/" in key for key in keys):
            raise ConfigError(f"--json_key is {list(keys)}: name each key once; keys name files, so no '/'")
        if not os.path.basename(self.output):
            raise ConfigError(f"--output is '{self.output}': it must be the prefix of file names, such as data/train")


def preprocess(options: PreprocessOptions) -> dict:
    """Tokenize all input and write one pair of files for each key.

    Returns:
        The report: documents, tokens, text_bytes, skipped (by kind), files, seconds, and for each output its prefix,
        documents, tokens and bytes.

    Raises:
        ConfigError: An option cannot work.
        DataError: Input, tokenizer or output is unusable, a worker died, or no document is left. Then no output exists.
    """
    options.validate()
    begin = time.monotonic()
    tokenizer = options.encode.build_tokenizer()
    tokenizer.eod  # noqa: B018  a tokenizer without an end token is refused before any data are read
    files = find_inputs(options.inputs, options.encode.input_format, options.suffixes, options.exclude)
    from megatron_fbt.data.indexed import IndexedWriter

    totals = Encoded()
    with ExitStack() as stack:
        writers = []
        for prefix in options.prefixes().values():
            writers.append(IndexedWriter(prefix, tokenizer.vocab_size))
            stack.callback(writers[-1].discard)
        _write_documents(options, files, Encoder(options.encode, tokenizer), writers, totals)
        _refuse_empty(options, writers, totals)
        for writer in writers:
            writer.finish()
        for writer in writers:
            writer.publish()
    return _report(options, files, writers, totals, time.monotonic() - begin)


def _write_documents(options, files: List[InputFile], encoder: Encoder, writers, totals: Encoded) -> None:
    chunks = make_chunks(files, options.encode)
    skipped = Counter()
    with Progress(sum(file.size for file in files)) as progress:
        for chunk, encoded in _encode_all(options, chunks, encoder):
            if encoded.failure:
                raise DataError(f"input {encoded.failure}")
            for writer, ids, lengths in zip(writers, encoded.ids, encoded.lengths, strict=True):
                writer.add(ids, lengths)
            skipped.update(encoded.skipped)
            totals.text_bytes += encoded.text_bytes
            documents, tokens = sum(w.documents for w in writers), sum(w.tokens for w in writers)
            progress.update(chunk.progress, documents, tokens)
    totals.skipped = dict(sorted(skipped.items()))


def _encode_all(options, chunks: Iterable[Chunk], encoder: Encoder) -> Iterator[Tuple[Chunk, Encoded]]:
    """Each chunk with its result, in the order of the input."""
    if options.workers == 1:
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    executor = ProcessPoolExecutor(options.workers, get_context("spawn"), initializer=_end_with_parent)
    waiting: "deque[Tuple[Chunk, Future]]" = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, executor.submit(encode_chunk, options.encode, chunk)))
            if len(waiting) >= _CHUNKS_AHEAD * options.workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died (killed, perhaps for lack of memory); nothing was written. Run again, with fewer "
            f"--workers than {options.workers} if memory is short"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """Make a worker end when the main process is killed; it would otherwise wait for work for ever."""
    sentinel = parent_process().sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _refuse_empty(options, writers, totals: Encoded) -> None:
    for key, writer in zip(options.prefixes(), writers, strict=True):
        if writer.documents == 0:
            what = "no text file has any text" if options.encode.input_format == "files" else f"no record has '{key}'"
            raise DataError(
                f"input {', '.join(map(str, options.inputs))}: {what}, so there is no document to write "
                f"(skipped: {totals.skipped or 'nothing'})"
            )


def _report(options, files, writers, totals: Encoded, seconds: float) -> dict:
    outputs = [
        {
            "key": key,
            "prefix": writer.prefix,
            "documents": writer.documents,
            "tokens": writer.tokens,
            "bytes": os.path.getsize(f"{writer.prefix}.bin"),
            "token_type": writer.dtype.__name__,
        }
        for key, writer in zip(options.prefixes(), writers, strict=True)
    ]
    return {
        "documents": sum(writer.documents for writer in writers),
        "tokens": sum(writer.tokens for writer in writers),
        "text_bytes": totals.text_bytes,
        "skipped": totals.skipped,
        "files": len(files),
        "seconds": round(seconds, 3),
        "outputs": outputs,
    }
