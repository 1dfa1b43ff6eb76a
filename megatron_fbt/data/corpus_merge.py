"""Several tokenized corpora into one: a single pair of files, or shards of nearly equal size."""

import argparse
import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from megatron_fbt.core.manifest import FileEntry, hash_file
from megatron_fbt.data.corpus_check import read_corpus
from megatron_fbt.data.corpus_manifest import ENDINGS, SUFFIX, CorpusManifest, Shard, write_manifest
from megatron_fbt.data.document_reader import DocumentReader
from megatron_fbt.data.indexed import IndexedWriter, check_ids, check_indexed
from megatron_fbt.data.output_files import check_prefix
from megatron_fbt.data.output_lock import locked
from megatron_fbt.data.shard_output import remove_pair, shard_prefix
from megatron_fbt.data.shard_record import ShardRecord, record_path, write_record
from megatron_fbt.data.tool import print_report, run_tool
from megatron_fbt.errors import ConfigError, DataError

_LOCKS = 500
"""Shards that stay locked during a merge, each with an open file; of more, it is looked at once."""
_SAME = ("tokenizer", "vocab_size", "eod", "token_type")


def merge(paths: Sequence[str], output: str, shards: int = 1, overwrite: bool = False) -> Dict[str, Any]:
    """Write the documents of several corpora, in order, as one corpus with its manifest.

    Memory does not depend on the size but for 4 bytes a document of an output shard. Documents are not cut: a shard
    ends with the one that brings it to its part of the tokens.

    Args:
        paths: Manifests, or prefixes of pairs that have a record.
        output: Prefix of the output.
        shards: Pairs of files to write.
        overwrite: Replace an output that is there.

    Returns:
        The report: documents, tokens, bytes, shards, manifest.

    Raises:
        ConfigError: An option cannot work.
        DataError: The corpora do not fit together, one is damaged, or the output cannot be written; then nothing is
            left of it.
    """
    corpora = [read_corpus(path) for path in paths]
    _check_fit(corpora)
    sources = [shard for corpus in corpora for shard in corpus.shards if shard.documents]
    check_prefix(output)
    output = os.path.abspath(output)
    prefixes = [shard_prefix(output, number, shards) for number in range(shards)]
    documents = sum(shard.documents for shard in sources)
    if not 1 <= shards <= documents:
        raise ConfigError(f"--shards is {shards}: it must be from 1 to the number of documents, {documents}")
    _check_output(output, prefixes, corpora, overwrite)
    others = [prefix for prefix in prefixes if prefix != output]
    with locked(output, *others[:_LOCKS]):
        for prefix in others[_LOCKS:]:
            with locked(prefix):  # whoever writes one of them is met before any is removed
                pass
        manifest = _make(corpora, sources, output, prefixes)
    return {
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "manifest": manifest.path,
    }


def _make(
    corpora: Sequence[CorpusManifest], sources: Sequence[Shard], output: str, prefixes: Sequence[str]
) -> CorpusManifest:
    """Write all shards, their records and the manifest, or leave nothing."""
    manifest_path = Path(f"{output}{SUFFIX}")
    try:
        manifest_path.unlink(missing_ok=True)
        for prefix in prefixes:
            remove_pair(prefix)
        made = _write(corpora, sources, prefixes)
        manifest = _corpus(corpora, str(manifest_path), made)
        for shard in made:
            write_record(_record(corpora, sources, shard))
        write_manifest(manifest)
    except BaseException as error:
        for prefix in prefixes:
            with suppress(OSError):  # the first error is what is told
                remove_pair(prefix)
        if isinstance(error, OSError):
            raise DataError(f"output {output}: cannot be written: {error.strerror}; nothing is left of it") from error
        raise
    return manifest


def _check_fit(corpora: Sequence[CorpusManifest]) -> None:
    first = corpora[0]
    for corpus in corpora[1:]:
        for name in _SAME:
            if getattr(corpus, name) != getattr(first, name):
                raise DataError(
                    f"{corpus.path} and {first.path} cannot be merged: {name} is {getattr(corpus, name)} in the one "
                    f"and {getattr(first, name)} in the other; preprocess both with the same tokenizer"
                )
    seen: Dict[Any, str] = {}
    for shard in (shard for corpus in corpora for shard in corpus.shards):
        known = seen.setdefault(_identity(f"{shard.prefix}.bin"), shard.prefix)
        if known is not shard.prefix:
            also = "" if known == shard.prefix else f" (as {known}, too)"
            raise DataError(f"data set {shard.prefix}: it is named more than once{also}; name every corpus once")


def _identity(path: str) -> Any:
    """What tells whether two paths are one file, whatever links lead to it."""
    try:
        facts = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return facts.st_dev, facts.st_ino


