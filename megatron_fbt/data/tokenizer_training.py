"""Training of lossless SentencePiece tokenizers."""

import io
import os
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, List, Sequence

from megatron_fbt.data.input_files import TWICE, each_once, find_inputs
from megatron_fbt.data.inputs import iterate_documents
from megatron_fbt.data.output_files import check_prefix
from megatron_fbt.errors import ConfigError, DataError

_LINES = 8
_CHARACTERS = 2000
"""A piece of text for training: this many lines together, so that line ends are learned, and at most this long."""


@dataclass(frozen=True)
class TokenizerTraining:
    """How to train.

    Attributes:
        inputs: Files and folders.
        output: PREFIX of PREFIX.model and PREFIX.vocab.
        vocab_size: Number of ids; 256 bytes, end of document and unknown are among them.
        sample_sentences: Pieces of text (up to 8 lines, 2,000 characters) drawn at random from all the input.
        input_format: ``jsonl`` or ``files``.
        json_key: Key of the text.
        suffixes: See megatron_fbt.data.input_files.find_inputs.
        exclude: Likewise.
        seed: Of the draw. Equal input and seed give an equal model.
    """

    inputs: Sequence[str]
    output: str
    vocab_size: int = 8000
    sample_sentences: int = 50_000
    input_format: str = "jsonl"
    json_key: str = "text"
    suffixes: Sequence[str] = ()
    exclude: Sequence[str] = ()
    seed: int = 1234

    def validate(self) -> None:
        """Raise ConfigError for values that cannot work."""
        if self.vocab_size < 300:
            raise ConfigError(f"--vocab_size is {self.vocab_size}: 256 bytes and some characters need at least 300")
        check_prefix(self.output)
        if self.sample_sentences < 1:
            raise ConfigError(f"--sample_sentences is {self.sample_sentences}: it must be at least 1")


def train_tokenizer(training: TokenizerTraining) -> dict:
    """Train and write PREFIX.model and PREFIX.vocab.

    Returns:
        The report: model, vocab_size, files, pieces (of text), characters.

    Raises:
        ConfigError: An option cannot work, or the text is too small for the vocabulary.
        DataError: Input cannot be read, or holds no text.
    """
    training.validate()
    left_out: List[str] = []
    found = find_inputs(training.inputs, training.input_format, training.suffixes, training.exclude, True, left_out)
    files, repeated = each_once(found)
    for line in [*left_out, *(f"{path}: {TWICE}" for path in repeated)]:
        print(f"input {line}", file=sys.stderr)
    documents = iterate_documents(files, training.input_format, training.json_key)
    sample = draw_sample(text_pieces(documents), training.sample_sentences, training.seed)
    if not sample:
        raise DataError(f"input {', '.join(map(str, training.inputs))}: no text to train a tokenizer on")
    model = _train(sample, training.vocab_size)
    _write(Path(f"{training.output}.model"), model)
    _write(Path(f"{training.output}.vocab"), _vocabulary(model))
    return {
        "model": f"{training.output}.model",
        "vocab_size": training.vocab_size,
        "files": len(files),
        "pieces": len(sample),
        "characters": sum(map(len, sample)),
    }


def text_pieces(documents: Iterable[str]) -> Iterator[str]:
    """Cut documents into pieces of a few lines."""
    for document in documents:
        lines = document.splitlines(keepends=True)
        for first in range(0, len(lines), _LINES):
            piece = "".join(lines[first : first + _LINES])
            for begin in range(0, len(piece), _CHARACTERS):
                yield piece[begin : begin + _CHARACTERS]


def draw_sample(pieces: Iterable[str], count: int, seed: int) -> List[str]:
    """A uniform sample of ``count`` pieces (all of them if there are fewer), drawn in one reading."""
    generator = random.Random(seed)
    sample: List[str] = []
    for number, piece in enumerate(pieces):
        if number < count:
            sample.append(piece)
            continue
        place = generator.randrange(number + 1)
        if place < count:
            sample[place] = piece
    return sample


def _train(sample: List[str], vocab_size: int) -> bytes:
    """Lossless settings: bytes for unknown characters, no normalization, no added prefix, all white space kept."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            max_sentence_length=16 * _CHARACTERS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[-1] if str(error) else "unknown"
        raise ConfigError(
            f"--vocab_size {vocab_size} does not fit the text ({sum(map(len, sample))} characters): {reason}"
        ) from error
    return model.getvalue()


def _vocabulary(model: bytes) -> bytes:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    lines = [f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(processor.get_piece_size())]
    return "".join(lines).encode("utf-8")


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DataError(f"output {path}: cannot be written: {error.strerror or error}") from error
