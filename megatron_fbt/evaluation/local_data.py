"""Data sets of the ready tasks: local .jsonl files of the user's, in the published data sets' own field names."""

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from megatron_fbt.errors import DataError

KINDS = {"text": "a text", "texts": "a list of texts"}


def load(
    data_dir: str = ".",
    file: str = "",
    fields: Optional[Mapping[str, str]] = None,
    optional: Optional[Mapping[str, str]] = None,
    also: Optional[Mapping[str, str]] = None,
    contains: Optional[Mapping[str, str]] = None,
    **metadata: Any,
) -> Any:
    """The data set of a task file, as its split "test".

    Args:
        data_dir: Folder of the files.
        file: Name in it, one JSON object a line.
        fields: {name: "text" or "texts"} that each line has.
        optional: The same for what a line may lack: then empty.
        also: {other name of a field: its name here}.
        contains: {name: what the text of the field must hold}.
        metadata: The task's other metadata.

    Raises:
        DataError: The file is missing or empty, or a line is not what the fields say: naming file, line and field.
    """
    import datasets

    path = Path(data_dir) / file
    rows = read_rows(path, fields or {}, optional or {}, also or {})
    for number, row in enumerate(rows, 1):
        for name, part in (contains or {}).items():
            if part not in row[name]:
                raise DataError(f"data {path}, object {number}: field {name} has no {part}: {row[name][-60:]!r}")
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def read_rows(
    path: Path, fields: Mapping[str, str], optional: Mapping[str, str], also: Mapping[str, str]
) -> List[Dict[str, Any]]:
    """The lines of a file, with exactly these fields; see load."""
    if not path.is_file():
        raise DataError(
            f"data {path}: no such file. Put one there with the fields {', '.join(fields)}, or name its folder with "
            "--data_dir"
        )
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_row(line, f"data {path}, line {number}", fields, optional, also))
    if not rows:
        raise DataError(f"data {path}: it is empty; one JSON object a line is expected")
    return rows


def _row(
    line: bytes, where: str, fields: Mapping[str, str], optional: Mapping[str, str], also: Mapping[str, str]
) -> Dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: not a JSON object, but a {type(found).__name__}")
    for other, name in also.items():
        if name not in found and other in found:
            found[name] = found[other]
    row = {}
    for name, kind in {**fields, **optional}.items():
        value = found.get(name)
        if value is None and name in optional:
            value = "" if kind == "text" else []
        if value is None:
            raise DataError(f"{where}: has no field {name}; it has {', '.join(sorted(found)) or 'none'}")
        if kind == "text" and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        right = isinstance(value, str) if kind == "text" else _texts(value)
        texts = ([value] if kind == "text" else value) if right else []
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            raise DataError(f"{where}: field {name} holds a lone surrogate; write the text as UTF-8")
        if not right:
            raise DataError(f"{where}: field {name} is {json.dumps(value)[:60]}, but must be {KINDS[kind]}")
        row[name] = value
    return row


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
