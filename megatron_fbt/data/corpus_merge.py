"""Several tokenized corpora into one: a single pair of files, or shards of nearly equal size."""

import argparse
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from megatron_fbt.data.corpus_check import read_corpus
from megatron_fbt.data.corpus_manifest import SUFFIX, CorpusManifest, Shard, write_manifest
from megatron_fbt.data.document_reader import DocumentReader
from megatron_fbt.data.indexed import IndexedWriter, check_indexed
from megatron_fbt.data.shard_output import remove_pair, shard_prefix
from megatron_fbt.data.shard_record import ShardRecord, record_path, write_record
from megatron_fbt.data.tool import print_report, run_tool
from megatron_fbt.errors import ConfigError, DataError

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
    output = os.path.abspath(output)
    prefixes = [shard_prefix(output, number, shards) for number in range(shards)]
    _check_output(output, prefixes, sources, overwrite)
    documents = sum(shard.documents for shard in sources)
    if not 1 <= shards <= documents:
        raise ConfigError(f"--shards is {shards}: it must be from 1 to the number of documents, {documents}")
    manifest_path = f"{output}{SUFFIX}"
    try:
        Path(manifest_path).unlink(missing_ok=True)
        for prefix in prefixes:
            remove_pair(prefix)
        made = _write(corpora, sources, prefixes)
        manifest = _corpus(corpora, manifest_path, made)
        for shard in made:
            write_record(_record(corpora, sources, shard))
        write_manifest(manifest)
    except BaseException as error:
        for prefix in prefixes:
            remove_pair(prefix)
        if isinstance(error, OSError):
            raise DataError(f"output {output}: cannot be written: {error.strerror}; nothing is left of it") from error
        raise
    return {
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
        "shards": len(made),
        "manifest": manifest_path,
    }


def _check_fit(corpora: Sequence[CorpusManifest]) -> None:
    first = corpora[0]
    for corpus in corpora[1:]:
        for name in _SAME:
            if getattr(corpus, name) != getattr(first, name):
                raise DataError(
                    f"{corpus.path} and {first.path} cannot be merged: {name} is {getattr(corpus, name)} in the one "
                    f"and {getattr(first, name)} in the other; preprocess both with the same tokenizer"
                )
    prefixes = Counter(shard.prefix for corpus in corpora for shard in corpus.shards)
    twice = [prefix for prefix, count in prefixes.items() if count > 1]
    if twice:
        raise DataError(f"data set {twice[0]}: it is named more than once; name every corpus once")


def _check_output(output: str, prefixes: Sequence[str], sources: Sequence[Shard], overwrite: bool) -> None:
    if not os.path.basename(output):
        raise ConfigError(f"--output is '{output}': it must be the prefix of file names, such as data/all")
    same = {shard.prefix for shard in sources} & set(prefixes)
    if same:
        raise ConfigError(f"--output: {same.pop()} is one of the corpora to merge; give another prefix")
    there = [f"{output}{SUFFIX}", *(f"{prefix}.bin" for prefix in prefixes)]
    found = [path for path in there if os.path.exists(path)]
    if found and not overwrite:
        raise ConfigError(f"--output: {found[0]} is there already; give another prefix, or --overwrite")


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
        for ids, lengths, last in _pieces(sources, tokens, len(prefixes)):
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


def _pieces(sources: Sequence[Shard], tokens: int, shards: int) -> Iterator[Tuple[numpy.ndarray, numpy.ndarray, bool]]:
    """Documents of all sources: ids [tokens], lengths [documents], and whether they end a shard."""
    shard, done, left = 1, 0, sum(source.documents for source in sources)
    for source in sources:
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
                yield ids[:size], lengths[:count], last
                ids, lengths = ids[size:], lengths[count:]
                shard += last
        found = reader.finish()
        if found != source.files[".bin"]:
            raise DataError(
                f"data set {source.prefix}.bin: it is not what was written (its hash is {found.digest}, not "
                f"{source.files['.bin'].digest}); it is damaged, preprocess again"
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
