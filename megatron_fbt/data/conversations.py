"""Conversations in JSON Lines, tokenised once into a cache of flat files.

    <data.cache_dir>/conversations-<fingerprint>/tokens.bin       ids of all conversations, one after the other
                                                 assistant.bin    a byte for each: 1 where the assistant generates it
                                                 ends.npy         [conversations] where each ends, in tokens
                                                 first_labels.npy [conversations] first place > 0 of a generated token
                                                 report.json      counts; written last

The folder is written under another name and renamed when all of it is there. Its name depends on the content of the
files, the template and the tokenizer, not on the sequence length.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy

from megatron_fbt.config.data import DataConfig
from megatron_fbt.data.chat import ASSISTANT, ChatEncoder, chat_template
from megatron_fbt.data.encode import narrow_ids, token_dtype
from megatron_fbt.data.inputs import (
    BadRecord,
    InputFile,
    check_text,
    find_inputs,
    parse_object,
    read_blocks,
    read_lines,
)
from megatron_fbt.data.progress import Progress
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 1
"""Changes when the files of the cache, or what is put into them, change."""
NO_TURN = "no_assistant_turn"
"""The one reason to leave out a conversation: there is nothing in it that the assistant generates."""


@dataclass(frozen=True, eq=False)
class Conversations:
    """Tokenised conversations in the order of the files.

    Attributes:
        tokens: [all tokens] ids.
        assistant: [all tokens] uint8.
        ends: [conversations] int64.
        first_labels: [conversations] int64.
        report: {"conversations", "tokens", "assistant_tokens", "skipped": {kind: count}, "end_of_turn", ...}.
    """

    tokens: numpy.ndarray
    assistant: numpy.ndarray
    ends: numpy.ndarray
    first_labels: numpy.ndarray
    report: Dict[str, Any]

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> numpy.ndarray:
        """[conversations] int64, in tokens."""
        return numpy.diff(self.ends, prepend=0)

    def conversation(self, number: int) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """Ids and assistant marks of one conversation."""
        begin, end = int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        return self.tokens[begin:end], self.assistant[begin:end]


def parse_conversation(line: bytes) -> List[Dict[str, Any]]:
    """The messages of one line.

    Raises:
        BadRecord: It is not one JSON object with a list of messages, each with a role and a content, both texts.
    """
    record = parse_object(line)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        found = "no key 'messages'" if "messages" not in record else f"'messages' is {json.dumps(messages)[:40]}"
        raise BadRecord("no_messages", f'{found}; a line holds {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise BadRecord("bad_message", f"message {number} is no object whose '{key}' is a text")
            check_text(message[key])
        if not message["role"].strip():
            raise BadRecord("bad_message", f"the role of message {number} is blank")
    return messages


def prepare_conversations(config: DataConfig, cache: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Tokenise the conversations of data.paths, unless the cache has them.

    Args:
        config: section data.
        cache: folder for the cache.
        tokenizer: of the run.

    Yields:
        "" after each piece of work, and at last the folder that holds the tokens.

    Raises:
        DataError: A file cannot be read, or a line is no conversation: naming file and line.
    """
    files = find_inputs(config.paths, "jsonl")
    template = chat_template(config, tokenizer)
    made_with = (FORMAT, template, tokenizer.unique_identifiers, tokenizer.template_variables, tokenizer.eod)
    digest = hashlib.sha256(repr(made_with).encode())
    for file in files:
        content = hashlib.sha256()
        for block, _ in read_blocks(file):
            content.update(block)
            yield ""
        digest.update(content.digest())
    folder = Path(cache) / f"conversations-{digest.hexdigest()[:16]}"
    if not _is_whole(folder):
        yield from _build(files, ChatEncoder(template, tokenizer), tokenizer, folder)
    yield str(folder)


