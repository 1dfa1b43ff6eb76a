"""Which .bin/.idx pairs a configuration means: prefixes, manifests, and patterns of either."""

import contextlib
import glob
import logging
import os
from typing import Dict, Iterable, Iterator, List, Sequence, Tuple

from megatron_fbt.config.data import DataConfig
from megatron_fbt.data.corpus_manifest import SUFFIX, CorpusManifest, is_manifest, read_manifest, shard_number
from megatron_fbt.data.first_rank import is_first_rank
from megatron_fbt.errors import DataError, MissingDataError

logger = logging.getLogger(__name__)


def find_prefixes(name: str, paths: Sequence[str], tokenizer=None) -> List[str]:
    """Prefixes of the pairs that some paths stand for, in order.

    Args:
        name: Of the source, for messages.
        paths: Prefixes of pairs or of manifests, manifests, and patterns; a pattern gives its pairs in sorted order.
        tokenizer: If given, a manifest must be of one with the same ids, and tell the sizes of its files.

    Raises:
        DataError: Nothing is found for a path, a pair is named twice, a corpus comes in two numbers of shards, or a
            manifest is of another tokenizer or of other files.
    """
    found: List[str] = []
    for path in paths:
        for match in _matches(name, path):
            if is_manifest(match):
                manifest = read_manifest(match)
                _check_manifest(manifest, tokenizer)
                found += manifest.prefixes
            else:
                found.append(match)
    seen: Dict[str, str] = {}
    for prefix in found:
        real = os.path.realpath(prefix)
        if real in seen:
            raise DataError(f"data set {name}: the pair {prefix} is named twice by {', '.join(paths)}; name it once")
        seen[real] = prefix
    _check_counts(name, seen)
    return found


def _check_counts(name: str, prefixes: Iterable[str]) -> None:
    """Refuse shards that were made of one corpus with two different numbers of shards."""
    first: Dict[str, Tuple[int, str]] = {}
    for prefix in prefixes:
        base, _, count = shard_number(prefix) or (prefix, 0, 1)
        known, other = first.setdefault(base, (count, prefix))
        if known != count:
            raise DataError(
                f"data set {name}: {other} and {prefix} are shards of one corpus that was cut twice, so documents "
                "would be read twice; name its manifest, or remove the older shards"
            )


def indexed_pairs(data: DataConfig) -> Iterator[Tuple[str, str]]:
    """Prefix and split of each pair of a data section that is there to be found."""
    named = [([path], data.split) for path in data.paths] if data.format == "indexed" else []
    named += [(source.paths, source.split or data.split) for source in data.sources]
    for paths, split in named:
        with contextlib.suppress(DataError):
            yield from ((prefix, split) for prefix in find_prefixes("", paths))


def _matches(name: str, path: str) -> List[str]:
    """Manifests and prefixes for one path."""
    if os.path.exists(f"{path}.idx"):
        return [path]
    if os.path.exists(f"{path}{SUFFIX}"):
        return [f"{path}{SUFFIX}"]
    if not glob.has_magic(path):
        return [path]
    files = sorted({*glob.glob(path), *glob.glob(f"{path}.bin")})
    pairs = [file.removesuffix(".bin") for file in files if file.endswith(".bin")]
    manifests = [file for file in files if is_manifest(file)]
    if not pairs and not manifests:
        raise MissingDataError(
            f"data set {name}: {path} matches no .bin file and no manifest; give a pattern such as data/part-*.bin"
        )
    if pairs and manifests:
        raise DataError(
            f"data set {name}: {path} matches pairs ({pairs[0]}, ...) and manifests ({manifests[0]}, ...) of perhaps "
            "the same tokens; end the pattern with .bin or with .manifest.json"
        )
    return pairs or manifests


def _check_manifest(manifest: CorpusManifest, tokenizer) -> None:
    if tokenizer is None:
        return
    theirs, ours = (manifest.vocab_size, manifest.eod), (tokenizer.vocab_size, tokenizer.eod)
    if theirs != ours:
        raise DataError(
            f"manifest {manifest.path}: its tokenizer has {theirs[0]} ids and the end-of-document token {theirs[1]}, "
            f"data.tokenizer has {ours[0]} and {ours[1]}; it is not the tokenizer that the data set was made with"
        )
    if manifest.tokenizer != dict(tokenizer.unique_identifiers) and is_first_rank():
        logger.warning(
            "manifest %s: the files of its tokenizer are not those of data.tokenizer, though they have as many ids",
            manifest.path,
        )
    for shard in manifest.shards if is_first_rank() else ():
        for ending, entry in shard.files.items():
            with contextlib.suppress(FileNotFoundError):  # which the pair's own check tells
                found = os.path.getsize(f"{shard.prefix}{ending}")
                if found != entry.size:
                    raise DataError(
                        f"manifest {manifest.path}: {shard.prefix}{ending} has {found} bytes, {entry.size} were "
                        "written; it was cut or replaced, preprocess again or name the pair itself"
                    )
