"""PREFIX.shard.json, beside each pair of files: how it was made, and the sign that it is complete."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence

from megatron_fbt.data.corpus_manifest import CorpusManifest, manifest_from_json, manifest_to_json
from megatron_fbt.data.inputs import InputFile
from megatron_fbt.data.output_files import write_json
from megatron_fbt.errors import DataError

RECORD_SUFFIX = ".shard.json"
_LISTED = 1000
"""Input files up to which a record names them all."""


@dataclass(frozen=True)
class ShardRecord:
    """The content of a record.

    Attributes:
        corpus: A corpus of this one shard.
        settings: What its content depends on beside the input.
        inputs: What it was made from, see describe_inputs.
    """

    corpus: CorpusManifest
    settings: Dict[str, Any]
    inputs: Dict[str, Any]


def record_path(prefix: str) -> Path:
    """Where the record of a pair is."""
    return Path(f"{prefix}{RECORD_SUFFIX}").absolute()


def describe_inputs(files: Sequence[InputFile]) -> Dict[str, Any]:
    """Number, bytes and digest of input files, and up to 1,000 of them by name; another input gives another one."""
    facts = [[os.path.abspath(file.path), file.size, file.mtime_ns] for file in files]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    found = {"files": len(facts), "bytes": sum(file.size for file in files), "digest": digest}
    return found if len(facts) > _LISTED else {**found, "list": facts}


def group_inputs(files: Sequence[InputFile], count: int) -> List[List[InputFile]]:
    """Cut a list of files into groups of nearly equal bytes, none empty.

    Args:
        files: At least ``count``.
        count: Number of groups.
    """
    total, done, groups = sum(file.size for file in files), 0, []
    begin = 0
    for number in range(1, count + 1):
        end, last = begin + 1, len(files) - (count - number)
        done += files[begin].size
        # Take the next file as long as that brings the group's end nearer to its place.
        while end < last and (number == count or 2 * done + files[end].size <= 2 * total * number / count):
            done += files[end].size
            end += 1
        groups.append(list(files[begin:end]))
        begin = end
    return groups


def read_record(prefix: str) -> ShardRecord:
    """The record of a pair.

    Raises:
        DataError: It is missing or damaged.
    """
    path = record_path(prefix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return ShardRecord(manifest_from_json(content, str(path)), dict(content["settings"]), dict(content["inputs"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"record {path}: cannot be read ({type(error).__name__}: {error})") from error


def write_record(record: ShardRecord) -> None:
    """Write the record of a pair that is complete.

    Raises:
        OSError: It cannot be written.
    """
    content = manifest_to_json(record.corpus)
    write_json(record.corpus.path, {**content, "settings": record.settings, "inputs": record.inputs})


def changed_settings(prefix: str, settings: Dict[str, Any]) -> str:
    """Which settings of a pair that has a record are other ones, with both values; empty if none are."""
    try:
        before = read_record(prefix).settings if record_path(prefix).exists() else settings
    except DataError:
        return ""
    names = [name for name, value in settings.items() if before.get(name) != value]
    if "merged" in before and names:
        return "it is the output of a merge"
    return "; ".join(f"{name} was {_short(before.get(name))} and is {_short(settings[name])}" for name in names)


def why_incomplete(prefix: str, settings: Dict[str, Any], inputs: Dict[str, Any]) -> str:
    """Why a pair of files is not what these settings and inputs would give; empty if it is.

    Sizes are compared, not contents.
    """
    if not record_path(prefix).exists():
        return "it has no record" if os.path.exists(f"{prefix}.bin") else "it is not there"
    try:
        record = read_record(prefix)
    except DataError as error:
        return str(error)
    if changed := changed_settings(prefix, settings):
        return changed
    if record.inputs != inputs:
        return _input_change(record.inputs, inputs)
    for ending, entry in record.corpus.shards[0].files.items():
        path = f"{prefix}{ending}"
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size != entry.size:
            return f"{path} has {size} bytes instead of {entry.size}" if size is not None else f"{path} is missing"
    return ""


def why_unknown(inputs: Dict[str, Any]) -> str:
    """Why nothing tells whether input is what it was before; empty if it can be told."""
    return "its input is a pipe" if any(file[2] < 0 for file in inputs.get("list", [])) else ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _input_change(before: Dict[str, Any], now: Dict[str, Any]) -> str:
    if "list" in before and "list" in now:
        old = {name: facts for name, *facts in before["list"]}
        new = {name: facts for name, *facts in now["list"]}
        for name in sorted({**old, **new}):
            if name not in new:
                return f"input {name} is no longer part of it"
            if name not in old:
                return f"input {name} is new in it"
            if old[name] != new[name]:
                return f"input {name} has changed"
    return f"its input was {before.get('files')} files and is {now['files']} files, of which some changed"