def _check_output(output: str, prefixes: Sequence[str], corpora: Sequence[CorpusManifest], overwrite: bool) -> None:
    read = {}
    for corpus in corpora:
        read[_identity(corpus.path)] = corpus.path
        for shard in corpus.shards:
            for path in (*(f"{shard.prefix}{ending}" for ending in ENDINGS), str(record_path(shard.prefix))):
                read[_identity(path)] = shard.prefix
    there = [f"{output}{SUFFIX}"]
    there += [path for p in prefixes for path in (*(f"{p}{ending}" for ending in ENDINGS), str(record_path(p)))]
    found = [path for path in there if os.path.lexists(path)]
    if found and not overwrite:
        raise ConfigError(f"--output: {found[0]} is there already; give another prefix, or --overwrite")
    for path in there:
        if source := read.get(_identity(path)):
            raise ConfigError(f"--output: {path} is of {source}, which is one of the corpora to merge; give another")


def _corpus(corpora: Sequence[CorpusManifest], path: str, shards: Sequence[Shard]) -> CorpusManifest:
    first = corpora[0]
    keys = {corpus.key for corpus in corpora}
    key = first.key if len(keys) == 1 else ""
    return CorpusManifest(
        path, key, dict(first.tokenizer), first.vocab_size, first.eod, first.token_type, tuple(shards)
    )


def _record(corpora: Sequence[CorpusManifest], sources: Sequence[Shard], shard: Shard) -> ShardRecord:
    digests = [source.files[".bin"].digest for source in sources]
    inputs = {
        "files": len(sources),
        "bytes": sum(source.files[".bin"].size for source in sources),
        "digest": hashlib.sha256(json.dumps(digests).encode()).hexdigest(),
    }
    return ShardRecord(_corpus(corpora, str(record_path(shard.prefix)), [shard]), {"merged": True}, inputs)


def _write(corpora: Sequence[CorpusManifest], sources: Sequence[Shard], prefixes: Sequence[str]) -> List[Shard]:
    """All shards. What is known of the sources as a whole only, texts and skipped records, is shared out to them."""
    tokens = sum(source.tokens for source in sources)
    text_bytes = sum(source.text_bytes for corpus in corpora for source in corpus.shards)
    skipped: Counter = Counter()
    for corpus in corpora:
        skipped.update(corpus.skipped)
    made: List[Shard] = []
    done = 0
    writer: Optional[IndexedWriter] = None
    try:
        for ids, lengths, last in _pieces(sources, tokens, len(prefixes), corpora[0].vocab_size):
            writer = writer or IndexedWriter(prefixes[len(made)], corpora[0].vocab_size)
            writer.add(ids, lengths)
            if not last:
                continue
            writer.finish()
            writer.publish()
            share = text_bytes * (done + writer.tokens) // tokens - text_bytes * done // tokens
            done += writer.tokens
            dropped = {} if made else dict(sorted(skipped.items()))
            made.append(Shard(writer.prefix, writer.documents, writer.tokens, share, dropped, dict(writer.files)))
            writer = None
    finally:
        if writer is not None:
            writer.discard()
    return made


def _pieces(
    sources: Sequence[Shard], tokens: int, shards: int, vocab_size: int
) -> Iterator[Tuple[numpy.ndarray, numpy.ndarray, bool]]:
    """Documents of all sources: ids [tokens], lengths [documents], and whether they end a shard."""
    shard, done, left = 1, 0, sum(source.documents for source in sources)
    for source in sources:
        _check_hash(f"{source.prefix}.idx", hash_file(f"{source.prefix}.idx"), source.files[".idx"])
        check_indexed(source.prefix)
        reader = DocumentReader(source.prefix)
        for begin, ids, ends in reader.pieces():
            lengths = numpy.diff(ends, prepend=begin)
            while len(lengths):
                # Up to the document that reaches the shard's end, but leave one document for each shard that follows.
                totals = done + numpy.cumsum(lengths)
                count = int(numpy.searchsorted(totals, -(-tokens * shard // shards))) + 1
                spare = left - (shards - shard)
                count = min(count, len(lengths), spare)
                size = int(lengths[:count].sum())
                left, done = left - count, done + size
                last = count == spare or done >= -(-tokens * shard // shards)
                check_ids(ids[:size], vocab_size, f"{source.prefix}.bin")
                yield ids[:size], lengths[:count], last
                ids, lengths = ids[size:], lengths[count:]
                shard += last
        _check_hash(f"{source.prefix}.bin", reader.finish(), source.files[".bin"])


def _check_hash(path: str, found: FileEntry, written: FileEntry) -> None:
    if found != written:
        raise DataError(
            f"data set {path}: it is not what was written (its hash is {found.digest}, not {written.digest}); it is "
            "damaged, preprocess again"
        )


def main(argv: Sequence[str]) -> int:
    """The command ``merge``."""
    example = "example:\n  python tools/preprocess_data.py merge --output data/all data/web.manifest.json data/x"
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py merge",
        description=f"Make one tokenized corpus of several.\n\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 done, 2 options, 3 data.",
    )
    parser.add_argument("paths", nargs="+", metavar="PREFIX_OR_MANIFEST")
    parser.add_argument("--output", required=True, help="prefix of the output files")
    parser.add_argument("--shards", type=int, default=1, help="pairs of files to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args(argv)
    return run_tool(lambda: print_report(merge(args.paths, args.output, args.shards, args.overwrite), args.json))
