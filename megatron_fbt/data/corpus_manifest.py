"""PREFIX.manifest.json: what a tokenized corpus of one or many shards consists of."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from megatron_fbt.core.manifest import HASH, FileEntry
from megatron_fbt.data.output_files import write_json
from megatron_fbt.errors import DataError, MissingDataError

SUFFIX = ".manifest.json"
FORMAT = 1
ENDINGS = (".bin", ".idx")


@dataclass(frozen=True)
class Shard:
    """One pair of files."""

    prefix: str
    """Absolute path without .bin and .idx."""
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of its texts."""
    skipped: Dict[str, int]
    """Records left out, by kind."""
    files: Dict[str, FileEntry]
    """Size and XXH3 of its files, by ending (.bin, .idx)."""


@dataclass(frozen=True)
class CorpusManifest:
    """All shards of one corpus, in order."""

    path: str
    """Where it was read from or is to be written."""
    key: str
    """JSON key of the texts; empty for whole files."""
    tokenizer: Dict[str, str]
    """What tells the tokenizer from others: its `unique_identifiers`."""
    vocab_size: int
    eod: int
    """The end-of-document token."""
    token_type: str
    """NumPy's name, uint16 or int32."""
    shards: Tuple[Shard, ...]

    @property
    def prefixes(self) -> List[str]:
        """Absolute paths, without .bin and .idx, of the shards that have documents, in order."""
        return [shard.prefix for shard in self.shards if shard.documents]

    @property
    def documents(self) -> int:
        """Of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Of all shards, end-of-document tokens included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Size of all .bin files together."""
        return sum(shard.files[".bin"].size for shard in self.shards)

    @property
    def skipped(self) -> Dict[str, int]:
        """Records left out in all shards, by kind in sorted order."""
        kinds = sorted({kind for shard in self.shards for kind in shard.skipped})
        return {kind: sum(shard.skipped.get(kind, 0) for shard in self.shards) for kind in kinds}


def shard_number(prefix: str) -> Optional[Tuple[str, int, int]]:
    """What stands before the numbers in the prefix of a shard, its number and how many there are; None if it has none.

    Args:
        prefix: Such as ``data/web-00003-of-00012``.
    """
    found = re.fullmatch(r"(.*)-(\d{5,})-of-(\d{5,})", prefix, re.DOTALL)
    return (found[1], int(found[2]), int(found[3])) if found else None


def is_manifest(path) -> bool:
    """Whether a path has the name of a corpus manifest."""
    return str(path).endswith(SUFFIX)


def read_manifest(path) -> CorpusManifest:
    """The manifest of a corpus; its files are not looked at.

    Args:
        path: PREFIX.manifest.json.

    Raises:
        DataError: It is missing, damaged or of another format; the message names it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return manifest_from_json(content, os.path.abspath(path))
    except FileNotFoundError as error:
        raise MissingDataError(
            f"manifest {path}: no such file; tools/preprocess_data.py writes it when all shards are there"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"manifest {path}: cannot be read ({type(error).__name__}: {error}); run tools/preprocess_data.py again"
        ) from error


def manifest_from_json(content: Dict[str, Any], path: str) -> CorpusManifest:
    """The manifest in a JSON object.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, not {FORMAT}")
    shards = tuple(shard_from_json(shard, os.path.dirname(path)) for shard in content["shards"])
    manifest = CorpusManifest(
        path,
        str(content["key"]),
        {str(name): str(value) for name, value in content["tokenizer"].items()},
        int(content["vocab_size"]),
        int(content["eod"]),
        str(content["token_type"]),
        shards,
    )
    totals = ("tokens", "documents", "bytes", "text_bytes")
    if not shards or any(getattr(manifest, name) != content[name] for name in totals):
        raise ValueError("its totals are not those of its shards")
    prefixes = [shard.prefix for shard in shards]
    if len(set(prefixes)) < len(prefixes):
        raise ValueError(f"it lists {max(prefixes, key=prefixes.count)} twice")
    return manifest


def shard_from_json(content: Dict[str, Any], folder: str) -> Shard:
    """A shard's entry.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    files = {ending: FileEntry(int(entry["bytes"]), str(entry[HASH])) for ending, entry in content["files"].items()}
    if sorted(files) != sorted(ENDINGS):
        raise ValueError(f"files of {content['prefix']} are {sorted(files)}, not {sorted(ENDINGS)}")
    counts = (content["documents"], content["tokens"], content["text_bytes"], *(e.size for e in files.values()))
    if min(map(int, counts)) < 0:
        raise ValueError(f"{content['prefix']} has negative counts")
    return Shard(
        os.path.normpath(os.path.join(folder, content["prefix"])),
        int(content["documents"]),
        int(content["tokens"]),
        int(content["text_bytes"]),
        {str(kind): int(count) for kind, count in content["skipped"].items()},
        files,
    )


def shard_to_json(shard: Shard, folder: str) -> Dict[str, Any]:
    """The entry of a shard in a file in ``folder``, to which its prefix is relative."""
    return {
        "prefix": os.path.relpath(shard.prefix, folder),
        "documents": shard.documents,
        "tokens": shard.tokens,
        "text_bytes": shard.text_bytes,
        "skipped": dict(sorted(shard.skipped.items())),
        "files": {e: {"bytes": shard.files[e].size, HASH: shard.files[e].digest} for e in ENDINGS},
    }


def manifest_to_json(manifest: CorpusManifest) -> Dict[str, Any]:
    """The manifest as a JSON object; equal manifests give equal ones."""
    folder = os.path.dirname(os.path.abspath(manifest.path))
    return {
        "format": FORMAT,
        "key": manifest.key,
        "tokenizer": dict(manifest.tokenizer),
        "vocab_size": manifest.vocab_size,
        "eod": manifest.eod,
        "token_type": manifest.token_type,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
        "text_bytes": manifest.text_bytes,
        "skipped": manifest.skipped,
        "shards": [shard_to_json(shard, folder) for shard in manifest.shards],
    }


def write_manifest(manifest: CorpusManifest) -> None:
    """Write a manifest to its path, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_json(manifest.path, manifest_to_json(manifest))
