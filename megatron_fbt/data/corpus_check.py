"""Finding every fault of a tokenized corpus: damaged files, wrong ids, end tokens out of place, wrong records."""

import argparse
import os
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy

from megatron_fbt.core.manifest import HASH, FileEntry, hash_file
from megatron_fbt.data.corpus_manifest import (
    ENDINGS,
    SUFFIX,
    CorpusManifest,
    Shard,
    is_manifest,
    read_manifest,
    shard_number,
)
from megatron_fbt.data.document_reader import DocumentReader
from megatron_fbt.data.encode import token_dtype
from megatron_fbt.data.indexed import check_indexed
from megatron_fbt.data.shard_record import read_record, record_path
from megatron_fbt.data.tool import run_report
from megatron_fbt.errors import DataError


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: Where.
        kind: ``missing``, ``size``, ``checksum``, ``index``, ``token_type``, ``token_ids``, ``end_tokens``,
            ``counts``, ``record`` or ``manifest``.
        detail: What was found and what was expected.
    """

    file: str
    kind: str
    detail: str


def validate(paths: Sequence[str]) -> Dict[str, Any]:
    """Check corpora and pairs of files from end to end, with constant memory.

    Args:
        paths: Manifests, or prefixes (or one of the files) of pairs that have a record.

    Returns:
        The report: corpora, shards, documents, tokens, bytes read, and faults (empty = all is well).

    Raises:
        DataError: Nothing says what a path should hold: it has no manifest and no record, or a damaged one.
    """
    report: Dict[str, Any] = {"corpora": len(paths), "shards": 0, "documents": 0, "tokens": 0, "bytes": 0}
    faults: List[Fault] = []
    for path in paths:
        corpus = read_corpus(path)
        faults += _check_numbers(corpus)
        for shard in corpus.shards:
            report["shards"] += 1
            for name, count in zip(("documents", "tokens"), (shard.documents, shard.tokens), strict=True):
                report[name] += count
            report["bytes"] += sum(entry.size for entry in shard.files.values())
            faults += _check_shard(corpus, shard)
            faults += _check_record(corpus, shard)
    return {**report, "faults": [asdict(fault) for fault in faults]}


def read_corpus(path: str) -> CorpusManifest:
    """What a manifest, or the record of a prefix, says; a prefix that has only a manifest stands for that.

    Raises:
        DataError: There is neither, or it is damaged.
    """
    if is_manifest(path):
        return read_manifest(path)
    for ending in ENDINGS:
        if record_path(path.removesuffix(ending)).exists():
            path = path.removesuffix(ending)
    if record_path(path).exists():
        return read_record(path).corpus
    if os.path.exists(f"{path}{SUFFIX}"):
        return read_manifest(f"{path}{SUFFIX}")
    raise DataError(
        f"data set {path}: it has neither {record_path(path)} nor {path}{SUFFIX}, which say what it should hold; "
        "tools/preprocess_data.py writes them"
    )


def _check_numbers(corpus: CorpusManifest) -> Iterator[Fault]:
    """A manifest names all of its shards, if their names have numbers."""
    shards = [shard_number(shard.prefix) for shard in corpus.shards]
    if not is_manifest(corpus.path) or None in shards or len({(base, count) for base, _, count in shards}) > 1:
        return
    base, _, count = shards[0]
    missing = sorted({*range(count)} - {number for _, number, _ in shards})
    if missing:
        names = ", ".join(f"{base}-{number:05d}-of-{count:05d}" for number in missing[:3])
        yield Fault(corpus.path, "manifest", f"{len(missing)} of {count} shards are not in it: {names}")


def _check_record(corpus: CorpusManifest, shard: Shard) -> Iterator[Fault]:
    """A manifest and the record of its shard must say the same."""
    path = str(record_path(shard.prefix))
    if corpus.path == path:
        return
    try:
        record = read_record(shard.prefix).corpus
    except DataError as error:
        yield Fault(path, "record", str(error))
        return
    if record.shards != (shard,):
        yield Fault(path, "record", f"it differs from the shard's entry in {corpus.path}")
    for name in ("key", "tokenizer", "vocab_size", "eod", "token_type"):
        if getattr(record, name) != getattr(corpus, name):
            was, now = getattr(record, name), getattr(corpus, name)
            yield Fault(path, "record", f"{name} is {was}, but {now} in {corpus.path}")


def _check_shard(corpus: CorpusManifest, shard: Shard) -> Iterator[Fault]:
    bin_path, idx_path = (f"{shard.prefix}{ending}" for ending in ENDINGS)
    of_bin = list(_check_file(bin_path, shard.files[".bin"], hashed=False))
    of_idx = list(_check_file(idx_path, shard.files[".idx"], hashed=True))
    if of_idx and not of_bin:
        of_bin = list(_check_file(bin_path, shard.files[".bin"], hashed=True))
    yield from of_bin + of_idx
    if of_bin or of_idx:
        return
    if token_dtype(corpus.vocab_size).__name__ != corpus.token_type:
        yield Fault(corpus.path, "token_type", f"{corpus.token_type} does not fit a vocabulary of {corpus.vocab_size}")
    try:
        check_indexed(shard.prefix, empty=shard.documents == 0)
        reader = DocumentReader(shard.prefix)
    except DataError as error:
        yield Fault(f"{shard.prefix}.idx", "index", str(error))
        return
    if reader.dtype.name != corpus.token_type:
        yield Fault(f"{shard.prefix}.idx", "token_type", f"{reader.dtype.name}, but {corpus.token_type} is recorded")
    for name, found in (("documents", reader.documents), ("tokens", reader.tokens)):
        if found != getattr(shard, name):
            yield Fault(f"{shard.prefix}.idx", "counts", f"{found} {name}, but {getattr(shard, name)} are recorded")
    yield from _check_tokens(corpus, shard, reader)


def _check_file(path: str, entry: FileEntry, hashed: bool) -> Iterator[Fault]:
    """Presence and size, and the hash of files that are not read anyway."""
    if not os.path.isfile(path):
        yield Fault(path, "missing", f"no such file; {entry.size} bytes are recorded")
        return
    size = os.path.getsize(path)
    if size != entry.size:
        yield Fault(path, "size", f"{size} bytes found, {entry.size} are recorded")
    elif hashed and (found := hash_file(path)) != entry:
        yield _wrong_hash(path, found, entry)


def _wrong_hash(path: str, found: FileEntry, entry: FileEntry) -> Fault:
    return Fault(path, "checksum", f"{HASH} is {found.digest}, but {entry.digest} is recorded")


def _check_tokens(corpus: CorpusManifest, shard: Shard, reader: DocumentReader) -> Iterator[Fault]:
    """Hash, ids and end tokens in one reading of the .bin file."""
    path, bad_ids, misplaced = f"{shard.prefix}.bin", 0, 0
    first_id: Optional[int] = None
    first_end: Optional[int] = None
    for begin, ids, ends in reader.pieces():
        outside = (ids < 0) | (ids >= corpus.vocab_size)
        if outside.any():
            bad_ids += int(outside.sum())
            first_id = int(ids[outside][0]) if first_id is None else first_id
        wrong = numpy.setxor1d(numpy.flatnonzero(ids == corpus.eod) + begin, ends - 1, assume_unique=True)
        if wrong.size:
            misplaced += int(wrong.size)
            first_end = int(wrong[0]) if first_end is None else first_end
    found_entry = reader.finish()
    if found_entry != shard.files[".bin"]:
        yield _wrong_hash(path, found_entry, shard.files[".bin"])
    if bad_ids:
        detail = f"{bad_ids} ids are outside the vocabulary of {corpus.vocab_size}, the first is {first_id}"
        yield Fault(path, "token_ids", detail)
    if misplaced:
        detail = f"{misplaced} tokens are end tokens ({corpus.eod}) inside of documents, or their last ones and none"
        yield Fault(path, "end_tokens", f"{detail}; the first is token {first_end}")


def describe(report: Dict[str, Any]) -> str:
    """The report for a person."""
    lines = [f"{fault['file']}: {fault['kind']}: {fault['detail']}" for fault in report["faults"]]
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults" if lines else "no fault"
    sizes = ", ".join(f"{report[name]:,} {name}" for name in ("shards", "documents", "tokens", "bytes"))
    return "\n".join([*lines, f"{sizes}: {count}"])


def main(argv: Sequence[str]) -> int:
    """The command ``validate``; its exit code is 3 if there is a fault."""
    example = "example:\n  python tools/preprocess_data.py validate data/corpus.manifest.json data/other --json"
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py validate",
        description=f"Check tokenized corpora from end to end.\n\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 no fault, 2 options, 3 a fault.",
    )
    parser.add_argument("paths", nargs="+", metavar="PREFIX_OR_MANIFEST")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args(argv)
    report: Dict[str, Any] = {}
    code = run_report(lambda: report.update(validate(args.paths)) or report, describe, args.json)
    return code or (DataError.exit_code if report["faults"] else 0)