def open_conversations(folder: str, mmap: bool) -> Conversations:
    """Open what prepare_conversations has named.

    Raises:
        DataError: This process does not find it.
    """
    path = Path(folder)
    try:
        report = json.loads((path / "report.json").read_text(encoding="utf-8"))
        read = _map if mmap else numpy.fromfile
        tokens, assistant = (
            read(path / "tokens.bin", dtype=report["dtype"]),
            read(path / "assistant.bin", dtype="uint8"),
        )
        tables = (numpy.load(path / f"{name}.npy") for name in ("ends", "first_labels"))
        return Conversations(tokens, assistant, *tables, report)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"cache {folder}: cannot be read here ({error}); data.cache_dir must be a folder that all processes share"
        ) from error


def _map(path: Path, dtype: str) -> numpy.ndarray:
    return numpy.memmap(path, mode="r", dtype=dtype)


def _is_whole(folder: Path) -> bool:
    """Whether a cache folder is there and its files have the sizes that they should have."""
    if not folder.is_dir():
        return False
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        sizes = {name: os.path.getsize(folder / name) for name in report["sizes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cache %s: damaged (%s), building it again", folder, error)
        return False
    if sizes != report["sizes"]:
        logger.warning("cache %s: damaged (sizes %s), building it again", folder, sizes)
    return sizes == report["sizes"]


def _build(files: List[InputFile], encoder: ChatEncoder, tokenizer: Tokenizer, folder: Path) -> Iterator[str]:
    """Write the cache folder; yields after each conversation."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"cache {folder.parent}: cannot be written: {error}") from error
    try:
        yield from _write(files, encoder, tokenizer, staging)
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            os.rename(staging, folder)
    except OSError as error:
        if not _is_whole(folder):  # else another run was faster
            raise DataError(f"cache {folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(files: List[InputFile], encoder: ChatEncoder, tokenizer: Tokenizer, folder: Path) -> Iterator[str]:
    dtype = numpy.dtype(token_dtype(tokenizer.vocab_size))
    ends, first_labels, skipped, last_tokens, end, marked = [], [], Counter(), Counter(), 0, 0
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "assistant.bin", "wb") as assistant,
        Progress(sum(file.size for file in files)) as progress,
    ):
        for done, ids, mask in _encode_all(files, encoder):
            yield ""
            places = numpy.flatnonzero(mask[1:])
            if not len(places):
                skipped[NO_TURN] += 1
                continue
            tokens.write(narrow_ids(ids, tokenizer.vocab_size).tobytes())
            assistant.write(mask.astype(numpy.uint8).tobytes())
            end, marked = end + len(ids), marked + int(mask.sum())
            ends.append(end)
            first_labels.append(int(places[0]) + 1)
            last_tokens[int(ids[1 + places[-1]])] += 1
            progress.update(done, len(ends), end)
    if not ends:
        raise DataError(
            f"data.paths {', '.join(file.path for file in files)}: no conversation has a turn of role '{ASSISTANT}' "
            f"({sum(skipped.values())} lines read), so there is nothing to train on"
        )
    numpy.save(folder / "ends.npy", numpy.array(ends, dtype=numpy.int64))
    numpy.save(folder / "first_labels.npy", numpy.array(first_labels, dtype=numpy.int64))
    report = {
        "conversations": len(ends),
        "tokens": end,
        "assistant_tokens": marked,
        "skipped": dict(skipped),
        "ended_by_eod": last_tokens[tokenizer.eod],
        "dtype": dtype.name,
        "sizes": {path.name: os.path.getsize(path) for path in sorted(folder.iterdir())},
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _encode_all(files: List[InputFile], encoder: ChatEncoder) -> Iterator[Tuple[int, numpy.ndarray, numpy.ndarray]]:
    """Bytes read so far, ids and assistant mask of each conversation."""
    before = 0
    for file in files:
        for number, (line, position) in enumerate(read_lines(file), 1):
            try:
                messages = parse_conversation(line)
                yield before + position, *encoder.encode(messages)
            except BadRecord as error:
                raise DataError(f"data.paths {file.path}, line {number}: {error} ({error.kind})") from error
        before += file.size
