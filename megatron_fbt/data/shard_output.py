"""Where preprocessing writes: shards of one or several corpora, their records, and at last their manifests."""

import glob
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Sequence

from megatron_fbt.data.corpus_manifest import (
    ENDINGS,
    SUFFIX,
    CorpusManifest,
    Shard,
    read_manifest,
    shard_number,
    write_manifest,
)
from megatron_fbt.data.encode import Encoded, token_dtype
from megatron_fbt.data.indexed import IndexedWriter
from megatron_fbt.data.inputs import EMPTY_TEXT, InputFile
from megatron_fbt.data.output_files import partial_path
from megatron_fbt.data.output_lock import locked
from megatron_fbt.data.shard_record import (
    ShardRecord,
    changed_settings,
    describe_inputs,
    group_inputs,
    read_record,
    record_path,
    why_incomplete,
    write_record,
)
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import ConfigError, DataError


def shard_prefix(prefix: str, number: int, count: int) -> str:
    """Prefix of one of ``count`` shards, e.g. ``data/web-00003-of-00012``; with one shard the prefix itself."""
    return prefix if count == 1 else f"{prefix}-{number:05d}-of-{count:05d}"


@dataclass(frozen=True)
class PlannedShard:
    """One shard to make.

    Attributes:
        number: From 0.
        files: What it is made from.
        inputs: The same for its record.
        prefixes: Of its pairs of files, one for each key.
    """

    number: int
    files: List[InputFile]
    inputs: Dict[str, Any]
    prefixes: List[str]


class CorpusPlan:
    """The shards of all corpora (one for each key) that a command makes."""

    def __init__(
        self,
        prefixes: Dict[str, str],
        files: Sequence[InputFile],
        count: int,
        tokenizer: Tokenizer,
        settings: Dict[str, Any],
    ):
        """
        Args:
            prefixes: Of the output for each key.
            files: All input, in order.
            count: Number of shards.
            tokenizer: Encodes all of it.
            settings: What else the content depends on.
        """
        self.prefixes = {key: os.path.abspath(prefix) for key, prefix in prefixes.items()}
        self.tokenizer = tokenizer
        self.settings = {
            "tokenizer": dict(tokenizer.unique_identifiers),
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            **settings,
        }
        self.shards = [
            PlannedShard(
                number,
                group,
                describe_inputs(group),
                [shard_prefix(prefix, number, count) for prefix in self.prefixes.values()],
            )
            for number, group in enumerate(group_inputs(files, count))
        ]

    def why_incomplete(self, shard: PlannedShard) -> str:
        """Why a shard must be made; empty if it is complete."""
        reasons = (why_incomplete(prefix, self.settings, shard.inputs) for prefix in shard.prefixes)
        return next(filter(None, reasons), "")

    def records(self, shard: PlannedShard) -> List[ShardRecord]:
        """Of a complete shard, one for each key."""
        return [read_record(prefix) for prefix in shard.prefixes]

    def manifest_path(self, key: str) -> str:
        """Where the manifest of a key's corpus is."""
        return f"{self.prefixes[key]}{SUFFIX}"

    def corpus(self, key: str, path: str, shards: Sequence[Shard]) -> CorpusManifest:
        """A manifest of some shards of a key's corpus."""
        tokenizer = self.tokenizer
        identity = {str(name): str(value) for name, value in tokenizer.unique_identifiers.items()}
        dtype = token_dtype(tokenizer.vocab_size).__name__
        return CorpusManifest(path, key, identity, tokenizer.vocab_size, tokenizer.eod, dtype, tuple(shards))

    def locked(self, shard: PlannedShard) -> ContextManager[None]:
        """Hold a shard, of all keys.

        Raises:
            DataError: Another process has it.
        """
        return locked(*shard.prefixes)

    def remove_manifests(self) -> None:
        """Remove the manifests, before a shard that they name is replaced."""
        for key in self.prefixes:
            Path(self.manifest_path(key)).unlink(missing_ok=True)

    def check_settings(self) -> None:
        """Refuse to replace what is there with what other settings give.

        Raises:
            ConfigError: A shard's record tells of other settings; it names them and the remedy.
        """
        for shard in self.shards:
            for prefix in shard.prefixes:
                if why := changed_settings(prefix, self.settings):
                    raise ConfigError(
                        f"--output: {prefix} is there and was made with other settings: {why}; give another prefix, "
                        "or --overwrite to replace it"
                    )

    def _remove_all(self) -> None:
        try:
            self.remove_manifests()
            for shard in self.shards:
                with self.locked(shard):
                    for prefix in shard.prefixes:
                        remove_pair(prefix)
        except OSError as error:
            raise DataError(f"output {error.filename}: cannot be removed: {error.strerror}") from error

    def no_documents(self, key: str, skipped: Dict[str, int]) -> DataError:
        """What to raise where nothing is left of a corpus."""
        files = [file.path for shard in self.shards for file in shard.files]
        more = f" and {len(files) - 3} more files" if len(files) > 3 else ""
        what = f"no record has '{key}'" if key else "no text file has any text"
        return DataError(
            f"input {', '.join(files[:3])}{more}: {what}, so there is no document to write "
            f"(skipped: {skipped or 'nothing'})"
        )

    def other_cuts(self) -> List[str]:
        """Shards of these corpora that are cut in another number, one of each number."""
        found = {}
        for prefix in self.prefixes.values():
            paths = [f"{prefix}.bin", *sorted(glob.glob(f"{glob.escape(prefix)}-*-of-*.bin"))]
            for pair in (path.removesuffix(".bin") for path in paths if os.path.exists(path)):
                base, _, count = shard_number(pair) or (pair, 0, 1)
                if base == prefix and count != len(self.shards):
                    found.setdefault((prefix, count), pair)
        return list(found.values())

    def write_manifests(self) -> str:
        """Write the manifests if all shards are complete, whoever made them; why not, or nothing.

        Raises:
            DataError: All shards together have no document, or a manifest cannot be written.
        """
        for shard in self.shards:
            if why := self.why_incomplete(shard):
                return f"{shard.prefixes[0]}: {why}"
        made = [self.records(shard) for shard in self.shards]
        for i, key in enumerate(self.prefixes):
            shards = [records[i].corpus.shards[0] for records in made]
            manifest = self.corpus(key, self.manifest_path(key), shards)
            if manifest.documents == 0:
                self._remove_all()
                raise self.no_documents(key, manifest.skipped)
            if not _is_written(manifest):
                try:
                    write_manifest(manifest)
                except OSError as error:
                    raise DataError(f"output {manifest.path}: cannot be written: {error.strerror}") from error
        return ""


