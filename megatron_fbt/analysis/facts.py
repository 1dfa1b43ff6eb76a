"""Labelled sequences for probes, in JSON Lines: what is to be read off the network at each token.

{"input_ids": [4, 1, 0], "labels": [null, 7, 8]}
{"text": "a = (1", "labels": ["out", "out", "out", "in"], "group": "file7.py"}
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from megatron_fbt.errors import DataError

NO_LABEL = -1
"""Class of a token without a label."""


@dataclass
class Facts:
    """Sequences and the class of each of their tokens.

    Attributes:
        input_ids: Token ids of each sequence.
        classes: For each of its tokens a number of `names`, or NO_LABEL.
        groups: Number of each sequence's group; a group is never split between training and test of a probe.
        names: The values of the fact.
    """

    input_ids: List[List[int]]
    classes: List[List[int]]
    groups: List[int]
    names: List[Any]


def read_facts(path: str, tokenizer: Any, vocab_size: int) -> Facts:
    """Read a file of labelled sequences.

    Args:
        path: One object a line: input_ids or text, labels for each token (whole numbers, strings or booleans; null or
            -100 = none), and optionally group (default: each line is a group).
        tokenizer: For lines with text; None if there is none.
        vocab_size: The model's.

    Raises:
        DataError: The file cannot be read, a line is wrong (its number is named), or the labels are all equal.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"facts {path}: cannot be read as UTF-8 ({error})") from error
    sequences, labels, groups = [], [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            ids, values, group = _parse(line, f"facts {path} line {number}", tokenizer, vocab_size)
            sequences.append(ids)
            labels.append(values)
            groups.append(("line", number) if group is None else ("group", json.dumps(group)))
    names = _names(path, labels)
    number_of = {name: number for number, name in enumerate(names)}
    group_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    classes = [[NO_LABEL if v is None else number_of[_key(v)] for v in values] for values in labels]
    return Facts(sequences, classes, [group_of[group] for group in groups], [name for _, name in names])


def _key(value: Any) -> Tuple[str, Any]:
    """Tells 1, true and "1" apart."""
    return type(value).__name__, value


def _names(path: str, labels: List[List[Any]]) -> List[Tuple[str, Any]]:
    names = sorted({_key(value) for values in labels for value in values if value is not None})
    if len(names) < 2:
        found = f"only the value {names[0][1]!r}" if names else "no label"
        raise DataError(f"facts {path}: {found} in it; a probe needs at least two values to tell apart")
    return names


def _parse(line: str, where: str, tokenizer: Any, vocab_size: int) -> Tuple[List[int], List[Any], Optional[Any]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict) or ("input_ids" in record) == ("text" in record) or "labels" not in record:
        raise DataError(f'{where}: must be an object with "labels" and either "input_ids" or "text"')
    ids = _token_ids(record, where, tokenizer)
    labels = [None if type(label) is int and label == -100 else label for label in _list(record, "labels", where)]
    if not all(label is None or isinstance(label, (bool, int, str)) for label in labels):
        raise DataError(f"{where}: labels must be whole numbers, strings, booleans or null")
    if len(labels) != len(ids) or not ids:
        raise DataError(f"{where}: {len(ids)} tokens and {len(labels)} labels; give one label for each token")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise DataError(f"{where}: token id {bad} is outside the model's vocabulary of {vocab_size} ids")
    return ids, labels, record.get("group")


def _token_ids(record: Dict[str, Any], where: str, tokenizer: Any) -> List[int]:
    if "text" in record:
        if tokenizer is None:
            raise DataError(f"{where}: has text, but the model's folder has no tokenizer; give input_ids")
        if not isinstance(record["text"], str):
            raise DataError(f"{where}: text must be a string")
        return tokenizer(record["text"], add_special_tokens=False).input_ids
    ids = _list(record, "input_ids", where)
    if any(type(token) is not int for token in ids):
        raise DataError(f"{where}: input_ids must be whole numbers")
    return ids


def _list(record: Dict[str, Any], key: str, where: str) -> List[Any]:
    if not isinstance(record[key], list):
        raise DataError(f"{where}: {key} must be a list")
    return record[key]
