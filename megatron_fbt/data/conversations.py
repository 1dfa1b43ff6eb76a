"""Conversations in JSON Lines, tokenised once into a cache of flat files.

    <data.cache_dir>/conversations-<fingerprint>/tokens.bin       ids of all conversations, one after the other
                                                 assistant.bin    a byte for each: 1 where the assistant generates it
                                                 ends.npy         [conversations] where each ends, in tokens
                                                 first_labels.npy [conversations] first place > 0 of a generated token
                                                 report.json      counts; written last

Its name depends on the content of the files, the template and the tokenizer, not on the sequence length.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy

from megatron_fbt.config.data import DataConfig
from megatron_fbt.data.cache_folder import cached_folder, read_array, read_report, unreadable, write_report
from megatron_fbt.data.chat import ASSISTANT, ChatEncoder, chat_template
from megatron_fbt.data.encode import narrow_ids, token_dtype
from megatron_fbt.data.input_files import InputFile, run_inputs
from megatron_fbt.data.inputs import BadRecord, check_text, parse_lines, parse_object
from megatron_fbt.data.progress import Progress
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import DataError

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
    try:
        files = run_inputs(config.paths)
    except DataError as error:
        remedy = "with data.format conversations, name .jsonl files or folders of them"
        raise DataError(f"data.paths: {error}; {remedy}") from error
    template = chat_template(config, tokenizer)
    made_with = (FORMAT, template, tokenizer.unique_identifiers, tokenizer.template_variables, tokenizer.eod)

    def write(folder: Path) -> Iterator[str]:
        return _write(files, ChatEncoder(template, tokenizer), tokenizer, folder)

    yield from cached_folder(cache, "conversations", made_with, files, write)


def open_conversations(folder: str, mmap: bool) -> Conversations:
    """Open what prepare_conversations has named.

    Raises:
        DataError: This process does not find it.
    """
    path = Path(folder)
    try:
        report = read_report(path)
        tokens = read_array(path / "tokens.bin", report["dtype"], mmap)
        assistant = read_array(path / "assistant.bin", "uint8", mmap)
        tables = (numpy.load(path / f"{name}.npy") for name in ("ends", "first_labels"))
        return Conversations(tokens, assistant, *tables, report)
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(folder, error) from error


def _write(files: List[InputFile], encoder: ChatEncoder, tokenizer: Tokenizer, folder: Path) -> Iterator[str]:
    dtype = numpy.dtype(token_dtype(tokenizer.vocab_size))
    ends, first_labels, skipped, last_tokens, end, marked = [], [], Counter(), Counter(), 0, 0
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "assistant.bin", "wb") as assistant,
        Progress(sum(file.size for file in files)) as progress,
    ):
        for done, (ids, mask) in parse_lines(files, lambda line: encoder.encode(parse_conversation(line))):
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
            f"({sum(skipped.values())} lines read), or "
            "the chat template (data.chat_template) renders nothing of it: there is nothing to train on"
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
    }
    write_report(folder, report)