def _is_written(manifest: CorpusManifest) -> bool:
    try:
        return read_manifest(manifest.path) == manifest
    except DataError:
        return False


def remove_pair(prefix: str) -> None:
    """Remove a pair of files, its record first, and what a killed process left of them."""
    record = record_path(prefix)
    record.unlink(missing_ok=True)
    for path in (record, *(Path(f"{prefix}{ending}") for ending in reversed(ENDINGS))):
        path.unlink(missing_ok=True)
        partial_path(path).unlink(missing_ok=True)


class ShardOutput:
    """The files of one shard while it is made."""

    def __init__(self, plan: CorpusPlan, shard: PlannedShard):
        self.plan, self.shard = plan, shard
        self.text_bytes = [0] * len(shard.prefixes)
        self.blank = [0] * len(shard.prefixes)
        self.skipped: Counter = Counter()
        self.writers: List[IndexedWriter] = []
        self._replaces = False
        try:
            for prefix in shard.prefixes:
                self.writers.append(IndexedWriter(prefix, plan.tokenizer.vocab_size))
        except DataError:
            self.discard()
            raise

    @property
    def documents(self) -> int:
        return sum(writer.documents for writer in self.writers)

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers)

    def add(self, encoded: Encoded) -> None:
        """Append the documents of a chunk."""
        for i, writer in enumerate(self.writers):
            writer.add(encoded.ids[i], encoded.lengths[i])
            self.text_bytes[i] += encoded.text_bytes[i]
            self.blank[i] += encoded.blank[i]
        self.skipped.update(encoded.skipped)

    def complete(self) -> List[ShardRecord]:
        """Bring everything to the disk, give the files their names, and write the records last.

        Only here an older shard goes, its record first.

        Raises:
            DataError: The only shard has no document, or a file cannot be written.
        """
        for key, i in zip(self.plan.prefixes, range(len(self.writers)), strict=True):
            if len(self.plan.shards) == 1 and self.writers[i].documents == 0:
                raise self.plan.no_documents(key, self._skipped(i))
        for writer in self.writers:
            writer.finish()
        self._replaces = True
        try:
            self.plan.remove_manifests()
            for prefix in self.shard.prefixes:
                record_path(prefix).unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"output {error.filename}: cannot be replaced: {error.strerror}") from error
        for writer in self.writers:
            writer.publish()
        return [self._write_record(key, i) for i, key in enumerate(self.plan.prefixes)]

    def _write_record(self, key: str, i: int) -> ShardRecord:
        writer = self.writers[i]
        made = Shard(
            writer.prefix, writer.documents, writer.tokens, self.text_bytes[i], self._skipped(i), dict(writer.files)
        )
        corpus = self.plan.corpus(key, str(record_path(writer.prefix)), [made])
        record = ShardRecord(corpus, self.plan.settings, self.shard.inputs)
        try:
            write_record(record)
        except OSError as error:
            raise DataError(f"output {corpus.path}: cannot be written: {error.strerror}") from error
        return record

    def _skipped(self, i: int) -> Dict[str, int]:
        blank = {EMPTY_TEXT: self.blank[i]} if self.blank[i] else {}
        return dict(sorted({**self.skipped, **blank}.items()))

    def discard(self) -> None:
        """Remove what there is of the new shard; an older one stays unless some of it was replaced."""
        for writer in self.writers:
            writer.discard()
        for prefix in self.shard.prefixes if self._replaces else ():
            with suppress(OSError):  # the error that ended the shard is what is told
                remove_pair(prefix)


def node_shards(plan: CorpusPlan, num_nodes: int, node_rank: int) -> List[PlannedShard]:
    """The shards that one node of several makes."""
    return plan.shards[node_rank::num_nodes]


def total_skipped(records: Sequence[Sequence[ShardRecord]]) -> Dict[str, int]:
    """Bad records by kind, each counted once, and blank texts of all keys."""
    total: Counter = Counter()
    for of_keys in records:
        for i, record in enumerate(of_keys):
            found = record.corpus.skipped
            total.update({kind: n for kind, n in found.items() if i == 0 or kind == EMPTY_TEXT})
    return dict(sorted(total.items()))
